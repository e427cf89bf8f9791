"""What a run writes while it learns: metrics.jsonl, boards, alarms with the trajectories behind them, audit.jsonl."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from prm.config import option
from prm.errors import UsageError
from prm.records import Trajectory, append_jsonl, dump_json
from rl.rewards import StepRewards

Line = dict[str, Any]
BOARDS = ("tensorboard", "wandb", "trackio", "none")


@dataclass(frozen=True)
class MonitorConfig:
    """When to raise an alarm, and what to write."""

    boards: tuple[str, ...] = option(("tensorboard",), "where the curves go: " + ", ".join(BOARDS))
    audit_every: int = option(10, "write trajectories to audit.jsonl after every so many updates")
    audit: int = option(20, "how many of them, successes and failures")
    alarm_tools: float = option(0.8, "alarm: the share of tool calls that succeed is below")
    alarm_kl: float = option(10.0, "alarm: the KL of an episode, in nats, is above (or below minus one)")
    alarm_length: float = option(2.0, "alarm: an episode has so many times the steps or tokens of the first updates")
    alarm_repeat: float = option(0.5, "alarm: more than this share of episodes end in one answer, mostly a wrong one")
    alarm_drop: float = option(0.1, "alarm: success is so far below its best while the process reward is above")


@dataclass(frozen=True)
class Played:
    """One finished episode as the monitor sees it.

    Args:
        trajectory: with `meta["update"]`.
        rewards: what each step earned, by part.
        scores: the PRM's, one a step; None where none is used.
        failed: steps whose action was no valid call, failed, or was blocked.
        cut: it ran into the step limit from outside.
        policy_tokens, tokens: how many the policy wrote, and how many there are.
    """

    trajectory: Trajectory
    rewards: StepRewards
    scores: list[float] | None
    failed: int
    cut: bool
    policy_tokens: int
    tokens: int

    @property
    def outcome(self) -> float:
        return self.trajectory.outcome or 0.0


@dataclass(frozen=True)
class Alarm:
    """Why, and the episodes (their places in the update) that show it best."""

    name: str
    reason: str
    episodes: list[int]


def describe(batch: Sequence[Played]) -> Line:
    """The series of an update's episodes; means an episode unless the name says otherwise. None: not defined."""
    steps = sum(len(p.trajectory.steps) for p in batch)
    tokens = sum(p.policy_tokens for p in batch)
    repeated = sum(len(p.trajectory.steps) - len({_same(s.action) for s in p.trajectory.steps}) for p in batch)
    line: Line = {
        "success": fmean(p.outcome for p in batch),
        "reward": fmean(sum(p.rewards.total) for p in batch),
        "reward_process": fmean(sum(p.rewards.process) for p in batch),
        "reward_outcome": fmean(sum(p.rewards.outcome) for p in batch),
        "reward_environment": fmean(sum(p.rewards.environment) for p in batch),
        "steps": steps / len(batch),
        "tokens_policy": tokens / len(batch),
        "tokens": fmean(p.tokens for p in batch),
        "tokens_a_step": tokens / max(steps, 1),
        "repeated_steps": repeated / max(steps, 1),
        "tool_success": 1 - sum(p.failed for p in batch) / max(steps, 1),
        "cut": fmean(p.cut for p in batch),
    }
    for name in batch[0].rewards.penalties:
        line[f"penalty_{name}"] = fmean(sum(p.rewards.penalties[name]) for p in batch)
    for name in batch[0].rewards.checks:
        line[f"check_{name}"] = fmean(sum(p.rewards.checks[name]) for p in batch)
    for name, good in (("score_success", True), ("score_failure", False)):
        own = [fmean(p.scores) for p in batch if p.scores and bool(p.outcome) is good]
        line[name] = fmean(own) if own else None
    scores = [s for p in batch for s in p.scores or ()]
    line["score_deviation"] = pstdev(scores) if scores else None
    return line


