"""Figures of compared steps with bootstrap intervals, whole and by source, domain, length and kind of error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prm.metrics import accuracy, auc, balanced_accuracy, first_error_f1
from prm.records import Trajectory

LENGTHS = ((1, 3), (4, 6), (7, 10), (11, 20), (21, 10**9))
DOMAINS = ("domain", "dataset", "env", "subset")


@dataclass(frozen=True)
class Compared:
    """The steps of one trajectory that gold and predictions both have.

    Attributes:
        trajectory_id, cluster: what is drawn together in the bootstrap (its task).
        gold, predicted: scores of the steps, and `good`, `positive`: on which side they are.
        first: (gold, predicted) index of the first error; None where gold does not settle it.
        groups: dimension -> where it belongs ("source", "domain", "length", "category").
    """

    trajectory_id: str
    cluster: str
    gold: tuple[float, ...]
    predicted: tuple[float, ...]
    good: tuple[bool, ...]
    positive: tuple[bool, ...]
    first: tuple[int, int | None] | None
    groups: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A line of a table: figures (None where not defined) and 95 % intervals of those that have one."""

    name: str
    n: int
    trajectories: int
    figures: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]


def groups_of(trajectory: Trajectory | None, source: str, steps: int) -> dict[str, str]:
    """Where a trajectory belongs in each table."""
    found = {"source": source}
    length = len(trajectory.steps) if trajectory is not None else steps
    low, high = next((low, high) for low, high in LENGTHS if length <= high)
    found["length"] = f"{low} to {high} steps" if high < 10**9 else f"{low} steps or more"
    if trajectory is not None:
        for key in DOMAINS:
            if isinstance(trajectory.meta.get(key), str):
                found["domain"] = trajectory.meta[key]
                break
        # PRMBench judges the versions with planted errors, not the originals beside them.
        if isinstance(trajectory.meta.get("category"), str) and trajectory.meta.get("version") != "original":
            found["category"] = trajectory.meta["category"]
    return found


def line(name: str, rows: Sequence[Compared], *, draws: int, seed: int, prmbench: bool = False) -> Line:
    """Figures of some rows, with intervals."""
    figures = _figures(rows, prmbench)
    return Line(name, sum(len(r.gold) for r in rows), len(rows), figures, intervals(rows, draws, seed, prmbench))


def tables(rows: Sequence[Compared], *, draws: int, seed: int) -> dict[str, list[Line]]:
    """A table for each dimension that divides the rows, and one of categories wherever they are known."""
    out: dict[str, list[Line]] = {}
    for dimension in ("source", "domain", "length", "category"):
        names = list(dict.fromkeys(r.groups[dimension] for r in rows if dimension in r.groups))
        if not names or (len(names) < 2 and dimension != "category"):
            continue
        if dimension == "length":
            names.sort(key=lambda name: int(name.split()[0]))
        own = [[r for r in rows if r.groups.get(dimension) == name] for name in names]
        category = dimension == "category"
        out[dimension] = [
            line(n, some, draws=draws, seed=seed, prmbench=category) for n, some in zip(names, own, strict=True)
        ]
    return out


