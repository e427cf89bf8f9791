"""Step labels from continuations: a step is as good as the policy's chance to succeed from it.

Math-Shepherd (Wang et al. 2023, arXiv 2312.08935): from the state after each step the policy is run to the end K times;
the soft label is the share of successes (their equation 4), the hard label whether there was any (equation 3). Cheaper
ways to labels like these are in `labeling.adaptive`, `labeling.search` and `labeling.tree`.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from labeling.adaptive import staged
from labeling.continuations import RESTORE, Continuation, Journal, Limits, Request, Runner, Strategy, drive
from labeling.draws import MonteCarloConfig, chosen_steps, draws_label, is_over, over_label
from labeling.search import first_error
from labeling.tree import grown, same_start
from prm.config import progress
from prm.env import Env, EnvFactory, Policy, env_factory, load_attribute
from prm.errors import EnvError, UsageError
from prm.records import StepLabel, Trajectory, append_jsonl, read_jsonl

__all__ = ["MonteCarloConfig", "first_error_labels", "rollout_labels", "tree_labels"]

SAMPLING = ("temperature", "top_p", "max_action_tokens", "system", "layout", "stop")  # what a policy's texts depend on
Out = str | os.PathLike[str] | None


def rollout_labels(
    trajectories: Sequence[Trajectory],
    env: str | EnvFactory | type[Env],
    policy: Policy,
    config: MonteCarloConfig | None = None,
    *,
    out: Out = None,
) -> list[StepLabel]:
    """Label steps by K continuations from the state after each; fewer with `config.adaptive`.

    The state is restored by replaying the actions with the trajectory's own seed, and checked, or copied where the
    environment has a method `copy`. A continuation that a limit cut, or that failed, is no failure of the step: it is
    counted in the label's meta and is not in `weight`. A step without any valid continuation has no label. Where the
    episode was over after the step, its outcome is the score, at no cost, with weight K.

    Args:
        trajectories: as recorded in `env`; `meta["seed"]` and `meta["options"]` start an episode again.
        env: `module:attribute`, a class, or a function that makes a fresh environment.
        policy: its sampling temperature must not be 0 when K > 1.
        config: defaults as in `MonteCarloConfig`.
        out: append the labels of each trajectory here as soon as it is done. Trajectories whose labels by this policy
            are there already are not run again; `OUT.continuations` keeps what was run until all are labelled, so that
            nothing is run twice, whenever the run was stopped.

    Returns:
        the labels in the order of trajectories and steps, those found in `out` included. `score` is successes / valid
        (adaptive: the unbiased estimate), `weight` is valid, `source` is "mc:" and the policy's name, and `meta` has
        "n_requested", "valid", "successes", "n_distinct", "truncated", "errors", "no_answer", "low_confidence" (all
        continuations were one text), "tokens" (sampled for this label), "interval" (95 %, Wilson).

    Raises:
        ReplayError: a trajectory does not replay; the message names the step.
        UsageError: K > 1 at temperature 0: all continuations would be one.
        EnvError: no continuation at all was valid.
    """
    config = config or MonteCarloConfig()
    source = f"mc:{policy_name(policy)}"
    chosen = _chosen(trajectories, config)
    if not config.adaptive:
        return _labelled([[one] for one in chosen], _fixed, env, policy, config, source, out)
    bounded = config.budget is not None or config.budget_tokens is not None
    return _labelled(same_start(chosen), staged, env, policy, config, source, out, at_once=bounded)


def first_error_labels(
    trajectories: Sequence[Trajectory],
    env: str | EnvFactory | type[Env],
    policy: Policy,
    config: MonteCarloConfig | None = None,
    *,
    out: Out = None,
) -> list[StepLabel]:
    """Label steps by where the first error is: the step after which no continuation succeeds any more.

    Arguments and errors are those of `rollout_labels`. The score is P(no error up to this step), see
    `labeling.search.first_error`. It takes about as many continuations as K = 8 spends on one or two steps.
    """
    config = config or MonteCarloConfig()
    source = f"mc:{policy_name(policy)}"
    groups = [[one] for one in _chosen(trajectories, config)]
    return _labelled(groups, first_error, env, policy, config, source, out)


def tree_labels(
    trajectories: Sequence[Trajectory],
    env: str | EnvFactory | type[Env],
    policy: Policy,
    config: MonteCarloConfig | None = None,
    *,
    out: Out = None,
    new: Out = None,
) -> tuple[list[StepLabel], list[Trajectory]]:
    """Label states by tree search, see `labeling.tree`; one tree for all trajectories of a task.

    Arguments and errors are those of `rollout_labels`.

    Args:
        new: append the trajectories that the search made, and that some labels speak of, here.

    Returns:
        the labels, source "tree:" and the policy's name, and those trajectories. Every state is labelled once a
        trajectory that was given, or once in one of the new ones.
    """
    config = config or MonteCarloConfig()
    if config.k < 2:
        raise UsageError(f"a tree needs k >= 2, got {config.k}")
    if out is not None and new is None:
        raise UsageError(f"labels in {out} would name trajectories that are written nowhere: say where (new)")
    source = f"tree:{policy_name(policy)}"
    groups = same_start(_chosen(trajectories, config))
    # A crash can tear the last line; skip_bad passes over it, and the next append removes it.
    there = [] if new is None or not os.path.exists(new) else read_jsonl(new, Trajectory, skip_bad=True)
    made = {one.id: one for one in there}

    def keep(product: tuple[list[StepLabel], list[Trajectory]]) -> list[StepLabel]:
        labels, trajectories = product
        fresh = [one for one in trajectories if one.id not in made]
        made.update((one.id, one) for one in fresh)
        if new is not None:
            append_jsonl(new, fresh)
        return labels

    labels = _labelled(groups, grown, env, policy, config, source, out, keep, there)
    return labels, list(made.values())


def policy_name(policy: Policy) -> str:
    """The name that a label's source carries."""
    name = getattr(policy, "name", None)
    return name if isinstance(name, str) and name else type(policy).__name__


