"""Readers of published data sets, for `prm.formats.convert`.

Each reader takes one row and gives trajectories and labels; a label's source is "gold:NAME". Step indices are made
0-based here, whatever the data set counts from. The rest of the row stays in `Trajectory.meta`, with `category` for
what the data set is divided by.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prm.chat import (
    Note,
    Row,
    chat_trajectory,
    message_style,
    messages_of,
    outcome_of,
    short,
    text_of,
    without,
)
from prm.errors import DataError
from prm.formats import Reader, labels_of
from prm.records import Step, StepLabel, Trajectory

TAG = "ки"
RATINGS = {-1: 0.0, 0: 0.5, 1: 1.0}

Pairs = Iterator[tuple[Trajectory, list[StepLabel]]]


# --- PRM800K ----------------------------------------------------------------------------------------------------------


def read_prm800k(row: Row, note: Note) -> Pairs:
    """PRM800K (Lightman et al. 2023, "Let's Verify Step by Step"): what people rated, one row a problem and labeler.

    A step of a row offers completions, of which one was chosen, or else a person wrote one; the solution goes on from
    there. That main path is one trajectory. Every other rated completion is an alternative end: a trajectory of its own
    which shares the steps before it (`meta["path"]` says which; a label that repeats one of the main path has
    `meta["shared"]`). Ratings -1, 0, 1 are the scores 0, 0.5, 1; null is no label. What a person wrote counts as good
    where it has no rating. The path ends before a step with no choice, and at a chosen step that was rejected: no
    rejected step is followed by another.

    Noted: steps without any completion, completions without a rating, steps after the path's end.
    """
    question, label = row.get("question"), row.get("label")
    if not isinstance(question, Mapping) or not isinstance(label, Mapping) or not isinstance(label.get("steps"), list):
        raise DataError("expected a question and a label with a list of steps, as objects")
    task = text_of(question, "problem")
    meta = {**without(row, "question", "label"), **without(question, "problem"), **without(label, "steps")}
    path: list[_Rated] = []
    ends: list[list[_Rated]] = []
    going = True
    for k, step in enumerate(label["steps"]):
        options, follow = _options(k, step)
        if not options:
            note("step without a completion")
            going = False
        elif not going:
            note("step after the end of its path")
        else:
            taken = set()
            for i, option in enumerate(options):
                if i == follow and option.score != 0:
                    continue
                if option.score is None:
                    note("completion without a rating")
                elif (option.text, option.score) in taken:
                    note("completion that repeats another")
                else:
                    taken.add((option.text, option.score))
                    ends.append([*path, option])
            going = follow is not None and options[follow].score != 0
            if going and follow is not None:
                path.append(options[follow])
    if path:
        yield _rated_trajectory(task, path, {**meta, "path": "main"}, 0)
    for end in ends:
        yield _rated_trajectory(task, end, {**meta, "path": "alternative"}, len(end) - 1)


class _Rated:
    def __init__(self, k: int, completion: Any, default: float | None = None) -> None:
        if not isinstance(completion, Mapping):
            raise DataError(f"a completion must be an object: step {k} has {short(completion)}")
        self.text = _step_text(k, completion.get("text"))
        rating = completion.get("rating")
        if rating is None:
            rating = completion.get("corrected_rating")
        if isinstance(rating, bool) or rating not in (None, -1, 0, 1):
            raise DataError(f"a rating must be -1, 0, 1 or null: step {k} has {short(rating)}")
        self.score = default if rating is None else RATINGS[rating]
        self.meta = {"flagged": True} if completion.get("flagged") is True else {}


def _options(k: int, step: Any) -> tuple[list[_Rated], int | None]:
    """The step's completions (the person's last), and the index of the one that the solution goes on from."""
    if not isinstance(step, Mapping):
        raise DataError(f"a step must be an object: step {k} is {short(step)}")
    completions = step.get("completions") or []
    if not isinstance(completions, list):
        raise DataError(f"completions must be a list or null: step {k} has {short(completions)}")
    options = [_Rated(k, completion) for completion in completions]
    chosen, human = step.get("chosen_completion"), step.get("human_completion")
    if chosen is not None and (isinstance(chosen, bool) or chosen not in range(len(options))):
        raise DataError(f"chosen_completion must be the index of a completion: step {k} has {short(chosen)}")
    human = {"text": human} if isinstance(human, str) else human
    if human is not None and not (isinstance(human, Mapping) and human.get("text") is None):
        options.append(_Rated(k, human, default=1.0))
        chosen = len(options) - 1 if chosen is None else chosen
    return options, chosen


def _rated_trajectory(task: str, path: Sequence[_Rated], meta: Row, own: int) -> tuple[Trajectory, list[StepLabel]]:
    """The trajectory and its labels, those of the steps before `own` marked as shared."""
    trajectory = Trajectory(task, tuple(Step(s.text) for s in path), None, meta)
    labels = []
    for k, step in enumerate(path):
        if step.score is not None:
            extra = {**step.meta, "shared": True} if k < own else step.meta
            labels.append(StepLabel(trajectory.id, k, step.score, "gold:prm800k", meta=extra))
    return trajectory, labels


# --- Math-Shepherd and RLHFlow ----------------------------------------------------------------------------------------


def read_math_shepherd(row: Row, note: Note) -> Pairs:
    """Math-Shepherd (Wang et al. 2023): `input` marks the end of each step with "ки", `label` with + or -.

    The two texts are walked side by side and must agree everywhere else, so that the different lengths of the marks
    shift nothing and a + or ки in the text is just text. The question ends at the one "Step 1:" (any case) before the
    first mark. White space around steps belongs to the marks. Text after the last mark is a step without a label,
    unless `label` alone has a mark after it.
    """
    source, marked = text_of(row, "input"), text_of(row, "label")
    chunks: list[str] = []
    scores: list[float | None] = []
    start = at = shift = 0
    while (at := source.find(TAG, at)) >= 0:
        there = at + shift
        if marked[there : there + len(TAG)] == TAG:
            if re.fullmatch(r"\s\s|\s", source[at - 1 : at] + source[at + len(TAG) : at + len(TAG) + 1]):
                raise DataError(f"a mark without a label: at the end of step {len(chunks)}")
            at += len(TAG)
            continue
        if marked[start + shift : there] != source[start:at]:
            raise DataError(f"input and label differ other than in their marks: before step {len(chunks)} ends")
        if marked[there : there + 1] not in ("+", "-"):
            got = short(marked[there : there + 1])
            raise DataError(f"label has no + or - where input has {TAG}: at the end of step {len(chunks)}, got {got}")
        chunks.append(source[start:at])
        scores.append(1.0 if marked[there] == "+" else 0.0)
        at += len(TAG)
        start, shift = at, shift + 1 - len(TAG)
    tail, marked_tail = source[start:].strip(), marked[start + shift :].strip()
    if marked_tail != tail:
        mark = marked_tail.removeprefix(tail).strip()
        if not tail or not marked_tail.startswith(tail) or mark not in ("+", "-"):
            raise DataError(f"input and label differ other than in their marks: after step {len(chunks) - 1}")
        chunks, scores = [*chunks, tail], [*scores, 1.0 if mark == "+" else 0.0]
    elif tail:
        chunks, scores = [*chunks, tail], [*scores, None]
    if not chunks:
        raise DataError(f"no step: input has no {TAG}")
    task, chunks[0] = _question_and_step(chunks[0])
    steps = tuple(Step(_step_text(k, chunk.strip())) for k, chunk in enumerate(chunks))
    trajectory = Trajectory(task, steps, None, {**without(row, "input", "label"), "category": row.get("task")})
    yield trajectory, labels_of(trajectory, scores, "gold:math-shepherd")


def _question_and_step(text: str) -> tuple[str, str]:
    found = list(re.finditer(r"\bstep\s*1\s*:", text, re.IGNORECASE))
    if len(found) != 1:
        raise DataError(f"question and first step cannot be told apart: {len(found)} times 'Step 1:', expected once")
    question = text[: found[0].start()].strip()
    if not question:
        raise DataError("no question before 'Step 1:'")
    return question, text[found[0].start() :]


def read_rlhflow(row: Row, note: Note) -> Pairs:
    """RLHFlow's PRM chats (Dong et al. 2024): each user turn is a step, the assistant's + or - its label.

    The first user turn is the question and the first step; the question ends where the row's own `question`, `problem`
    or `prompt` does, or else at the one "Step 1:". A last user turn without an answer is a step without a label.
    """
    key, messages = messages_of(row)
    rest = without(row, key)
    chunks: list[str] = []
    scores: list[float | None] = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "system" and not chunks:
            rest = {**rest, "system": message.get("content")}
        elif role == "user" and len(chunks) == len(scores):
            chunks.append(text_of(message, "content"))
        elif role == "assistant" and len(chunks) == len(scores) + 1:
            mark = text_of(message, "content").strip()
            if mark not in ("+", "-"):
                raise DataError(f"an assistant turn must be + or -: message {i} is {short(mark)}")
            scores.append(1.0 if mark == "+" else 0.0)
        else:
            raise DataError(
                f"user turns (steps) and assistant turns (+ or -) must alternate: message {i} is {short(role)}"
            )
    if not chunks:
        raise DataError("no step: the chat has no user turn")
    asked = next((row[k] for k in ("question", "problem", "prompt") if isinstance(row.get(k), str) and row[k]), None)
    if asked is not None and chunks[0].startswith(asked):
        task, chunks[0] = asked, chunks[0][len(asked) :].strip()
    else:
        task, chunks[0] = _question_and_step(chunks[0])
    steps = tuple(Step(_step_text(k, chunk)) for k, chunk in enumerate(chunks))
    trajectory = Trajectory(task, steps, outcome_of(row), rest)
    yield trajectory, labels_of(trajectory, [*scores, *[None] * (len(steps) - len(scores))], "gold:rlhflow")


# --- benchmarks -------------------------------------------------------------------------------------------------------


def read_processbench(row: Row, note: Note) -> Pairs:
    """ProcessBench (Zheng et al. 2024): `label` is the 0-based index of the first wrong step, -1 for none.

    Steps before it are good, it is bad, and the steps after it have no label: nobody looked at them. The outcome is
    `final_answer_correct`.
    """
    steps, label, correct = row.get("steps"), row.get("label"), row.get("final_answer_correct")
    if not isinstance(steps, list) or not steps:
        raise DataError(f"steps must be a list of texts, got {short(steps)}")
    if isinstance(label, bool) or not isinstance(label, int) or not -1 <= label < len(steps):
        raise DataError(f"label must be -1 or the 0-based index of one of {len(steps)} steps, got {short(label)}")
    texts = [_step_text(k, step) for k, step in enumerate(steps)]
    scores = [1.0] * len(steps) if label < 0 else [*[1.0] * label, 0.0, *[None] * (len(steps) - label - 1)]
    meta = without(row, "problem", "steps", "label")
    if isinstance(row.get("id"), str):
        meta["category"] = row["id"].rpartition("-")[0]
    outcome = float(correct) if isinstance(correct, bool) else None
    trajectory = Trajectory(text_of(row, "problem"), tuple(map(Step, texts)), outcome, meta)
    yield trajectory, labels_of(trajectory, scores, "gold:processbench")


def read_prmbench(row: Row, note: Note) -> Pairs:
    """PRMBench (Song et al. 2025): a solution by people, and a version of it with planted errors.

    Two trajectories: the modified one, whose `error_steps` (1-based) are bad and whose other steps are good, and the
    original, all good. `meta["version"]` says which. A row whose error steps lie outside its solution, or whose two
    versions are the same, contradicts itself and is an error.
    """
    modified, original = row.get("modified_process"), row.get("original_process")
    errors = row.get("error_steps")
    for name, steps in (("modified_process", modified), ("original_process", original or ["-"])):
        if not isinstance(steps, list) or not steps:
            raise DataError(f"{name} must be a list of texts, got {short(steps)}")
    assert isinstance(modified, list)
    if not isinstance(errors, list):
        raise DataError(f"error_steps must be a list, got {short(errors)}")
    for error in errors:
        if isinstance(error, bool) or not isinstance(error, int) or not 1 <= error <= len(modified):
            raise DataError(f"error_steps must be 1-based: got {short(error)}, expected 1 to {len(modified)}")
    question = text_of(row, "modified_question" if "modified_question" in row else "question")
    asked = row.get("original_question", question)
    if errors and modified == original and asked == question:
        raise DataError("the version with errors is the version without")
    meta = without(row, "modified_process", "original_process", "modified_question", "original_question", "error_steps")
    meta["category"], meta["group"] = row.get("classification"), asked if isinstance(asked, str) else question
    versions = [("modified", question, modified)]
    if original and not (modified == original and asked == question):
        versions.append(
            ("original", text_of(row, "original_question") if "original_question" in row else asked, original)
        )
    for version, task, steps in versions:
        texts = [_step_text(k, step) for k, step in enumerate(steps)]
        trajectory = Trajectory(task, tuple(map(Step, texts)), None, {**meta, "version": version})
        bad = errors if version == "modified" else []
        yield (
            trajectory,
            labels_of(trajectory, [0.0 if k + 1 in bad else 1.0 for k in range(len(texts))], "gold:prmbench"),
        )


# --- MATH-APS ---------------------------------------------------------------------------------------------------------


def read_math_aps(row: Row, note: Note) -> Pairs:
    """MATH-APS (made with OmegaPRM, Luo et al. 2024): a search tree whose states have Monte-Carlo values.

    A trajectory is a path from the question to a leaf, a step is what a state adds to the one before, its score the
    state's `mc_value`. Two forms: a tree of `{"text", "mc_value", "children"}`, or a list of
    `{"solution_prefix", "mc_value"}`, where a state follows the longest other prefix of its text. The question's own
    value is `meta["question_value"]`. A label that repeats one of an earlier path has `meta["shared"]`. A state listed
    twice has both labels.
    """
    question, states = text_of(row, "question"), row.get("reasoning_steps")
    meta = without(row, "question", "reasoning_steps")
    if isinstance(states, Mapping):
        paths, root = list(_tree_paths(states)), [_mc_value(states)]
        if text_of(states, "text") != question:
            raise DataError("the tree's root must be the question")
    elif isinstance(states, list):
        paths, root = _prefix_paths(question, states)
    else:
        raise DataError(f"reasoning_steps must be a tree or a list, got {short(states)}")
    if root:
        meta["question_value"] = root[0]
    seen: set[tuple[Any, ...]] = set()
    for path in paths:
        trajectory = Trajectory(question, tuple(Step(text) for text, _ in path), None, meta)
        labels = []
        for k, (_, values) in enumerate(path):
            prefix = tuple((text, *mc) for text, mc in path[: k + 1])
            extra = {"shared": True} if prefix in seen else {}
            seen.add(prefix)
            labels += [StepLabel(trajectory.id, k, value, "gold:math-aps", meta=extra) for value in values]
        yield trajectory, labels


def _tree_paths(root: Row) -> Iterator[list[tuple[str, list[float]]]]:
    stack: list[tuple[Row, list[tuple[str, list[float]]]]] = [(root, [])]
    while stack:
        node, path = stack.pop()
        children = node.get("children") or []
        if not isinstance(children, list) or not all(isinstance(child, Mapping) for child in children):
            raise DataError(f"children must be a list of objects, got {short(children)}")
        if not children and path:
            yield path
        for child in reversed(children):
            stack.append((child, [*path, (_step_text(len(path), child.get("text")), [_mc_value(child)])]))


def _prefix_paths(question: str, states: list[Any]) -> tuple[list[list[tuple[str, list[float]]]], list[float]]:
    values: dict[str, list[float]] = {}
    for i, state in enumerate(states):
        if not isinstance(state, Mapping) or not isinstance(state.get("solution_prefix"), str):
            raise DataError(f"a state must have a solution_prefix: state {i} is {short(state)}")
        if not state["solution_prefix"].startswith(question):
            raise DataError(f"a solution_prefix must start with the question: that of state {i} does not")
        values.setdefault(state["solution_prefix"], []).append(_mc_value(state))
    paths: list[list[str]] = []
    open_path: list[str] = []
    for text in sorted(values):
        while open_path and not text.startswith(open_path[-1]):
            open_path.pop()
        if not (paths and paths[-1] == open_path):
            paths.append([])
        open_path.append(text)
        paths[-1] = list(open_path)
    found = []
    for prefixes in paths:
        texts = [p for p in prefixes if p != question]
        if texts:
            starts = [question, *texts]
            found.append([(t[len(s) :], values[t]) for s, t in zip(starts, texts, strict=False)])
    return found, values.get(question, [])


def _mc_value(state: Row) -> float:
    value = state.get("mc_value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(f"mc_value must lie in [0, 1], got {short(value)}")
    return float(value)


# --- agents -----------------------------------------------------------------------------------------------------------


def read_tau_bench(row: Row, note: Note) -> Pairs:
    """tau-bench runs (Yao et al. 2024): a chat with tools and a simulated user under `traj`, success in `reward`."""
    _, messages = messages_of(row, ("traj",))
    trajectory = chat_trajectory(messages, without(row, "traj"), kind="tau-bench", note=note, outcome=outcome_of(row))
    if trajectory is not None:
        yield trajectory, []


SPEAKERS = {
    "human": "user", "user": "user", "observation": "user", "tool": "user", "system": "system",
    "gpt": "assistant", "assistant": "assistant", "function_call": "assistant",
}  # fmt: skip


def read_agentgym(row: Row, note: Note) -> Pairs:
    """AgentGym trajectories (Xi et al. 2024) and other chats of `{"from", "value"}`.

    Assistant turns that open the chat with `loss: false` are part of the set-up, not steps: the task is then all that
    the human said before the first turn of the policy. The flags stay in `meta["loss"]`.
    """
    key, raw = messages_of(row)
    messages = []
    for i, turn in enumerate(raw):
        if not isinstance(turn, Mapping) or str(turn.get("from")) not in SPEAKERS:
            raise DataError(f"a turn must be from one of {', '.join(SPEAKERS)}: turn {i} is {short(turn)}")
        messages.append({"role": SPEAKERS[turn["from"]], "content": text_of(turn, "value")})
    policy = (i for i, m in enumerate(messages) if m["role"] == "assistant" and raw[i].get("loss") is not False)
    meta = without(row, key)
    if any("loss" in turn for turn in raw):
        meta["loss"] = [turn.get("loss") for turn in raw]
    if isinstance(row.get("item_id"), str):
        meta["category"] = row["item_id"].rpartition("_")[0]
    trajectory = chat_trajectory(
        messages, meta, kind="agentgym", note=note, outcome=outcome_of(row), head=next(policy, len(messages))
    )
    if trajectory is not None:
        yield trajectory, []


# --- ReAct text -------------------------------------------------------------------------------------------------------


def react_blocks(text: str) -> list[tuple[int, dict[str, str]]]:
    """The trajectories of a ReAct log (Yao et al. 2022; Reflexion's files): where each starts, and a row of its text.

    A trajectory starts at a line `Question: ...` that a line `Thought 1: ...` follows before any other thought. It ends
    at the next one, or at a heading `---- BEGIN NAME AGENTS ----` or `####`, whose name becomes the row's `category`.
    """
    start = r"Question: [^\n]*(?:\n(?!Thought \d|Question: )[^\n]*)*?\nThought 1:"
    marks = re.finditer(
        rf"^(?:(?P<block>(?={start}))|-+ BEGIN (?P<name>[A-Z]+) AGENTS -+$|#{{10,}}$)", text, re.MULTILINE
    )
    found = list(marks)
    rows, name = [], ""
    for mark, following in zip(found, [*found[1:], None], strict=False):
        if mark["block"] is None:
            name = (mark["name"] or name).lower()
            continue
        end = following.start() if following else len(text)
        rows.append((mark.start(), {"react": text[mark.start() : end].rstrip("\n"), "category": name}))
    return rows


def read_react(row: Row, note: Note) -> Pairs:
    """One block of a ReAct log: a step is `Thought k` and `Action k` as they stand, its observation that of `k`.

    The outcome is what the last observation says, `Answer is CORRECT` or `INCORRECT`; a line `Correct answer: ...`
    after it is `meta["answer"]`.
    """
    text = text_of(row, "react")
    meta = without(row, "react")
    if found := re.search(r"\nCorrect answer: ([^\n]*)\s*\Z", text):
        text, meta["answer"] = text[: found.start()], found[1]
    starts = [0]
    while (at := text.find(f"\nThought {len(starts)}:", starts[-1])) >= 0:
        starts.append(at + 1)
    if not text.startswith("Question: ") or len(starts) < 2:
        raise DataError("expected 'Question: ...' and then 'Thought 1: ...', on lines of their own")
    steps = []
    for k, (begin, end) in enumerate(zip(starts[1:], [*starts[2:], len(text) + 1], strict=True), 1):
        part = text[begin : end - 1]
        action, marker, seen = part.partition(f"\nObservation {k}:")
        if marker and f"\nAction {k}:" not in action:
            raise DataError(f"Observation {k} without an action before it")
        if not marker and end <= len(text):
            raise DataError(f"no Observation {k} before the next thought")
        if stray := re.search(r"^Thought \d+:", seen, re.MULTILINE):
            raise DataError(f"a thought out of order: {stray[0]} after Thought {k}")
        steps.append(Step(action, seen.removeprefix(" ")))
    verdict = re.match(r"Answer is (CORRECT|INCORRECT)\b", steps[-1].observation)
    outcome = float(verdict[1] == "CORRECT") if verdict else None
    yield Trajectory(text[len("Question: ") : starts[1] - 1], tuple(steps), outcome, meta), []


# --- shared -----------------------------------------------------------------------------------------------------------


def _step_text(k: int, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"a step has no text: step {k} is {short(text)}")
    return text


FORMATS: dict[str, tuple[Callable[[Row], bool], Reader]] = {
    "prm800k": (lambda row: isinstance(row.get("label"), Mapping) and "question" in row, read_prm800k),
    "math-shepherd": (
        lambda row: isinstance(row.get("input"), str) and isinstance(row.get("label"), str),
        read_math_shepherd,
    ),
    "processbench": (lambda row: "problem" in row and "steps" in row and "label" in row, read_processbench),
    "prmbench": (lambda row: "modified_process" in row and "error_steps" in row, read_prmbench),
    "math-aps": (lambda row: "question" in row and "reasoning_steps" in row, read_math_aps),
    "rlhflow": (lambda row: message_style(row) == "rlhflow", read_rlhflow),
    "agentgym": (lambda row: message_style(row) == "agentgym", read_agentgym),
    "tau-bench": (lambda row: isinstance(row.get("traj"), list), read_tau_bench),
    "react": (lambda row: isinstance(row.get("react"), str), read_react),
}
