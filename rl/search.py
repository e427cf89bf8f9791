"""Search with a PRM: best-of-n, step-level beam search and rejection sampling, over any policy and environment.

Whole candidates come from `rl.rollout.episodes`. Beam search (Snell et al. 2024, arXiv 2408.03314, section 5.2, with
environments) draws actions from each kept state, applies them to copies of the state made by replay, and keeps the
states whose scores are best. Candidates that share a prefix are scored together, and what the PRM has read once it
does not read again where it can keep it (`StepScorer.session`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prm.batching import AGGREGATES, aggregate
from prm.config import option
from prm.env import Action, Env, EnvFactory, Episode, Policy, act, env_factory, replay
from prm.errors import UsageError
from prm.records import Trajectory
from rl.rollout import episodes, failed_action, named

METHODS = ("best-of-n", "beam", "rejection")


@dataclass(frozen=True)
class SearchConfig:
    out: str = option(..., "append the trajectories that were found here; seeds that are there are not searched again")
    method: str = option("best-of-n", "how to search", choices=METHODS)
    n: int = option(8, "episodes a task (best-of-n; rejection: at most), or actions drawn from each kept state (beam)")
    width: int = option(2, "beam: states kept")
    aggregate: str = option("min", "how step scores become one number", choices=AGGREGATES)
    threshold: float = option(0.5, "rejection: the number that is good enough")
    tasks: int = option(100, "how many tasks; their seeds are seed, seed + 1, ...")
    seed: int = option(0, "the first seed")
    salt: int = option(0, "other numbers give other draws of the policy")
    batch: int = option(16, "tasks side by side")
    max_steps: int = option(50, "cut an episode after so many steps")

    def __post_init__(self) -> None:
        for name in ("n", "width", "tasks", "batch", "max_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold must lie in [0, 1], got {self.threshold}")


@dataclass(frozen=True)
class Found:
    """What a search gave for one task.

    Args:
        trajectory: the best one; its meta says how it was found. None where none was good enough (rejection), or where
            the policy failed each time.
        scores: its step scores.
        value: their aggregate.
        candidates: how many trajectories or states were scored.
        failed: how many times the policy failed.
    """

    seed: int
    trajectory: Trajectory | None
    scores: tuple[float, ...]
    value: float
    candidates: int
    failed: int = 0


def search(
    policy: Policy, env: str | EnvFactory, scorer: Any, seeds: Sequence[int], config: SearchConfig
) -> Iterator[Found]:
    """Search one trajectory for each seed, by `config.method`; in the order of `seeds`.

    Args:
        policy: acts, with a sampling temperature above 0 (equal candidates are worth no search).
        env: `module:attribute`, or a class or function that makes an environment.
        scorer: a PRM, here or remote, or anything with `score(trajectories)`.

    Raises:
        EnvError: an environment raised, broke its protocol, or gave something else when it was replayed.
        UsageError: greedy sampling.
    """
    if getattr(policy, "temperature", 1.0) == 0 and config.n > 1:
        raise UsageError(f"{config.n} draws at temperature 0 are one draw; give the policy a temperature")
    make = env_factory(env)
    for start in range(0, len(seeds), config.batch):
        group = list(seeds[start : start + config.batch])
        yield from {"best-of-n": best_of_n, "beam": beam, "rejection": rejection}[config.method](
            policy, make, scorer, group, config
        )


def best_of_n(policy: Policy, make: EnvFactory, scorer: Any, seeds: Sequence[int], config: SearchConfig) -> list[Found]:
    """Play n episodes a seed and take the one whose aggregate is highest (the earliest of equals)."""
    played, failed = _play(policy, make, [s for s in seeds for _ in range(config.n)], config, config.salt)
    own = [(i // config.n, episode) for i, episode in played]
    scored = _scores(scorer, [episode.trajectory(**named(policy)) for _, episode in own])
    out = []
    for k, seed in enumerate(seeds):
        mine = [pair for (which, _), pair in zip(own, scored, strict=True) if which == k]
        lost = sum(i // config.n == k for i in failed)
        out.append(_best(seed, mine, config, len(mine), lost))
    return out


def rejection(policy: Policy, make: EnvFactory, scorer: Any, seeds: Sequence[int], config: SearchConfig) -> list[Found]:
    """Play episodes of each seed until one reaches the threshold, n at most."""
    out = {seed: Found(seed, None, (), 0.0, 0) for seed in seeds}
    waiting = list(seeds)
    for turn in range(config.n):
        played, failed = _play(policy, make, waiting, config, config.salt + turn * 1_000_003)
        scored = _scores(scorer, [episode.trajectory(**named(policy)) for _, episode in played])
        for i in failed:
            out[waiting[i]] = replace(out[waiting[i]], failed=out[waiting[i]].failed + 1)
        for (i, _), pair in zip(played, scored, strict=True):
            before = out[waiting[i]]
            found = _best(waiting[i], [pair], config, before.candidates + 1, before.failed)
            out[waiting[i]] = found if found.value >= config.threshold else replace(before, candidates=found.candidates)
        waiting = [seed for seed in waiting if out[seed].trajectory is None]
        if not waiting:
            break
    return [out[seed] for seed in seeds]


@dataclass(eq=False)
class _State:
    episode: Episode
    scores: tuple[float, ...] = ()
    over: bool = False


def beam(policy: Policy, make: EnvFactory, scorer: Any, seeds: Sequence[int], config: SearchConfig) -> list[Found]:
    """Step by step: draw n actions from each kept state, score where they lead, keep the best `width` of a task.

    A state that is over stays among the kept ones as long as its aggregate is among the best.
    """
    session = scorer.session() if hasattr(scorer, "session") else scorer
    beams = {seed: [_State(Episode(make(), seed))] for seed in seeds}
    candidates = dict.fromkeys(seeds, 0)
    failed = dict.fromkeys(seeds, 0)
    for step in range(config.max_steps):
        asked = [(seed, state, i) for seed in seeds for state in beams[seed] if not state.over for i in range(config.n)]
        if not asked:
            break
        histories = [
            replace(state.episode.history, seed=_draw(config.salt, seed, step, beams[seed].index(state), i))
            for seed, state, i in asked
        ]
        actions = act(policy, histories)
        drawn: dict[_State, dict[str, Action]] = {}
        for (seed, state, _), action in zip(asked, actions, strict=True):
            if action.finish == "error":
                failed[seed] += 1
            else:
                # Equal actions lead to equal states.
                drawn.setdefault(state, {}).setdefault(action.text, action)
        for seed in seeds:
            grown = [
                _State(episode, over=episode.done or step + 1 == config.max_steps)
                for state in beams[seed]
                for episode in _children(make, state.episode, list(drawn.get(state, {}).values()))
            ]
            candidates[seed] += len(grown)
            beams[seed] = [state for state in beams[seed] if state.over] + grown
        fresh = [state for seed in seeds for state in beams[seed] if not state.scores]
        for state, scores in zip(fresh, _score(session, [s.episode.trajectory() for s in fresh]), strict=True):
            state.scores = tuple(scores)
            if state.over and not state.episode.done:
                state.episode.truncated = state.episode.cut = True
        for seed in seeds:
            beams[seed].sort(key=lambda state: -aggregate(state.scores, config.aggregate))
            beams[seed] = beams[seed][: config.width]
    out = []
    for seed in seeds:
        kept = [(s.episode.trajectory(**named(policy)), s.scores) for s in beams[seed] if s.over]
        out.append(_best(seed, kept, config, candidates[seed], failed[seed]))
    return out


def _children(make: EnvFactory, parent: Episode, actions: Sequence[Action]) -> Iterator[Episode]:
    """The episodes one action later, each in a state of its own; the last takes over the parent's."""
    record, history = parent.trajectory(), parent.history
    for i, action in enumerate(actions):
        child = parent if i + 1 == len(actions) else replay(make(), record)
        # The replay knows texts only: what was sampled stays as it was sampled.
        child.history = history
        child.step(action)
        yield child


