import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm import DataError, Step, convert
from prm.formats import to_messages, to_trl

DATA = Path(__file__).parents[2] / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason="the public data files are not here")


def read(row, **options):
    return convert([row], **options)


def texts(trajectory):
    return [step.action for step in trajectory.steps]


def scores(converted, trajectory):
    """One score a step, None where there is none."""
    own = {x.step: x.score for x in converted.labels if x.trajectory_id == trajectory.id}
    assert all(k < len(trajectory.steps) for k in own)
    return [own.get(k) for k in range(len(trajectory.steps))]


def table(converted):
    return {" | ".join(texts(t)): scores(converted, t) for t in converted.trajectories}


def fails(row, reason, kind="auto"):
    with pytest.raises(DataError) as error:
        convert([row], kind=kind)
    assert str(error.value).startswith("row 1: ") and reason in str(error.value)
    got = convert([row], kind=kind if kind != "auto" else "auto", skip_bad=True)
    assert (got.trajectories, got.labels, got.read, sum(got.skipped.values())) == ((), (), 1, 1)


# --- PRM800K ------------------------------------------------------------------------------------------------------


def rated(text, rating, **more):
    return {"text": text, "rating": rating, "flagged": False, **more}


def offer(*completions, chosen=None, human=None):
    return {"completions": list(completions) or None, "human_completion": human, "chosen_completion": chosen}


def written(text, rating=None):
    return {"text": text, "rating": rating, "source": "human", "flagged": False}


def prm800k(*steps, **label):
    question = {"problem": "Solve 3x = 6.", "ground_truth_answer": "2"}
    return {"labeler": "l", "question": question, "label": {"steps": list(steps), "finish_reason": "solution", **label}}


FOUR_NULLS = prm800k(
    offer(rated("Let us start.", 1), chosen=0),
    offer(rated("Add 3.", -1), rated("Guess.", None), human=written("Divide both sides by 3.")),
    offer(rated("So x is found.", 0), rated("So x = 3.", -1)),
    offer(),
)


def test_prm800k_nulls_in_four_places():
    got = read(FOUR_NULLS)
    assert got.kind == "prm800k"
    assert table(got) == {
        "Let us start. | Divide both sides by 3.": [1.0, 1.0],
        "Let us start. | Add 3.": [1.0, 0.0],
        "Let us start. | Divide both sides by 3. | So x is found.": [1.0, 1.0, 0.5],
        "Let us start. | Divide both sides by 3. | So x = 3.": [1.0, 1.0, 0.0],
    }
    assert got.skipped == {"completion without a rating": 1, "step without a completion": 1}
    assert {x.source for x in got.labels} == {"gold:prm800k"}
    main, *ends = got.trajectories
    assert main.meta["path"] == "main" and {t.meta["path"] for t in ends} == {"alternative"}
    assert main.task == "Solve 3x = 6." and main.outcome is None
    assert main.meta["ground_truth_answer"] == "2" and main.meta["finish_reason"] == "solution"
    for t in ends:
        shared = [x.meta.get("shared", False) for x in got.labels if x.trajectory_id == t.id]
        assert shared == [True] * (len(t.steps) - 1) + [False]


def test_prm800k_never_goes_on_after_a_rejected_step():
    got = read(prm800k(offer(rated("a", 1), chosen=0), offer(rated("b", -1), chosen=0), offer(rated("c", 1), chosen=0)))
    assert table(got) == {"a": [1.0], "a | b": [1.0, 0.0]}
    assert got.skipped == {"step after the end of its path": 1}


def test_prm800k_a_null_rating_on_the_path_is_no_label():
    got = read(prm800k(offer(rated("a", None), chosen=0), offer(rated("b", 1), rated("c", 0), chosen=0)))
    assert table(got) == {"a | b": [None, 1.0], "a | c": [None, 0.5]}
    assert got.skipped == {}


