"""Step rewards from step scores, the outcome, and named penalties. The reward decides more than the algorithm does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prm.config import option, write_text
from prm.env import Episode
from prm.errors import DataError, UsageError
from prm.records import Trajectory, parse_json
from prm.shapes import SHAPES, shape_scores


@dataclass(frozen=True)
class RewardConfig:
    """r_t = process_weight * shape_t + [t = T] * outcome_weight * outcome + environment_weight * env_t + penalties_t
    + check_weight * (check_t - check_{t-1}) of each scorer that needs no PRM; the checks of an episode add up to their
    last score, so that their bonus is capped by the weight."""

    shape: str = option("progress", "how step scores become rewards", choices=SHAPES)
    process_weight: float = option(0.3, "weight of the shaped step scores")
    outcome_weight: float = option(1.0, "weight of the outcome, on the last step")
    environment_weight: float = option(0.0, "weight of the environment's own step rewards")
    baseline: float = option(0.0, "progress: the score before the first step")
    known_end: bool = option(True, "where the outcome is known it is the last step's score, not what the PRM guesses")
    repeat_penalty: float = option(-0.1, "for an action that was taken before in the episode")
    invalid_penalty: float = option(-0.1, "for an action that the environment could not read (info['error'])")
    limit_penalty: float = option(0.0, "on the last step of an episode that ran out of steps")
    blocked_penalty: float = option(-0.1, "for an action that the guard did not let through")
    check_weight: float = option(0.1, "the most that each scorer without a PRM (--checks) adds to an episode")


@dataclass(frozen=True)
class StepRewards:
    """The parts of each step's reward, each a list of length T; `total` is their sum."""

    process: list[float]
    outcome: list[float]
    environment: list[float]
    penalties: dict[str, list[float]]
    checks: dict[str, list[float]] = field(default_factory=dict)

    @property
    def total(self) -> list[float]:
        parts = [self.process, self.outcome, self.environment, *self.penalties.values(), *self.checks.values()]
        return [sum(step) for step in zip(*parts, strict=True)]


def step_rewards(
    actions: Sequence[str],
    config: RewardConfig,
    *,
    scores: Sequence[float] | None = None,
    outcome: float | None = None,
    environment: Sequence[float] | None = None,
    infos: Sequence[Mapping[str, Any]] | None = None,
    out_of_steps: bool = False,
    checks: Mapping[str, Sequence[float]] | None = None,
) -> StepRewards:
    """The rewards of one episode of T steps.

    Args:
        actions: the T action texts; two that differ in white space or case only are the same action.
        scores: T step scores in [0, 1]; None where no PRM is used.
        outcome: success in [0, 1]; None (unknown) pays nothing.
        environment: the T rewards of the environment itself.
        infos: the T infos of the environment; an `error` in one marks an invalid action, `blocked` a blocked one.
        out_of_steps: the episode ended at a step limit.
        checks: T scores in [0, 1] of each scorer that needs no PRM, by name.

    Raises:
        DataError: lists of another length than T.
    """
    steps = len(actions)
    lists = {"scores": scores, "environment rewards": environment, "infos": infos}
    lists |= {f"scores of {name}": own for name, own in (checks or {}).items()}
    for name, given in lists.items():
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
    infos = infos or [{}] * steps
    invalid = [config.invalid_penalty if info.get("error") else 0.0 for info in infos]
    blocked = [config.blocked_penalty if info.get("blocked") else 0.0 for info in infos]
    own = [config.environment_weight * r for r in environment] if environment is not None else [0.0] * steps
    paid = {k: [config.check_weight * x for x in shape_scores(v)] for k, v in (checks or {}).items()}
    penalties = {"repeat": repeat, "invalid": invalid, "limit": limit, "blocked": blocked}
    return StepRewards(process, final, own, penalties, paid)


# --- one function for training and deployment ------------------------------------------------------------------------

Scorer = Callable[[Sequence[Trajectory]], list[list[float]]]


