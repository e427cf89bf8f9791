"""How other people's PRMs read a problem and its steps: token ids, and the places that are read, as in their code.

Marks are put in as ids, or found by their place in the text; they are never searched for among the ids, so a mark that
a step itself holds is only text. Control tokens in a step are text, too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from prm.checkpoint import first_line
from prm.errors import DataError, ModelError
from prm.render import encode

TAG = "ки"
SEPARATOR = "<extra_0>"

Pieces = tuple[list[int], list[int]]


class Reading:
    """From task and step texts to token ids and the places that are read: one method a kind."""

    def __init__(self, kind: str, tokenizer: Any, prompt: str) -> None:
        self.tokenizer, self.prompt = tokenizer, prompt
        if kind == "qwen-math":
            self.separator = single(self.tokenizer, SEPARATOR)
        if kind == "math-shepherd":
            self.tag = _tag(self.tokenizer)
        if kind in ("qwen-math", "rlhflow", "yes-no"):
            self.chat = _Chat(self.tokenizer) if getattr(self.tokenizer, "chat_template", None) else None
            if self.chat is None and kind != "yes-no":
                raise ModelError(f"the tokenizer has no chat template, which {kind} needs")
        if kind == "rlhflow":
            self.plus = single(self.tokenizer, "+")

    def trl(self, task: str, steps: list[str]) -> list[Pieces]:
        bos = self.tokenizer.bos_token_id
        ids = ([] if bos is None else [bos]) + encode(self.tokenizer, task)
        newline, ends = encode(self.tokenizer, "\n"), []
        for step in steps:
            ids += encode(self.tokenizer, step) + newline
            ends.append(len(ids) - 1)
        return [(ids, ends)]

    def skywork(self, task: str, steps: list[str]) -> list[Pieces]:
        newline = self.tokenizer("\n", add_special_tokens=False).input_ids[-1]
        bos = self.tokenizer.bos_token_id
        ids = ([] if bos is None else [bos]) + encode(self.tokenizer, task + "\n")
        ends = []
        for step in steps:
            for line in step.split("\n"):
                ids += [*encode(self.tokenizer, line), newline]
            ends.append(len(ids) - 1)
        return [(ids, ends)]

    def qwen_math(self, task: str, steps: list[str]) -> list[Pieces]:
        assert self.chat is not None
        head, between, _ = self.chat.around([("system", self.prompt), ("user", None), ("assistant", None)])
        runs: list[str | int] = [*head, self.chat.content(task), *between]
        for i, step in enumerate(steps):
            # The template trims the turn, that is the first step's beginning; its end is a mark.
            runs += [step.lstrip() if i == 0 and self.chat.trims else step, self.separator]
        ids, at = _join(self.tokenizer, runs)
        return [(ids, [at[i] for i, run in enumerate(runs) if run == self.separator])]

    def rlhflow(self, task: str, steps: list[str]) -> list[Pieces]:
        assert self.chat is not None
        turns: list[tuple[str, str | None]] = [turn for _ in steps for turn in (("user", None), ("assistant", "+"))]
        if not steps:
            return []
        fragments = self.chat.around(turns)
        runs: list[str | int] = [*fragments[0]]
        answers = []
        for i, (step, fragment) in enumerate(zip(steps, fragments[1:], strict=True)):
            runs.append(self.chat.content(f"{task} {step}" if i == 0 else step))
            found = [k for k, run in enumerate(fragment) if isinstance(run, str) and run.endswith("+")]
            if len(found) != 1:
                raise ModelError("the chat template does not end the answer + with a control token")
            answers.append(len(runs) + found[0])
            runs += fragment
        ids, at = _join(self.tokenizer, runs)
        if any(ids[at[i]] != self.plus for i in answers):
            raise ModelError("the answer + merges with what the chat template puts before it")
        return [(ids, [at[i] - 1 for i in answers])]

    def math_shepherd(self, task: str, steps: list[str]) -> list[Pieces]:
        text, stops = f"{task} ", []
        for i, step in enumerate(steps):
            text += ("\n" if i else "") + f"{step} {TAG}"
            stops.append(len(text))
        text = text.encode("utf-8", "replace").decode("utf-8")
        read = self.tokenizer(text, return_offsets_mapping=True, split_special_tokens=True)
        ids, offsets = read.input_ids, [stop for _, stop in read.offset_mapping]
        ends = []
        for k, stop in enumerate(stops):
            # A leading BOS has the offset 0, as has nothing else that ends before a tag.
            at = bisect_left(offsets, stop)
            if at == len(ids) or offsets[at] != stop or ids[at] != self.tag:
                raise DataError(
                    f"the tag {TAG} after step {k} is no token of its own: it merges with {steps[k][-20:]!r}"
                )
            ends.append(at)
        return [(ids, ends)]

    def yes_no(self, task: str, steps: list[str]) -> list[Pieces]:
        if self.chat is not None:
            head, tail = self.chat.around([("user", None), ("assistant", None)])[:2]
        else:
            bos = self.tokenizer("", add_special_tokens=True).input_ids
            head, tail = [i for i in bos if i == self.tokenizer.bos_token_id], ["\nAnswer:"]
        out, text = [], task
        for k, step in enumerate(steps):
            text += f"\n\nStep {k + 1}: {step}"
            ids, _ = _join(self.tokenizer, [*head, f"{text}\n\n{self.prompt}", *tail])
            out.append((ids, [len(ids) - 1]))
        return out


class _Chat:
    """A tokenizer's chat template, taken apart: the runs of text and control tokens around the contents of turns."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        mark = "zq0mark0qz"
        shown = self._show([{"role": "user", "content": f" {mark} "}])
        self.trims = f" {mark} " not in shown

    def content(self, text: str) -> str:
        """A turn's content as the template leaves it."""
        return text.strip() if self.trims else text

    def around(self, turns: Sequence[tuple[str, str | None]]) -> list[list[str | int]]:
        """The fragments before, between and after the turns without a content, which are for the caller to fill in."""
        marks = [f"zq{i}mark{i}qz" for i, (_, content) in enumerate(turns) if content is None]
        names = iter(marks)
        messages = [{"role": r, "content": next(names) if c is None else c} for r, c in turns]
        rest = self._show(messages)
        out = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ModelError("the chat template drops or repeats the content of a turn")
            out.append(self._runs(before))
        return [*out, self._runs(rest)]

    def _show(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:
            # Templates are programs: they raise whatever they like about roles they do not know.
            raise ModelError(f"the chat template cannot render the turns: {first_line(error)}") from error

    def _runs(self, fragment: str) -> list[str | int]:
        """A fragment of the template as runs of text and the ids of its control tokens."""
        out: list[str | int] = []
        at = 0
        for found in self.special.finditer(fragment):
            out += [fragment[at : found.start()], self.tokenizer.convert_tokens_to_ids(found.group())]
            at = found.end()
        out.append(fragment[at:])
        return [run for run in out if run != ""]


def _join(tokenizer: Any, runs: Sequence[str | int]) -> tuple[list[int], list[int]]:
    """The ids of runs, and for each run the place of its last id; texts side by side are encoded in one piece."""
    ids: list[int] = []
    at: list[int] = []
    text = ""
    for i, run in enumerate(runs):
        if isinstance(run, str):
            text += run
            if i + 1 == len(runs) or not isinstance(runs[i + 1], str):
                ids += encode(tokenizer, text)
                text = ""
        else:
            ids.append(run)
        at.append(len(ids) - 1)
    return ids, at


def single(tokenizer: Any, token: str) -> int:
    """The id of a mark that must be one token (and the blank that SentencePiece puts before it)."""
    ids = tokenizer(token, add_special_tokens=False).input_ids
    if len(ids) != 1 and not (len(ids) == 2 and not tokenizer.decode(ids[:1]).strip()):
        raise ModelError(f"the mark {token!r} encodes to {len(ids)} tokens, expected one")
    return ids[-1]


def _tag(tokenizer: Any) -> int:
    """The id of Math-Shepherd's tag, which must be one token after a blank, and the same as alone."""
    if not tokenizer.is_fast:
        raise ModelError("the tokenizer gives no offsets, so the tags cannot be told from the text")
    tag = tokenizer(TAG, add_special_tokens=False).input_ids[-1]
    read = tokenizer(f"a {TAG}", add_special_tokens=False, return_offsets_mapping=True)
    start, stop = read.offset_mapping[-1]
    if read.input_ids[-1] != tag or start > 2 or stop != 4:
        raise ModelError(f"the mark {TAG!r} encodes to several tokens, expected one")
    return tag
