"""From a judge's reply to verdicts, or to the reason why there are none. Nothing is padded, cut, shifted or guessed.

A reply is parsed as it is first; then JSON objects are looked for in it, leniently (fences, prose, single quotes,
trailing commas, Python's constants). What is not closed is not completed, and where verdicts begin that cannot be read,
none are taken: what can be read elsewhere may be a draft, or a quotation inside of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 400_000  # characters of a reply that are looked at
_BEGINS = re.compile(r"""["']steps["']\s*:\s*[\[{]\s*[{"'\d]""", re.I)
TRIES = 300  # places in a reply where an object may seem to begin


class ReplyError(ValueError):
    """A reply without usable verdicts; `status` is "unparsable", "wrong steps" or "refused"."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class Verdict:
    """What a reply says of a step: score in [0, 1], what is wrong (or None), why."""

    step: int
    score: float
    error: str | None = None
    reason: str = ""


_REFUSAL = re.compile(
    r"\W*((i('|’| a)?m )?((very |so )?sorry|not able|unable)|i (can(not|('|’)t)|won('|’)t)|as an ai)\b", re.I
)


def parse_reply(
    text: str,
    steps: Sequence[int],
    *,
    quotes: str = "",
    logprobs: Sequence[Mapping[str, Any]] | None = None,
    verdicts: bool = False,
) -> list[Verdict]:
    """The verdicts of a reply, one for each of `steps`, in their order.

    Args:
        text: the reply. Where several objects fit, the last counts; one that is quoted from `quotes` does not. What
            comes before `</think>` is passed over.
        steps: the numbers that were asked for. Those of the reply must be the same, each once, in any order.
        quotes: the text that was judged.
        logprobs: with `verdicts`, the reply's tokens as an endpoint gives them: {"token", "logprob", "top_logprobs"}.
        verdicts: the reply says "good" or "bad"; the score is P(good) / (P(good) + P(bad)) at that token.

    Raises:
        ReplyError: there is no such object, a score is none, or the steps are others.
    """
    answer = text.rpartition("</think>")[2]
    found = _candidates(answer, quotes)
    if not found:
        shown = repr(answer.strip()[:80])
        raise ReplyError("refused" if _REFUSAL.match(answer) else "unparsable", f"no JSON object with steps in {shown}")
    rows, (start, stop) = found[-1]
    by_step: dict[int, Verdict] = {}
    for number, row in rows:
        step = _step_number(number)
        if step in by_step:
            raise ReplyError("wrong steps", f"step {step} is judged twice")
        entry = row if isinstance(row, dict) else {"score": row}
        known = {_fold(key): value for key, value in entry.items()}
        if len(known) != len(entry):
            raise ReplyError("unparsable", f"step {step}: a field twice")
        score = math.nan if verdicts else _score(step, known.get("score"))
        error, reason = known.get("error"), known.get("reason")
        by_step[step] = Verdict(
            step, score, error if isinstance(error, str) and error else None, reason if isinstance(reason, str) else ""
        )
    if sorted(by_step) != sorted(steps):
        raise ReplyError("wrong steps", f"asked for steps {_listed(steps)}, got {_listed(sorted(by_step))}")
    if verdicts:
        at = len(text) - len(answer)
        scores = _from_logprobs(text, at + start, at + stop, logprobs or ())
        if list(scores) != list(by_step):
            raise ReplyError("unparsable", "the verdicts and their log-probabilities do not go together")
        by_step = {step: Verdict(step, scores[step], v.error, v.reason) for step, v in by_step.items()}
    return [by_step[step] for step in steps]


def _candidates(text: str, quotes: str) -> list[tuple[list[tuple[Any, Any]], tuple[int, int]]]:
    """((step, entry) pairs, span) of each object that has steps, in order; the whole text alone where it is one."""
    if len(text) > LONGEST:
        raise ReplyError("unparsable", f"the reply has {len(text)} characters")
    try:
        whole = json.loads(text, strict=False, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        pass
    else:
        rows = _rows(whole)
        return [] if rows is None else [(rows, (0, len(text)))]
    found = []
    for value, start, stop in _objects(text):
        rows = _rows(value)
        if rows is not None:
            found.append((rows, (start, stop)))
    for match in _BEGINS.finditer(text):
        if not any(start <= match.end() - 1 < stop for _, (start, stop) in found):
            raise ReplyError("unparsable", f"verdicts that are not closed or cannot be read at {match.start()}")
    return [(rows, (start, stop)) for rows, (start, stop) in found if not (quotes and text[start:stop] in quotes)]


def _rows(value: Any, deeper: bool = True) -> list[tuple[Any, Any]] | None:
    """(step, entry) pairs of {"steps": [{"step": ...}]}, of that list alone, or of {"steps": {"0": ...}}."""
    if isinstance(value, list):
        fits = value and all(isinstance(row, dict) and "step" in map(_fold, row) for row in value)
        return [(next(v for k, v in row.items() if _fold(k) == "step"), row) for row in value] if fits else None
    if not isinstance(value, dict):
        return None
    named = [v for k, v in value.items() if _fold(k) == "steps"]
    if len(named) == 1:
        return list(named[0].items()) if isinstance(named[0], dict) and named[0] else _rows(named[0], False)
    inner = [rows for v in value.values() if isinstance(v, dict) and (rows := _rows(v, False)) is not None]
    return inner[0] if deeper and len(inner) == 1 else None


def _fold(key: Any) -> str:
    return str(key).casefold()


def _step_number(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise ReplyError("wrong steps", f"{value!r:.40} is no step number")
    return int(value)


def _score(step: int, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ReplyError("unparsable", f"step {step}: the score must be a number in [0, 1], got {value!r:.40}")
    return float(value)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:20])) + (", ..." if len(steps) > 20 else "") if steps else "none"


