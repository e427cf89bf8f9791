"""From continuations to labels: what every method of drawing them shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from labeling.continuations import Continuation
from labeling.intervals import Plan, estimate, wilson
from prm.config import option
from prm.errors import UsageError
from prm.records import Step, StepLabel, Trajectory


@dataclass(frozen=True)
class MonteCarloConfig:
    k: int = option(8, "continuations from the state after a step")
    adaptive: bool = option(False, "share continuations among the states they pass")
    width: float | None = option(None, "adaptive: stop early where the 95 % interval is so narrow (0.55 suits K = 8)")
    threshold: float | None = option(None, "adaptive: stop early where the interval is on one side of this")
    confidence: float = option(0.9, "first-error: search until one step is the first error with this probability")
    searches: int = option(8, "tree: how many rollouts are searched for their first error, for each task")
    alpha: float = option(0.5, "tree: Q = alpha^(1-MC) beta^(length/L)")
    beta: float = option(0.9, "tree: see alpha")
    length: float = option(500.0, "tree: L, in tokens")
    c_puct: float = option(0.125, "tree: the weight of exploration")
    hard: bool = option(False, "score 1 where any continuation succeeded and 0 where none did, not their share")
    seed: int = option(0, "of the draws")
    batch: int = option(256, "episodes in flight, and so histories in one call of the policy")
    max_steps: int = option(50, "cut a continuation after so many steps (it then says nothing)")
    max_trajectories: int | None = option(None, "label only so many trajectories, drawn at random")
    max_steps_per_trajectory: int | None = option(None, "label only so many steps of each, drawn at random")
    budget: int | None = option(None, "the most continuations, those of an earlier run for the same file included")
    budget_tokens: int | None = option(None, "the most sampled tokens, likewise")
    workers: int = option(0, "environment processes, one episode each; 0 keeps environments in this process")
    timeout: float = option(60.0, "with workers: kill an environment that does not answer for so many seconds")

    def __post_init__(self) -> None:
        for name in ("k", "batch", "max_steps", "searches", "max_trajectories", "max_steps_per_trajectory"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be >= 1, got {value}")
        for name in ("budget", "budget_tokens", "workers"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UsageError(f"{name} must be >= 0, got {value}")
        if not self.timeout > 0:
            raise UsageError(f"timeout must be > 0, got {self.timeout}")
        if not 0.5 < self.confidence < 1:
            raise UsageError(f"confidence must lie between 0.5 and 1, got {self.confidence}")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise UsageError(f"threshold must lie between 0 and 1, got {self.threshold}")


def chosen_steps(trajectory: Trajectory, config: MonteCarloConfig) -> list[int]:
    """The steps to label: all, or a random subset that depends on the seed and the trajectory alone."""
    steps = list(range(len(trajectory.steps)))
    most = config.max_steps_per_trajectory
    if most is None or most >= len(steps):
        return steps
    return sorted(Random(f"{config.seed}:{trajectory.id}").sample(steps, most))


def is_over(restored: Continuation | None) -> bool:
    """Whether the episode of a restored state is over."""
    return restored is not None and restored.status not in ("open", "error")


def over_label(
    trajectory: Trajectory, step: int, restored: Continuation | None, source: str, config: MonteCarloConfig
) -> StepLabel | None:
    """The label of a step that ended its episode: the outcome itself, which is certain; None where it is unknown."""
    if restored is None or restored.outcome is None:
        return None
    meta = {"n_requested": 0, "over": True, "interval": [restored.outcome, restored.outcome]}
    score = float(restored.outcome > 0) if config.hard else restored.outcome
    return StepLabel(trajectory.id, step, score, source, config.k, meta=meta)


def draws_label(
    trajectory: Trajectory,
    step: int,
    draws: Sequence[Continuation],
    source: str,
    config: MonteCarloConfig,
    plan: Plan | None = None,
    requested: int | None = None,
    shared: tuple[float, float] | None = None,
) -> StepLabel | None:
    """The label from continuations; None where none was valid.

    Args:
        plan: how their number came about, where it depended on their outcomes; the score is then the unbiased estimate.
        requested: how many were asked for (default K).
        shared: a better estimate, to which other states' continuations contribute, and the number of draws that it is
            worth; that is then the label's weight.
    """
    outcomes = [d.outcome for d in draws if d.outcome is not None]
    if not outcomes:
        return None
    n, successes = len(outcomes), sum(outcomes)
    share, worth = shared or (successes / n, n)
    if config.hard:
        score = float(share > 0)
    elif shared is None and plan is not None and all(o in (0, 1) for o in outcomes):
        score = estimate(plan, round(successes), n)
    else:
        score = min(1.0, share)
    meta = {"n_requested": config.k if requested is None else requested, "valid": n, "successes": successes}
    meta |= counts(draws) | {"interval": list(wilson(share * worth, worth))}
    return StepLabel(trajectory.id, step, score, source, worth, meta=meta)


def counts(draws: Sequence[Continuation]) -> dict[str, Any]:
    """What a label's meta says of its continuations, beside how they ended."""
    status = Counter(d.status for d in draws)
    texts = {tuple(s.action for s in d.steps) for d in draws if d.status != "error"}
    return {
        "n_distinct": len(texts),
        "truncated": status["truncated"],
        "errors": status["error"],
        "no_answer": status["unanswered"] + sum(d.verdict == "no answer" for d in draws),
        "low_confidence": len(texts) == 1 and len(draws) - status["error"] > 1,
        "tokens": sum(d.tokens for d in draws),
    }


def common(a: Sequence[Step], b: Sequence[Step]) -> int:
    """How many first steps two sequences share."""
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n


def onward(draw: Continuation, steps: int) -> Continuation:
    """A continuation as it looks from `steps` steps later on its way; its tokens stay where they were sampled."""
    return replace(draw, steps=draw.steps[steps:], tokens=0) if steps else draw
