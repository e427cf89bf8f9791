"""Chat messages and trajectories, both ways; and the few helpers that every reader of rows needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prm.errors import DataError
from prm.records import Step, Trajectory

Row = Mapping[str, Any]
Note = Callable[[str], None]

MESSAGE_KEYS = ("messages", "conversations", "conversation")


def message_style(row: Row) -> str:
    """ "chat", "rlhflow" (every assistant turn is + or -), "agentgym" (from/value), or "" for no list of messages."""
    messages = next((row[key] for key in MESSAGE_KEYS if isinstance(row.get(key), list)), None)
    if not messages or not isinstance(messages[0], Mapping):
        return ""
    if "from" in messages[0] and "value" in messages[0]:
        return "agentgym"
    said = [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "assistant"]
    if said and all(isinstance(c, str) and c.strip() in ("+", "-") for c in said):
        return "rlhflow"
    return "chat" if "role" in messages[0] else ""


def messages_of(row: Row, keys: Sequence[str] = MESSAGE_KEYS) -> tuple[str, list[Any]]:
    """The key and the list of messages of a row. Raises DataError where there is none."""
    for key in keys:
        if isinstance(row.get(key), list):
            return key, row[key]
    raise DataError(f"no list of messages, expected a key {' or '.join(keys)}")


def chat_trajectory(
    messages: Sequence[Any], meta: Row, *, kind: str, note: Note, outcome: float | None = None, head: int | None = None
) -> Trajectory | None:
    """One trajectory from chat messages: a step is an assistant turn, its observation what came before the next one.

    The task is the user messages before the first assistant turn, joined by blank lines (the system prompt, where there
    are none). An action is `<think>REASONING</think>` where the message has reasoning, then its content, then a block
    `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>` a call; arguments that are not valid JSON, or have a
    key twice, stand there as they came. An observation is the reply's text; several replies come in the order of their
    calls, each inside `<tool_response>` tags, and then what users said. What action and observation cannot hold (ids,
    names, images) stays in `meta["converted"]`, from where `to_messages` takes it.

    Args:
        messages: as in the OpenAI API; fields that are null are dropped (except `content`).
        meta: what to keep of the row.
        kind: kept as `meta["converted"]["kind"]`.
        note: counts what is left out: image parts, a last tool call without a reply.
        outcome: success in [0, 1].
        head: how many messages come before the policy's first turn; None: up to the first assistant turn.

    Returns:
        None where there is no assistant turn (noted).

    Raises:
        DataError: an unknown role, a tool reply that answers no call, a call without a reply (except a last turn that
            nothing followed), two replies to one call.
    """
    clean = [_clean_message(i, message) for i, message in enumerate(messages)]
    if head is None:
        head = next((i for i, m in enumerate(clean) if m["role"] == "assistant"), len(clean))
    for i, message in enumerate(clean[:head]):
        if message["role"] in ("tool", "function"):
            raise DataError(f"a tool reply before any assistant turn: message {i}")
    if head == len(clean):
        note("no assistant turn")
        return None
    task, kept_head = chat_head(clean[:head], note)
    turns: list[list[dict[str, Any]]] = []
    for message in clean[head:]:
        if message["role"] == "assistant":
            turns.append([message])
        else:
            turns[-1].append(message)
    steps, kept = [], []
    for k, turn in enumerate(turns):
        try:
            step = Step(_action(turn[0], note), _observation(turn, note, last=k == len(turns) - 1))
        except DataError as error:
            raise DataError(f"{error}; in step {k}") from None
        steps.append(step)
        kept.append([_mark(turn[0], step.action), *(_mark(m, step.observation) for m in turn[1:])])
    converted: dict[str, Any] = {"kind": kind, "head": kept_head, "turns": kept}
    if "converted" in meta:
        converted["converted"] = meta["converted"]
    return Trajectory(task, tuple(steps), outcome, {**meta, "converted": converted})


def to_messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The trajectory as OpenAI chat messages: an assistant turn an action, tool or user messages for observations.

    What `convert` read from a chat comes back as it was (null fields dropped): call ids, names, system prompt and all.
    Any other step, and any step whose text is no longer what the chat held, becomes an assistant message with the
    action as it stands, and a user message with the observation where that is not empty.
    """
    kept = trajectory.meta.get("converted")
    kept = kept if isinstance(kept, Mapping) else {}
    messages = _unmark(kept.get("head"), trajectory.task)
    if "head" not in kept or _or_none(_head_task, messages, _ignore) != trajectory.task:
        rules = [m for m in messages if m.get("role") in ("system", "developer")]
        messages = [*rules, {"role": "user", "content": trajectory.task}]
    turns = kept.get("turns")
    turns = turns if isinstance(turns, list) else []
    for k, step in enumerate(trajectory.steps):
        own = turns[k] if k < len(turns) and isinstance(turns[k], list) else []
        turn = [*_unmark(own[:1], step.action), *_unmark(own[1:], step.observation)]
        if _or_none(_turn_step, turn) != step:
            turn = [{"role": "assistant", "content": step.action}]
            if step.observation:
                turn.append({"role": "user", "content": step.observation})
        messages += turn
    return messages