def _chosen(trajectories: Sequence[Trajectory], config: MonteCarloConfig) -> list[Trajectory]:
    """Each trajectory once; a random subset where only so many are to be labelled."""
    unique = {one.id: one for one in trajectories}
    most = config.max_trajectories
    if most is None or most >= len(unique):
        return list(unique.values())
    kept = set(Random(config.seed).sample(sorted(unique), most))
    return [one for one in unique.values() if one.id in kept]


def _fixed(trajectories: Sequence[Trajectory], config: MonteCarloConfig, source: str) -> Strategy:
    """K continuations from every chosen step of one trajectory."""
    (trajectory,) = trajectories
    last = len(trajectory.steps) - 1
    restored = (yield [Request(trajectory, last + 1, RESTORE)])[0]
    steps = chosen_steps(trajectory, config)
    drawn: dict[int, list[Continuation]] = {t: [] for t in steps if t != last or not is_over(restored)}
    requests = [Request(trajectory, t + 1, draw) for t in drawn for draw in range(config.k)]
    results = yield requests
    for request, result in zip(requests, results, strict=True):
        if result is not None:
            drawn[request.steps - 1].append(result)
    labels = [
        draws_label(trajectory, t, drawn[t], source, config)
        if t in drawn
        else over_label(trajectory, t, restored, source, config)
        for t in steps
    ]
    return [label for label in labels if label is not None]


