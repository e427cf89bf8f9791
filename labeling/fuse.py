"""Labels of several sources to one label a step, and how far each source is to be trusted.

People override, gold is taken as true. Among the rest: a weighted mean, the steps on which all agree, or Dawid and
Skene's model (1979), whose EM finds what is true of each step and how each source errs, from nothing but the labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from prm.config import option
from prm.errors import DataError, UsageError
from prm.records import StepLabel

METHODS = ("soft", "dawid-skene", "mean", "consensus")
ROLLOUTS = ("mc", "tree")
LEVELS = np.array([0.2, 0.4, 0.6, 0.8])
PRIOR = 2.0
ITERATIONS = 1000
TOLERANCE = 1e-7


@dataclass(frozen=True)
class FuseConfig:
    method: str = option("soft", "how sources that are neither people nor gold become one label", choices=METHODS)
    people: str = option(
        "override", "a person's label settles a step, or joins the others", choices=("override", "join")
    )
    rollouts_good: float = option(0.5, "consensus: rollouts (mc:, tree:) call a step good above this share")
    min_sources: int = option(1, "leave out steps with fewer sources (consensus: at least 2)")
    trust: tuple[str, ...] = option((), "mean: factors of label weights, as SOURCE=X or KIND=X (mc=0.5)")


@dataclass(frozen=True)
class Reliability:
    """How a source errs, as the fused labels see it; a share is None where it never had the chance.

    Attributes:
        n: its labels among the fused steps.
        error: share of its labels on the wrong side of 0.5 (a label of 0.5 is half wrong).
        good_as_good, bad_as_bad: shares of good steps that it calls good, and of bad steps that it calls bad.
        anchored: how many of its labels stand beside a gold or overriding label.
    """

    n: int
    error: float | None
    good_as_good: float | None
    bad_as_bad: float | None
    anchored: int


@dataclass(frozen=True)
class Fusion:
    """Fused labels in the order in which their steps first occur, each source's reliability, and what was left out."""

    labels: list[StepLabel]
    sources: dict[str, Reliability]
    dropped: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Sources, what was dropped, and notes, as JSON values."""
        own = {name: asdict(source) for name, source in self.sources.items()}
        return {"labels": len(self.labels), "sources": own, "dropped": self.dropped, "notes": self.notes}

    def summary(self) -> str:
        """A line for each source, and one for what was left out."""
        lines = []
        for name, source in self.sources.items():
            shown = [_percent(v) for v in (source.error, source.good_as_good, source.bad_as_bad)]
            lines.append(
                f"{name}: {source.n} labels, error {shown[0]}, good called good {shown[1]}, bad called bad {shown[2]}"
            )
        lines += [f"left out: {n} {reason}" for reason, n in self.dropped.items()]
        return "\n".join([*lines, *self.notes])


def fuse(labels: Iterable[StepLabel], config: FuseConfig | None = None) -> list[StepLabel]:
    """One label a step, of source "fused". See `fusion`."""
    return fusion(labels, config).labels


def fusion(labels: Iterable[StepLabel], config: FuseConfig | None = None) -> Fusion:
    """Fuse labels.

    A step with a gold label takes it; else, one that people labelled takes their weighted mean. Both anchor the
    estimate of the others' reliability. What is left is fused by `config.method`:

    mean: the mean by weight and trust.
    consensus: the mean where at least two sources all take the same side, as Qwen's PRM work keeps what rollouts and
        judge agree on (Zhang et al. 2025, arXiv 2501.07301); other steps get no label.
    dawid-skene: P(good) given who says good and who says bad, each by its own error rates (Dawid and Skene 1979).
    soft: the same with five levels of score in place of two sides, so that a hesitant 0.6 counts for less than a 1 to
        the extent that this source's hesitation turned out to mean it.

    A source's later label of a step replaces its earlier one. A fused label's weight is the sum of those behind it; its
    `meta` says `method` (or "gold", "people") and `from`, each source's score.

    Raises:
        DataError: there is no label.
        UsageError: an option makes no sense.
    """
    config = config or FuseConfig()
    trust = _trust(config)
    dropped: Counter[str] = Counter()
    by_step: dict[tuple[str, int], dict[str, StepLabel]] = {}
    for label in labels:
        own = by_step.setdefault((label.trajectory_id, label.step), {})
        dropped["labels replaced by a later one of the same source"] += label.source in own
        own[label.source] = label
    if not by_step:
        raise DataError("there are no labels to fuse")
    steps = list(by_step.values())
    anchors = [_anchor(own, config) for own in steps]
    notes: list[str] = []
    if config.method in ("soft", "dawid-skene"):
        estimate = _em([list(own.values()) for own in steps], [a[0] if a else None for a in anchors], config, notes)
    made: list[StepLabel] = []
    truth: list[tuple[float, dict[str, StepLabel], bool]] = []
    for i, ((trajectory_id, step), own) in enumerate(by_step.items()):
        anchor = anchors[i]
        if anchor is not None:
            score, behind, by = anchor
        else:
            behind, by = own, config.method
            if len(own) < config.min_sources:
                dropped["steps with too few sources"] += 1
                continue
            if config.method == "consensus" and (reason := _disagreement(own.values(), config)):
                dropped[reason] += 1
                continue
            score = float(estimate[i]) if config.method in ("soft", "dawid-skene") else _mean(own.values(), trust)
        weight = sum(label.weight for label in behind.values())
        meta = {"method": by, "from": {source: label.score for source, label in own.items()}}
        made.append(StepLabel(trajectory_id, step, min(max(score, 0.0), 1.0), "fused", weight, meta=meta))
        truth.append((score, own, anchor is not None))
    return Fusion(made, _reliability(truth), {k: n for k, n in dropped.items() if n}, notes)


def kind_of(source: str) -> str:
    """What stands before the colon: human, gold, judge, mc, tree, prm."""
    return source.partition(":")[0]


def _trust(config: FuseConfig) -> Mapping[str, float]:
    if config.method not in METHODS:
        raise UsageError(f"method must be one of {', '.join(METHODS)}, got {config.method!r}")
    if config.people not in ("override", "join"):
        raise UsageError(f"people must be override or join, got {config.people!r}")
    if not 0 <= config.rollouts_good < 1:
        raise UsageError(f"rollouts_good must lie in [0, 1), got {config.rollouts_good:g}")
    if config.min_sources < 1:
        raise UsageError(f"min_sources must be at least 1, got {config.min_sources}")
    if config.trust and config.method != "mean":
        raise UsageError("trust is for the method mean; the others find it out")
    trust = {}
    for item in config.trust:
        name, _, value = item.rpartition("=")
        try:
            trust[name] = float(value)
        except ValueError:
            trust[name] = -1.0
        if not name or not 0 < trust[name] < float("inf"):
            raise UsageError(f"trust must be SOURCE=X with X > 0, got {item!r}")
    return trust


def _anchor(own: Mapping[str, StepLabel], config: FuseConfig) -> tuple[float, dict[str, StepLabel], str] | None:
    """(score, the labels behind it, why) of a step that gold or people settle."""
    for kind, name in (("gold", "gold"), ("human", "people")):
        behind = {source: label for source, label in own.items() if kind_of(source) == kind}
        if behind and (kind == "gold" or config.people == "override"):
            return _mean(behind.values(), {}), behind, name
    return None


def _mean(labels: Iterable[StepLabel], trust: Mapping[str, float]) -> float:
    pairs = [(x.score, x.weight * trust.get(x.source, trust.get(kind_of(x.source), 1.0))) for x in labels]
    return sum(score * weight for score, weight in pairs) / sum(weight for _, weight in pairs)


def _disagreement(labels: Iterable[StepLabel], config: FuseConfig) -> str:
    """Why there is no consensus on a step; "" where there is."""
    own = list(labels)
    if len(own) < 2:
        return "steps with one source only"
    sides = {_side(label, config) for label in own}
    return "" if len(sides) == 1 else "steps on which the sources disagree"


def _side(label: StepLabel, config: FuseConfig) -> int:
    """1 good, -1 bad, 0 neither. Where one success is enough, no success is bad."""
    limit = config.rollouts_good if kind_of(label.source) in ROLLOUTS else 0.5
    if limit == 0:
        return 1 if label.score > 0 else -1
    return (label.score > limit) - (label.score < limit)


# --- Dawid and Skene --------------------------------------------------------------------------------------------------


def _em(
    steps: Sequence[Sequence[StepLabel]], anchors: Sequence[float | None], config: FuseConfig, notes: list[str]
) -> np.ndarray:
    """P(good) of each step, (steps,), by EM on the others than gold and overriding people.

    A source is two distributions over levels of score, one on good and one on bad steps, with a prior of `PRIOR` labels
    each that takes scores at their word. A label counts by its weight over its source's mean weight.
    """
    settled = ("gold", "human") if config.people == "override" else ("gold",)
    rows = [(i, x) for i, own in enumerate(steps) for x in own if kind_of(x.source) not in settled]
    known = np.array([np.nan if a is None else a for a in anchors])
    p = np.where(np.isnan(known), 0.5, known)
    if not rows:
        return p
    names = {name: j for j, name in enumerate(dict.fromkeys(x.source for _, x in rows))}
    item = np.array([i for i, _ in rows])
    source = np.array([names[x.source] for _, x in rows])
    score = np.array([x.score for _, x in rows])
    weight = np.array([x.weight for _, x in rows])
    weight = weight / (np.bincount(source, weight) / np.bincount(source))[source]
    if config.method == "soft":
        # Symmetric about 0.5: what lies on an inner limit belongs to the level nearer the middle.
        below = np.searchsorted(LEVELS, score, side="right")
        above = np.searchsorted(LEVELS, score, side="left")
        level, middles = np.where(score < 0.5, below, above), np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    else:
        level, middles = np.sign(score - 0.5).astype(int) + 1, np.array([0.1, 0.5, 0.9])
    free = np.isnan(known)
    votes = np.bincount(item, minlength=len(p))
    if free.all() and (votes < 3).all():
        notes.append(
            "no step has three sources and none has a gold or human label: how far each source is right cannot be told "
            "from such labels alone, so take the error rates with care"
        )
    total = np.bincount(item, weight, minlength=len(p))
    mean = np.bincount(item, weight * score, minlength=len(p)) / np.maximum(total, 1e-12)
    p = np.where(free & (votes > 0), mean, p)
    shape = (len(names), len(middles))
    believed = PRIOR * np.stack([1 - middles, middles]) / np.stack([1 - middles, middles]).sum(1, keepdims=True)
    cell = source * len(middles) + level
    used = votes > 0
    for _ in range(ITERATIONS):
        at = p[item]
        counts = [np.bincount(cell, weight * q, minlength=shape[0] * shape[1]).reshape(shape) for q in (1 - at, at)]
        given = [(c + b) / (c + b).sum(1, keepdims=True) for c, b in zip(counts, believed, strict=True)]
        share = (p[used].sum() + 1) / (used.sum() + 2)
        odds = np.log(share / (1 - share)) + np.bincount(
            item, weight * np.log(given[1] / given[0]).reshape(-1)[cell], minlength=len(p)
        )
        new = np.where(free & used, 1 / (1 + np.exp(-np.clip(odds, -500, 500))), p)
        moved, p = np.abs(new - p).max(), new
        if moved < TOLERANCE:
            break
    else:
        notes.append(f"EM had not settled after {ITERATIONS} rounds (the last moved a score by {moved:.1g})")
    return p


def _reliability(truth: Sequence[tuple[float, Mapping[str, StepLabel], bool]]) -> dict[str, Reliability]:
    sums: dict[str, list[float]] = {}
    for p, own, anchored in truth:
        for source, label in own.items():
            said = 0.5 + 0.5 * ((label.score > 0.5) - (label.score < 0.5))
            row = sums.setdefault(source, [0.0] * 7)
            parts = (1, p * (1 - said) + (1 - p) * said, p, p * said, 1 - p, (1 - p) * (1 - said), anchored)
            for k, value in enumerate(parts):
                row[k] += value
    made = {}
    for source, (n, wrong, good, right, bad, found, marks) in sums.items():
        shares = (right / good if good > 1e-9 else None, found / bad if bad > 1e-9 else None)
        made[source] = Reliability(int(n), wrong / n, *shares, int(marks))
    return made


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
