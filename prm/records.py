"""The records that every part of the toolkit exchanges, and the JSON Lines files that hold them.

A `Trajectory` is a task and the steps a policy took; a `StepLabel` says how good one step is. People, judges, rollouts
and the PRM itself all write `StepLabel`, so comparing any two of them is comparing two files.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from prm.errors import DataError

Record = TypeVar("Record", "Trajectory", "StepLabel")

DEEPEST = 100  # levels of meta; copying and writing it recurse


@dataclass(frozen=True)
class Step:
    """One step: `action` is exactly what the policy wrote, `observation` what came back ("" where nothing did)."""

    action: str
    observation: str = ""

    def __post_init__(self) -> None:
        for name in ("action", "observation"):
            if not isinstance(getattr(self, name), str):
                raise DataError(f"{name} must be a string, got {_short(getattr(self, name))}")


@dataclass(frozen=True)
class Trajectory:
    """A task and the steps taken for it.

    Args:
        task: what the policy was asked, as the environment's first observation.
        steps: the steps in order.
        outcome: success in [0, 1]; None when unknown.
        meta: anything else, JSON values only (seed, environment, source row, ...). Copied on construction.
        id: derived from task and steps (first 16 hex digits of a SHA-256), so that a label cannot point at changed
            text. May be given, as readers of files do, and must then agree.

    Raises:
        DataError: a field has the wrong type or range, or `id` is not that of the content.
    """

    task: str
    steps: tuple[Step, ...]
    outcome: float | None = None
    meta: Mapping[str, Any] = field(default_factory=dict, hash=False)
    id: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.task, str):
            raise DataError(f"task must be a string, got {_short(self.task)}")
        if isinstance(self.steps, str | Mapping) or not isinstance(self.steps, Iterable):
            raise DataError(f"steps must be a list of steps, got {_short(self.steps)}")
        object.__setattr__(self, "steps", tuple(self.steps))
        for i, step in enumerate(self.steps):
            if not isinstance(step, Step):
                raise DataError(f"step {i} must be a Step, got {_short(step)}")
        if self.outcome is not None:
            object.__setattr__(self, "outcome", _number("outcome", self.outcome, 0, 1))
        object.__setattr__(self, "meta", _json_mapping(self.meta))
        derived = content_id(self.task, self.steps)
        if self.id and self.id != derived:
            raise DataError(f"id {_short(self.id)} is not that of the task and steps ({derived}): the text was changed")
        object.__setattr__(self, "id", derived)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: `{"id", "task", "steps": [{"action", "observation"}], "outcome", "meta"}`."""
        steps = [{"action": s.action, "observation": s.observation} for s in self.steps]
        return {"id": self.id, "task": self.task, "steps": steps, "outcome": self.outcome, "meta": dict(self.meta)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """The inverse of `to_dict`. Raises DataError on a missing, unknown or malformed field."""
        row = _checked_keys(cls, row, required=("task", "steps"))
        if not isinstance(row["steps"], list):
            raise DataError(f"steps must be a list, got {_short(row['steps'])}")
        steps = []
        for i, step in enumerate(row["steps"]):
            if not isinstance(step, Mapping) or "action" not in step:
                raise DataError(f"step {i} must be an object with an action, got {_short(step)}")
            try:
                steps.append(Step(**_checked_keys(Step, step, required=("action",))))
            except DataError as error:
                raise DataError(f"step {i}: {error}") from None
        return cls(**{**row, "steps": tuple(steps), "meta": row.get("meta") or {}, "id": row.get("id") or ""})


@dataclass(frozen=True)
class StepLabel:
    """How good one step is, and who says so.

    Args:
        trajectory_id: `Trajectory.id`.
        step: 0-based index of the step.
        score: P(the step is good) in [0, 1]: bad 0, neutral 0.5, good 1, Monte-Carlo k/n.
        source: "human:NAME", "judge:MODEL", "mc:POLICY", "tree:POLICY", "prm:PATH", "fused" or "gold:NAME".
        weight: votes or valid rollouts behind the score, > 0.
        note: free text.
        time: ISO 8601 in UTC, or "".
        meta: anything else, JSON values only.

    No label is no row: an unlabelled step is never written as 0 or 0.5.
    """

    trajectory_id: str
    step: int
    score: float
    source: str
    weight: float = 1.0
    note: str = ""
    time: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("trajectory_id", "source", "note", "time"):
            if not isinstance(getattr(self, name), str):
                raise DataError(f"{name} must be a string, got {_short(getattr(self, name))}")
        for name in ("trajectory_id", "source"):
            if not getattr(self, name):
                raise DataError(f"{name} must not be empty")
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise DataError(f"step must be an integer >= 0, got {_short(self.step)}")
        object.__setattr__(self, "score", _number("score", self.score, 0, 1))
        object.__setattr__(self, "weight", _number("weight", self.weight, 0, math.inf))
        if self.weight == 0:
            raise DataError("weight must be > 0: a label that nothing stands behind is no label")
        object.__setattr__(self, "meta", _json_mapping(self.meta))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: one key a field."""
        return {f.name: dict(self.meta) if f.name == "meta" else getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> StepLabel:
        """The inverse of `to_dict`. Raises DataError on a missing, unknown or malformed field."""
        row = _checked_keys(cls, row, required=("trajectory_id", "step", "score", "source"))
        return cls(**{**row, "meta": row.get("meta") or {}})


def content_id(task: str, steps: Iterable[Step]) -> str:
    """The id of a trajectory with this text: 16 hex digits."""
    text = json.dumps([task, [[s.action, s.observation] for s in steps]], separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


# --- JSON Lines -------------------------------------------------------------------------------------------------------


def read_jsonl(
    path: str | os.PathLike[str], cls: type[Record] | None = None, *, skip_bad: bool = False
) -> list[Record]:
    """All records of a file, in order. See `iter_jsonl`."""
    return list(iter_jsonl(path, cls, skip_bad=skip_bad))


def iter_jsonl(
    path: str | os.PathLike[str], cls: type[Record] | None = None, *, skip_bad: bool = False
) -> Iterator[Record]:
    """Stream the records of a JSON Lines file.

    Args:
        path: the file; UTF-8, one JSON object a line; blank lines are passed over.
        cls: `Trajectory` or `StepLabel`; None takes whichever the row's keys name.
        skip_bad: pass over bad lines, and print on stderr how many there were and the first reason.

    Raises:
        DataError: `path:line: reason`, on the first bad line.
    """
    bad: list[str] = []
    for where, line in _lines(path):
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise DataError(f"expected a JSON object, got {_short(row)}")
            kind: Any = cls
            if kind is None:
                kind = StepLabel if "trajectory_id" in row else Trajectory
            elif kind is Trajectory and "trajectory_id" in row:
                raise DataError("this is a step label, expected a trajectory")
            elif kind is StepLabel and "steps" in row:
                raise DataError("this is a trajectory, expected a step label")
            record = kind.from_dict(row)
        except DataError as error:
            if not line.endswith(b"\n") and not _is_json(line):
                error = DataError(f"the last line is torn, as after a crash ({error})")
            if not skip_bad:
                raise DataError(f"{where}: {error}") from None
            bad.append(f"{where}: {error}")
        else:
            yield record
    if bad:
        print(f"{path}: skipped {len(bad)} bad line(s), the first: {bad[0]}", file=sys.stderr)


def append_jsonl(
    path: str | os.PathLike[str], records: Iterable[Trajectory | StepLabel] | Trajectory | StepLabel
) -> int:
    """Append records, each as one line, and make them durable; the number written is returned.

    All lines go out in one write under a lock, so that several processes may append to one file. A torn last line, left
    by a crash, is removed first (and named on stderr). When the disk is full nothing of this call stays in the file.
    """
    if isinstance(records, Trajectory | StepLabel):
        records = [records]
    lines = [dump_json(record.to_dict()) + b"\n" for record in records]
    if not lines:
        return 0
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        size = _mend_tail(handle, path)
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)
    return len(lines)


class Writer:
    """Appends records to a file in groups, at the latest every two seconds and when it is left, also by an error."""

    def __init__(self, path: str | os.PathLike[str], group: int = 256) -> None:
        self.path, self.group = path, group
        self._waiting: list[Trajectory | StepLabel] = []
        self._since = time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()

    def add(self, record: Trajectory | StepLabel) -> None:
        """Write the record, now or with the next ones."""
        self._waiting.append(record)
        if len(self._waiting) >= self.group or time.monotonic() - self._since > 2:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        append_jsonl(self.path, self._waiting)
        self._waiting, self._since = [], time.monotonic()


def dump_json(value: Any) -> bytes:
    """One line of UTF-8 JSON without NaN. Text that UTF-8 cannot hold (lone surrogates) is written as escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def parse_json(line: bytes | str) -> Any:
    """Parse strict JSON (NaN and Infinity are refused). Raises DataError."""
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"not JSON that can be read: {error}") from None


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", line
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory, expected a JSON Lines file") from None