def _play(
    policy: Policy, make: Callable[[], Env], seeds: Sequence[int], config: SearchConfig, salt: int
) -> tuple[list[tuple[int, Episode]], list[int]]:
    """Finished episodes by their place in `seeds`, and the places where the policy failed."""
    done, failed = [], []
    for index, episode in episodes(
        policy, make, seeds, batch=max(config.batch, config.n), max_steps=config.max_steps, salt=salt
    ):
        if failed_action(episode):
            failed.append(index)
        else:
            done.append((index, episode))
    return sorted(done, key=lambda pair: pair[0]), failed


def _score(scorer: Any, trajectories: list[Trajectory]) -> list[list[float]]:
    scores: list[list[float]] = getattr(scorer, "score", scorer)(trajectories)
    for trajectory, own in zip(trajectories, scores, strict=True):
        if len(own) != len(trajectory.steps):
            raise UsageError(f"the scorer gave {len(own)} scores for {len(trajectory.steps)} steps")
    return scores


def _scores(scorer: Any, trajectories: list[Trajectory]) -> list[tuple[Trajectory, tuple[float, ...]]]:
    return [(t, tuple(s)) for t, s in zip(trajectories, _score(scorer, trajectories), strict=True)]


def _best(
    seed: int,
    scored: Sequence[tuple[Trajectory, tuple[float, ...]]],
    config: SearchConfig,
    candidates: int,
    failed: int,
) -> Found:
    if not scored:
        return Found(seed, None, (), 0.0, candidates, failed)
    values = [aggregate(scores, config.aggregate) for _, scores in scored]
    at = values.index(max(values))
    trajectory, scores = scored[at]
    how = {"method": config.method, "aggregate": config.aggregate, "value": values[at], "candidates": candidates}
    meta = {**trajectory.meta, "search": {**how, "scores": list(scores)}}
    return Found(seed, replace(trajectory, meta=meta), scores, values[at], candidates, failed)


