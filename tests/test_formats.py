import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm import DataError, Step, StepLabel, Trajectory, UsageError, convert
from prm.formats import KINDS, Converted, _formats, split_text, to_dataset, to_messages, to_trl

DATA = Path(__file__).parents[2] / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason="the public data files are not here")
text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)


def call(name, arguments, ident="c1"):
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def says(content, *calls, **more):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def user(content):
    return {"role": "user", "content": content}


def tool(content, ident="c1", **more):
    return {"role": "tool", "tool_call_id": ident, "content": content, **more}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- reasoning ----------------------------------------------------------------------------------------------------


def test_split_blank_line():
    assert split_text("a\nb\n\nc\n \t\r\n\nd", "blank-line") == ["a\nb\n\n", "c\n \t\r\n\n", "d"]
    assert split_text("\n\n a\n\nb\n\n", "blank-line") == ["\n\n a\n\n", "b\n\n"]
    assert split_text("", "blank-line") == split_text(" \n\n", "line") == []


def test_split_line():
    assert split_text("a\n\nb\u2028c\r\nd", "line") == ["a\n\n", "b\u2028c\r\n", "d"]


def test_a_closed_code_fence_is_not_cut():
    code = "Run:\n\n```python\nx = 1\n\ny = 2\n```\nDone.\n\nNext."
    assert split_text(code, "blank-line") == ["Run:\n\n", "```python\nx = 1\n\ny = 2\n```\nDone.\n\n", "Next."]
    assert len(split_text("```\na\n\nb\n\nc", "blank-line")) == 3
    assert len(split_text("~~~~\na\n\n~~~\n\n```\n~~~~\n\nb", "blank-line")) == 2
    assert len(split_text("```x``` is code\n\nb\n\n``` again", "blank-line")) == 3
    assert len(split_text(code, "line")) == 7


lines = st.lists(
    st.sampled_from(["", " ", "\t", "a", "b c", "```", "~~~py", "\r", "é", "\u2028", "\x00", "\ud800"]), max_size=12
)


