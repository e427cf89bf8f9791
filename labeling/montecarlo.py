"""Step labels from continuations: a step is as good as the policy's chance to succeed from it.

Math-Shepherd (Wang et al. 2023, arXiv 2312.08935): from the state after each step the policy is run to the end K times;
the soft label is the share of successes (their equation 4), the hard label whether there was any (equation 3).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from labeling.continuations import RESTORE, Continuation, Journal, Limits, Request, Runner, Strategy, drive
from prm.config import option, progress
from prm.env import Env, EnvFactory, Policy, env_factory
from prm.errors import EnvError, UsageError
from prm.records import StepLabel, Trajectory, append_jsonl, read_jsonl


@dataclass(frozen=True)
class MonteCarloConfig:
    k: int = option(8, "continuations from the state after each step")
    seed: int = option(0, "of the draws")
    hard: bool = option(False, "score 1 where any continuation succeeded and 0 where none did, not their share")
    batch: int = option(256, "episodes in flight, and so histories in one call of the policy")
    max_steps: int = option(50, "cut a continuation after so many steps (it then says nothing)")
    max_trajectories: int | None = option(None, "label only so many trajectories, drawn at random")
    max_steps_per_trajectory: int | None = option(None, "label only so many steps of each, drawn at random")
    budget: int | None = option(None, "the most continuations of the whole run")
    budget_tokens: int | None = option(None, "the most sampled tokens of the whole run")


def rollout_labels(
    trajectories: Sequence[Trajectory],
    env: str | EnvFactory | type[Env],
    policy: Policy,
    config: MonteCarloConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
) -> list[StepLabel]:
    """Label steps by K continuations from the state after each.

    The state is restored by replaying the actions with the trajectory's own seed, and checked. A continuation that a
    limit cut, or that failed, is no failure of the step: it is counted in the label's meta and is not in `weight`. A
    step without any valid continuation has no label. Where the episode was over after the step, its outcome is the
    score, at no cost, with weight K.

    Args:
        trajectories: as recorded in `env`; `meta["seed"]` and `meta["options"]` start an episode again.
        env: `module:attribute`, a class, or a function that makes a fresh environment.
        policy: its sampling temperature must not be 0 when K > 1.
        config: defaults as in `MonteCarloConfig`.
        out: append the labels of each trajectory here as soon as it is done. Trajectories whose labels by this policy
            are there already are not run again, and the continuations of unfinished ones are kept beside it.

    Returns:
        the labels in the order of trajectories and steps, those found in `out` included. `score` is successes / valid
        (in `meta`: "n_requested", "valid", "successes", "n_distinct", "truncated", "errors", "no_answer"),
        `weight` is valid, `source` is "mc:" and the policy's name.

    Raises:
        ReplayError: a trajectory does not replay; the message names the step.
        UsageError: K > 1 at temperature 0: all continuations would be one.
        EnvError: no continuation at all was valid.
    """
    config = config or MonteCarloConfig()
    return labelled(trajectories, env, policy, config, out, "mc", lambda one: _fixed(one, config, policy_name(policy)))


def policy_name(policy: Policy) -> str:
    """The name that a label's source carries."""
    name = getattr(policy, "name", None)
    return name if isinstance(name, str) and name else type(policy).__name__


def chosen_steps(trajectory: Trajectory, config: MonteCarloConfig) -> list[int]:
    """The steps to label: all, or a random subset that depends on the seed and the trajectory alone."""
    steps = list(range(len(trajectory.steps)))
    most = config.max_steps_per_trajectory
    if most is None or most >= len(steps):
        return steps
    return sorted(Random(f"{config.seed}:{trajectory.id}").sample(steps, most))


def _fixed(trajectory: Trajectory, config: MonteCarloConfig, name: str) -> Strategy:
    """K continuations from every chosen step."""
    steps = chosen_steps(trajectory, config)
    over = (yield [Request(trajectory, len(trajectory.steps), RESTORE)])[0]
    labels = []
    last = len(trajectory.steps) - 1
    wanted = [t for t in steps if t != last or not ended(over)]
    requests = [Request(trajectory, t + 1, draw) for t in wanted for draw in range(config.k)]
    results = yield requests
    by_step: dict[int, list[Continuation]] = {t: [] for t in wanted}
    for request, result in zip(requests, results, strict=True):
        if result is not None:
            by_step[request.steps - 1].append(result)
    for t in steps:
        if t in by_step:
            label = draws_label(trajectory, t, by_step[t], f"mc:{name}", config)
        else:
            label = over_label(trajectory, t, over, f"mc:{name}", config)
        if label is not None:
            labels.append(label)
    return labels


def ended(over: Continuation | None) -> bool:
    """Whether a restored state's episode is over."""
    return over is not None and over.status != "open"


def over_label(
    trajectory: Trajectory, step: int, over: Continuation | None, source: str, config: MonteCarloConfig
) -> StepLabel | None:
    """The label of a step that ended its episode: the outcome itself, which is certain."""
    if over is None or over.outcome is None:
        return None
    meta = {"n_requested": 0, "over": True, "interval": [over.outcome, over.outcome]}
    score = float(over.outcome > 0) if config.hard else over.outcome
    return StepLabel(trajectory.id, step, score, source, config.k, meta=meta)