def intervals(
    rows: Sequence[Compared], draws: int, seed: int, prmbench: bool = False
) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of a bootstrap over tasks (Efron 1979): steps of one task are drawn together.

    None is given of figures that are not defined in some of 50 draws, and none at all of fewer than 5 tasks.
    """
    clusters: dict[str, list[Compared]] = {}
    for row in rows:
        clusters.setdefault(row.cluster, []).append(row)
    if draws < 1 or len(clusters) < 5:
        return {}
    own = list(clusters.values())
    random = np.random.default_rng(seed)
    weights = random.multinomial(len(own), [1 / len(own)] * len(own), size=draws).astype(float)
    sums = np.array([_sums(some) for some in own])
    drawn = _of_sums(weights @ sums, prmbench)
    drawn["auc"] = _auc(own, weights)
    found = {}
    for name, values in drawn.items():
        if np.isfinite(values).mean() > 0.98:
            low, high = np.nanpercentile(values, [2.5, 97.5])
            found[name] = (float(low), float(high))
    return found


# What every figure but the AUC is made of, summed over a cluster: the four counts of a confusion, squared errors, first
# errors, and for each of ten bins of calibration its size and its sums of scores and of gold.
BINS = 10


def _sums(rows: Sequence[Compared]) -> list[float]:
    good = np.array([g for r in rows for g in r.good], bool)
    positive = np.array([p for r in rows for p in r.positive], bool)
    gold = np.array([v for r in rows for v in r.gold], float)
    said = np.array([v for r in rows for v in r.predicted], float)
    first = [r.first for r in rows if r.first is not None]
    error, correct = [p == g for g, p in first if g >= 0], [p == -1 for g, p in first if g == -1]
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    calibration = [np.bincount(bins, w, BINS) for w in (np.ones(len(said)), said, gold)]
    counts = [(good & positive).sum(), (good & ~positive).sum(), (~good & positive).sum(), (~good & ~positive).sum()]
    more = [((said - gold) ** 2).sum(), len(error), sum(error), len(correct), sum(correct)]
    return [*counts, *more, *np.concatenate(calibration)]


def _of_sums(sums: np.ndarray, prmbench: bool) -> dict[str, np.ndarray]:
    tp, fn, fp, tn, squared, n_error, error, n_correct, correct = sums[:, :9].T
    n = tp + fn + fp + tn
    size, said, gold = (sums[:, 9 + BINS * k : 9 + BINS * (k + 1)] for k in range(3))
    with np.errstate(divide="ignore", invalid="ignore"):
        right = (tp + tn) / n
        chance = ((tp + fn) * (tp + fp) + (tn + fp) * (tn + fn)) / n**2
        on_error, on_correct = error / n_error, correct / n_correct
        f1 = np.where(on_error + on_correct == 0, 0.0, 2 * on_error * on_correct / (on_error + on_correct))
        f1 = np.where((n_error == 0) | (n_correct == 0), np.nan, f1)
        found = {
            "step_accuracy": right,
            "balanced_accuracy": (tp / (tp + fn) + tn / (tn + fp)) / 2,
            "kappa": np.where(chance < 1, (right - chance) / (1 - chance), np.nan),
            "brier": squared / n,
            "ece": np.where(size > 0, np.abs(said - gold), 0).sum(1) / n,
            "first_error_f1": f1,
            "error_accuracy": on_error,
            "correct_accuracy": on_correct,
        }
        if prmbench:
            found["prm_score"] = tp / (2 * tp + fp + fn) + tn / (2 * tn + fp + fn)
    return found


def _auc(clusters: Sequence[Sequence[Compared]], weights: np.ndarray) -> np.ndarray:
    """The AUC of each draw, (draws,): P(good above bad), ties half, by the weights of the clusters drawn."""
    flat = [(s, g, c) for c, own in enumerate(clusters) for r in own for s, g in zip(r.predicted, r.good, strict=True)]
    score, good, cluster = (np.array(column) for column in zip(*flat, strict=True))
    order = np.argsort(score, kind="stable")
    score, good, cluster = score[order], good[order].astype(bool), cluster[order]
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    out = np.empty(len(weights))
    for i, own in enumerate(weights):
        w = own[cluster]
        up = np.add.reduceat(np.where(good, w, 0), starts)
        down = np.add.reduceat(np.where(good, 0, w), starts)
        below = np.cumsum(down) - down
        total = up.sum() * down.sum()
        out[i] = (up * (below + down / 2)).sum() / total if total else np.nan
    return out


def _figures(rows: Sequence[Compared], prmbench: bool) -> dict[str, float | None]:
    good = [g for r in rows for g in r.good]
    positive = [p for r in rows for p in r.positive]
    scores = [s for r in rows for s in r.predicted]
    first = [r.first for r in rows if r.first is not None]
    found = {
        "step_accuracy": accuracy(good, positive),
        "balanced_accuracy": balanced_accuracy(good, positive),
        "auc": auc(good, scores),
        "first_error_f1": first_error_f1([g for g, _ in first], [p for _, p in first]).f1,
    }
    return found | ({"prm_score": prm_score(good, positive)} if prmbench else {})


def prm_score(good: Sequence[bool], positive: Sequence[bool]) -> float | None:
    """PRMBench's measure (Song et al. 2025): the mean of F1 with good, and with bad, as the class to be found.

    An F1 whose class is neither there nor predicted is not defined, and so is the score.
    """
    shares: list[float] = []
    for kind in (True, False):
        both = sum(g == p == kind for g, p in zip(good, positive, strict=True))
        either = sum(g == kind for g in good) + sum(p == kind for p in positive)
        if not either:
            return None
        shares.append(2 * both / either)
    return sum(shares) / 2