@given(st.one_of(lines.map("\n".join), text), st.sampled_from(["blank-line", "line"]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_splitting_loses_nothing(text, split):
    steps = split_text(text, split)
    assert "".join(steps) == (text if text.strip(" \t\r\n") else "")
    assert all(step.strip(" \t\r\n") for step in steps)


def test_reasoning_prefixes_keep_every_byte():
    parts = ["Let x = 4.\n\n", "Then 2x = 8. \n\n", "    indented code\n"]
    got = convert([{"question": "q", "solution": "".join(parts), "answer": "8", "level": 2}], split="blank-line")
    (trajectory,) = got.trajectories
    assert [s.action for s in trajectory.steps] == parts and got.kind == "reasoning"
    assert trajectory.meta == {"answer": "8", "level": 2} and trajectory.task == "q"


def test_reasoning_needs_to_be_told_how_to_split(tmp_path):
    row = {"problem": "p", "solution": "a\n\nb"}
    with pytest.raises(UsageError, match="row 1: reasoning text needs split= one of blank-line, line"):
        convert([row], skip_bad=True)
    with pytest.raises(UsageError, match="split is for reasoning text, not for chat"):
        convert([], kind="chat", split="line")
    with pytest.raises(UsageError, match="split is for reasoning text, and this is chat"):
        convert([{"messages": [user("q"), says("a")]}], split="line")
    with pytest.raises(UsageError, match="split must be one of"):
        convert([row], split="sentence")
    with pytest.raises(DataError, match="row 1: solution must be text, got None"):
        convert([{"problem": "p", "solution": None}], split="line")
    with pytest.raises(DataError, match="no reasoning text, expected a key reasoning or solution"):
        convert([{"problem": "p"}], kind="reasoning", split="line")
    assert convert([{"problem": "p", "solution": " \n"}], split="line").skipped == {"no text": 1}


def test_a_text_file_is_one_reasoning(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeff[1] first\r\n\r\nsecond é".encode())
    (got,) = convert(path, kind="reasoning", split="blank-line").trajectories
    assert [s.action for s in got.steps] == ["[1] first\r\n\r\n", "second é"] and got.task == ""
    path.write_text("plain\nwords")
    assert len(convert(path, split="line").trajectories[0].steps) == 2
    path.write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(DataError, match=r"a.txt: not UTF-8"):
        convert(path, split="line")


# --- TRL ----------------------------------------------------------------------------------------------------------


def trl(labels, **row):
    return {"prompt": "p", "completions": [f"s{i}" for i in range(len(labels))], "labels": labels, **row}


@pytest.mark.parametrize(
    ("labels", "scores"),
    [
        ([True, False], {0: 1.0, 1: 0.0}),
        ([1, 0], {0: 1.0, 1: 0.0}),
        ([0.9, 0.2], {0: 0.9, 1: 0.2}),
        ([None, True, None], {1: 1.0}),
        ([-100, False, -100], {1: 0.0}),
        ([1.0, -100.0, 0], {0: 1.0, 2: 0.0}),
        ([], {}),
    ],
)
def test_trl_labels(labels, scores):
    got = convert([trl(labels, domain="math")])
    assert {x.step: x.score for x in got.labels} == scores
    assert all(type(x.score) is float and x.source == "gold:trl" for x in got.labels)
    (trajectory,) = got.trajectories
    assert trajectory.task == "p" and len(trajectory.steps) == len(labels) and trajectory.meta == {"domain": "math"}


@pytest.mark.parametrize("label", [-1, 2, 1.5, "1", float("nan"), [1], -99, "-100"])
def test_other_trl_labels_are_errors(label):
    with pytest.raises(DataError, match=r"row 2: a label must be a boolean, in .0, 1., null or -100: step 1 has"):
        convert([trl([1]), trl([1, label])])
    assert convert([trl([1, label])], skip_bad=True).skipped == {
        "a label must be a boolean, in [0, 1], null or -100": 1
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [True]}, "labels and completions must be as many, got 1 and 2"),
        ({"labels": [True] * 3}, "labels and completions must be as many, got 3 and 2"),
        ({"labels": None}, "labels must be a list, got None"),
        ({"completions": ["a", None]}, "completions must be a list of texts"),
        ({"completions": "ab"}, "completions must be a list of texts"),
        ({"prompt": None}, "prompt must be text, got None"),
    ],
)
def test_trl_rows_that_do_not_fit(change, reason):
    with pytest.raises(DataError) as error:
        convert([{**trl([True, False]), **change}])
    assert reason in str(error.value)


def test_trl_prompt_of_messages():
    head = [{"role": "system", "content": "s"}, user("q")]
    (got,) = convert([trl([1], prompt=head)]).trajectories
    assert got.task == "q" and to_messages(got) == [*head, says("s0")]


labels = st.one_of(st.lists(st.booleans(), min_size=1, max_size=5), st.lists(st.floats(0, 1), min_size=1, max_size=5))


@given(st.lists(st.tuples(text, labels), max_size=4, unique_by=lambda x: x[0]), text)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_trl_round_trip(rows, completion):
    rows = [{"prompt": p, "completions": [completion + str(i) for i in range(len(v))], "labels": v} for p, v in rows]
    got = convert(rows)
    back, skipped = to_trl(got.trajectories, got.labels, soft=True)
    assert back == rows and skipped == {}


def steps(*texts):
    return tuple(Step(t) if isinstance(t, str) else Step(*t) for t in texts)


def label(trajectory, step, score, source="human:a"):
    return StepLabel(trajectory.id, step, score, source)


