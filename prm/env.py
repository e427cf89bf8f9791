"""Environments and policies as the toolkit sees them: two protocols, and what follows from them alone."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prm.config import option
from prm.errors import DataError, EnvError, PrmError, ReplayError, UsageError
from prm.records import Step, Trajectory, parse_json


@runtime_checkable
class Env(Protocol):
    """A text environment with Gymnasium's methods. One object is one episode at a time.

    `tools() -> list[dict]` (JSON-schema functions) is optional. `info["success"]` (a number in [0, 1] or a bool) in the
    last step's info is the outcome; without it the last reward decides: > 0 is a success.
    """

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the text is the task. The same seed and options give the same episode, on any object."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info)."""
        ...


EnvFactory = Callable[[], Env]


@dataclass(frozen=True)
class Action:
    """What a policy did. Only `text` is required.

    Args:
        text: the action as the environment reads it.
        token_ids: the ids that were sampled, the end-of-turn id included when the policy sampled it.
        logprobs: their log-probabilities at the sampling temperature, one each.
        finish: why it ended: "stop" (the policy ended it), "length" (cut at the token limit), "error".
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish: str = "stop"


@dataclass(frozen=True)
class History:
    """An episode so far, as a policy sees it: the task, its own actions, what came back after each.

    `tools` are the environment's JSON-schema functions, where it has any; `seed` tells apart two samples from the same
    state (a policy that can seed its sampling derives the seed of its draw from it).
    """

    task: str
    actions: tuple[Action, ...] = ()
    observations: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    seed: int | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The episode so far as records."""
        return tuple(Step(a.text, o) for a, o in zip(self.actions, self.observations, strict=True))

    def then(self, action: Action, observation: str) -> History:
        """The history one step later."""
        return History(
            self.task, (*self.actions, action), (*self.observations, observation), self.tools, self.seed
        )

    @classmethod
    def of(cls, trajectory: Trajectory, steps: int | None = None, **more: Any) -> History:
        """The history after the first `steps` steps of a trajectory (all of them by default)."""
        kept = trajectory.steps[:steps]
        return cls(trajectory.task, tuple(Action(s.action) for s in kept), tuple(s.observation for s in kept), **more)


class Policy(Protocol):
    """Anything that acts. `act` is batched: one action a history, in order."""

    def act(self, histories: Sequence[History]) -> list[Action]:
        """Choose one action for each history."""
        ...


def act(policy: Policy, histories: Sequence[History]) -> list[Action]:
    """One action of the policy for each history. Raises EnvError where it raises, or gives something else."""
    name = type(policy).__name__
    try:
        actions = policy.act(histories)
    except PrmError:
        raise
    except Exception as error:
        raise EnvError(f"policy {name}.act: raised {type(error).__name__}: {error}") from error
    if not isinstance(actions, Sequence) or not all(isinstance(action, Action) for action in actions):
        raise EnvError(f"{name}.act: expected one Action a history, got {actions!r:.80}")
    if len(actions) != len(histories):
        raise EnvError(f"{name}.act gave {len(actions)} actions for {len(histories)} histories")
    return list(actions)