def test_prm800k_what_a_person_wrote():
    first = offer(rated("a", -1), human="by hand")
    assert table(read(prm800k(first))) == {"by hand": [1.0], "a": [0.0]}
    assert table(read(prm800k(offer(human=written("h", 0)), offer(rated("b", 1), chosen=0)))) == {"h | b": [0.5, 1.0]}
    assert table(read(prm800k(offer(human=written("h", -1)), offer(rated("b", 1), chosen=0)))) == {"h": [0.0]}
    assert table(read(prm800k(offer(human={**written("h"), "corrected_rating": -1})))) == {"h": [0.0]}
    both = read(prm800k(offer(rated("a", 1), human=written("h"), chosen=0), offer(rated("b", 1), chosen=0)))
    assert table(both) == {"a | b": [1.0, 1.0], "h": [1.0]}
    empty = read(prm800k(offer(rated("a", 1), human=written(None))))
    assert table(empty) == {"a": [1.0]}


def test_prm800k_without_a_choice_or_without_steps():
    found_error = read(prm800k(offer(rated("a", 1), chosen=0), offer(rated("b", -1), rated("b", -1), rated("c", 1))))
    assert table(found_error) == {"a": [1.0], "a | b": [1.0, 0.0], "a | c": [1.0, 1.0]}
    assert found_error.skipped == {"completion that repeats another": 1}
    assert read(prm800k()).trajectories == ()
    assert read(prm800k(offer(), offer(rated("a", 1), chosen=0))).skipped == {
        "step without a completion": 1,
        "step after the end of its path": 1,
    }
    flagged = read(prm800k(offer(rated("a", 1, flagged=True), chosen=0)))
    assert flagged.labels[0].meta == {"flagged": True}


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (offer(rated(None, 1), chosen=0), "a step has no text: step 0 is None"),
        (offer(rated(" ", 1), chosen=0), "a step has no text: step 0 is ' '"),
        (offer(rated("a", 2), chosen=0), "a rating must be -1, 0, 1 or null: step 0 has 2"),
        (offer(rated("a", True), chosen=0), "a rating must be -1, 0, 1 or null: step 0 has True"),
        (offer(rated("a", "1"), chosen=0), "a rating must be -1, 0, 1 or null"),
        (offer(rated("a", 1), chosen=1), "chosen_completion must be the index of a completion: step 0 has 1"),
        (offer(rated("a", 1), chosen=-1), "chosen_completion must be the index of a completion"),
        (offer("a", chosen=0), "a completion must be an object: step 0 has 'a'"),
        ("a", "a step must be an object: step 0 is 'a'"),
    ],
)
def test_prm800k_errors(step, reason):
    fails(prm800k(step), reason)


def test_prm800k_needs_question_and_label():
    fails({"question": "q", "label": {"steps": []}}, "expected a question and a label with a list of steps")
    fails({"question": {}, "label": {"steps": []}}, "problem must be text, got nothing")


# --- Math-Shepherd ------------------------------------------------------------------------------------------------

SUM = "What is 2+3-1? Step 1: 2+3 = 5 ки\nStep 2: 5-1 = 4 ки\nStep 3: The answer is: 4 ки"
SUM_STEPS = ["Step 1: 2+3 = 5", "Step 2: 5-1 = 4", "Step 3: The answer is: 4"]


def shepherd(source, marks):
    """A row whose label has the marks in place of the tags, in order."""
    parts = source.split("ки")
    label = "".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True))
    return {"input": source, "label": label, "task": "GSM8K"}


def test_math_shepherd_reads_every_mark_at_its_own_step():
    row = shepherd(SUM, "++-")
    assert row["label"] == "What is 2+3-1? Step 1: 2+3 = 5 +\nStep 2: 5-1 = 4 +\nStep 3: The answer is: 4 -"
    got = read(row)
    (t,) = got.trajectories
    assert (got.kind, t.task, texts(t), scores(got, t)) == ("math-shepherd", "What is 2+3-1?", SUM_STEPS, [1, 1, 0])
    assert {x.source for x in got.labels} == {"gold:math-shepherd"}
    assert t.meta["category"] == "GSM8K"


@pytest.mark.parametrize("sign", ["step 1:", "STEP 1:", "Step 1 :", "Step  1:"])
def test_math_shepherd_other_spellings_of_step_one(sign):
    got = read(shepherd(SUM.replace("Step 1:", sign), "++-"))
    (t,) = got.trajectories
    assert t.task == "What is 2+3-1?" and texts(t)[0] == f"{sign} 2+3 = 5" and scores(got, t) == [1, 1, 0]


