"""Who labels what next: queue order, overlap, gold items, the blind slice, and leases.

A lease is derived: an item is somebody's while they opened it, said something on it or sent a heartbeat within
`LEASE_SECONDS`. It only decides what is handed out; a label that comes after its end is kept like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labeling.annotate.store import Store
from prm.errors import DataError
from prm.records import StepLabel, Trajectory, parse_json

LEASE_SECONDS = 600.0


@dataclass(frozen=True)
class Plan:
    """What is fixed while the server runs.

    Args:
        trajectories: by id, in file order.
        order: the ids in the order in which they are handed out.
        prelabels: (trajectory, step) -> the model's label.
        gold: (trajectory, step) -> the known score.
        asked: trajectory -> the steps that the queue names.
        blind: ids of which the pre-labels are withheld. Gold items always are.
        people: how many people each id is handed to; 1 where it is not named.
        gold_every: every so many items a person gets a gold one.
    """

    trajectories: Mapping[str, Trajectory]
    order: Sequence[str]
    prelabels: Mapping[tuple[str, int], StepLabel] = field(default_factory=dict)
    gold: Mapping[tuple[str, int], float] = field(default_factory=dict)
    asked: Mapping[str, frozenset[int]] = field(default_factory=dict)
    blind: frozenset[str] = frozenset()
    people: Mapping[str, int] = field(default_factory=dict)
    gold_every: int = 10

    @property
    def gold_items(self) -> frozenset[str]:
        """The trajectories with a known answer."""
        return frozenset(t for t, _ in self.gold)

    def assist(self, trajectory_id: str) -> str:
        """ "shown", "blind" or "none": what a person sees of the model's opinion on a trajectory."""
        if trajectory_id in self.blind:
            return "blind"
        return "shown" if any((trajectory_id, k) in self.prelabels for k in self._steps(trajectory_id)) else "none"

    def _steps(self, trajectory_id: str) -> range:
        found = self.trajectories.get(trajectory_id)
        return range(len(found.steps)) if found else range(0)


def make_plan(
    trajectories: Iterable[Trajectory],
    project: str,
    *,
    prelabels: Iterable[StepLabel] = (),
    gold: Iterable[StepLabel] = (),
    queue: Sequence[tuple[str, int | None, float]] | None = None,
    overlap: float = 0.0,
    per_item: int = 2,
    blind: float = 0.1,
    gold_every: int = 10,
) -> Plan:
    """Decide order, overlap and blind slice; the same files and project give the same plan.

    Args:
        project: the database's own random word: the slices differ between projects and not between restarts.
        queue: (trajectory, step or None, priority); the highest priority first, what is not named comes after. Without
            it, trajectories with pre-labels go by their most uncertain step, 0.5 first.
        overlap: the share of trajectories that `per_item` people get.
        blind: the share of trajectories whose pre-labels are withheld.
    """
    by_id = {t.id: t for t in trajectories}
    shown = {(p.trajectory_id, p.step): p for p in prelabels}
    known = {(g.trajectory_id, g.step): g.score for g in gold}
    golden = {t for t, _ in known}
    priority: dict[str, float] = {}
    asked: dict[str, set[int]] = {}
    if queue is not None:
        for trajectory_id, step, value in queue:
            priority[trajectory_id] = max(value, priority.get(trajectory_id, value))
            if step is not None:
                asked.setdefault(trajectory_id, set()).add(step)
    else:
        for (trajectory_id, _), label in shown.items():
            doubt = 1 - abs(2 * label.score - 1)
            priority[trajectory_id] = max(doubt, priority.get(trajectory_id, 0.0))
    order = sorted((t for t in by_id if t not in golden), key=lambda t: -priority.get(t, -1e300))
    withheld = {t for t, _ in shown if t in golden or _draw("blind", project, t) < blind}
    return Plan(
        by_id,
        order,
        shown,
        known,
        {t: frozenset(s) for t, s in asked.items()},
        frozenset(withheld),
        {t: per_item for t in order if _draw("overlap", project, t) < overlap},
        gold_every,
    )


def next_item(store: Store, plan: Plan, annotator: str, now: float, leave: str = "") -> str | None:
    """The trajectory that a person gets next, leased to them; None when nothing is left.

    First what they began and did not submit (except `leave`, which they are just leaving), then, at its turn, a gold
    item, then the first of the queue that is not with enough other people.
    """
    choice = _choose(store, plan, annotator, now, leave)
    if choice is not None:
        store.touch(annotator, choice, now)
    return choice


def _choose(store: Store, plan: Plan, annotator: str, now: float, leave: str) -> str | None:
    own = [(t, sheet) for t, sheet in store.own(annotator) if t in plan.trajectories]
    begun = [(-sheet.opened, t) for t, sheet in own if sheet.status == "open" and t != leave and mine(sheet, now)]
    if begun:
        return min(begun)[1]
    closed = {t for t, sheet in own if sheet.status != "open"} | {leave}
    gold = [t for t in sorted(plan.gold_items, key=lambda t: _draw("gold", annotator, t)) if t in plan.trajectories]
    gold = [t for t in gold if t not in closed]
    done = sum(sheet.status == "submitted" for _, sheet in own)
    turn = int(_draw("turn", annotator, str(done // plan.gold_every)) * plan.gold_every)
    if gold and done % plan.gold_every == turn:
        return gold[0]
    for t in plan.order:
        if t not in closed and taken(store, t, annotator, now) < plan.people.get(t, 1):
            return t
    return gold[0] if gold else None


def mine(sheet: Any, now: float) -> bool:
    """Whether an open sheet is still its person's: a rating was given on it, or its lease runs."""
    return bool(sheet.ratings()) or now - sheet.opened < LEASE_SECONDS


def taken(store: Store, trajectory_id: str, annotator: str, now: float) -> int:
    """How many others have submitted a trajectory or hold a lease on it."""
    count = 0
    for name in list(store.people.get(trajectory_id, ())):
        if name != annotator:
            sheet = store.sheet(name, trajectory_id)
            held = sheet.status == "open" and now - sheet.opened < LEASE_SECONDS
            count += sheet.status == "submitted" or held
    return count


def read_queue(path: str) -> list[tuple[str, int | None, float]]:
    """The rows of a queue file: `{"trajectory_id": ..., "step": ... or none, "priority": number}`, one a line.

    Raises:
        DataError: a row is something else.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("trajectory_id"), str):
            raise DataError(f"{where}: expected an object with a trajectory_id")
        step, priority = row.get("step"), row.get("priority", 0.0)
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise DataError(f"{where}: step must be an integer >= 0, got {step!r}")
        if isinstance(priority, bool) or not isinstance(priority, int | float):
            raise DataError(f"{where}: priority must be a number, got {priority!r}")
        rows.append((row["trajectory_id"], step, float(priority)))
    if not rows:
        raise DataError(f"{path}: holds no row of a queue")
    return rows


def _draw(what: str, *words: str) -> float:
    """A number in [0, 1) that depends on the words alone."""
    digest = hashlib.sha256("\0".join((what, *words)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