@dataclass
class Episode:
    """One running episode: the environment, its history, and what it paid. `step` keeps the protocol honest.

    Raises EnvError, naming seed and step, where the environment raises or returns something else than it should.
    """

    env: Env
    seed: int | None
    options: Mapping[str, Any] | None = None
    history: History = field(init=False)
    rewards: list[float] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    cut: bool = False  # truncated from outside, so that nothing is known of the outcome

    def __post_init__(self) -> None:
        kwargs: dict[str, Any] = {"seed": self.seed}
        if self.options is not None:
            kwargs["options"] = self.options
        result = self._guard("reset", lambda: self.env.reset(**kwargs))
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
            raise EnvError(f"{self._where('reset')}: expected (str, dict), got {result!r:.80}")
        found = getattr(self.env, "tools", None)
        tools = self._guard("tools", found) if callable(found) else ()
        if isinstance(tools, str) or not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
            raise EnvError(f"{self._where('tools')}: expected a list of objects, got {tools!r:.80}")
        self.history = History(result[0], tools=tuple(tools), seed=self.seed)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def step(self, action: Action) -> str:
        """Apply one action; returns the observation."""
        result = self._guard(f"step {len(self.rewards)}", lambda: self.env.step(action.text))
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[0], str)):
            where = self._where(f"step {len(self.rewards)}")
            raise EnvError(f"{where}: expected (str, float, terminated, truncated, dict), got {result!r:.80}")
        observation, reward, terminated, truncated, info = result
        self._number("reward", reward)
        if not isinstance(info, Mapping):
            raise EnvError(f"{self._where(f'step {len(self.rewards)}')}: expected info as a dict, got {info!r:.80}")
        if info.get("success") is not None:
            self._number("success", info["success"], 0.0, 1.0)
        self.history = self.history.then(action, observation)
        self.rewards.append(float(reward))
        self.infos.append(dict(info))
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return observation

    @property
    def outcome(self) -> float | None:
        """Success in [0, 1]; None while the episode runs, and where it was cut from outside."""
        if not self.done or self.cut:
            return None
        success = self.infos[-1].get("success")
        return float(self.rewards[-1] > 0) if success is None else float(success)

    def trajectory(self, **meta: Any) -> Trajectory:
        """The episode as a record. Seed, options, rewards and how it ended are kept in `meta`."""
        kept: dict[str, Any] = {"seed": self.seed, "rewards": list(self.rewards)}
        if self.options is not None:
            kept["options"] = dict(self.options)
        kept |= {"terminated": self.terminated, "truncated": self.truncated, **meta}
        return Trajectory(self.history.task, self.history.steps, self.outcome, kept)

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise EnvError(f"{self._where(what)}: raised {type(error).__name__}: {error}") from error

    def _number(self, name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
        try:
            good = not isinstance(value, str) and math.isfinite(value) and low <= value <= high
        except (TypeError, ValueError, OverflowError):
            good = False
        if not good:
            limits = "a finite number" if high == math.inf else f"a number in [{low:g}, {high:g}]"
            where = self._where(f"step {len(self.rewards)}")
            raise EnvError(f"{where}: expected {name} as {limits}, got {value!r:.80}")

    def _where(self, what: str) -> str:
        return f"environment {type(self.env).__name__}, seed {self.seed}, {what}"


def replay(env: Env, trajectory: Trajectory, steps: int | None = None) -> Episode:
    """Restore the state after the first `steps` steps (default: all) by acting them out again with the same seed.

    The trajectory's `meta["seed"]` and `meta["options"]` start the episode.

    Raises:
        ReplayError: the task, or the observation of a step, differs from the recorded one; or the episode ended early.
    """
    episode = Episode(env, trajectory.meta.get("seed"), trajectory.meta.get("options"))
    where = f"replay of {trajectory.id} in {type(env).__name__}"
    if episode.history.task != trajectory.task:
        raise ReplayError(f"{where}: the task is {episode.history.task!r:.80}, recorded was {trajectory.task!r:.80}")
    for i, step in enumerate(trajectory.steps[:steps]):
        if episode.done:
            raise ReplayError(f"{where}: step {i}: the episode was already over")
        if (got := episode.step(Action(step.action))) != step.observation:
            raise ReplayError(f"{where}: step {i}: observed {got!r:.80}, recorded was {step.observation!r:.80}")
    return episode


def load_attribute(name: str) -> Any:
    """What `module:attribute` names; the working directory is importable. Raises UsageError."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r}: expected module:attribute, for example rl.envs.multihop:MultiHop")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"{name!r}: cannot import {module_name}: {error}") from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name!r}: cannot import {module_name}: it raised {said}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{name!r}: {module_name} has no attribute {attribute}")
        found = getattr(found, part)
    return found


@dataclass(frozen=True)
class EnvConfig:
    env: str = option(..., "the environment, module:attribute")
    env_args: str | None = option(None, 'its arguments as JSON, for example \'{"split": "test"}\'')

    def factory(self) -> EnvFactory:
        """A function that makes a fresh environment. Raises UsageError where there is none of that name."""
        try:
            parameters = {} if self.env_args is None else parse_json(self.env_args)
            if not isinstance(parameters, dict):
                raise DataError("expected an object")
        except DataError as error:
            raise UsageError(f"--env-args {self.env_args}: {error}") from None
        make = env_factory(self.env, **parameters)
        try:
            make()
        except Exception as error:
            raise EnvError(f"{self.env} cannot be made: {type(error).__name__}: {error}") from error
        return make


def env_factory(env: str | Env | EnvFactory, **parameters: Any) -> EnvFactory:
    """A function that makes a fresh environment, from `module:attribute`, a class, or a function."""
    found = load_attribute(env) if isinstance(env, str) else env
    if not callable(found):
        raise UsageError(f"{env!r}: expected a class or function that makes an environment")
    return lambda: found(**parameters)


def check_env(make: EnvFactory, actions: Sequence[str], seed: int = 123) -> None:
    """Try an environment against the protocol; raises EnvError with the first thing that is wrong.

    Checked: what `reset` and `step` return; that a seed gives the same episode on one object, again, and on a second
    one while the first is in use; that the global random generator is left alone; that changing a returned object (an
    info, the tools) changes nothing inside; that no mutable state hangs on the class.

    Args:
        make: makes a fresh environment.
        actions: actions to try; the episode may end before the last.
    """
    import copy
    import random

    def play(env: Env) -> list[Any]:
        episode = Episode(env, seed)
        seen: list[Any] = [episode.history.task]
        for tool in episode.history.tools:
            seen.append(copy.deepcopy(tool))
            if isinstance(tool, dict):
                tool.clear()
        for action in actions:
            if episode.done:
                break
            seen.append((episode.step(Action(action)), episode.rewards[-1], episode.terminated, episode.truncated))
            for info in episode.infos:
                info.clear()
        return seen

    first, second = make(), make()
    name = type(first).__name__
    state = random.getstate()
    shared = {
        key: copy.deepcopy(value)
        for cls in type(first).__mro__[:-1]
        for key, value in vars(cls).items()
        if isinstance(value, list | dict | set) and not key.startswith("__")
    }
    expected = play(first)
    if play(first) != expected:
        raise EnvError(f"{name}: the same seed gave another episode on the same object")
    if play(second) != expected:
        raise EnvError(f"{name}: the same seed gave another episode on a second object")
    half = Episode(first, seed)
    for action in actions[: len(actions) // 2]:
        if not half.done:
            half.step(Action(action))
    if play(second) != expected:
        raise EnvError(f"{name}: an episode in one object changed an episode in another")
    for key, before in shared.items():
        if getattr(type(first), key) != before:
            raise EnvError(f"{name}.{key}: a class attribute changed during an episode; objects share it")
    if random.getstate() != state:
        raise EnvError(f"{name}: the global random generator was used or seeded")
    if "seed" not in inspect.signature(first.reset).parameters:
        raise EnvError(f"{name}.reset takes no seed")
