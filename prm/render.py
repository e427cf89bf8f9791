"""The one place where a trajectory becomes token ids, for training, scoring, serving, warm start and PPO alike.

Pieces (task, action, observation) are encoded one by one and joined as ids, so where a step ends is known by
construction and never searched for in text. Pieces come from models, tools and data sets: in them the text of a control
token is just text. Only the layout's own fragments may hold control tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prm.env import Action, History
from prm.errors import DataError, ModelError
from prm.records import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Layout:
    """The ids that stand around the pieces.

        head TASK begin_action ACTION end_turn begin_observation OBSERVATION after_observation ACTION end_turn ...

    A step without an observation is followed by `no_observation` instead of the three. `end_turn` is what the policy
    itself writes to end its action (none in a PRM's plain layout).
    """

    kind: str
    head: tuple[int, ...]
    begin_action: tuple[int, ...]
    end_turn: tuple[int, ...]
    begin_observation: tuple[int, ...]
    after_observation: tuple[int, ...]
    no_observation: tuple[int, ...]


@dataclass(frozen=True)
class Rendered:
    """Token ids of a trajectory, or of its newest steps.

    Args:
        ids: the token ids.
        ends: for each kept step, the index in `ids` of its read-out token: the last token of its action (of what stands
            before it where the action is empty; the step token where there is one). Strictly increasing.
        spans: for each kept step, [start, stop) of the tokens that the policy wrote; its end of turn is among them,
            unless the sampled ids show that it did not write one.
        first: how many of the oldest steps were left out; `ends[i]` belongs to step `first + i`.
    """

    ids: list[int]
    ends: list[int]
    spans: list[tuple[int, int]]
    first: int = 0


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a piece of outside text: no control token comes of it, and none is added."""
    # Lone surrogates cannot be encoded as UTF-8; tokenizers would raise.
    text = text.encode("utf-8", "replace").decode("utf-8")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    control = _control_ids(tokenizer, len(tokenizer))
    if control.keys().isdisjoint(ids):
        return ids
    # A unigram model holds its control tokens among its pieces and finds them in any text: spell them out.
    out = []
    for i in ids:
        pieces = [[i]] if i not in control else tokenizer(list(control[i]), add_special_tokens=False).input_ids
        out += [j for piece in pieces for j in piece if j not in control]
    return out


@functools.lru_cache(maxsize=16)
def _control_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, str]:
    """The control tokens of a tokenizer of this size, by id; an unknown token's is none."""
    tokens = tokenizer.added_tokens_decoder.items()
    return {i: t.content for i, t in tokens if t.special and i != tokenizer.unk_token_id}


def plain_layout(tokenizer: PreTrainedTokenizerBase, *, end_turn: bool = False) -> Layout:
    """A layout for any tokenizer: plain words around the pieces.

    Args:
        tokenizer: its BOS, where it has one that it adds itself, comes first.
        end_turn: the action ends with the tokenizer's EOS, written by the policy (a policy needs it, a PRM does not).
    """

    def ids(text: str) -> tuple[int, ...]:
        return tuple(encode(tokenizer, text))

    bos = tokenizer("", add_special_tokens=True).input_ids
    if end_turn and tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no EOS token, so a policy could not end its action")
    return Layout(
        kind="plain",
        head=(*(i for i in bos if i == tokenizer.bos_token_id), *ids("Task: ")),
        begin_action=ids("\n\nStep: "),
        end_turn=(tokenizer.eos_token_id,) if end_turn else (),
        begin_observation=ids("\n\nResult: "),
        after_observation=ids("\n\nStep: "),
        no_observation=ids("\n\nStep: "),
    )