def test_to_trl_puts_an_observation_before_the_action_it_led_to():
    t = Trajectory("task", steps(("look", "a door"), ("open", ""), ("go", "won")))
    rows, skipped = to_trl([t], [label(t, 2, 0), label(t, 0, 1), label(t, 1, 1)])
    assert rows == [{"prompt": "task", "completions": ["look", "a door\nopen", "go"], "labels": [True, True, False]}]
    assert all(type(x) is bool for x in rows[0]["labels"])
    assert skipped == {"observation after the last step": 1}


def test_to_trl_ends_before_the_first_unlabelled_step():
    t, u = Trajectory("t", steps("a", "b", "c")), Trajectory("u", steps("a", "b"))
    rows, skipped = to_trl([t, u], [label(t, 0, 1), label(t, 2, 0), label(u, 1, 1), StepLabel("f" * 16, 0, 1, "x")])
    assert rows == [{"prompt": "t", "completions": ["a"], "labels": [True]}]
    assert skipped == {
        "step from the first unlabelled one on": 2,
        "trajectory without a label of its first step": 1,
        "label of another trajectory": 1,
    }
    assert to_trl([Trajectory("t", ())], []) == ([], {"trajectory without a label of its first step": 1})


def test_to_trl_never_chooses_between_labels():
    t = Trajectory("t", steps("a", "b"))
    same = [label(t, 0, 1), label(t, 0, 1, "human:b")]
    rows, skipped = to_trl([t], [*same, label(t, 1, 1), label(t, 1, 0, "human:b")])
    assert rows == [{"prompt": "t", "completions": ["a"], "labels": [True]}]
    assert skipped == {"step whose labels differ": 1, "step from the first unlabelled one on": 1}
    with pytest.raises(DataError, match=r"a label of step 2, but .* has 2 steps"):
        to_trl([t], [label(t, 2, 1)])


def test_to_trl_floors_no_soft_label():
    t = Trajectory("t", steps("a", "b"))
    own = [label(t, 0, 0.9), label(t, 1, 0.2)]
    with pytest.raises(UsageError, match=r"a score of 0.9 is no boolean: pass soft=True for floats, or a threshold"):
        to_trl([t], own)
    assert to_trl([t], own, soft=True)[0][0]["labels"] == [0.9, 0.2]
    assert to_trl([t], own, threshold=0.2)[0][0]["labels"] == [True, True]
    assert to_trl([t], own, threshold=0.5)[0][0]["labels"] == [True, False]
    for bad in ({"soft": True, "threshold": 0.5}, {"threshold": 2}):
        with pytest.raises(UsageError):
            to_trl([t], own, **bad)


def test_dataset_types_are_pinned():
    t = Trajectory("t", steps(("a", "o"), "b"), 1, {"seed": 1})
    u = Trajectory("u", ())
    data = to_dataset([t, u], [label(t, 0, 1), label(t, 1, 0)])
    assert data.features["labels"].feature["score"].dtype == "float64"
    assert data.features["labels"].feature["step"].dtype == "int64"
    assert data.features["outcome"].dtype == "float64"
    row = data[0]
    assert [(type(x["score"]), x["score"], x["step"]) for x in row["labels"]] == [(float, 1.0, 0), (float, 0.0, 1)]
    assert row["actions"] == ["a", "b"] and row["observations"] == ["o", ""] and json.loads(row["meta"]) == {"seed": 1}
    assert data[1]["labels"] == [] and data[1]["outcome"] is None
    empty = to_dataset([])
    assert len(empty) == 0 and empty.features == data.features
    # an integer mapped into the column stays the number it is
    mapped = data.map(lambda r: {"labels": [{**x, "score": -100} for x in r["labels"]]}, load_from_cache_file=False)
    assert [x["score"] for x in mapped[0]["labels"]] == [-100.0, -100.0]
    with pytest.raises(DataError, match="lone surrogate"):
        to_dataset([Trajectory("\ud800", ())])


# --- sources ------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_reader():
    assert set(KINDS) == {"auto", *_formats(None)}