def test_math_shepherd_last_step_without_tag():
    source = SUM.removesuffix(" ки")
    got = read(shepherd(source, "++"))
    assert table(got) == {" | ".join(SUM_STEPS): [1, 1, None]}
    marked = shepherd(source, "++")
    got = read({**marked, "label": marked["label"] + " -"})
    assert table(got) == {" | ".join(SUM_STEPS): [1, 1, 0]}
    fails({**marked, "label": marked["label"] + " ?"}, "input and label differ other than in their marks: after step 1")


def test_math_shepherd_a_question_with_two_question_marks():
    source = SUM.replace("What is 2+3-1?", "2+3? And 2+3-1?")
    assert read(shepherd(source, "+-+")).trajectories[0].task == "2+3? And 2+3-1?"


@pytest.mark.parametrize(
    ("source", "times"),
    [
        (SUM.replace("Step 1: ", ""), 0),
        (SUM.replace("What is 2+3-1?", "2+3? And 2+3-1?").replace("Step 1: ", ""), 0),
        (SUM.replace("What", "In Step 1: what"), 2),
        ("What is 2+3-1? ки Step 1: 2+3 = 5 ки\nStep 2: 5-1 = 4 ки", 0),
    ],
)
def test_math_shepherd_does_not_guess_where_the_question_ends(source, times):
    fails(shepherd(source, "++-"), f"question and first step cannot be told apart: {times} times 'Step 1:'")


def test_math_shepherd_step_one_again_in_a_later_step_is_text():
    got = read(shepherd(SUM.replace("Step 2:", "Step 1:"), "+-+"))
    assert texts(got.trajectories[0])[1] == "Step 1: 5-1 = 4" and got.trajectories[0].task == "What is 2+3-1?"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": SUM}, "a mark without a label: at the end of step 0"),
        (
            {"label": shepherd(SUM, "+?-")["label"]},
            "label has no + or - where input has ки: at the end of step 1, got '?'",
        ),
        (
            {"label": shepherd(SUM, "++-")["label"].replace("5-1", "5-2")},
            "input and label differ other than in their marks",
        ),
        ({"label": shepherd(SUM, "++-")["label"][:40]}, "input and label differ other than in their marks"),
        ({"label": shepherd(SUM, "++-")["label"] + " more"}, "input and label differ other than in their marks"),
        ({"input": "no mark", "label": "no mark"}, "question and first step cannot be told apart"),
        ({"input": "", "label": ""}, "no step: input has no ки"),
        ({"input": "Step 1: a ки", "label": "Step 1: a +"}, "no question before 'Step 1:'"),
        ({"input": "q Step 1: a ки ки", "label": "q Step 1: a + -"}, "a step has no text: step 1 is ''"),
    ],
)
def test_math_shepherd_errors(change, reason):
    fails({**shepherd(SUM, "++-"), **change}, reason)


def test_math_shepherd_the_tag_inside_words_is_text():
    row = {"input": "Считай знаки? Step 1: знаки + - ки", "label": "Считай знаки? Step 1: знаки + - -"}
    got = read(row)
    assert table(got) == {"Step 1: знаки + -": [0.0]} and got.trajectories[0].task == "Считай знаки?"


words = st.text(st.sampled_from("ab+-?: \nки\r\u2028é\x00"), max_size=12).filter(lambda w: "ки" not in w + "к")
step_texts = st.lists(st.tuples(words, st.sampled_from("+-")), min_size=1, max_size=6)


@given(words.filter(str.strip), step_texts)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_math_shepherd_compose_and_parse(question, parts):
    composed = "\n".join(f"Step {k}: {word}. ки" for k, (word, _) in enumerate(parts, 1))
    row = shepherd(f"{question} {composed}", [mark for _, mark in parts])
    got = read(row)
    (t,) = got.trajectories
    assert t.task == question.strip()
    assert texts(t) == [f"Step {k}: {word}." for k, (word, _) in enumerate(parts, 1)]
    assert scores(got, t) == [float(mark == "+") for _, mark in parts]


# --- RLHFlow ------------------------------------------------------------------------------------------------------


def turn(role, content):
    return {"role": role, "content": content}


def rlhflow(*pairs, **row):
    messages = []
    for content, mark in pairs:
        messages += [turn("user", content)] + ([turn("assistant", mark)] if mark else [])
    return {"conversations": messages, **row}


