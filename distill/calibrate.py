"""Make scores mean what they say: fit a temperature or an isotonic map on held-out labels, and choose the threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distill.data import Row
from prm.checkpoint import Calibration
from prm.errors import DataError, UsageError
from prm.metrics import balanced_accuracy, brier, ece, first_bad, first_error_f1
from prm.model import PRM


def fit(kind: str, logits: Tensor, targets: Tensor, weights: Tensor) -> Calibration:
    """Fit a calibration.

    Args:
        kind: "temperature" (Guo et al. 2017), "isotonic" (Zadrozny and Elkan 2002) or "none".
        logits: raw logits, (n,).
        targets: labels in [0, 1], (n,).
        weights: of the labels, (n,).

    Raises:
        DataError: there is nothing to fit on.
    """
    if kind == "none":
        return Calibration()
    if not len(logits):
        raise DataError("no labelled step is held out, so nothing can be calibrated on")
    if kind == "temperature":
        return Calibration("temperature", temperature=_temperature(logits.double(), targets.double(), weights.double()))
    if kind != "isotonic":
        raise UsageError(f"calibration must be temperature, isotonic or none, got {kind!r}")
    from sklearn.isotonic import IsotonicRegression

    line = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    line.fit(logits.double().numpy(), targets.double().numpy(), sample_weight=weights.double().numpy())
    return Calibration("isotonic", knots=tuple(line.X_thresholds_.tolist()), values=tuple(line.y_thresholds_.tolist()))


def choose_threshold(gold: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]) -> tuple[float, str]:
    """The threshold on scores that finds first errors best, and what it was chosen by.

    Args:
        gold: the labels of each trajectory's steps, in order; below 0.5 is bad.
        scores: the scores of the same steps.

    By first-error F1, then balanced accuracy; by the latter alone where no trajectory is without an error, or none has
    one; 0.5 where all labels are of one class. Among equals the one nearest 0.5.
    """
    flat = sorted({s for own in scores for s in own})
    if not flat:
        return 0.5, "default"
    middles = [(a + b) / 2 for a, b in pairwise(flat)]
    candidates = [0.5, *middles[:: max(1, len(middles) // 100)]]
    first = [first_bad(own, 0.5) for own in gold]
    good = [g >= 0.5 for own in gold for g in own]

    def quality(threshold: float) -> tuple[float, float, float]:
        f1 = first_error_f1(first, [first_bad(own, threshold) for own in scores]).f1
        balanced = balanced_accuracy(good, [s >= threshold for own in scores for s in own])
        return (-1.0 if f1 is None else f1, -1.0 if balanced is None else balanced, -abs(threshold - 0.5))

    best = max(candidates, key=quality)
    f1, balanced, _ = quality(best)
    if balanced < 0:
        return 0.5, "default"
    return best, "held-out balanced accuracy" if f1 < 0 else "held-out first-error F1"


def _temperature(logits: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The temperature of least cross-entropy in [0.05, 20]: golden-section search in its logarithm."""

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        return float(functional.binary_cross_entropy_with_logits(scaled, targets, weight=weights))

    low, high, ratio = math.log(0.05), math.log(20.0), (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return math.exp((low + high) / 2)


def calibrate(prm: PRM, held: Sequence[Row], kind: str, weights: bool, batch_tokens: int) -> dict[str, Any]:
    """Fit calibration and threshold on held-out rows and set them; what came of it, {} where nothing is held out.

    The figures "after" are cross-fitted: each half of the trajectories is calibrated by a fit on the other, so that
    they say what to expect of new ones. What is kept is fitted on both halves.
    """
    if not held:
        return {}
    read = prm.raw([row.part for row in held], batch_tokens=batch_tokens)
    logits, targets = torch.cat(read), torch.tensor([s for row in held for s in row.scores])
    each = torch.tensor([w if weights else 1.0 for row in held for w in row.weights])
    found = fit(kind, logits, targets, each)
    by_id: dict[str, tuple[list[float], list[float]]] = {}
    for row, own in zip(held, read, strict=True):
        gold, scores = by_id.setdefault(row.trajectory_id, ([], []))
        gold += row.scores
        scores += found(own).tolist()
    threshold, by = choose_threshold([g for g, _ in by_id.values()], [s for _, s in by_id.values()])
    prm.settings = dataclasses.replace(prm.settings, calibration=found, threshold=threshold)
    names = {name: i % 2 for i, name in enumerate(by_id)}
    half = torch.tensor([names[row.trajectory_id] for row in held for _ in row.scores])
    values = summary(logits, targets, cross_fitted(kind, logits, targets, each, half))
    return {"kind": found.kind, "temperature": found.temperature, "threshold": threshold, "by": by} | values


def cross_fitted(kind: str, logits: Tensor, targets: Tensor, weights: Tensor, half: Tensor) -> Tensor:
    """Scores, (n,), of each half (0 or 1) calibrated on the other; where one half is empty, on themselves."""
    out = torch.empty_like(logits)
    for side in (0, 1):
        here, other = half == side, half != side
        if here.any():
            other = other if other.any() else here
            out[here] = fit(kind, logits[other], targets[other], weights[other])(logits[here])
    return out


def summary(logits: Tensor, targets: Tensor, after: Tensor) -> dict[str, float]:
    """ECE and Brier score of the logits' sigmoid, and of scores after calibration."""
    gold, before = targets.tolist(), torch.sigmoid(logits.float()).tolist()
    values = {
        "ece_before": ece(before, gold),
        "ece_after": ece(after.tolist(), gold),
        "brier_before": brier(before, gold),
        "brier_after": brier(after.tolist(), gold),
    }
    return {name: value for name, value in values.items() if value is not None}


def describe(found: dict[str, Any]) -> str:
    """`calibrate`'s result in a line."""
    if not found:
        return "nothing is held out: the scores are not calibrated, and the threshold is 0.5"
    shown = f" T = {found['temperature']:.3f}" if found["kind"] == "temperature" else ""
    return (
        f"held out: ECE {found['ece_before']:.3f} -> {found['ece_after']:.3f}, "
        f"Brier {found['brier_before']:.3f} -> {found['brier_after']:.3f} ({found['kind']}{shown}, cross-fitted); "
        f"threshold {found['threshold']:.3f} ({found['by']})"
    )
