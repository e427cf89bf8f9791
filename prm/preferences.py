"""Preference pairs as trajectories: two answers to one prompt, of which one is the better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prm.chat import Note, Row, short, text_of, without
from prm.errors import DataError
from prm.records import Step, StepLabel, Trajectory, content_id


def is_preference(row: Row) -> bool:
    return all(key in row for key in ("prompt", "chosen", "rejected"))


def read_preference(row: Row, note: Note, split: str | None) -> Iterator[tuple[Trajectory, list[StepLabel]]]:
    """RewardBench (Lambert et al. 2024): `prompt`, `chosen`, `rejected`; an answer is a text, or a list of several.

    A trajectory each, without labels: which answer is better says nothing of a step. `meta["pair"]` is the same for all
    answers of a row, `meta["role"]` says which it is. An answer is one step; with `split`, as reasoning text.
    """
    from prm.formats import split_text

    prompt = text_of(row, "prompt")
    answers = [(role, text) for role in ("chosen", "rejected") for text in _texts(row, role)]
    if {text for role, text in answers if role == "chosen"} & {text for role, text in answers if role == "rejected"}:
        note("a pair whose two answers are the same")
        return
    pair = content_id(prompt, [Step(text, role) for role, text in answers])
    meta = without(row, "prompt", "chosen", "rejected")
    for role, text in answers:
        steps = split_text(text, split) if split else [text] if text.strip() else []
        yield Trajectory(prompt, tuple(map(Step, steps)), None, {**meta, "pair": pair, "role": role}), []


def _texts(row: Row, key: str) -> list[str]:
    value: Any = row[key]
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{key} must be a text or a list of texts, got {short(value)}")
    return texts
