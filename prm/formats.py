"""Reading what people have as trajectories and labels, and writing it for other tools.

`convert` knows our own records, OpenAI chat messages with tool calls, reasoning text, TRL stepwise rows, and the
published data sets of `prm.published`. Three rules hold everywhere. Nothing is guessed: what cannot be told apart is an
error that says what came and what was expected. Nothing is lost in silence: what is left out is counted by reason. And
text is kept as it came, byte for byte.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prm.chat import (
    MESSAGE_KEYS,
    Note,
    Row,
    chat_head,
    chat_trajectory,
    message_style,
    messages_of,
    outcome_of,
    short,
    text_of,
    to_messages,
    without,
)
from prm.errors import DataError, UsageError
from prm.records import Step, StepLabel, Trajectory, parse_json

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["KINDS", "SPLITS", "Converted", "convert", "split_text", "to_dataset", "to_messages", "to_trl"]

Reader = Callable[[Row, Note], Iterable[tuple[Trajectory | None, Sequence[StepLabel]]]]

KINDS = (
    "auto", "records", "chat", "reasoning", "trl", "prm800k", "math-shepherd", "processbench", "prmbench", "math-aps",
    "rlhflow", "agentgym", "tau-bench", "react", "preference",
)  # fmt: skip
SPLITS = ("blank-line", "line")
SPLIT_KINDS = ("reasoning", "preference")

QUESTION_KEYS = ("question", "problem", "prompt", "task", "instruction")
REASONING_KEYS = ("reasoning", "solution", "response", "completion", "output", "generation", "answer")


@dataclass(frozen=True)
class Converted:
    """What `convert` read.

    Args:
        trajectories: in the order of the source. A source that repeats a solution gives its trajectory (and id) again.
        labels: `trajectory_id` is that of a trajectory here (records may bring labels of trajectories kept elsewhere).
        read: rows read, good or not.
        skipped: reason -> how many rows, or steps of a row, were left out for it.
        kind: the format that the rows were read as; "" when there was no row.
    """

    trajectories: tuple[Trajectory, ...] = ()
    labels: tuple[StepLabel, ...] = ()
    read: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    kind: str = ""

    def summary(self) -> str:
        """One line: `read 40 rows: 39 trajectories, 212 steps, 0 labels; skipped 1: no assistant turn (1)`."""
        steps = sum(len(t.steps) for t in self.trajectories)
        counts = ((len(self.trajectories), "trajectories", "trajectory"), (steps, "steps", "step"))
        parts = [f"{n} {one if n == 1 else many}" for n, many, one in (*counts, (len(self.labels), "labels", "label"))]
        line = f"read {self.read} row{'' if self.read == 1 else 's'}: {', '.join(parts)}"
        if self.skipped:
            most = sorted(self.skipped.items(), key=lambda item: -item[1])
            reasons = [f"{reason} ({n})" for reason, n in most[:8]]
            rest = [f"and {len(most) - 8} more reasons"] if len(most) > 8 else []
            line += f"; skipped {sum(self.skipped.values())}: {', '.join(reasons + rest)}"
        return line


def convert(
    source: str | os.PathLike[str] | Iterable[Any],
    *,
    kind: str = "auto",
    split: str | None = None,
    skip_bad: bool = False,
) -> Converted:
    """Read trajectories and labels from a file or from rows.

    Args:
        source: a path (JSON Lines, a JSON array, or plain text for "reasoning" and "react"), or rows (dicts).
        kind: the format, one of `KINDS`. "auto" recognises it by each row's keys; all rows must be of one kind.
        split: how reasoning text becomes steps, "blank-line" or "line" (see `split_text`); needed there, only there.
        skip_bad: count bad rows by reason in `Converted.skipped` and go on, instead of raising on the first.

    Raises:
        DataError: `file:line: what came, what was expected` (`row N` for JSON arrays and iterables, from 1).
        UsageError: an unknown `kind` or `split`, or reasoning text without `split`.
    """
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if split not in (None, *SPLITS):
        raise UsageError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if split and kind not in ("auto", *SPLIT_KINDS):
        raise UsageError(f"split is for reasoning text, not for {kind}")
    formats = _formats(split)
    trajectories: list[Trajectory] = []
    labels: list[StepLabel] = []
    skipped: Counter[str] = Counter()
    first_error: DataError | None = None
    found, read = "" if kind == "auto" else kind, 0
    for where, row in _rows(source, kind):
        read += 1
        try:
            if isinstance(row, DataError):
                raise row
            if kind == "auto":
                this = _recognise(row, formats)
                if found and this != found:
                    raise DataError(f"a row of another kind: {this}, but the rows before are {found}; pass kind=")
                found = this
                if split and found not in SPLIT_KINDS:
                    raise UsageError(f"split is for reasoning text, and this is {found}")
            notes: list[str] = []
            pairs = list(formats[found][1](row, notes.append))
        except DataError as error:
            if not skip_bad:
                raise DataError(f"{where}: {error}") from None
            first_error = first_error or DataError(f"{where}: {error}")
            skipped[_reason(error)] += 1
            continue
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        skipped.update(notes)
        for trajectory, own in pairs:
            if trajectory is not None:
                trajectories.append(trajectory)
            labels += own
    if first_error and not found:
        raise first_error
    return Converted(tuple(trajectories), tuple(labels), read, dict(skipped), found)


def _reason(error: DataError) -> str:
    return re.split(r"[:;] |, (?=got |but |expected |pass )", str(error))[0]


# --- sources ----------------------------------------------------------------------------------------------------------


def _formats(split: str | None) -> dict[str, tuple[Callable[[Row], bool], Reader]]:
    from prm.preferences import is_preference, read_preference
    from prm.published import FORMATS

    return {
        "records": (lambda row: "trajectory_id" in row or ("task" in row and "steps" in row), _read_record),
        "trl": (lambda row: "prompt" in row and "completions" in row, _read_trl),
        "chat": (lambda row: message_style(row) == "chat", _read_chat),
        "preference": (is_preference, lambda row, note: read_preference(row, note, split)),
        **FORMATS,
        "reasoning": (_is_reasoning, lambda row, note: _read_reasoning(row, note, split)),
    }


def _recognise(row: Row, formats: Mapping[str, tuple[Callable[[Row], bool], Reader]]) -> str:
    kinds = [kind for kind, (test, _) in formats.items() if kind != "reasoning" and test(row)]
    if not kinds and _is_reasoning(row):
        return "reasoning"
    if len(kinds) == 1:
        return kinds[0]
    keys = short(sorted(map(str, row)), 200)
    if kinds:
        raise DataError(f"the row could be {' or '.join(kinds)}, pass kind= to say which (its keys: {keys})")
    raise DataError(f"no known format, got the keys {keys}, expected one of {', '.join(KINDS[1:])}")


def _rows(source: Any, kind: str) -> Iterator[tuple[str, Row | DataError]]:
    if isinstance(source, str | os.PathLike):
        yield from _file_rows(source, kind)
        return
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise DataError(f"expected a path or rows, got {short(source)}")
    for number, row in enumerate(source, 1):
        if isinstance(row, Trajectory | StepLabel):
            row = row.to_dict()
        yield f"row {number}", _checked_row(row)


def _file_rows(path: str | os.PathLike[str], kind: str) -> Iterator[tuple[str, Row | DataError]]:
    try:
        with open(path, "rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            file.seek(0)
            if kind in ("react", "reasoning") or (kind == "auto" and start and start not in b"{["):
                data = file.read().removeprefix(b"\xef\xbb\xbf")
                if start not in (b"{", b"[") or not _starts_as_json(data):
                    yield from _text_rows(path, data, kind)
                    return
                file.seek(0)
            if start == b"[":
                rows = parse_json(file.read().removeprefix(b"\xef\xbb\xbf"))
                for number, row in enumerate(rows, 1):
                    yield f"{path}: row {number}", _checked_row(row)
                return
            for number, line in enumerate(file, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", _checked_row(parse_json(line))
                except DataError as error:
                    whole = _single_object(path) if number == 1 else None
                    if whole is not None:
                        yield f"{path}: row 1", whole
                        return
                    torn = "" if line.endswith(b"\n") else ", and the last line has no end: torn, as after a crash"
                    yield f"{path}:{number}", DataError(f"{error}{torn}")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory, expected a file") from None
    except DataError as error:
        raise error if str(error).startswith(f"{path}:") else DataError(f"{path}: {error}") from None


def _text_rows(path: Any, data: bytes, kind: str) -> Iterator[tuple[str, Row | DataError]]:
    from prm.published import react_blocks

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    blocks = react_blocks(text) if kind in ("auto", "react") else []
    for start, block in blocks:
        yield f"{path}:{text.count(chr(10), 0, start) + 1}", block
    if not blocks:
        if kind == "react":
            raise DataError("no ReAct trajectory, expected 'Question: ...' and 'Thought 1: ...' on lines of their own")
        yield f"{path}", {"question": "", "reasoning": text}


def _starts_as_json(data: bytes) -> bool:
    for part in (data.lstrip().split(b"\n", 1)[0], data):
        try:
            return isinstance(parse_json(part), dict | list)
        except DataError:
            continue
    return False


def _single_object(path: Any) -> Row | None:
    try:
        with open(path, "rb") as file:
            value = parse_json(file.read().removeprefix(b"\xef\xbb\xbf"))
    except DataError:
        return None
    return value if isinstance(value, dict) else None


def _checked_row(row: Any) -> Row | DataError:
    return row if isinstance(row, Mapping) else DataError(f"expected an object, got {short(row)}")


# --- reasoning text ---------------------------------------------------------------------------------------------------


def split_text(text: str, split: str) -> list[str]:
    """Cut text into steps; `"".join(steps)` is the text, each step keeps the separator that ends it.

    Args:
        text: any text. Lines end at `\\n` alone; text of blanks only gives no step.
        split: "line": each line that is not blank starts a step. "blank-line": each line after a blank one does, except
            inside a code fence (``` or ~~~) that is closed later: a code block is never cut.
    """
    if split not in SPLITS:
        raise UsageError(f"reasoning text needs split= one of {', '.join(SPLITS)}: where a step ends is never guessed")
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    blank = [not line.strip(" \t\r\n") for line in lines]
    fenced = _fenced(lines) if split == "blank-line" else [False] * len(lines)
    steps: list[str] = []
    start = True
    for i, line in enumerate(lines):
        if blank[i]:
            start = start or (not fenced[i])
        elif split == "line" or (start and not fenced[i]):
            steps.append("")
            start = False
        if steps:
            steps[-1] += line
    if not steps:
        return []
    lead = len(text) - sum(map(len, steps))
    return [text[:lead] + steps[0], *steps[1:]]


def _fenced(lines: list[str]) -> list[bool]:
    """For each line, whether it stands inside a closed code fence, after the line that opens it."""
    inside = [False] * len(lines)
    opened, fence = -1, ""
    for i, line in enumerate(lines):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if mark and opened < 0 and not (mark[1][0] == "`" and "`" in line[mark.end() :]):
            opened, fence = i, mark[1]
        elif mark and opened >= 0 and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            inside[opened + 1 : i + 1] = [True] * (i - opened)
            opened = -1
    return inside


def _is_reasoning(row: Row) -> bool:
    return any(key in row for key in QUESTION_KEYS) and any(key in row for key in REASONING_KEYS)


def _read_reasoning(row: Row, note: Note, split: str | None) -> Iterator[Any]:
    asked = next((key for key in QUESTION_KEYS if key in row), None)
    key = next((key for key in REASONING_KEYS if key in row), None)
    if key is None:
        raise DataError(f"no reasoning text, expected a key {' or '.join(REASONING_KEYS)}")
    steps = split_text(text_of(row, key), split or "")
    if not steps:
        note("no text")
        return
    task = text_of(row, asked) if asked else ""
    yield Trajectory(task, tuple(map(Step, steps)), outcome_of(row), without(row, asked or "", key)), ()


# --- rows -------------------------------------------------------------------------------------------------------------


def _read_chat(row: Row, note: Note, keys: Sequence[str] = MESSAGE_KEYS, kind: str = "chat") -> Iterator[Any]:
    key, messages = messages_of(row, keys)
    trajectory = chat_trajectory(messages, without(row, key), kind=kind, note=note, outcome=outcome_of(row))
    if trajectory is not None:
        yield trajectory, ()


def _read_record(row: Row, note: Note) -> Iterator[Any]:
    try:
        if "trajectory_id" in row:
            yield None, [StepLabel.from_dict(row)]
        else:
            yield Trajectory.from_dict(row), ()
    except OverflowError as error:
        raise DataError(f"a number is too large: {error}") from None


def _read_trl(row: Row, note: Note) -> Iterator[Any]:
    """TRL's stepwise supervision rows: `{"prompt": str, "completions": [str], "labels": [bool or float]}`.

    A label is a boolean or a number in [0, 1]; null and -100 (the index that losses ignore) mean unlabelled. Anything
    else, -1 included, is an error: it may mean a bad step or no label. Labels are as many as completions, or the row is
    wrong. A prompt of chat messages is read as the head of a chat.
    """
    completions, labels, prompt = row.get("completions"), row.get("labels"), row.get("prompt")
    if not isinstance(completions, list) or not all(isinstance(c, str) for c in completions):
        raise DataError(f"completions must be a list of texts, got {short(completions)}")
    if not isinstance(labels, list):
        raise DataError(f"labels must be a list, got {short(labels)}")
    if len(labels) != len(completions):
        raise DataError(f"labels and completions must be as many, got {len(labels)} and {len(completions)}")
    scores = [_trl_score(k, value) for k, value in enumerate(labels)]
    meta = without(row, "prompt", "completions", "labels")
    if isinstance(prompt, list):
        task, head = chat_head(prompt, note)
        meta["converted"] = {"kind": "trl", "head": head}
    else:
        task = text_of(row, "prompt")
    trajectory = Trajectory(task, tuple(map(Step, completions)), None, meta)
    yield trajectory, labels_of(trajectory, scores, "gold:trl")


def _trl_score(k: int, value: Any) -> float | None:
    if value is None or value == -100:
        return None
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(f"a label must be a boolean, in [0, 1], null or -100: step {k} has {short(value)}")
    return float(value)


def to_trl(
    trajectories: Iterable[Trajectory],
    labels: Iterable[StepLabel],
    *,
    soft: bool = False,
    threshold: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of TRL's stepwise supervision type, and how much was left out for what reason.

    A row is `{"prompt": task, "completions": [...], "labels": [...]}`. TRL puts a label at the end of its completion,
    so an observation stands before the action that it led to: a completion is the previous step's observation and a
    newline, where there is one, and then the action. The observation after the last step is left out, and reading the
    row back cannot tell observation from action. There is no null: a trajectory ends before its first unlabelled step.
    Steps whose labels differ count as unlabelled; fuse them first.

    Args:
        trajectories: one row each, where the first step is labelled.
        labels: those of these trajectories; others are counted.
        soft: write scores as floats. Without it labels are booleans, and scores other than 0 and 1 need `threshold`.
        threshold: in [0, 1]; a step is good from this score on.

    Raises:
        DataError: a label of a step that its trajectory does not have.
        UsageError: scores other than 0 and 1 with neither `soft` nor `threshold`, or both of them.
    """
    if soft and threshold is not None:
        raise UsageError("soft keeps scores, threshold makes booleans of them: pass one of the two")
    if threshold is not None and not 0 <= threshold <= 1:
        raise UsageError(f"threshold must lie in [0, 1], got {threshold}")
    trajectories = list(trajectories)
    by_step: dict[str, dict[int, set[float]]] = {t.id: defaultdict(set) for t in trajectories}
    skipped: Counter[str] = Counter()
    for label in labels:
        if label.trajectory_id in by_step:
            by_step[label.trajectory_id][label.step].add(label.score)
        else:
            skipped["label of another trajectory"] += 1
    rows: list[dict[str, Any]] = []
    for trajectory in trajectories:
        scores = by_step[trajectory.id]
        if beyond := [k for k in scores if k >= len(trajectory.steps)]:
            raise DataError(f"a label of step {beyond[0]}, but {trajectory.id} has {len(trajectory.steps)} steps")
        skipped["step whose labels differ"] += sum(len(s) > 1 for s in scores.values())
        end = next((k for k in range(len(trajectory.steps)) if len(scores.get(k, ())) != 1), len(trajectory.steps))
        if end == 0:
            skipped["trajectory without a label of its first step"] += 1
            continue
        skipped["step from the first unlabelled one on"] += len(trajectory.steps) - end
        skipped["observation after the last step"] += bool(trajectory.steps[end - 1].observation)
        before = ["", *(s.observation and s.observation + "\n" for s in trajectory.steps)]
        completions = [seen + step.action for seen, step in zip(before, trajectory.steps[:end], strict=False)]
        own = [next(iter(scores[k])) for k in range(end)]
        rows.append({"prompt": trajectory.task, "completions": completions, "labels": own})
    for row in rows:
        if soft:
            continue
        if threshold is None and not set(row["labels"]) <= {0.0, 1.0}:
            bad = next(s for s in row["labels"] if s not in (0, 1))
            raise UsageError(f"a score of {bad:g} is no boolean: pass soft=True for floats, or a threshold")
        row["labels"] = [s >= (1.0 if threshold is None else threshold) for s in row["labels"]]
    return rows, {reason: n for reason, n in skipped.items() if n}


def to_dataset(trajectories: Iterable[Trajectory], labels: Iterable[StepLabel] = ()) -> Dataset:
    """A `datasets.Dataset` with one row a trajectory and nothing lost.

    Columns: id, task, actions, observations (one text a step), outcome (float64, null when unknown), labels (a list of
    {step: int64, score: float64, source, weight: float64, note, time, meta}), meta (both metas as JSON text). The types
    are given, not inferred, so that a column of 0 and 1 stays numbers. Labels of other trajectories are left out.

    Raises:
        DataError: text that Arrow cannot hold (lone surrogates); names the trajectory.
    """
    from datasets import Dataset, Features, Value

    own: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for label in labels:
        row = {**label.to_dict(), "meta": json.dumps(dict(label.meta))}
        own[row.pop("trajectory_id")].append(row)
    names = ("id", "task", "actions", "observations", "outcome", "labels", "meta")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for t in trajectories:
        texts = [t.task, *(s.action for s in t.steps), *(s.observation for s in t.steps)]
        try:
            "".join([*texts, *(row["source"] + row["note"] for row in own[t.id])]).encode()
        except UnicodeEncodeError:
            raise DataError(f"{t.id}: a lone surrogate in the text, which a Dataset cannot hold") from None
        actions, seen = [s.action for s in t.steps], [s.observation for s in t.steps]
        values = (t.id, t.task, actions, seen, t.outcome, own[t.id], json.dumps(dict(t.meta)))
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    text, number = Value("string"), Value("float64")
    label_type = {"step": Value("int64"), "score": number, "source": text, "weight": number, "note": text, "time": text}
    features = {"id": text, "task": text, "actions": [text], "observations": [text], "outcome": number}
    return Dataset.from_dict(
        columns, features=Features({**features, "labels": [{**label_type, "meta": text}], "meta": text})
    )


def labels_of(trajectory: Trajectory, scores: Sequence[float | None], source: str, **meta: Any) -> list[StepLabel]:
    """One label a step; None gives none."""
    return [
        StepLabel(trajectory.id, k, score, source, meta=meta) for k, score in enumerate(scores) if score is not None
    ]
