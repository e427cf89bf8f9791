"""`prm show`: trajectories and labels to read, in the browser by the view of the labelling page, or in the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prm.config import option
from prm.errors import DataError, UsageError
from prm.records import StepLabel, Trajectory, read_jsonl

RUN_FILES = ("audit.jsonl", "eval.jsonl", "trajectories.jsonl")


@dataclass(frozen=True)
class ShowConfig:
    """Options of `prm show`."""

    labels: tuple[str, ...] = option((), "label files to colour the steps by")
    terminal: bool = option(False, "print in the terminal; without it, this happens when stdout is no terminal")
    port: int | None = option(None, "serve to the browser at this port of the loopback address; 0 takes a free one")
    n: int = option(0, "print the first N trajectories or labels; 0 prints all")
    skip_bad: bool = option(False, "count bad rows and go on")


@dataclass(frozen=True)
class Shown:
    """What was found: trajectories, the labels of each (trajectory, step), or labels alone."""

    name: str
    trajectories: Sequence[Trajectory] = ()
    labels: Sequence[StepLabel] = ()
    notes: Sequence[str] = ()
    at: dict[tuple[str, int], list[StepLabel]] = field(default_factory=dict)


def show(path: str, config: ShowConfig) -> int:
    """Show a file of trajectories or labels, or the trajectories of a training run; the exit status.

    Raises:
        DataError, UsageError: nothing to show there; the port is taken.
    """
    found = find(path, config.labels, skip_bad=config.skip_bad)
    browser = config.port is not None or (not config.terminal and sys.stdout.isatty() and _has_browser())
    if config.terminal or not browser:
        colour = "NO_COLOR" not in os.environ and (config.terminal or sys.stdout.isatty())
        try:
            for line in terminal(found, colour=colour, limit=config.n):
                print(line)
            sys.stdout.flush()
        except BrokenPipeError:  # `prm show FILE | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    from labeling.annotate.reader import show_app
    from labeling.annotate.run import serve

    opener = webbrowser.open if config.port is None else bool
    return serve(show_app(found), "127.0.0.1", config.port or 0, opener)


def find(path: str, label_files: Iterable[str] = (), *, skip_bad: bool = False) -> Shown:
    """Read what `prm show` shows.

    Raises:
        DataError: no such file, a bad row, an empty file, a directory without trajectories.
    """
    notes, file = [], Path(path)
    if file.is_dir():
        there = [file / name for name in RUN_FILES if (file / name).is_file()]
        if (file / "report.html").is_file():
            notes.append(f"The report of this run: {file / 'report.html'}")
        if not there:
            expected = f"{path}: holds no trajectories, expected one of {', '.join(RUN_FILES)}"
            raise DataError("; ".join((expected, *notes)))
        file = there[0]
    records: list[Any] = read_jsonl(file, skip_bad=skip_bad)  # type: ignore[type-var]
    if not records:
        raise DataError(f"{file}: holds no trajectory and no label")
    trajectories = [r for r in records if isinstance(r, Trajectory)]
    labels = [r for r in records if isinstance(r, StepLabel)]
    for name in label_files:
        labels += read_jsonl(name, StepLabel, skip_bad=skip_bad)
    at: dict[tuple[str, int], list[StepLabel]] = {}
    for label in labels:
        at.setdefault((label.trajectory_id, label.step), []).append(label)
    if trajectories:
        known_steps = {t.id: len(t.steps) for t in trajectories}
        astray = sum(label.step >= known_steps.get(label.trajectory_id, 0) for label in labels)
        if astray:
            notes.append(f"{astray} of {len(labels)} labels are for steps that are not in {file.name}")
    for t in trajectories:
        scores = t.meta.get("scores")
        if isinstance(scores, list) and len(scores) == len(t.steps):
            for k, score in enumerate(scores):
                if isinstance(score, int | float) and 0 <= score <= 1:
                    at.setdefault((t.id, k), []).append(StepLabel(t.id, k, score, "prm:this run"))
    return Shown(file.name, trajectories, labels, notes, at)


# --- the terminal -----------------------------------------------------------------------------------------------------


def terminal(found: Shown, *, colour: bool, limit: int = 0, width: int | None = None) -> Iterator[str]:
    """The lines to print. Control and direction characters of the texts stand as escapes; nothing else is changed."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    paint = _painter(colour)
    yield from map(visible, found.notes)
    if not found.trajectories:
        shown = found.labels[: limit or None]
        yield f"{'trajectory':<18}{'step':>5}  {'score':>6}  source"
        for label in shown:
            score = paint(f"{label.score:6.3f}", label.score)
            note = f"  {visible(label.note)}" if label.note else ""
            yield f"{visible(label.trajectory_id):<18}{label.step + 1:>5}  {score}  {visible(label.source)}{note}"
        if len(shown) < len(found.labels):
            yield f"... {len(found.labels) - len(shown)} more labels"
        return
    chosen = found.trajectories[: limit or None]
    for number, t in enumerate(chosen, 1):
        outcome = "unknown" if t.outcome is None else f"{t.outcome:g}"
        yield paint(f"== {number}/{len(found.trajectories)}  {t.id}  {len(t.steps)} steps, outcome {outcome}", None)
        yield from _indented(t.task, "   ", width)
        for k, step in enumerate(t.steps):
            labels = found.at.get((t.id, k), [])
            mean = sum(label.score for label in labels) / len(labels) if labels else None
            said = "  ".join(f"{visible(label.source)} {label.score:.2f}" for label in labels)
            yield paint(f"{k + 1:>3} {'█' if labels else '░'} {said}".rstrip(), mean)
            yield from _indented(step.action, "      ", width)
            if step.observation:
                yield from _indented(step.observation, "    > ", width)
        yield ""
    if len(chosen) < len(found.trajectories):
        yield f"... {len(found.trajectories) - len(chosen)} more trajectories"


def visible(text: str) -> str:
    """A text on one line that no terminal acts on: what cannot be printed stands as an escape, a newline as \\n."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def _indented(text: str, margin: str, width: int) -> Iterator[str]:
    for line in text.split("\n"):
        shown = "\t".join(visible(part) for part in line.split("\t")).expandtabs(4)
        room = max(width - len(margin), 20)
        for start in range(0, max(len(shown), 1), room):
            yield margin + shown[start : start + room]


def _painter(colour: bool) -> Callable[[str, float | None], str]:
    def paint(text: str, score: float | None) -> str:
        if not colour:
            return text
        code = "1" if score is None else "31" if score < 1 / 3 else "32" if score > 2 / 3 else "33"
        return f"\x1b[{code}m{text}\x1b[0m"

    return paint


def _has_browser() -> bool:
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return webbrowser.get() is not None
    except webbrowser.Error:
        return False


def check_port(port: int) -> None:
    """Raises UsageError where no port has this number."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must lie in [0, 65535], got {port}")