def test_records_and_their_labels():
    t = Trajectory("t", steps("a"), 1)
    x = label(t, 0, 0.5)
    for source in ([t, x], [t.to_dict(), x.to_dict()]):
        got = convert(source)
        assert got == Converted((t,), (x,), 2, {}, "records")


def test_files(tmp_path):
    rows = [{"messages": [user("q"), says(f"a{i}")]} for i in range(3)]
    expected = convert(rows).trajectories
    lines = write(tmp_path / "a.jsonl", *rows)
    array, pretty = tmp_path / "b.json", tmp_path / "c.json"
    array.write_text(json.dumps(rows, indent=1))
    pretty.write_text(json.dumps(rows[0], indent=1))
    assert convert(lines).trajectories == convert(str(array)).trajectories == expected
    assert convert(pretty).trajectories == expected[:1]
    lines.write_bytes(b"\xef\xbb\xbf\n" + lines.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert convert(lines).trajectories == expected
    assert convert(row for row in rows).trajectories == expected


def test_errors_say_where(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [user("q"), says("a")]}, {"messages": [user("q"), tool("x")]})
    with pytest.raises(DataError) as error:
        convert(path)
    assert str(error.value).startswith(f"{path}:2: a tool reply before any assistant turn")
    array = tmp_path / "b.json"
    array.write_text(json.dumps([{"messages": [user("q"), says("a")]}, 7]))
    with pytest.raises(DataError, match=r"b.json: row 2: expected an object, got 7"):
        convert(array)
    for content, reason in (("[1, 2", "b.json: not JSON"), ("[]", None), ("", None)):
        array.write_text(content)
        if reason:
            with pytest.raises(DataError, match=reason):
                convert(array)
        else:
            assert convert(array) == Converted()
    with pytest.raises(DataError, match="no such file"):
        convert(tmp_path / "none")
    with pytest.raises(DataError, match="is a directory"):
        convert(tmp_path)
    for source in ({"messages": []}, 7):
        with pytest.raises(DataError, match="expected a path or rows"):
            convert(source)
    with pytest.raises(UsageError, match="kind must be one of auto, records, chat"):
        convert(path, kind="chats")


def test_bad_lines_are_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [user("q"), says("a")]})
    with path.open("ab") as file:
        file.write(b'{"messages": [NaN]}\n\xff\n[1]\n{"torn')
    with pytest.raises(DataError, match=r"a.jsonl:2: NaN is no JSON number"):
        convert(path)
    got = convert(path, skip_bad=True)
    assert (got.read, len(got.trajectories), sum(got.skipped.values())) == (5, 1, 4)
    assert got.summary().startswith("read 5 rows: 1 trajectory, 1 step, 0 labels; skipped 4: ")
    path.write_bytes(b'{"messages": []}\n{"torn')
    with pytest.raises(DataError, match="torn, as after a crash"):
        convert(path, kind="chat")


def test_auto_says_what_came_and_what_is_known():
    with pytest.raises(DataError) as error:
        convert([{"foo": 1, "bar": 2}])
    assert "row 1: no known format, got the keys ['bar', 'foo'], expected one of records, chat" in str(error.value)
    with pytest.raises(DataError, match="row 1: no known format"):
        convert([{"foo": 1}], skip_bad=True)
    with pytest.raises(DataError, match="could be trl or chat, pass kind="):
        convert([{**trl([1]), "messages": [user("q"), says("a")]}])
    rows = [{"messages": [user("q"), says("a")]}, trl([1])]
    with pytest.raises(DataError, match="row 2: a row of another kind: trl, but the rows before are chat"):
        convert(rows)
    assert convert(rows, skip_bad=True).skipped == {"a row of another kind": 1}