def chat_layout(
    tokenizer: PreTrainedTokenizerBase, *, system: str | None = None, tools: Sequence[dict[str, Any]] = ()
) -> Layout:
    """The layout of a tokenizer's own chat template: the task is a user turn, actions are assistant turns, observations
    tool turns (user turns where there are no tools).

    The template is rendered once around markers, and its fragments between them are taken; contents are then put in as
    ids. So nothing that a template does to contents (trimming, dropping earlier reasoning) can happen.

    Raises:
        ModelError: there is no template, or it does not build a conversation by appending (it rewrites earlier turns,
            or opens a later turn in another way than the first), so that what is trained would not be what was sampled.
        DataError: a tool definition would put a control token into the head.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("the tokenizer has no chat template; use the plain layout")
    spelt = json.dumps(list(tools), ensure_ascii=False)
    if held := sorted(text for text in _control_ids(tokenizer, len(tokenizer)).values() if text in spelt):
        # The template writes tools into the head as text, where such a one would become the token itself.
        raise DataError(f"a tool definition holds the text of the control token {held[0]!r}")
    marks = [f"zq{i}mark{i}qz" for i in range(5)]
    role = "tool" if tools else "user"
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant", role, "assistant", role)
    messages += [{"role": r, "content": mark} for r, mark in zip(roles, marks, strict=True)]
    kwargs: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    except Exception as error:
        raise ModelError(f"the chat template cannot render {' '.join(roles)} turns: {error}") from error
    parts: list[str] = []
    rest = str(text)
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise ModelError(f"the chat template drops or repeats the content of a {roles[len(parts)]} turn")
        parts.append(before)
    head, begin, after_first, again, after_second = parts
    if after_first != after_second or again != rest:
        raise ModelError(
            "the chat template does not build a conversation by appending turns "
            f"({again!r} opens a later turn, {rest!r} a new one); use the plain layout"
        )
    after_ids = _control(tokenizer, after_first)
    if not after_ids or after_ids[0] not in tokenizer.all_special_ids:
        raise ModelError(f"the chat template does not end a turn with a special token (got {after_first!r})")
    return Layout(
        kind="chat",
        head=_control(tokenizer, head),
        begin_action=_control(tokenizer, begin),
        end_turn=after_ids[:1],
        begin_observation=after_ids[1:],
        after_observation=_control(tokenizer, rest),
        no_observation=after_ids + _control(tokenizer, rest),
    )


def text_layout(tokenizer: PreTrainedTokenizerBase) -> Layout:
    """No words around the pieces: the task is a prompt, the steps continue it, byte for byte (reasoning text)."""
    bos = [i for i in tokenizer("", add_special_tokens=True).input_ids if i == tokenizer.bos_token_id]
    return Layout("text", tuple(bos), (), (), (), (), ())


def render(
    trajectory: Trajectory | History,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    *,
    max_tokens: int | None = None,
    step_token: int | None = None,
) -> Rendered:
    """Render a trajectory whole, or its task and as many of its newest steps as fit.

    Args:
        trajectory: a record, or a running episode, whose actions' sampled ids are then taken as they are.
        max_tokens: the most ids; the oldest steps are left out first, never the newest.
        step_token: an id put after each action (before the end of turn) and read there, for models trained so.

    Raises:
        DataError: the task and the newest step alone do not fit.
    """
    parts = _parts(trajectory, tokenizer, layout, step_token)
    return _join(parts, _oldest(parts, len(parts.steps), max_tokens), len(parts.steps))


def windows(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    *,
    max_tokens: int | None = None,
    step_token: int | None = None,
    skip_long: bool = False,
) -> list[Rendered]:
    """Render a trajectory in as few parts as needed, so that each step is read exactly once.

    The first part starts at step 0. A later one begins with the newest earlier steps that fill at most half of
    `max_tokens`; those are context, and their `ends` and `spans` are left out, so `first + i` still numbers `ends[i]`.

    Raises:
        DataError: a step does not fit together with the task; names the step and the limit. With `skip_long` it is
            left out instead, and no part holds it. Or it is empty, in the text layout, so there is nothing to read.
    """
    parts = _parts(trajectory, tokenizer, layout, step_token)
    if layout.kind == "text" and (empty := [i for i, s in enumerate(parts.steps) if not s.action + s.mark]):
        raise DataError(f"{parts.where}: step {empty[0]} is empty; the text layout has nothing to read there")
    total = len(parts.steps)
    done, out = 0, []
    while done < total:
        start = done
        while start > 0 and max_tokens and parts.size(start - 1, done) <= max_tokens // 2:
            start -= 1
        while start < done and max_tokens and parts.size(start, done + 1) > max_tokens:
            start += 1
        if max_tokens and parts.size(start, done + 1) > max_tokens:
            if not skip_long:
                raise DataError(_too_long(parts, done, max_tokens))
            done += 1
            continue
        stop = done + 1
        while stop < total and (not max_tokens or parts.size(start, stop + 1) <= max_tokens):
            stop += 1
        part = _join(parts, start, stop)
        out.append(Rendered(part.ids, part.ends[done - start :], part.spans[done - start :], done))
        done = stop
    return out


def prompt(
    history: History, tokenizer: PreTrainedTokenizerBase, layout: Layout, *, max_tokens: int | None = None
) -> list[int]:
    """The ids that stand before the policy's next action: those sampled so far as sampled, the rest rendered.

    Raises:
        DataError: they are more than `max_tokens` (a policy's past is not cut behind its back), or there is none.
    """
    if layout.kind == "text":
        # Text that was not sampled here is encoded in one piece, as the model would have written it in one go.
        given = next((i for i, a in enumerate(history.actions) if a.token_ids is not None), len(history.actions))
        said = zip(history.actions[:given], history.observations[:given], strict=True)
        text = history.task + "".join(action.text + observation for action, observation in said)
        history = History(text, history.actions[given:], history.observations[given:])
    parts = _parts(history, tokenizer, layout, None)
    ids = _join(parts, 0, len(parts.steps)).ids
    ids += parts.steps[-1].after if parts.steps else []
    if not ids:
        raise DataError("an empty prompt: the task is empty, and the tokenizer has no token that begins a text")
    if max_tokens is not None and len(ids) > max_tokens:
        steps = len(history.actions)
        raise DataError(f"an episode of {steps} steps takes {len(ids)} tokens, the policy's limit is {max_tokens}")
    return ids


@dataclass(frozen=True)
class _StepIds:
    action: list[int]
    mark: list[int]
    end_turn: list[int]
    after: list[int]
    ended: bool


@dataclass(frozen=True)
class _Parts:
    where: str
    head: list[int]
    steps: list[_StepIds]

    def size(self, start: int, stop: int) -> int:
        """The number of ids of the steps [start, stop) with the task; in constant time."""
        own, after = self._sums
        return len(self.head) + own[stop] - own[start] + after[max(start, stop - 1)] - after[start]

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        own = accumulate((len(s.action) + len(s.mark) + len(s.end_turn) for s in self.steps), initial=0)
        return list(own), list(accumulate((len(s.after) for s in self.steps), initial=0))


def _parts(
    trajectory: Trajectory | History, tokenizer: PreTrainedTokenizerBase, layout: Layout, step_token: int | None
) -> _Parts:
    head = [*layout.head, *encode(tokenizer, trajectory.task), *layout.begin_action]
    steps = []
    actions = trajectory.actions if isinstance(trajectory, History) else [Action(s.action) for s in trajectory.steps]
    for action, step in zip(actions, trajectory.steps, strict=True):
        ids = list(encode(tokenizer, action.text) if action.token_ids is None else action.token_ids)
        # Sampled ids hold the end of turn when the policy wrote one; then it is not added again.
        end_turn = list(layout.end_turn)
        ended = action.token_ids is None or (bool(end_turn) and ids[-len(end_turn) :] == end_turn)
        if ended and action.token_ids is not None:
            ids = ids[: -len(end_turn)]
        # A policy's turn that ended is answered, be it with an empty text; without turns, the text just goes on.
        if step.observation or (isinstance(trajectory, History) and layout.end_turn):
            after = [*layout.begin_observation, *encode(tokenizer, step.observation), *layout.after_observation]
        else:
            after = list(layout.no_observation[len(layout.end_turn) :])
        steps.append(_StepIds(ids, [] if step_token is None else [step_token], end_turn, after, ended))
    where = f"trajectory {trajectory.id}" if isinstance(trajectory, Trajectory) else "episode"
    return _Parts(where, head, steps)


def _join(parts: _Parts, start: int, stop: int) -> Rendered:
    ids = list(parts.head)
    ends, spans = [], []
    for i, step in enumerate(parts.steps[start:stop], start):
        begin = len(ids)
        ids += step.action + step.mark
        ends.append(len(ids) - 1)
        wrote = len(ids) + (len(step.end_turn) if step.ended else 0)
        ids += step.end_turn
        spans.append((begin, wrote))
        if i < stop - 1:
            ids += step.after
    return Rendered(ids, ends, spans, start)


def _oldest(parts: _Parts, stop: int, max_tokens: int | None) -> int:
    """The oldest step that can be kept when the steps up to `stop` are rendered."""
    if max_tokens is None:
        return 0
    for start in range(max(stop, 1)):
        if parts.size(start, stop) <= max_tokens:
            return start
    raise DataError(_too_long(parts, stop - 1, max_tokens))


def _too_long(parts: _Parts, step: int, max_tokens: int) -> str:
    size = parts.size(step, step + 1) if step >= 0 else len(parts.head)
    what = f"step {step} with the task" if step >= 0 else "the task"
    return f"{parts.where}: {what} takes {size} tokens, the limit is {max_tokens}"


def _control(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of a layout's own fragment, in which control tokens count as such."""
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=False).input_ids)


def tools_key(tools: Sequence[Any]) -> str:
    """A key that equal tool lists share."""
    return json.dumps(list(tools), sort_keys=True)
