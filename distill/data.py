"""Labels to training targets: what is supervised, what is left out and why, and which tasks are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from prm.errors import DataError, UsageError
from prm.model import PRM
from prm.records import StepLabel, Trajectory
from prm.render import Rendered


@dataclass
class Targets:
    """One (score, weight) for each labelled step, by trajectory id and step; and notes on what was merged."""

    of: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))


def merge(labels: Iterable[StepLabel]) -> Targets:
    """One target a step: the weighted mean of its labels, with their weights' sum.

    A source's later label of a step replaces its earlier one: files are append-only, so that is a correction.
    """
    by_step: dict[tuple[str, int], dict[str, StepLabel]] = {}
    n = 0
    for label in labels:
        n += 1
        by_step.setdefault((label.trajectory_id, label.step), {})[label.source] = label
    targets = Targets()
    for (trajectory_id, step), sources in by_step.items():
        weight = sum(label.weight for label in sources.values())
        score = sum(label.weight * label.score for label in sources.values()) / weight
        targets.of.setdefault(trajectory_id, {})[step] = (min(max(score, 0.0), 1.0), weight)
    if replaced := n - sum(map(len, by_step.values())):
        targets.notes.append(f"{replaced} labels replaced by a later one of the same source")
    if several := sum(len(sources) > 1 for sources in by_step.values()):
        targets.notes.append(f"{several} steps have labels of several sources: their weighted mean is taken")
    return targets


def check_labels(trajectories: Iterable[Trajectory], targets: Targets) -> None:
    """Raises DataError, with names: a label is of an unknown trajectory, or of a step that it does not have."""
    steps = {t.id: len(t.steps) for t in trajectories}
    if unknown := [i for i in targets.of if i not in steps]:
        raise DataError(f"labels of {len(unknown)} unknown trajectories, the first: {unknown[0]}")
    for trajectory_id, own in targets.of.items():
        for step in own:
            if step >= steps[trajectory_id]:
                raise DataError(
                    f"a label of step {step} (0-based) of trajectory {trajectory_id}, "
                    f"which has {steps[trajectory_id]} steps"
                )


def split(trajectories: Sequence[Trajectory], holdout: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """(train, held out): whole tasks are held out, at least the given share of trajectories, and never all.

    Tasks are the same where their text is, but for case and blanks, or where `meta["group"]` is: variants of a problem.

    Raises:
        DataError: there is one task only, so nothing can be held out.
    """
    if not 0 <= holdout < 1:
        raise UsageError(f"holdout must lie in [0, 1), got {holdout:g}")
    if holdout == 0:
        return list(trajectories), []
    where = _tied(trajectories)
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_task.setdefault(where[task_of(trajectory)], []).append(trajectory)
    if len(by_task) < 2:
        raise DataError(f"{len(trajectories)} labelled trajectories share {len(by_task)} task; none can be held out")
    tasks = sorted(by_task)
    Random(seed).shuffle(tasks)
    held: set[str] = set()
    n = 0
    for task in tasks[:-1]:
        if n >= holdout * len(trajectories):
            break
        held.add(task)
        n += len(by_task[task])
    sides = [where[task_of(t)] in held for t in trajectories]
    return tuple([t for t, side in zip(trajectories, sides, strict=True) if side == which] for which in (False, True))  # type: ignore[return-value]


def _tied(trajectories: Iterable[Trajectory]) -> dict[str, str]:
    """For each task the first of those that it is tied to, by groups that they share."""
    first: dict[str, str] = {}

    def root(name: str) -> str:
        while first[name] != name:
            first[name] = first[first[name]]
            name = first[name]
        return name

    for trajectory in trajectories:
        task, group = task_of(trajectory), "\0" + group_of(trajectory)
        for name in (task, group):
            first.setdefault(name, name)
        first[root(group)] = root(task)
    return {name: root(name) for name in first}


@dataclass(frozen=True)
class Row:
    """A part of a trajectory, with `ends` of its labelled steps only, and their targets."""

    part: Rendered
    scores: tuple[float, ...]
    weights: tuple[float, ...]
    trajectory_id: str
    steps: tuple[int, ...]


def rows(prm: PRM, trajectories: Iterable[Trajectory], targets: Targets, dropped: Counter[str]) -> list[Row]:
    """What there is to learn from: each labelled step once, read as it will be when it is scored.

    Steps that do not fit into the model's limit, and parts without a labelled step, are counted in `dropped`.
    """
    out = []
    for trajectory in trajectories:
        own = targets.of.get(trajectory.id, {})
        read = 0
        for part in prm.render(trajectory, skip_long=True) if own else []:
            places = [(end, part.first + i) for i, end in enumerate(part.ends) if part.first + i in own]
            if not places:
                dropped["parts without a label"] += 1
                continue
            read += len(places)
            scores, weights = zip(*(own[step] for _, step in places), strict=True)
            kept = Rendered(part.ids, [end for end, _ in places], [], part.first)
            out.append(Row(kept, scores, weights, trajectory.id, tuple(step for _, step in places)))
        dropped["steps dropped by truncation"] += len(own) - read
        dropped["trajectories without a label"] += not own
    return out


def task_of(trajectory: Trajectory) -> str:
    """The text of the task, but for case and blanks."""
    return " ".join(trajectory.task.casefold().split())


def group_of(trajectory: Trajectory) -> str:
    """What ties variants of a task together: `meta["group"]` where it is text, else the task."""
    group = trajectory.meta.get("group")
    return " ".join(group.casefold().split()) if isinstance(group, str) else task_of(trajectory)