SAMPLES = [
    {"messages": [user("q"), says("a", call("f", "{}"), reasoning="r"), tool("o"), says([{"type": "text"}, "b"])],
     "reward": 1},
    {"messages": [{"role": "system", "content": "s"}, {**says(None), "function_call": {"name": "f", "arguments": "{}"}},
                  {"role": "function", "name": "f", "content": "r"}]},
    {"traj": [user("q"), says("a")], "reward": 0.5},
    {"prompt": [user("p")], "completions": ["a", "b"], "labels": [True, None]},
    {"question": "q", "solution": "a\n\nb", "outcome": 1},
    {"question": {"problem": "p"}, "label": {"steps": [
        {"completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}], "chosen_completion": 0,
         "human_completion": {"text": "h", "rating": None}}]}},
    {"input": "q Step 1: a ки\nStep 2: b ки", "label": "q Step 1: a +\nStep 2: b -", "task": "t"},
    {"id": "i-1", "problem": "p", "steps": ["a", "b"], "label": 1, "final_answer_correct": True},
    {"question": "q", "modified_process": ["a"], "original_process": ["b"], "error_steps": [1], "classification": "c"},
    {"question": "q", "reasoning_steps": [{"solution_prefix": "q", "mc_value": 1}, {"solution_prefix": "qa",
                                                                                    "mc_value": 0}]},
    {"question": "q", "reasoning_steps": {"text": "q", "mc_value": 1, "children": [{"text": "a", "mc_value": 0.5}]}},
    {"conversations": [user("q Step 1: a"), says("+")], "prompt": "q"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "loss": True}], "item_id": "x_1"},
    {"react": "Question: q\nThought 1: a\nAction 1: b\nObservation 1: c"},
    {"task": "t", "steps": [{"action": "a", "observation": "o"}], "outcome": 1, "meta": {}},
    {"trajectory_id": "x", "step": 0, "score": 1, "source": "s"},
]  # fmt: skip
ODD = [
    None,
    True,
    False,
    -1,
    0,
    2,
    0.5,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "a",
    "\ud800",
    "+",
    [],
    [None],
    [[]],
    {},
]
ODD += [
    {"a": 1},
    {"text": "x"},
    "user",
    "assistant",
    "tool",
    "q Step 1: ки",
    {1: 2},
    b"x",
    {"role": "user"},
    [user("q")],
]


def places(value, path=()):
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_odd_values_anywhere_make_data_errors_alone(sample):
    split = {"split": "line"} if "solution" in sample else {}
    kind = convert([sample], **split).kind
    for path in places(sample):
        for odd in ODD:
            row = replaced(sample, path, odd)
            for options in ({}, {"kind": kind, **split}):
                try:
                    got = convert([row], **options)
                except (DataError, UsageError):
                    continue
                for trajectory in got.trajectories:
                    to_messages(trajectory)
                assert got.trajectories or got.skipped or got.labels or row == [] or kind in ("prm800k", "math-aps")


def test_summary():
    assert Converted().summary() == "read 0 rows: 0 trajectories, 0 steps, 0 labels"
    many = Converted(skipped={f"reason {i}": i for i in range(1, 12)})
    assert (
        many.summary().endswith("reason 4 (4), and 3 more reasons") and "skipped 66: reason 11 (11)" in many.summary()
    )


def test_nothing_heavy_is_imported():
    code = (
        "import sys, prm.formats, prm.published; print([m for m in ('torch', 'datasets', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# --- real files ---------------------------------------------------------------------------------------------------


@real
def test_real_reasoning_joins_back():
    rows = [json.loads(line) for line in (DATA / "gsm8k/test.jsonl").read_text().splitlines()]
    got = convert(DATA / "gsm8k/test.jsonl", split="line")
    assert got.summary() == "read 1319 rows: 1319 trajectories, 6138 steps, 0 labels"
    for row, trajectory in zip(rows, got.trajectories, strict=True):
        assert "".join(s.action for s in trajectory.steps) == row["answer"] and trajectory.task == row["question"]
    path = DATA / "openr_samples/math_test500.jsonl"
    solutions = [json.loads(line)["solution"] for line in path.read_text().splitlines()]
    got = convert(path, split="blank-line")
    assert ["".join(s.action for s in t.steps) for t in got.trajectories] == solutions
