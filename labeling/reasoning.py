"""Pure reasoning as an environment: a prompt, a text that grows step by step, and a checker for its final answer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from labeling.checkers import CHECKERS, NO_ANSWER, RIGHT, final_answer, judge, shared_checker
from prm.errors import DataError, EnvError, UsageError

QUESTIONS, ANSWERS = ("question", "problem", "prompt"), ("answer", "gold", "solution")


class Reasoning:
    """One problem an episode. Follows `prm.env.Env`; an action is the next piece of the text, the observation is "".

    The text is over with a piece that does not end in `separator` (the policy ended it itself; an empty piece does so,
    too), or, with `end_at_answer`, with the piece that holds a final answer. Then info has `success` and `verdict`:
    "right", "wrong", "no answer"; and "unanswered" where a continuation adds no answer to a text that had one already,
    which says nothing about the continuation.

    Args:
        tasks: a JSON Lines file, or rows: {"question", "answer"} ("problem" and "prompt", "gold" and "solution" will
            do); of an answer with "####" only what follows it counts.
        checker: "exact", "numeric", "math-verify" or `module:attribute`. It runs in a process of its own.
        separator: what a step ends with.
        prompt: the task, "{question}" is put in.
        end_at_answer: for models that go on after their answer.
        timeout: seconds for the checker; after that the episode fails with an error.
    """

    continues_text = True

    def __init__(
        self,
        tasks: str | Sequence[Mapping[str, Any]] = (),
        checker: str = "numeric",
        separator: str = "\n",
        prompt: str = "{question}\n",
        end_at_answer: bool = False,
        timeout: float = 10.0,
    ) -> None:
        if not separator:
            raise UsageError("separator must not be empty")
        if checker not in CHECKERS and ":" not in checker:
            raise UsageError(f"checker must be {', '.join(CHECKERS)} or module:attribute, got {checker!r}")
        self._tasks = _read(tasks) if isinstance(tasks, str) else tuple(_task(dict(row), "tasks") for row in tasks)
        self._checker, self._timeout = checker, timeout
        self._separator, self._prompt, self._end_at_answer = separator, prompt, end_at_answer
        self._random = Random()
        self._gold: str | None = None
        self._before = self._text = ""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Pose the problem number `seed` modulo their number, or the options' own {"task", "answer"}."""
        options = dict(options or {})
        if unknown := sorted(set(options) - {"task", "answer"}):
            raise UsageError(f"unknown option {', '.join(unknown)}; there are task and answer")
        if options:
            if not isinstance(options.get("task"), str) or not isinstance(options.get("answer"), str):
                raise UsageError("options must have a task and an answer, both texts")
            task, self._gold = options["task"], options["answer"]
        elif not self._tasks:
            raise UsageError("there are no tasks: give a file, rows, or the options task and answer")
        else:
            number = self._random.randrange(len(self._tasks)) if seed is None else seed % len(self._tasks)
            question, self._gold = self._tasks[number]
            task = self._prompt.replace("{question}", question)
        self._before = self._text = ""
        return task, {}

    def begin_continuation(self) -> None:
        """What was written so far is given; the answer is to come in what follows."""
        self._before, self._text = self._before + self._text, ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Append a piece of text."""
        if self._gold is None:
            raise EnvError("no problem was posed, or the text is over: call reset")
        self._text += action
        over = not action.endswith(self._separator) or (self._end_at_answer and final_answer(self._text) is not None)
        if not over:
            return "", 0.0, False, False, {}
        gold, self._gold = self._gold, None
        verdict = judge(self._text, gold, shared_checker(self._checker, self._timeout))
        if verdict == NO_ANSWER and final_answer(self._before) is not None:
            verdict = "unanswered"
        success = float(verdict == RIGHT)
        return "", success, True, False, {"success": success, "verdict": verdict}


def _read(path: str) -> tuple[tuple[str, str], ...]:
    """The tasks of a file, read once for as long as it does not change."""
    try:
        return _parsed(path, os.stat(path).st_mtime_ns)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


@lru_cache(maxsize=8)
def _parsed(path: str, changed: int) -> tuple[tuple[str, str], ...]:
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    found = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{i}: not JSON: {error.msg}") from None
            found.append(_task(row, f"{path}:{i}"))
    if not found:
        raise DataError(f"{path}: holds no task")
    return tuple(found)


def _task(row: Any, where: str) -> tuple[str, str]:
    """(question, gold) of a row."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object, got {row!r:.60}")
    question = next((row[key] for key in QUESTIONS if key in row), None)
    gold = next((row[key] for key in ANSWERS if key in row), None)
    if not isinstance(question, str) or not isinstance(gold, str | int | float):
        raise DataError(f"{where}: expected a question and an answer, got the fields {', '.join(row)}")
    return question, str(gold).rpartition("####")[2].strip()