def draws_label(
    trajectory: Trajectory, step: int, draws: Sequence[Continuation], source: str, config: MonteCarloConfig
) -> StepLabel | None:
    """The label from continuations; None where none was valid."""
    valid = [d.outcome for d in draws if d.outcome is not None]
    if not valid:
        return None
    score = float(any(valid)) if config.hard else sum(valid) / len(valid)
    return StepLabel(trajectory.id, step, score, source, len(valid), meta=counts(draws, config.k))


def counts(draws: Sequence[Continuation], requested: int) -> dict[str, Any]:
    """What a label's meta says of its continuations."""
    status = Counter(d.status for d in draws)
    valid = [d.outcome for d in draws if d.outcome is not None]
    texts = {tuple(s.action for s in d.steps) for d in draws if d.status != "error"}
    return {
        "n_requested": requested,
        "valid": len(valid),
        "successes": sum(valid),
        "n_distinct": len(texts),
        "truncated": status["truncated"],
        "errors": status["error"],
        "no_answer": status["unanswered"] + sum(d.verdict == "no answer" for d in draws),
        "low_confidence": len(draws) > 1 and len(texts) == 1,
        "tokens": sum(d.tokens for d in draws),
    }


def labelled(
    trajectories: Sequence[Trajectory],
    env: str | EnvFactory | type[Env],
    policy: Policy,
    config: MonteCarloConfig,
    out: str | os.PathLike[str] | None,
    kind: str,
    strategy: Callable[[Trajectory], Strategy],
) -> list[StepLabel]:
    """Run a strategy for every trajectory that has no labels yet; all labels."""
    name = policy_name(policy)
    _check(policy, config)
    unique = {t.id: t for t in trajectories}
    if config.max_trajectories is not None and config.max_trajectories < len(unique):
        kept = set(Random(config.seed).sample(sorted(unique), config.max_trajectories))
        unique = {i: t for i, t in unique.items() if i in kept}
    labels: dict[str, list[StepLabel]] = {}
    if out is not None and os.path.exists(out):
        for label in read_jsonl(out, StepLabel):
            if label.source == f"{kind}:{name}" and label.trajectory_id in unique:
                labels.setdefault(label.trajectory_id, []).append(label)
    left = [t for i, t in unique.items() if i not in labels]
    limits = Limits(config.batch, config.max_steps, config.budget, config.budget_tokens)
    runner = Runner(policy, env_factory(env), limits, config.seed)
    mark = hashlib.sha256(f"{kind}:{name}:{config.seed}:{config.max_steps}".encode()).hexdigest()[:8]
    journal = Journal(None if out is None else Path(f"{out}.continuations"), mark)
    bar = progress(sum(len(chosen_steps(t, config)) for t in left), kind, "label")
    made = 0
    for trajectory_id, new in drive(((t.id, strategy(t)) for t in left), runner, journal):
        labels[trajectory_id] = new
        if out is not None:
            append_jsonl(out, new)
        made += len(new)
        bar.update(len(new))
        bar.set_postfix(_spent(runner, made, config), refresh=False)
    bar.close()
    journal.close()
    everything = [label for i in unique for label in sorted(labels.get(i, []), key=lambda x: x.step)]
    if left and runner.launched and not everything:
        reasons = {c.reason for c in journal.known.values() if c.reason}
        raise EnvError(f"none of {runner.launched} continuations was valid: {'; '.join(sorted(reasons)[:3])}")
    _warn([label for i in unique for label in labels.get(i, []) if i in {t.id for t in left}])
    return everything


def _check(policy: Policy, config: MonteCarloConfig) -> None:
    for name in ("k", "batch", "max_steps"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} must be >= 1, got {getattr(config, name)}")
    if config.k > 1 and getattr(policy, "temperature", None) == 0:
        raise UsageError(
            f"k = {config.k} at temperature 0 would be one continuation {config.k} times: set temperature > 0 or k = 1"
        )


def _spent(runner: Runner, labels: int, config: MonteCarloConfig) -> dict[str, str]:
    """What the progress bar says beside labels a second."""
    shown = {"tokens/label": f"{runner.tokens / max(labels, 1):.0f}"}
    if config.budget is not None:
        shown["left"] = str(max(0, config.budget - runner.launched))
    if config.budget_tokens is not None:
        shown["tokens left"] = str(max(0, config.budget_tokens - runner.tokens))
    return shown


def _warn(labels: Iterable[StepLabel]) -> None:
    rows = [label for label in labels if label.meta.get("n_requested")]
    alike = [label for label in rows if label.meta["low_confidence"]]
    if alike:
        one = alike[0]
        warnings.warn(
            f"{len(alike)} of {len(rows)} labels rest on one distinct continuation although more were asked for (the "
            f"first: trajectory {one.trajectory_id}, step {one.step}); a server that ignores seeds or caches by prompt "
            "does that, as does a policy that is sure. They are flagged low_confidence",
            stacklevel=3,
        )