def action_text(message: Row) -> str:
    """An assistant message as the text of an action: reasoning, content, and tool calls in the Hermes form."""
    return _action(message, _ignore)


def _clean_message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"a message must be an object: message {i} is {short(message)}")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool", "function"):
        raise DataError(f"unknown role: message {i} has {short(role)}")
    if isinstance(message.get("content"), bool):
        raise DataError(f"content must be text, null or a list of parts: message {i} has {message['content']}")
    return {str(k): v for k, v in message.items() if v is not None or k == "content"}


def chat_head(messages: Sequence[Any], note: Note) -> tuple[str, list[dict[str, Any]]]:
    """The task that the messages before the policy's first turn put, and those messages as `to_messages` wants them."""
    head = [_clean_message(i, message) for i, message in enumerate(messages)]
    task = _head_task(head, note)
    return task, [_mark(message, task) for message in head]


def _head_task(head: Sequence[Row], note: Note) -> str:
    asked = [m for m in head if m["role"] == "user"] or [m for m in head if m["role"] != "assistant"]
    return "\n\n".join(_text(m.get("content"), note) for m in asked)


def _text(content: Any, note: Note) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise DataError(f"content must be text, null or a list of parts, got {short(content)}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and part.get("type") == "refusal":
            text = part.get("refusal")
        if isinstance(text, str):
            texts.append(text)
        elif isinstance(part, Mapping):
            note(f"content part that is not text: {short(part.get('type'))}")
        else:
            raise DataError(f"a content part must be an object, got {short(part)}")
    return "".join(texts)


def _action(message: Row, note: Note) -> str:
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    text = f"<think>{reasoning}</think>" if isinstance(reasoning, str) and reasoning else ""
    content = message.get("content")
    text += _text(message.get("refusal") if content is None else content, note)
    for call in _calls(message):
        text += "\n" if text else ""
        text += f'<tool_call>\n{{"name": {_dump(call["name"])}, "arguments": {call["arguments"]}}}\n</tool_call>'
    return text


def _calls(message: Row) -> list[dict[str, Any]]:
    """The message's calls as {"id", "name", "arguments": the text to show}."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise DataError(f"tool_calls must be a list, got {short(calls)}")
    if isinstance(message.get("function_call"), Mapping):
        calls = [*calls, {"function": message["function_call"]}]
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"a tool call must be an object with a function and its name, got {short(call)}")
        if not isinstance(call.get("id"), str | int | None):
            raise DataError(f"a tool call's id must be text, got {short(call['id'])}")
        arguments = _arguments(function.get("arguments"))
        found.append({"id": call.get("id"), "name": function["name"], "arguments": arguments})
    return found


def _arguments(value: Any) -> str:
    if not isinstance(value, str):
        return _dump(value)
    try:
        return _dump(json.loads(value, object_pairs_hook=_unique))
    except (ValueError, RecursionError):
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice: parsing would lose one")
    return dict(pairs)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise DataError(f"arguments must be JSON, got {short(value)}") from None


def _observation(turn: Sequence[Row], note: Note, last: bool = False) -> str:
    calls = _calls(turn[0])
    replies = [m for m in turn[1:] if m["role"] in ("tool", "function")]
    others = [m for m in turn[1:] if m["role"] not in ("tool", "function")]
    if calls and last and len(turn) == 1:
        note("last tool call without a reply (its step is kept)")
        return ""
    parts = [_text(m.get("content"), note) for m in [*_in_call_order(calls, replies), *others]]
    if len(parts) > 1:
        parts[: len(replies)] = [f"<tool_response>\n{part}\n</tool_response>" for part in parts[: len(replies)]]
    return "\n".join(parts)


def _in_call_order(calls: list[dict[str, Any]], replies: list[Row]) -> list[Row]:
    ids = [call["id"] for call in calls]
    nameless = not any(ids) and not any(reply.get("tool_call_id") for reply in replies)
    if nameless or (len(calls) == len(replies) == 1 and not (ids[0] and replies[0].get("tool_call_id"))):
        if len(calls) != len(replies):
            raise DataError(f"tool calls and replies without ids must be as many, got {len(calls)} and {len(replies)}")
        for call, reply in zip(calls, replies, strict=True):
            if reply.get("name") not in (None, call["name"]):
                raise DataError(f"a tool reply to another tool: {short(reply['name'])} answers {short(call['name'])}")
        return replies
    if len(set(map(str, ids))) < len(ids):
        raise DataError(f"two calls of one turn with the same id: {short(ids)}")
    by_id: dict[Any, Row] = {}
    for reply in replies:
        to = reply.get("tool_call_id")
        if to not in ids:
            raise DataError(f"a tool reply to an unknown call: {short(to)}, the turn's calls are {short(ids)}")
        if to in by_id:
            raise DataError(f"two replies to one call: {short(to)}")
        by_id[to] = reply
    if missing := [i for i in ids if i not in by_id]:
        raise DataError(f"a tool call without a reply: {short(missing[0])}")
    return [by_id[i] for i in ids]


def _turn_step(turn: list[dict[str, Any]]) -> Step:
    if turn[0]["role"] != "assistant":
        raise DataError("a turn starts with the assistant")
    return Step(_action(turn[0], _ignore), _observation(turn, _ignore, last=True))


def _ignore(reason: str) -> None:
    pass


def _or_none(call: Callable[..., Any], *args: Any) -> Any:
    """The result, or None where stored messages do not have the shape they were written in."""
    try:
        return call(*args)
    except (DataError, LookupError, TypeError, AttributeError, ValueError):
        return None


def _mark(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Long text is stored once: content equal to the step's own text becomes `true`."""
    return {**message, "content": True} if message.get("content") == text != "" else message


def _unmark(messages: Any, text: str) -> list[dict[str, Any]]:
    messages = messages if isinstance(messages, list) else []
    copies = [copy.deepcopy(dict(m)) for m in messages if isinstance(m, Mapping)]
    return [{**m, "content": text} if m.get("content") is True else m for m in copies]


# --- rows -------------------------------------------------------------------------------------------------------------


def outcome_of(row: Row) -> float | None:
    """Success in [0, 1] from the row's `outcome`, `success` or `reward`, the first that holds such a number."""
    for key in ("outcome", "success", "reward"):
        value = row.get(key)
        if isinstance(value, int | float) and 0 <= value <= 1:
            return float(value)
    return None


def without(row: Row, *keys: str) -> dict[str, Any]:
    """The row as metadata, less what became text or labels."""
    return {key: value for key, value in row.items() if key not in keys}


def text_of(row: Row, key: str) -> str:
    """A text field of a row. Raises DataError where it is missing or no text."""
    if not isinstance(row.get(key), str):
        raise DataError(f"{key} must be text, got {short(row[key]) if key in row else 'nothing'}")
    return row[key]


def short(value: Any, limit: int = 60) -> str:
    """`repr`, cut to a length that fits an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