def test_rlhflow():
    got = read(rlhflow(("What is 1+1? Step 1: It is 2.", "+"), ("Step 2: So 3.", " -"), ("Step 3: Done.", "")))
    assert got.kind == "rlhflow" and got.trajectories[0].task == "What is 1+1?"
    assert table(got) == {"Step 1: It is 2. | Step 2: So 3. | Step 3: Done.": [1.0, 0.0, None]}
    assert {x.source for x in got.labels} == {"gold:rlhflow"}
    given = read(rlhflow(("What is 1+1?\n\nTwo.", "+"), prompt="What is 1+1?", id=3))
    assert given.trajectories[0].task == "What is 1+1?" and texts(given.trajectories[0]) == ["Two."]
    assert given.trajectories[0].meta == {"prompt": "What is 1+1?", "id": 3}
    with_rules = read({"messages": [turn("system", "s"), *rlhflow(("q Step 1: a", "-"))["conversations"]]})
    assert with_rules.trajectories[0].meta == {"system": "s"} and table(with_rules) == {"Step 1: a": [0.0]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([turn("user", "q Two."), turn("assistant", "+")], "question and first step cannot be told apart: 0 times"),
        ([turn("assistant", "+")], "must alternate: message 0 is 'assistant'"),
        ([turn("user", "q Step 1: a"), turn("user", "b"), turn("assistant", "+")], "must alternate: message 1"),
        ([turn("user", "q Step 1: a"), turn("assistant", "+"), turn("assistant", "+")], "must alternate: message 2"),
        ([turn("user", None), turn("assistant", "+")], "content must be text, got None"),
        ([turn("user", "q Step 1: a"), turn("assistant", "+"), turn("user", " "), turn("assistant", "+")],
         "a step has no text: step 1"),
    ],
)  # fmt: skip
def test_rlhflow_errors(messages, reason):
    fails({"conversations": messages}, reason)


def test_rlhflow_and_chat_are_told_apart():
    row = {
        "messages": [turn("user", "q Step 1: a"), turn("assistant", "+"), turn("user", "b"), turn("assistant", "maybe")]
    }
    assert read(row).kind == "chat"
    fails(row, "an assistant turn must be + or -: message 3 is 'maybe'", kind="rlhflow")
    assert read(rlhflow(("q Step 1: a", "+")), kind="chat").trajectories[0].steps == (Step("+"),)


# --- ProcessBench -------------------------------------------------------------------------------------------------


def processbench(label, n=4, **row):
    steps = [f"s{k}" for k in range(n)]
    return {
        "id": "gsm8k-7",
        "generator": "g",
        "problem": "p",
        "steps": steps,
        "final_answer_correct": False,
        "label": label,
        **row,
    }


@pytest.mark.parametrize(
    ("label", "expected"),
    [(-1, [1, 1, 1, 1]), (0, [0, None, None, None]), (2, [1, 1, 0, None]), (3, [1, 1, 1, 0])],
)
def test_processbench(label, expected):
    got = read(processbench(label))
    (t,) = got.trajectories
    assert got.kind == "processbench" and scores(got, t) == expected and t.task == "p" and t.outcome == 0.0
    assert t.meta == {"id": "gsm8k-7", "generator": "g", "final_answer_correct": False, "category": "gsm8k"}
    assert {x.source for x in got.labels} == {"gold:processbench"}
    rows, _ = to_trl(got.trajectories, got.labels)
    assert rows[0]["labels"] == [bool(x) for x in expected if x is not None]


@pytest.mark.parametrize("label", [4, -2, None, True, "1", 1.0])
def test_processbench_labels_out_of_range(label):
    fails(processbench(label), "label must be -1 or the 0-based index of one of 4 steps")


@pytest.mark.parametrize(("steps", "reason"), [([], "steps must be a list"), ("ab", "steps must be a list"),
                                               (["a", None], "a step has no text: step 1 is None")])  # fmt: skip
def test_processbench_steps(steps, reason):
    fails(processbench(0, steps=steps), reason)


def test_processbench_outcome():
    assert read(processbench(-1, final_answer_correct=True)).trajectories[0].outcome == 1.0
    assert read(processbench(-1, final_answer_correct=None)).trajectories[0].outcome is None


# --- PRMBench -----------------------------------------------------------------------------------------------------


