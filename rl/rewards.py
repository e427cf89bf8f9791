"""Step rewards from step scores, the outcome, and named penalties. The reward decides more than the algorithm does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prm.config import option
from prm.errors import DataError, UsageError

SHAPES = ("progress", "raw", "worst")
TEMPERATURE = 0.1


@dataclass(frozen=True)
class RewardConfig:
    """r_t = process_weight * shape_t + [t = T] * outcome_weight * outcome + environment_weight * env_t + penalties_t"""

    shape: str = option("progress", "how step scores become rewards", choices=SHAPES)
    process_weight: float = option(0.3, "weight of the shaped step scores")
    outcome_weight: float = option(1.0, "weight of the outcome, on the last step")
    environment_weight: float = option(0.0, "weight of the environment's own step rewards")
    baseline: float = option(0.0, "progress: the score before the first step")
    repeat_penalty: float = option(-0.1, "for an action that was taken before in the episode")
    invalid_penalty: float = option(-0.1, "for an action that the environment could not read (info['error'])")
    limit_penalty: float = option(0.0, "on the last step of an episode that ran out of steps")


@dataclass(frozen=True)
class StepRewards:
    """The parts of each step's reward, each a list of length T; `total` is their sum."""

    process: list[float]
    outcome: list[float]
    environment: list[float]
    penalties: dict[str, list[float]]

    @property
    def total(self) -> list[float]:
        parts = [self.process, self.outcome, self.environment, *self.penalties.values()]
        return [sum(step) for step in zip(*parts, strict=True)]


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


def step_rewards(
    actions: Sequence[str],
    config: RewardConfig,
    *,
    scores: Sequence[float] | None = None,
    outcome: float | None = None,
    environment: Sequence[float] | None = None,
    infos: Sequence[Mapping[str, Any]] | None = None,
    out_of_steps: bool = False,
) -> StepRewards:
    """The rewards of one episode of T steps.

    Args:
        actions: the T action texts; two that differ in white space or case only are the same action.
        scores: T step scores in [0, 1]; None where no PRM is used.
        outcome: success in [0, 1]; None (unknown) pays nothing.
        environment: the T rewards of the environment itself.
        infos: the T infos of the environment; an `error` in one marks an invalid action.
        out_of_steps: the episode ended at a step limit.

    Raises:
        DataError: lists of another length than T.
    """
    steps = len(actions)
    for name, given in (("scores", scores), ("environment rewards", environment), ("infos", infos)):
        if given is not None and len(given) != steps:
            raise DataError(f"{steps} actions have {len(given)} {name}")
    process = [0.0] * steps
    if scores is not None and config.process_weight:
        process = [config.process_weight * x for x in shape_scores(scores, config.shape, config.baseline)]
    final = [0.0] * steps
    limit = [0.0] * steps
    if steps:
        final[-1] = config.outcome_weight * (outcome or 0.0)
        limit[-1] = config.limit_penalty if out_of_steps else 0.0
    seen: set[str] = set()
    repeat = []
    for action in actions:
        key = " ".join(action.lower().split())
        repeat.append(config.repeat_penalty if key in seen else 0.0)
        seen.add(key)
    invalid = [config.invalid_penalty if info.get("error") else 0.0 for info in infos or [{}] * steps]
    own = [config.environment_weight * r for r in environment] if environment is not None else [0.0] * steps
    return StepRewards(process, final, own, {"repeat": repeat, "invalid": invalid, "limit": limit})
