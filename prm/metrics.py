"""How good step scores are: ranking, accuracy, the first error, calibration, agreement. Plain Python on plain lists.

A measure that is not defined on what it is given (an empty list, one class only) is None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from prm.errors import DataError


def auc(good: Sequence[bool], scores: Sequence[float]) -> float | None:
    """P(a good step scores higher than a bad one), a tie counting half (the area under the ROC curve).

    None unless there are both good and bad steps.
    """
    _same_length(good, scores)
    _finite(scores)
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    positive = sum(map(bool, good))
    negative = len(good) - positive
    if not positive or not negative:
        return None
    ranks, i = 0.0, 0
    while i < len(order):
        j = i
        while j < len(order) and scores[order[j]] == scores[order[i]]:
            j += 1
        ranks += sum(bool(good[k]) for k in order[i:j]) * (i + 1 + j) / 2
        i = j
    return (ranks - positive * (positive + 1) / 2) / (positive * negative)


def accuracy(gold: Sequence[bool], predicted: Sequence[bool]) -> float | None:
    """The share of equal answers; None of no answers."""
    _same_length(gold, predicted)
    return sum(bool(g) == bool(p) for g, p in zip(gold, predicted, strict=True)) / len(gold) if gold else None


def balanced_accuracy(gold: Sequence[bool], predicted: Sequence[bool]) -> float | None:
    """The mean of the accuracy on good and on bad steps; None unless there are both."""
    _same_length(gold, predicted)
    shares = [
        accuracy([kind] * len(own), own)
        for kind in (True, False)
        for own in [[bool(p) for g, p in zip(gold, predicted, strict=True) if bool(g) == kind]]
    ]
    return None if None in shares else sum(s for s in shares if s is not None) / 2


@dataclass(frozen=True)
class FirstError:
    """ProcessBench's measure: shares in [0, 1], None where not defined, and what to know about them."""

    f1: float | None
    error_accuracy: float | None
    correct_accuracy: float | None
    n_error: int
    n_correct: int
    notes: tuple[str, ...] = ()


def first_error_f1(gold: Sequence[int], predicted: Sequence[int | None]) -> FirstError:
    """The harmonic mean of two accuracies (Zheng et al. 2024, "ProcessBench"): that of the exact index of the first
    error where there is one, and that of finding none where there is none.

    Args:
        gold: the 0-based index of each solution's first bad step, -1 where all are good.
        predicted: the same; None where no answer could be read, which is wrong everywhere.

    An empty subset leaves its accuracy and F1 undefined; two accuracies of 0 give F1 0, with a note.
    """
    _same_length(gold, predicted)
    for i, value in enumerate([*gold, *(p for p in predicted if p is not None)]):
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise DataError(f"row {i % max(len(gold), 1)}: an index must be an integer >= -1, got {value!r}")
    pairs = list(zip(gold, predicted, strict=True))
    error = [p == g for g, p in pairs if g >= 0]
    correct = [p == -1 for g, p in pairs if g == -1]
    notes = []
    for name, rows in (("an error", error), ("no error", correct)):
        if not rows:
            notes.append(f"not defined: no solution has {name}")
    if unread := sum(p is None for p in predicted):
        notes.append(f"{unread} without an answer, counted as wrong")
    on_error = sum(error) / len(error) if error else None
    on_correct = sum(correct) / len(correct) if correct else None
    f1 = None
    if on_error is not None and on_correct is not None:
        both = on_error + on_correct
        f1 = 2 * on_error * on_correct / both if both else 0.0
        if not both:
            notes.append("both accuracies are 0, so F1 is taken as 0")
    return FirstError(f1, on_error, on_correct, len(error), len(correct), tuple(notes))


def first_bad(scores: Sequence[float], threshold: float) -> int:
    """The index of the first score below the threshold, -1 if there is none."""
    return next((i for i, score in enumerate(scores) if score < threshold), -1)


@dataclass(frozen=True)
class Bin:
    """Scores in [low, high) (the last bin holds 1 too): how many, their mean, and the mean of what they estimate."""

    low: float
    high: float
    n: int
    score: float
    target: float


def reliability(scores: Sequence[float], targets: Sequence[float], *, bins: int = 10) -> list[Bin]:
    """The bins of equal width that hold any score."""
    _same_length(scores, targets)
    _finite(scores)
    held: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for score, target in zip(scores, targets, strict=True):
        held[min(int(score * bins), bins - 1)].append((score, target))
    return [
        Bin(i / bins, (i + 1) / bins, len(own), sum(s for s, _ in own) / len(own), sum(t for _, t in own) / len(own))
        for i, own in enumerate(held)
        if own
    ]


def ece(scores: Sequence[float], targets: Sequence[float], *, bins: int = 10) -> float | None:
    """Expected calibration error: the mean distance of score and target over bins of equal width, by their size."""
    if not scores:
        return None
    found = reliability(scores, targets, bins=bins)
    return sum(b.n * abs(b.score - b.target) for b in found) / len(scores)


def brier(scores: Sequence[float], targets: Sequence[float]) -> float | None:
    """The mean squared distance of scores and targets in [0, 1]."""
    _same_length(scores, targets)
    _finite(scores)
    return sum((s - t) ** 2 for s, t in zip(scores, targets, strict=True)) / len(scores) if scores else None


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Agreement beyond chance (Cohen 1960); None where chance alone agrees always (one and the same class only)."""
    _same_length(first, second)
    if not first:
        return None
    n = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    left, right = Counter(first), Counter(second)
    chance = sum(left[key] * right[key] for key in left) / n**2
    return None if chance == 1 else (observed - chance) / (1 - chance)


def _same_length(first: Sequence[object], second: Sequence[object]) -> None:
    if len(first) != len(second):
        raise DataError(f"expected as many predictions as gold values, got {len(second)} and {len(first)}")


def _finite(scores: Sequence[float]) -> None:
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise DataError(f"score {i} is {score}, expected a finite number")