def prmbench(errors, modified=("a", "b!", "c"), original=("a", "b"), **row):
    return {
        "original_question": "q", "modified_question": "q'", "original_process": list(original), "idx": "i1",
        "modified_process": list(modified), "modified_steps": [2], "error_steps": errors, "reason": "r",
        "question": "q'", "classification": "confidence", **row,
    }  # fmt: skip


def test_prmbench_error_steps_are_one_based():
    got = read(prmbench([2, 3]))
    assert got.kind == "prmbench" and table(got) == {"a | b! | c": [1, 0, 0], "a | b": [1, 1]}
    modified, original = got.trajectories
    assert (modified.task, original.task) == ("q'", "q")
    assert modified.meta["version"] == "modified" and original.meta["version"] == "original"
    assert modified.meta["category"] == "confidence" and modified.meta["reason"] == "r" and modified.meta["idx"] == "i1"
    assert {x.source for x in got.labels} == {"gold:prmbench"}
    assert table(read(prmbench([1])))["a | b! | c"] == [0, 1, 1]
    assert table(read(prmbench([])))["a | b! | c"] == [1, 1, 1]


def test_prmbench_without_the_original():
    row = {"question": "q", "modified_process": ["a", "b"], "error_steps": [2]}
    got = read(row)
    assert table(got) == {"a | b": [1, 0]} and got.trajectories[0].task == "q"
    unchanged = read(prmbench([], modified=["a"], original=["a"], modified_question="q"))
    assert len(unchanged.trajectories) == 1


@pytest.mark.parametrize("error", [0, 4, -1, True, "1", 1.0, None])
def test_prmbench_errors_outside_the_solution(error):
    fails(prmbench([2, error]), "error_steps must be 1-based: got")


def test_prmbench_errors():
    fails(prmbench(None), "error_steps must be a list, got None")
    fails(prmbench([1], modified=["", "b"]), "a step has no text: step 0 is ''")
    fails(prmbench([1], modified=[]), "modified_process must be a list of texts")
    fails(prmbench([1], original_process="ab"), "original_process must be a list of texts")
    fails(
        prmbench([1], modified=["a"], original=["a"], modified_question="q"), "the version with errors is the version"
    )


# --- MATH-APS -----------------------------------------------------------------------------------------------------


def test_math_aps_tree():
    def node(text, value, *children):
        return {"text": text, "mc_value": value, "children": list(children)}

    tree = node("q", 0.5, node("a", 0.75, node("b", 1.0), node("c", 0.0)), node("d", 0.25))
    got = read({"question": "q", "reasoning_steps": tree, "final_answer": "4"})
    assert table(got) == {"a | b": [0.75, 1.0], "a | c": [0.75, 0.0], "d": [0.25]}
    assert got.trajectories[0].meta == {"final_answer": "4", "question_value": 0.5}
    assert [x.meta for x in got.labels] == [{}, {}, {"shared": True}, {}, {}]
    assert {x.source for x in got.labels} == {"gold:math-aps"} and got.kind == "math-aps"
    fails({"question": "q", "reasoning_steps": node("x", 0.5)}, "the tree's root must be the question")
    fails({"question": "q", "reasoning_steps": node("q", 0.5, node("a", 2))}, "mc_value must lie in [0, 1], got 2")
    deep = node("x", 1.0)
    for _ in range(500):
        deep = node("x", 1.0, deep)
    assert len(read({"question": "x", "reasoning_steps": deep}).trajectories[0].steps) == 500


def test_math_aps_prefixes():
    states = [("q", 0.5), ("q\n a", 0.75), ("q\n d", 0.25), ("q\n a b", 1.0), ("q\n a c", 0.0), ("q\n a c", 0.5)]
    rows = [{"solution_prefix": prefix, "mc_value": value} for prefix, value in states]
    got = read({"question": "q", "reasoning_steps": rows})
    assert [texts(t) for t in got.trajectories] == [["\n a", " b"], ["\n a", " c"], ["\n d"]]
    assert [(x.step, x.score) for x in got.labels] == [(0, 0.75), (1, 1.0), (0, 0.75), (1, 0.0), (1, 0.5), (0, 0.25)]
    assert got.trajectories[0].meta["question_value"] == 0.5
    fails({"question": "z", "reasoning_steps": rows}, "a solution_prefix must start with the question")
    fails({"question": "q", "reasoning_steps": ["q"]}, "a state must have a solution_prefix: state 0 is 'q'")
    fails({"question": "q", "reasoning_steps": 3}, "reasoning_steps must be a tree or a list, got 3")


