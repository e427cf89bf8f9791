"""Choosing by step scores: the best of n answers against the majority and the best there is, and preference pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from prm.batching import AGGREGATES, aggregate
from prm.records import Trajectory

DRAWS = 200
LARGEST = 64


@dataclass(frozen=True)
class BestOfN:
    """Success of choosing one of n answers, over tasks; each list has one share a value of `n`.

    Attributes:
        n: how many answers are chosen from.
        tasks: how many tasks have as many answers as the largest n.
        by: for each aggregation of step scores ("min", "last", "mean", "product"), of the answer that scores highest.
        majority: of the answer that most give, ties shared; None where answers are not known (`meta["answer"]`).
        pass_at_n: of any of the n being right (Chen et al. 2021, the unbiased estimate).
        notes: what was left out.
    """

    n: tuple[int, ...]
    tasks: int
    by: dict[str, tuple[float, ...]]
    majority: tuple[float, ...] | None
    pass_at_n: tuple[float, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairAccuracy:
    """How often the better of two answers has the higher score.

    Attributes:
        n: pairs compared; a tie counts half.
        by: the share, for each aggregation of step scores.
        subsets: for each `meta["subset"]`, (pairs, the share by "min").
        notes: what was left out.
    """

    n: int
    by: dict[str, float | None]
    subsets: dict[str, tuple[int, float]]
    notes: tuple[str, ...] = ()


def scored(trajectory: Trajectory, found: Mapping[int, float], how: str) -> float | None:
    """The aggregated score; None without steps, or where a step has none: that is no score, and not a low one."""
    if not trajectory.steps or any(k not in found for k in range(len(trajectory.steps))):
        return None
    return aggregate([found[k] for k in range(len(trajectory.steps))], how)


def best_of_n(
    trajectories: Sequence[Trajectory], scores: Mapping[str, Mapping[int, float]], *, seed: int = 0
) -> BestOfN | None:
    """Best-of-n curves for n = 1, 2, 4, ... 64 over tasks with several answers whose outcomes are known.

    Each value is the expectation over which n of a task's answers are drawn, exact but for the majority, which takes
    200 draws. An answer without a score is never chosen before one with a score, and is worth 0 where it alone is
    there. Outcomes of 0.5 or more are right.

    Args:
        trajectories: the answers, grouped by their task's text.
        scores: of their steps, by trajectory id.
        seed: of the draws.

    Returns:
        None where no task has two answers with outcomes.
    """
    groups: dict[str, list[Trajectory]] = {}
    unknown = 0
    for trajectory in trajectories:
        unknown += trajectory.outcome is None
        if trajectory.outcome is not None:
            groups.setdefault(" ".join(trajectory.task.casefold().split()), []).append(trajectory)
    several = sorted((len(own) for own in groups.values() if len(own) > 1), reverse=True)
    if not several:
        return None
    # As many answers as nine tasks in ten have.
    largest = min(LARGEST, several[math.ceil(0.9 * len(several)) - 1])
    kept = [own for own in groups.values() if len(own) >= max(largest, 2)]
    ns = sorted({min(2**k, largest) for k in range(largest.bit_length())} | {largest})
    notes = []
    if unknown:
        notes.append(f"{unknown} answers left out: their outcome is unknown")
    if left := len(groups) - len(kept):
        notes.append(f"{left} tasks left out: fewer than {largest} answers")
    bare = sum(scored(t, scores.get(t.id, {}), "min") is None for own in kept for t in own)
    if bare:
        notes.append(f"{bare} answers have no score (no steps, or not all of them scored) and are chosen last, for 0")
    right = [[float((t.outcome or 0) >= 0.5) for t in own] for own in kept]
    by = {}
    for how in AGGREGATES:
        given = [[scored(t, scores.get(t.id, {}), how) for t in own] for own in kept]
        by[how] = tuple(_mean(_chosen(s, r, n) for s, r in zip(given, right, strict=True)) for n in ns)
    answers = [[_answer(t) for t in own] for own in kept]
    majority = None
    if all(answer is not None for own in answers for answer in own):
        random = Random(seed)
        majority = tuple(_mean(_majority(a, r, n, random) for a, r in zip(answers, right, strict=True)) for n in ns)
    else:
        missing = sum(answer is None for own in answers for answer in own)
        notes.append(f"no majority vote: {missing} answers have no meta['answer']")
    passed = tuple(_mean(1 - _ratio(len(r) - int(sum(r)), len(r), n) for r in right) for n in ns)
    return BestOfN(tuple(ns), len(kept), by, majority, passed, tuple(notes))


def pair_accuracy(trajectories: Sequence[Trajectory], scores: Mapping[str, Mapping[int, float]]) -> PairAccuracy | None:
    """How often the chosen answer outscores the rejected one; trajectories as `prm convert` makes them of pairs.

    A pair of which an answer has no score (no steps, or not all scored) is counted and left out. With several answers
    of a kind all their pairs count.

    Returns:
        None where there is no pair.
    """
    pairs: dict[str, dict[str, list[Trajectory]]] = {}
    for trajectory in trajectories:
        if isinstance(trajectory.meta.get("pair"), str) and trajectory.meta.get("role") in ("chosen", "rejected"):
            pairs.setdefault(trajectory.meta["pair"], {}).setdefault(trajectory.meta["role"], []).append(trajectory)
    if not pairs:
        return None
    wins: dict[str, list[float]] = {how: [] for how in AGGREGATES}
    subsets: dict[str, list[float]] = {}
    left = 0
    for own in pairs.values():
        for chosen, rejected in product(own.get("chosen", []), own.get("rejected", [])):
            both = [[scored(t, scores.get(t.id, {}), how) for t in (chosen, rejected)] for how in AGGREGATES]
            if any(score is None for score in both[0]):
                left += 1
                continue
            for how, (better, worse) in zip(AGGREGATES, both, strict=True):
                assert better is not None and worse is not None
                wins[how].append(0.5 if better == worse else float(better > worse))
            if isinstance(subset := chosen.meta.get("subset", chosen.meta.get("category")), str):
                subsets.setdefault(subset, []).append(wins["min"][-1])
    half = sum(len(own) < 2 for own in pairs.values())
    notes = [f"{left} pairs left out: an answer has no score"] if left else []
    notes += [f"{half} pairs left out: one of the two answers is missing"] if half else []
    shares = {how: (_mean(own) if own else None) for how, own in wins.items()}
    return PairAccuracy(
        len(wins["min"]), shares, {k: (len(v), _mean(v)) for k, v in sorted(subsets.items())}, tuple(notes)
    )


def _chosen(scores: Sequence[float | None], right: Sequence[float], n: int) -> float:
    """Expected success of the highest score among n drawn without replacement; ties share."""
    order = sorted({s for s in scores if s is not None}, reverse=True)
    above, total = 0, 0.0
    for value in order:
        own = [r for s, r in zip(scores, right, strict=True) if s == value]
        # P(the best drawn is one of these) = P(none above drawn) - P(none of these or above drawn)
        share = _ratio(len(scores) - above, len(scores), n) - _ratio(len(scores) - above - len(own), len(scores), n)
        total += share * sum(own) / len(own)
        above += len(own)
    return total


def _majority(answers: Sequence[Any], right: Sequence[float], n: int, random: Random) -> float:
    every = n == len(answers)
    total = 0.0
    for _ in range(1 if every else DRAWS):
        drawn = range(len(answers)) if every else random.sample(range(len(answers)), n)
        votes = Counter(answers[i] for i in drawn)
        most = max(votes.values())
        tied = [answer for answer, count in votes.items() if count == most]
        total += _mean(_mean(right[i] for i in drawn if answers[i] == answer) for answer in tied)
    return total / (1 if every else DRAWS)


def _ratio(among: int, total: int, n: int) -> float:
    """P(n drawn of `total` without replacement all lie among certain ones)."""
    return math.comb(among, n) / math.comb(total, n) if among >= n else 0.0


def _answer(trajectory: Trajectory) -> str | None:
    answer = trajectory.meta.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    return " ".join(str(answer).casefold().split())


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