def _labelled(
    groups: Sequence[list[Trajectory]],
    strategy: Callable[[Sequence[Trajectory], MonteCarloConfig, str], Strategy],
    env: str | EnvFactory | type[Env],
    policy: Policy,
    config: MonteCarloConfig,
    source: str,
    out: Out,
    keep: Callable[[Any], list[StepLabel]] = list,
    more: Sequence[Trajectory] = (),
    at_once: bool = False,
) -> list[StepLabel]:
    """Run a strategy for each group of trajectories, without those that have labels already; all labels.

    Args:
        keep: takes a strategy's product, gives its labels.
        more: trajectories whose labels in `out` also count.
    """
    if config.k > 1 and getattr(policy, "temperature", None) == 0:
        raise UsageError(
            f"k = {config.k} at temperature 0 would be one continuation {config.k} times: set temperature > 0 or k = 1"
        )
    labels: dict[str, list[StepLabel]] = {one.id: [] for group in [*groups, more] for one in group}
    if out is not None and os.path.exists(out):
        for label in read_jsonl(out, StepLabel, skip_bad=True):
            if label.source == source and label.trajectory_id in labels:
                labels[label.trajectory_id].append(label)
    unlabelled = [[one for one in group if not labels[one.id]] for group in groups]
    left = [group for group in unlabelled if group]
    limits = Limits(
        config.batch, config.max_steps, config.budget, config.budget_tokens, config.workers, config.timeout
    )
    sampling = [getattr(getattr(policy, "config", policy), name, None) for name in SAMPLING]
    mark = hashlib.sha256(repr([source, config.seed, config.max_steps, *sampling]).encode()).hexdigest()[:8]
    journal = Journal(None if out is None else Path(f"{out}.continuations"), mark)
    # Another process finds an environment by its name, which the function around it has not.
    named: Any = load_attribute(env) if isinstance(env, str) else env
    runner = Runner(policy, named if config.workers else env_factory(named), limits, config.seed)
    total = sum(len(chosen_steps(one, config)) for group in left for one in group)
    bar = progress(total if not more else None, source.partition(":")[0], "label")
    made: list[StepLabel] = []
    whole = True
    try:
        strategies = ((group, strategy(group, config, source)) for group in left)
        for group, product in drive(strategies, runner, journal, at_once=at_once):
            fresh = keep(product)
            whole = whole and {one.id for one in group} <= {label.trajectory_id for label in fresh}
            if out is not None:
                append_jsonl(out, fresh)
            for label in fresh:
                labels.setdefault(label.trajectory_id, []).append(label)
            made += fresh
            bar.update(len(fresh))
            bar.set_postfix(_spent(runner, len(made), config), refresh=False)
    finally:
        bar.close()
        runner.close()
    if left and not made and runner.launched and not runner.spent:
        reasons = sorted({c.reason for c in journal.known.values() if c.reason})
        raise EnvError(f"none of {runner.launched} continuations led to a label: {'; '.join(reasons[:3])}")
    if whole:
        journal.close()
    _warn(made)
    there = {(label.trajectory_id, label.step) for own in labels.values() for label in own}
    missing = [(one.id, step) for group in left for one in group for step in chosen_steps(one, config)]
    missing = [place for place in missing if place not in there]
    if missing and strategy is not grown:  # a tree labels the states that it comes by
        why = "the budget was spent" if runner.spent else "each of their continuations was cut or failed"
        warnings.warn(
            f"{len(missing)} of {total} steps have no label: {why} (the first: trajectory {missing[0][0]}, step "
            f"{missing[0][1]})",
            stacklevel=3,
        )
    return [label for one in labels.values() for label in sorted(one, key=lambda label: label.step)]


def _spent(runner: Runner, labels: int, config: MonteCarloConfig) -> dict[str, str]:
    """What the progress bar says beside labels a second."""
    shown = {"tokens/label": f"{runner.tokens / max(labels, 1):.0f}"}
    if config.budget is not None:
        shown["left"] = str(max(0, config.budget - runner.launched))
    if config.budget_tokens is not None:
        shown["tokens left"] = str(max(0, config.budget_tokens - runner.tokens))
    return shown


def _warn(labels: Sequence[StepLabel]) -> None:
    rows = [label for label in labels if label.meta.get("n_requested", 0) > 1]
    alike = [label for label in rows if label.meta["low_confidence"] and label.meta["n_distinct"] == 1]
    if alike:
        one = alike[0]
        warnings.warn(
            f"{len(alike)} of {len(rows)} labels rest on one distinct continuation although more were asked for (the "
            f"first: trajectory {one.trajectory_id}, step {one.step}); a server that ignores seeds or caches by prompt "
            "does that, as does a policy that is sure. They are flagged low_confidence",
            stacklevel=4,
        )