# --- agents -------------------------------------------------------------------------------------------------------


def spoken(speaker, value, **more):
    return {"from": speaker, "value": value, **more}


def test_agentgym():
    row = {
        "conversations": [
            spoken("human", "You play a game.", loss=None),
            spoken("gpt", "OK.", loss=False),
            spoken("human", "You see a door.", loss=None),
            spoken("gpt", "open door", loss=True),
            spoken("human", "It is open.", loss=None),
            spoken("gpt", "go", loss=True),
        ],
        "item_id": "alfworld_12",
    }
    got = read(row)
    (t,) = got.trajectories
    assert got.kind == "agentgym" and t.task == "You play a game.\n\nYou see a door."
    assert t.steps == (Step("open door", "It is open."), Step("go"))
    assert t.meta["item_id"] == "alfworld_12" and t.meta["category"] == "alfworld"
    assert t.meta["loss"] == [None, False, None, True, None, True]
    assert [m["content"] for m in to_messages(t)] == [c["value"] for c in row["conversations"]]
    assert [m["role"] for m in to_messages(t)] == ["user", "assistant"] * 3


def test_agentgym_without_flags_and_with_other_speakers():
    row = {"conversations": [spoken("system", "s"), spoken("human", "q"), spoken("function_call", "f()"),
                             spoken("observation", "r"), spoken("gpt", "a")]}  # fmt: skip
    got = read(row)
    assert got.trajectories[0].steps == (Step("f()", "r"), Step("a")) and got.trajectories[0].task == "q"
    only = {"conversations": [spoken("human", "q"), spoken("gpt", "OK", loss=False)]}
    assert read(only).skipped == {"no assistant turn": 1}
    fails({"conversations": [spoken("narrator", "q")]}, "a turn must be from one of human, user")
    fails({"conversations": [spoken("human", None)]}, "value must be text, got None")


def test_tau_bench():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        turn("system", "rules"), turn("user", "hi"), {**turn("assistant", None), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"}, turn("assistant", "bye"),
        turn("user", "###STOP###"),
    ]  # fmt: skip
    got = read({"task_id": 3, "reward": 1.0, "info": {"a": 1}, "traj": messages, "trial": 0})
    (t,) = got.trajectories
    assert got.kind == "tau-bench" and t.outcome == 1.0 and t.task == "hi" and to_messages(t) == messages
    assert [s.observation for s in t.steps] == ["r", "###STOP###"]
    assert {"task_id", "info", "trial", "reward", "converted"} == set(t.meta)


REACT = """
########################################
BEGIN TRIAL 1
------------- BEGIN CORRECT AGENTS -------------

Question: Which one?
Or two?
Thought 1: Look.
Action 1: Search[a]
Observation 1: Found
Question: is it?
Action 7: no
Thought 2: Done.
Action 2: Finish[a]
Observation 2: Answer is CORRECT
Correct answer: a

------------- BEGIN HALTED AGENTS --------------

Question: Another?
Thought 1: Hm.
Action 1: Search[b]
"""


