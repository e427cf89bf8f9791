"""How step scores become rewards: the pure part, which the trainer pays by and the audit tests."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from prm.errors import DataError, UsageError

SHAPES = ("progress", "raw", "worst")
TEMPERATURE = 0.1


def shape_scores(scores: Sequence[float], shape: str = "progress", baseline: float = 0.0) -> list[float]:
    """Shape step scores s_1..s_T, each in [0, 1].

    progress: s_t - s_{t-1} with s_0 = baseline. It telescopes: the sum is s_T - baseline however many steps there are,
    so padding and repeating earn nothing (potential-based shaping, Ng et al. 1999, with the last potential kept).
    raw: s_t. It pays by the step, so it pays for padding; a warning says so.
    worst: s_t * softmax_t(-s / 0.1): the sum is about the worst step's score (the min form, PURE, arXiv 2504.15275).

    Raises:
        UsageError: an unknown shape.
        DataError: a score that is not in [0, 1].
    """
    for t, score in enumerate(scores):
        if not 0 <= score <= 1:
            raise DataError(f"the score of step {t} must lie in [0, 1], got {score}")
    if shape == "progress":
        return [now - before for now, before in zip(scores, [baseline, *scores], strict=False)]
    if shape == "raw":
        warnings.warn("the raw shape pays for every step, also for padding; progress does not", stacklevel=2)
        return list(scores)
    if shape == "worst":
        exponents = [math.exp((min(scores) - score) / TEMPERATURE) for score in scores]
        return [s * e / sum(exponents) for s, e in zip(scores, exponents, strict=True)]
    raise UsageError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