def mend(path: str | os.PathLike[str]) -> None:
    """Remove the torn last line that a crash left in a file that is to be gone on with; no file is fine."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory, expected a JSON Lines file") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _mend_tail(handle, path)
    finally:
        os.close(handle)


def _mend_tail(handle: int, path: str | os.PathLike[str]) -> int:
    """Give a file without a final newline one, or cut its torn last line. Returns the size."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return size
    start = size
    while start > 0:
        block = max(0, start - 65536)
        cut = os.pread(handle, start - block, block).rfind(b"\n")
        start = block if cut < 0 else block + cut + 1
        if cut >= 0:
            break
    if _is_json(os.pread(handle, size - start, start)):
        os.write(handle, b"\n")
        return size + 1
    os.ftruncate(handle, start)
    print(f"{path}: removed a torn last line of {size - start} bytes", file=sys.stderr)
    return start


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise DataError(f"{name} is no JSON number")


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise DataError(f"{name} must be a number, got {_short(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        limits = f"in [{low:g}, {high:g}]" if high < math.inf else f"finite and >= {low:g}"
        raise DataError(f"{name} must lie {limits}, got {number:g}")
    return number


def _json_mapping(meta: Any) -> dict[str, Any]:
    if not isinstance(meta, Mapping):
        raise DataError(f"meta must be an object, got {_short(meta)}")
    try:
        json.dumps(dict(meta), allow_nan=False)
    except RecursionError:
        raise DataError(f"meta is nested deeper than {DEEPEST} levels") from None
    except (TypeError, ValueError) as error:
        raise DataError(f"meta must hold JSON values only: {error}") from None
    level: list[Any] = [meta]
    for _ in range(DEEPEST):
        level = [v for one in level for v in (one.values() if isinstance(one, Mapping) else one)
                 if isinstance(v, Mapping | list | tuple)]  # fmt: skip
        if not level:
            return copy.deepcopy(dict(meta))
    raise DataError(f"meta is nested deeper than {DEEPEST} levels")


def _checked_keys(cls: type, row: Mapping[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    known = {f.name for f in fields(cls)}
    if missing := [name for name in required if name not in row]:
        raise DataError(f"missing {', '.join(missing)}")
    if unknown := sorted(set(row) - known):
        raise DataError(f"unknown field {', '.join(map(repr, unknown))}; {cls.__name__} has {', '.join(sorted(known))}")
    return dict(row)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