def _draw(*key: int) -> int:
    return int.from_bytes(hashlib.sha256(":".join(map(str, key)).encode()).digest()[:6], "big")


def run(policy: Policy, make: EnvFactory, scorer: Any, config: SearchConfig, meta: Mapping[str, Any]) -> int:
    """The command: search the seeds that are not in `config.out` yet; the exit status.

    `meta` goes into each trajectory's.
    """
    import sys
    from pathlib import Path

    from prm.config import progress
    from prm.records import Writer, read_jsonl

    there = read_jsonl(config.out, Trajectory) if Path(config.out).exists() else []
    known = {t.meta.get("seed") for t in there}
    seeds = [s for s in range(config.seed, config.seed + config.tasks) if s not in known]
    bar = progress(len(seeds), "search", "task")
    kept: list[Trajectory] = list(there)
    none = failed = candidates = 0
    with Writer(config.out) as writer:
        for found in search(policy, make, scorer, seeds, config):
            bar.update()
            candidates, failed = candidates + found.candidates, failed + found.failed
            if found.trajectory is None:
                none += 1
            else:
                trajectory = replace(found.trajectory, meta={**found.trajectory.meta, **meta})
                kept.append(trajectory)
                writer.add(trajectory)
    bar.close()
    if failed:
        print(f"the policy failed {failed} times", file=sys.stderr)
    if none:
        print(f"{none} tasks without a trajectory: none was good enough, or the policy failed", file=sys.stderr)
    good = [t.outcome for t in kept if t.outcome is not None]
    mean = sum(good) / len(good) if good else float("nan")
    print(f"{config.out}: {len(kept)} trajectories, {len(there)} from before, {candidates} scored; success {mean:.3f}")
    return 0 if kept else 1