def find_alarms(
    history: Sequence[Line], batch: Sequence[Played], kls: Sequence[float], config: MonitorConfig, count: int = 5
) -> list[Alarm]:
    """What is wrong with the last update of `history`.

    Args:
        history: the lines of metrics.jsonl, oldest first; the last one is that of `batch`.
        batch: its episodes.
        kls: the KL of each to the starting policy, in nats; empty where it was not measured.
        config: the limits.
        count: how many episodes to show.
    """
    line, found = history[-1], list[Alarm]()

    def worst(key: Callable[[int], float]) -> list[int]:
        return sorted(range(len(batch)), key=key, reverse=True)[:count]

    if broken := [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]:
        found.append(Alarm("not-finite", f"{', '.join(broken)}: not a finite number", worst(lambda i: 0.0)))
    if line["tool_success"] < config.alarm_tools:
        share, least = f"{line['tool_success']:.0%}", f"{config.alarm_tools:.0%}"
        reason = f"{share} of the actions were carried out, expected at least {least}"
        found.append(Alarm("tool-success", reason, worst(lambda i: batch[i].failed)))
    kl = line.get("kl") or 0.0
    if not -1 <= kl <= config.alarm_kl:
        reason = f"the KL to the starting policy is {kl:.2f} nats an episode, expected -1 to {config.alarm_kl:g}"
        found.append(Alarm("kl", reason, worst(lambda i: abs(kls[i]) if kls else 0.0)))
    for name, what in (("steps", "steps"), ("tokens_policy", "tokens of the policy")):
        start = fmean(past[name] for past in history[:3])
        now = line[name]
        if len(history) > 3 and start > 0 and not 1 / config.alarm_length <= now / start <= config.alarm_length:
            longer = now > start
            size = (lambda i: len(batch[i].trajectory.steps)) if name == "steps" else (lambda i: batch[i].policy_tokens)
            reason = f"an episode has {now:.1f} {what}, {start:.1f} in the first updates"
            found.append(Alarm("length", reason, worst(lambda i: size(i) if longer else -size(i))))  # noqa: B023
            break
    if alarm := _one_answer(batch, config, count):
        found.append(alarm)
    if alarm := _hacking(history, batch, config, count):
        found.append(alarm)
    deviation = line.get("score_deviation")
    if deviation is not None and deviation < 1e-4:
        reason = f"all step scores are the same (deviation {deviation:.1g}): the PRM tells nothing apart"
        found.append(Alarm("flat-scores", reason, list(range(min(count, len(batch))))))
    return found


def _one_answer(batch: Sequence[Played], config: MonitorConfig, count: int) -> Alarm | None:
    ends = [_same(p.trajectory.steps[-1].action) if p.trajectory.steps else "" for p in batch]
    answer, times = Counter(ends).most_common(1)[0]
    own = [i for i, end in enumerate(ends) if end == answer]
    tasks = {batch[i].trajectory.task for i in own}
    if times <= config.alarm_repeat * len(batch) or len(tasks) < 3 or fmean(batch[i].outcome for i in own) >= 0.5:
        return None
    reason = f"{times} of {len(batch)} episodes, of {len(tasks)} tasks, end in the same answer: {answer:.80}"
    return Alarm("one-answer", reason, own[:count])


def _hacking(history: Sequence[Line], batch: Sequence[Played], config: MonitorConfig, count: int) -> Alarm | None:
    """Process reward up while success is down, both as means of three updates, against the best success so far."""
    if len(history) < 6:
        return None
    success = [fmean(past["success"] for past in history[i : i + 3]) for i in range(len(history) - 2)]
    process = [fmean(past["reward_process"] for past in history[i : i + 3]) for i in range(len(history) - 2)]
    best = max(range(len(success)), key=success.__getitem__)
    if success[best] - success[-1] <= config.alarm_drop or process[-1] <= process[best]:
        return None
    reason = (
        f"success went from {success[best]:.2f} to {success[-1]:.2f} while the process reward went from "
        f"{process[best]:.2f} to {process[-1]:.2f} (since update {history[best + 2]['update']})"
    )
    order = sorted(range(len(batch)), key=lambda i: batch[i].outcome * 1e6 - sum(batch[i].rewards.process))
    return Alarm("process-up-success-down", reason, order[:count])


