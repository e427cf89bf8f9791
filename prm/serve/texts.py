"""Texts and chats of other people's protocols as trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prm.chat import chat_trajectory
from prm.errors import DataError
from prm.formats import split_text
from prm.records import Step, Trajectory


def text_trajectories(
    query: Sequence[str] | str, prompts: Sequence[str] | str | None, tokenizer: Any, split: str
) -> list[Trajectory]:
    """OpenRLHF's queries as trajectories: the prompt is the task, the steps are the rest of the query.

    Control tokens of the model's own tokenizer at the end of a query are the end of the text and are left out.

    Raises:
        DataError: not one prompt a query, or a query that does not begin with its prompt.
    """
    queries = [query] if isinstance(query, str) else list(query)
    asked = [prompts] if isinstance(prompts, str) else list(prompts or [])
    if asked and len(asked) != len(queries):
        raise DataError(f"{len(queries)} queries, but {len(asked)} prompts")
    ends = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)
    out = []
    for i, text in enumerate(queries):
        prompt = asked[i] if asked else ""
        if not text.startswith(prompt):
            raise DataError(f"query {i} does not begin with its prompt")
        rest, cut = text[len(prompt) :], True
        while cut:
            cut = False
            for end in ends:
                if rest.endswith(end):
                    rest, cut = rest[: -len(end)], True
        out.append(Trajectory(prompt, tuple(map(Step, split_text(rest, split)))))
    return out


def chat_of(messages: Sequence[Mapping[str, Any]]) -> Trajectory:
    """A chat as a trajectory: a step is an assistant's turn."""
    found = chat_trajectory(list(messages), {}, kind="chat", note=lambda *_: None)
    if found is None:
        raise DataError("the messages hold no assistant turn, so there is nothing to score")
    return found