# --- log-probabilities ------------------------------------------------------------------------------------------------

_WORD = re.compile(r"""["']step["']\s*:\s*["']?(\d{1,9})["']?\s*,\s*["']verdict["']\s*:\s*["'](good|bad)["']""", re.I)


def _from_logprobs(text: str, start: int, stop: int, tokens: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """step -> P(good) / (P(good) + P(bad)) at the token with which the verdict's word begins."""
    try:
        pieces = [str(token["token"]) for token in tokens]
        if "".join(pieces) != text:
            raise ReplyError("unparsable", "the log-probabilities are of another text")
        begins, at = {}, 0
        for i, piece in enumerate(pieces):
            for place in range(at, at + len(piece)):
                begins[place] = i, at
            at += len(piece)
        scores: dict[int, float] = {}
        for match in _WORD.finditer(text, start, stop):
            i, offset = begins[match.start(2)]
            before = pieces[i][: match.start(2) - offset]  # a token may begin with the quote
            weight = {"good": 0.0, "bad": 0.0}
            alternatives = {str(a["token"]): float(a["logprob"]) for a in tokens[i]["top_logprobs"]}
            alternatives.setdefault(pieces[i], float(tokens[i]["logprob"]))
            if not all(logprob <= 1e-3 for logprob in alternatives.values()):
                raise ReplyError("unparsable", "log-probabilities above 0, or NaN")
            for piece, logprob in alternatives.items():
                rest = piece.removeprefix(before).casefold()
                rest = re.split(r"""["'\s,}]""", rest)[0] if piece.startswith(before) else ""
                for word in weight:
                    if rest and word.startswith(rest):
                        weight[word] += math.exp(min(0.0, logprob))
            total = sum(weight.values())
            step = int(match[1])
            if step in scores or not total > 0:
                raise ReplyError("unparsable", f"step {step}: no probability of its verdict")
            scores[step] = weight["good"] / total
        return scores
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ReplyError):
            raise
        raise ReplyError("unparsable", f"log-probabilities that cannot be read: {error}") from None


# --- lenient JSON -----------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*", re.S)
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_STRING = {q: re.compile(rf"{q}((?:[^{q}\\]|\\.)*){q}", re.S) for q in "\"'"}
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CONSTANT = re.compile("|".join(_CONSTANTS) + r"\b")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.S)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
DEEPEST = 12


def _objects(text: str) -> Iterator[tuple[Any, int, int]]:
    """(value, start, stop) of the objects and lists in a text, outermost ones, from left to right."""
    at = tries = 0
    while tries < TRIES and (match := re.compile(r"[{\[]").search(text, at)):
        tries += 1
        try:
            value, stop = _value(text, match.start(), 0)
        except ValueError:
            at = match.start() + 1
        else:
            yield value, match.start(), stop
            at = stop


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at a place and where it ends. Raises ValueError; NaN and infinities are no values."""
    at = _skip(text, at)
    char = text[at : at + 1]
    if char in ("{", "["):
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
        return (_dict if char == "{" else _list)(text, at + 1, depth + 1)
    if char in _STRING and char:
        return _string(text, at)
    if match := _CONSTANT.match(text, at):
        return _CONSTANTS[match[0]], match.end()
    if match := _NUMBER.match(text, at):
        plain = re.fullmatch(r"-?\d{1,15}", match[0])
        return (int(match[0]) if plain else float(match[0])), match.end()
    raise ValueError(f"no value at {at}")


def _string(text: str, at: int) -> tuple[str, int]:
    if not (match := _STRING[text[at]].match(text, at)):
        raise ValueError("a string without an end")
    return _ESCAPE.sub(
        lambda m: chr(int(m[1][1:], 16)) if m[1][0] == "u" and len(m[1]) == 5 else _ESCAPED.get(m[1], m[1]), match[1]
    ), match.end()


def _dict(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return found, at + 1
        if text[at : at + 1] not in ("'", '"'):
            raise ValueError("a key without quotes")
        key, at = _string(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":" or key in found:
            raise ValueError("no colon, or a key twice")
        found[key], at = _value(text, at + 1, depth)
        at = _next(text, at, "}")


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            return found, at + 1
        value, at = _value(text, at, depth)
        found.append(value)
        at = _next(text, at, "]")


def _next(text: str, at: int, end: str) -> int:
    """Past a comma; or at the end of the list or object."""
    at = _skip(text, at)
    if text[at : at + 1] == ",":
        return at + 1
    if text[at : at + 1] == end:
        return at
    raise ValueError("no comma and no end")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return found