class Monitor:
    """Writes a run's files, and trims what a kill left after the last checkpoint.

    Args:
        out: the run's folder.
        config: limits and boards.
        first: updates that the checkpoint holds; later lines will be made again and are removed.

    Raises:
        UsageError: a board that is unknown or not installed.
    """

    def __init__(self, out: Path, config: MonitorConfig, first: int = 0) -> None:
        self.out, self.config = out, config
        self.history: list[Line] = _trim(out / "metrics.jsonl", first, lambda row: row["update"])
        _trim(out / "alarms.jsonl", first, lambda row: row["update"])
        for name in ("audit.jsonl", "alarm_trajectories.jsonl"):
            _trim(out / name, first, lambda row: row["meta"]["update"])
        self._on: set[str] = set()
        check_boards(config.boards)
        self._boards = [board for name in config.boards for board in _board(name, out)]

    def add(self, line: Line, batch: Sequence[Played], kls: Sequence[float] = ()) -> list[Alarm]:
        """Take in an update: its metrics, alarms and, every so often, its trajectories. Returns the alarms."""
        self.history.append(line)
        alarms = find_alarms(self.history, batch, kls, self.config)
        line["alarms"] = len(alarms)
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        _append(self.out / "metrics.jsonl", clean)
        for board in self._boards:
            board(line["update"], {k: float(v) for k, v in clean.items() if v is not None})
        for alarm in alarms:
            shown = [batch[i].trajectory for i in alarm.episodes]
            row = {"update": line["update"], "alarm": alarm.name, "reason": alarm.reason}
            _append(self.out / "alarms.jsonl", {**row, "trajectories": [t.id for t in shown]})
            if alarm.name not in self._on:
                print(f"update {line['update']}: alarm {alarm.name}: {alarm.reason}", file=sys.stderr)
                marked = [_with_meta(batch[i], alarm=alarm.name) for i in alarm.episodes]
                append_jsonl(self.out / "alarm_trajectories.jsonl", marked)
        self._on = {alarm.name for alarm in alarms}
        if self.config.audit_every and (line["update"] + 1) % self.config.audit_every == 0:
            append_jsonl(self.out / "audit.jsonl", audit(batch, self.config.audit))
        return alarms

    def close(self) -> None:
        """Flush the boards."""
        for board in self._boards:
            board(-1, {})


def audit(batch: Sequence[Played], count: int) -> list[Trajectory]:
    """Half successes, half failures (as far as there are), with their step scores in meta."""
    good = [p for p in batch if p.outcome > 0]
    bad = [p for p in batch if p.outcome <= 0]
    take = min(len(good), max(count // 2, count - len(bad)))
    return [_with_meta(p) for p in good[:take] + bad[: count - take]]


def _with_meta(played: Played, **more: Any) -> Trajectory:
    t = played.trajectory
    scores = {"scores": played.scores} if played.scores is not None else {}
    return Trajectory(t.task, t.steps, t.outcome, {**t.meta, **scores, **more})


def _same(action: str) -> str:
    return " ".join(action.lower().split())


def _append(path: Path, row: Line) -> None:
    with open(path, "ab") as file:
        file.write(dump_json(row) + b"\n")


def _trim(path: Path, updates: int, update_of: Callable[[Any], int]) -> list[Line]:
    """The rows of the first `updates` updates; the others, and a line torn by a kill, are removed from the file."""
    if not path.exists():
        return []
    rows = []
    for text in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if update_of(row) < updates:
            rows.append(row)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(dump_json(row) + b"\n" for row in rows))
    os.replace(partial, path)
    return rows


def check_boards(names: Sequence[str]) -> None:
    """Raises UsageError where a board is unknown or not installed."""
    for name in names:
        if name not in BOARDS:
            raise UsageError(f"unknown board {name!r}; known: {', '.join(BOARDS)}")
        if name in ("wandb", "trackio"):
            _client(name)


def _client(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"--boards {name}: {name} is not installed; pip install {name}") from None


def _board(name: str, out: Path) -> Iterable[Callable[[int, dict[str, float]], None]]:
    """A function that takes (update, values), and closes at update -1; nothing for "none"."""
    if name == "none":
        return []
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(out / "tensorboard"))

        def write(update: int, values: dict[str, float]) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, update)
            if update < 0:
                writer.close()

        return [write]
    client = _client(name)
    client.init(project="prm", name=out.name, **({"dir": str(out)} if name == "wandb" else {}))

    def log(update: int, values: dict[str, float]) -> None:
        if update < 0:
            client.finish()
        else:
            client.log(values, step=update)

    return [log]