def test_react(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(REACT)
    got = convert(path)
    first, second = got.trajectories
    assert got.kind == "react" and convert(path, kind="react") == got
    assert first.task == "Which one?\nOr two?" and first.outcome == 1.0 and second.outcome is None
    assert first.steps == (
        Step("Thought 1: Look.\nAction 1: Search[a]", "Found\nQuestion: is it?\nAction 7: no"),
        Step("Thought 2: Done.\nAction 2: Finish[a]", "Answer is CORRECT"),
    )
    assert first.meta == {"category": "correct", "answer": "a"} and second.meta == {"category": "halted"}
    assert second.steps == (Step("Thought 1: Hm.\nAction 1: Search[b]"),)
    path.write_text(REACT.replace("Thought 2:", "Thought 3:"))
    with pytest.raises(DataError, match=r"log.txt:6: a thought out of order: Thought 3: after Thought 1"):
        convert(path)
    path.write_text(REACT.replace("Action 2:", "Act:"))
    with pytest.raises(DataError, match="Observation 2 without an action before it"):
        convert(path)
    path.write_text(REACT.replace("Observation 1:", "Seen:"))
    with pytest.raises(DataError, match="no Observation 1 before the next thought"):
        convert(path)
    path.write_text("Question: q\nAnswer: a")
    with pytest.raises(DataError, match=r"log.txt: no ReAct trajectory"):
        convert(path, kind="react")


# --- real files ---------------------------------------------------------------------------------------------------


def rows_of(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@real
def test_real_prm800k():
    got = convert(DATA / "openr_samples/samples_prm800k.jsonl")
    assert got.summary() == (
        "read 6 rows: 35 trajectories, 210 steps, 210 labels; "
        "skipped 3: completion that repeats another (2), step without a completion (1)"
    )
    main = [t for t in got.trajectories if t.meta["path"] == "main"]
    assert [len(t.steps) for t in main] == [6, 6, 5, 7, 8, 12]
    assert texts(main[0])[1] == "We have $3p+e=1.24$ and $5p+e=1.82$."
    for t in got.trajectories:
        assert all(score for score in scores(got, t)[:-1]), "a rejected step is followed by another"


@real
def test_real_math_shepherd():
    name = "openr_samples/samples_math-shepherd.jsonl"
    got = convert(DATA / name)
    assert got.summary() == "read 7 rows: 7 trajectories, 25 steps, 25 labels"
    for row, t in zip(rows_of(name), got.trajectories, strict=True):
        own = scores(got, t)
        source = t.task + " " + "\n".join(f"{text} ки" for text in texts(t))
        label = t.task + " " + "\n".join(f"{s} {'+' if x else '-'}" for s, x in zip(texts(t), own, strict=True))
        assert (source, label) == (row["input"], row["label"])


@real
@pytest.mark.parametrize(
    ("name", "rows", "skipped"),
    [
        ("confidence", 400, {"error_steps must be 1-based": 8, "a step has no text": 1}),
        (
            "counterfactual",
            401,
            {"error_steps must be 1-based": 10, "the version with errors is the version without": 2},
        ),
        (
            "missing_condition",
            400,
            {"error_steps must be 1-based": 16, "the version with errors is the version without": 1},
        ),
        ("redundency", 401, {"error_steps must be 1-based": 4}),
    ],
)
def test_real_prmbench(name, rows, skipped):
    path = DATA / "prmbench" / f"{name}.jsonl"
    got = convert(path, skip_bad=True)
    assert (got.read, dict(got.skipped)) == (rows, skipped)
    good = rows - sum(skipped.values())
    assert len(got.trajectories) == 2 * good and len(got.labels) == sum(len(t.steps) for t in got.trajectories)
    bad = Counter(x.trajectory_id for x in got.labels if x.score == 0)
    modified = [t for t in got.trajectories if t.meta["version"] == "modified"]
    assert all(bad[t.id] for t in modified) and sum(bad.values()) == sum(bad[t.id] for t in modified)
    with pytest.raises(DataError, match=rf"{name}.jsonl:\d+: "):
        convert(path)


@real
def test_real_math_aps():
    flat = convert(DATA / "openr_samples/samples_math-aps.jsonl")
    assert flat.summary() == "read 3 rows: 124 trajectories, 290 steps, 353 labels"
    for row in rows_of("openr_samples/samples_math-aps.jsonl"):
        built = {t.task + "".join(texts(t)) for t in flat.trajectories if t.task == row["question"]}
        assert built <= {state["solution_prefix"] for state in row["reasoning_steps"]}
    tree = convert(DATA / "openr_samples/samples_math-aps-tree.jsonl")
    assert tree.summary() == "read 3 rows: 242 trajectories, 624 steps, 624 labels"


@real
def test_real_tau_bench():
    path = DATA / "tau_bench/gpt-4o-airline.json"
    got = convert(path)
    assert got.summary() == "read 40 rows: 40 trajectories, 571 steps, 0 labels"
    raw = json.loads(path.read_text())
    assert [to_messages(t) for t in got.trajectories] == [row["traj"] for row in raw]
    assert [t.outcome for t in got.trajectories] == [row["reward"] for row in raw]


@real
def test_real_react():
    got = convert(DATA / "react_hotpotqa/react_base_100_questions.txt")
    assert got.summary() == "read 512 rows: 512 trajectories, 1867 steps, 0 labels"
    assert Counter(t.outcome for t in got.trajectories) == {0.0: 294, 1.0: 170, None: 48}
