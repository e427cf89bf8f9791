"""Episodes of a policy in an environment, many side by side."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prm.config import option
from prm.env import Action, Env, EnvFactory, Episode, Policy, act, env_factory
from prm.errors import UsageError
from prm.records import Trajectory


@dataclass(frozen=True)
class RolloutConfig:
    out: str = option(..., "append trajectories here; seeds that are there already are not played again")
    n: int = option(100, "how many episodes")
    seed: int = option(0, "the seeds are seed, seed + 1, ...")
    batch: int = option(64, "episodes side by side")
    max_steps: int = option(50, "cut an episode after so many steps (it is then truncated)")


def rollout(
    policy: Policy,
    env: str | Env | EnvFactory,
    seeds: Sequence[int],
    *,
    batch: int = 64,
    max_steps: int = 50,
    salt: int = 0,
) -> list[Trajectory]:
    """Play one episode a seed; trajectories in the order of `seeds`.

    Args:
        policy: acts on all running episodes at once.
        env: `module:attribute`, a class or function that makes an environment (one is made for each episode side by
            side), or one environment object, which then plays one episode at a time.
        seeds: the environment's seeds; each is kept in its trajectory's meta, with rewards and how the episode ended.
        batch: the most episodes side by side.
        max_steps: an episode that has not ended by then is truncated, outcome None.
        salt: other numbers give other draws of the policy in the same episodes.

    Raises:
        EnvError: an environment raised or broke its protocol; the message names seed and step.
        UsageError: the policy failed in every episode (as when an endpoint is away).
    """
    done: dict[int, Trajectory] = {}
    failed = 0
    for index, episode in episodes(policy, env, seeds, batch=batch, max_steps=max_steps, salt=salt):
        if failure := failed_action(episode):
            failed += 1
            reason = failure
        else:
            done[index] = episode.trajectory(**named(policy))
    if seeds and not done:
        raise UsageError(f"the policy failed in all {failed} episodes; the last reason: {reason}")
    return [done[i] for i in sorted(done)]


def episodes(
    policy: Policy,
    env: str | Env | EnvFactory,
    seeds: Sequence[int],
    *,
    batch: int = 64,
    max_steps: int = 50,
    salt: int = 0,
) -> Iterable[tuple[int, Episode]]:
    """Like `rollout`, giving (index in seeds, finished episode) as they end."""
    if batch < 1 or max_steps < 1:
        raise UsageError(f"batch and max_steps must be at least 1, got {batch} and {max_steps}")
    if callable(env) or isinstance(env, str):
        make = env_factory(env)
    else:
        batch, make = 1, lambda: env
    times: Counter[int] = Counter()
    waiting = []
    for index, seed in enumerate(seeds):
        waiting.append((index, seed, times[seed]))
        times[seed] += 1
    waiting.reverse()
    idle: list[Env] = []
    running: list[tuple[int, Episode]] = []
    while waiting or running:
        while waiting and len(running) < batch:
            index, seed, time = waiting.pop()
            episode = Episode(idle.pop() if idle else make(), seed)
            episode.history = replace(episode.history, seed=_draw_seed(salt, seed, time))
            running.append((index, episode))
        actions = act(policy, [episode.history for _, episode in running])
        still = []
        for (index, episode), action in zip(running, actions, strict=True):
            if action.finish == "error":
                episode.history = episode.history.then(action, "")
                episode.rewards.append(0.0)
                episode.infos.append({})
                episode.truncated = True
            else:
                episode.step(action)
                # An action that never ended for want of context would be repeated for ever.
                if len(episode.rewards) >= max_steps or (action.token_ids == () and action.finish == "length"):
                    episode.truncated = episode.truncated or not episode.terminated
                    episode.cut = not episode.terminated
            if episode.done:
                idle.append(episode.env)
                yield index, episode
            else:
                still.append((index, episode))
        running = still


def failed_action(episode: Episode) -> str:
    """Why the episode does not count: the policy failed (an endpoint's error); "" when it did not."""
    last: Action | None = episode.history.actions[-1] if episode.history.actions else None
    return "the endpoint gave an error" if last is not None and last.finish == "error" else ""


def named(policy: Policy) -> dict[str, str]:
    """The policy's name for a trajectory's meta, where it has one."""
    name = getattr(policy, "name", None)
    return {"policy": name} if isinstance(name, str) else {}


def _draw_seed(salt: int, seed: int, time: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{salt}:{seed}:{time}".encode()).digest()[:6], "big")