@dataclass(frozen=True)
class Reward:
    """What episodes are paid: the one function that training and deployment use.

    Args:
        config: weights, shape, penalties.
        scorer: a `prm.PRM`, anything with `score(trajectories) -> list[list[float]]`, or that function; None for none.
        checks: scorers that need no PRM, by name.

    Raises:
        UsageError: a process weight with nothing that scores.
    """

    config: RewardConfig
    scorer: Any = None
    checks: Mapping[str, Scorer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scorer is None and self.config.process_weight and not self.checks:
            raise UsageError("a process weight needs a PRM; give one, or --process-weight 0")

    def score(self, trajectories: Sequence[Trajectory]) -> list[list[float]] | None:
        """The PRM's step scores; None where it has no weight."""
        if self.scorer is None or not self.config.process_weight:
            return None
        return getattr(self.scorer, "score", self.scorer)(list(trajectories))

    def __call__(
        self, episodes: Sequence[Episode], trajectories: Sequence[Trajectory], scores: list[list[float]] | None
    ) -> list[StepRewards]:
        """The rewards of finished episodes; `scores` are those of `score(trajectories)`."""
        checks = {name: call(trajectories) for name, call in self.checks.items()}
        return [
            step_rewards(
                [a.text for a in episode.history.actions],
                self.config,
                scores=self._ended(scores[i], episode) if scores else None,
                outcome=episode.outcome,
                environment=episode.rewards,
                infos=episode.infos,
                out_of_steps=episode.truncated,
                checks={name: own[i] for name, own in checks.items()},
            )
            for i, episode in enumerate(episodes)
        ]

    def _ended(self, scores: list[float], episode: Episode) -> list[float]:
        """The scores, the last one being the outcome where the episode is over: P(success) is then known.

        A PRM sees few right answers where success is rare, and scores them like the wrong ones; paid as progress that
        teaches never to answer. Where it overrates answers, it teaches to answer anything.
        """
        known = self.config.known_end and scores and episode.outcome is not None
        return [*scores[:-1], episode.outcome or 0.0] if known else scores

    def freeze(self, path: Path, *, going_on: bool = False, **more: Any) -> None:
        """Write the reward's configuration, whole or not at all, with what else `load_frozen` is to know.

        Raises:
            UsageError: the run goes on, and its PRM was another.
        """
        names = {f.name for f in dataclasses.fields(RewardConfig)}
        config = {k: v for k, v in dataclasses.asdict(self.config).items() if k in names}
        fingerprint = self.scorer.fingerprint() if hasattr(self.scorer, "fingerprint") else None
        row = {"format": 1, "reward": config, "checks": list(self.checks), "prm_fingerprint": fingerprint, **more}
        if going_on and path.exists() and load_frozen(path.parent)[1].get("prm_fingerprint") != fingerprint:
            raise UsageError(f"{path.parent} holds a run with another PRM; write elsewhere, or use the same one")
        write_text(path, json.dumps(row, indent=2) + "\n")


def load_frozen(run: Any) -> tuple[RewardConfig, dict[str, Any]]:
    """The reward's configuration of a training run, and what else its `reward.json` holds (prm, checks, guard, ...).

    Raises:
        DataError: the folder holds none, or one of another form.
    """
    path = Path(run) / "reward.json"
    try:
        row = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{run}: holds no reward.json; expected the folder of a training run") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    known = {f.name for f in dataclasses.fields(RewardConfig)}
    given = row.get("reward") if isinstance(row, dict) and row.get("format") == 1 else None
    if isinstance(given, dict):
        given = {"known_end": False, **given}  # runs that were trained before there was a choice
    if not isinstance(given, dict) or set(given) != known:
        raise DataError(f"{path}: expected format 1 with a reward of {', '.join(sorted(known))}")
    for name, value in given.items():
        if name == "known_end" and not isinstance(value, bool):
            raise DataError(f"{path}: known_end must be true or false, got {value!r:.40}")
        if name not in ("shape", "known_end") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{path}: {name} must be a number, got {value!r:.40}")
    if given["shape"] not in SHAPES:
        raise DataError(f"{path}: shape must be one of {', '.join(SHAPES)}, got {given['shape']!r:.40}")
    return RewardConfig(**given), row
