import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm import DataError, Step, Trajectory, append_jsonl, convert, read_jsonl
from prm.chat import to_messages

text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)


def call(name, arguments, ident="c1"):
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def says(content, *calls, **more):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def user(content):
    return {"role": "user", "content": content}


def tool(content, ident="c1", **more):
    return {"role": "tool", "tool_call_id": ident, "content": content, **more}


def chat(*messages, **row):
    return convert([{"messages": list(messages), **row}])


def one(*messages, **row):
    (trajectory,) = chat(*messages, **row).trajectories
    return trajectory


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_step_is_an_assistant_turn():
    messages = [
        {"role": "system", "content": "Be brief."},
        user("What is 2+2?"),
        says(None, call("add", '{"a":2,"b":2}')),
        tool("4"),
        says("It is 4."),
    ]
    got = one(*messages, tools=[{"type": "function"}], success=True, seed=3)
    assert got.task == "What is 2+2?"
    assert got.steps == (
        Step('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>', "4"),
        Step("It is 4."),
    )
    assert got.outcome == 1.0
    assert got.meta["tools"] == [{"type": "function"}] and got.meta["seed"] == 3
    assert to_messages(got) == messages


def test_content_reasoning_and_calls_stand_in_one_action():
    got = one(user("q"), says("Let me look.", call("f", "{}"), reasoning_content="hm\n"), tool("r"))
    assert (
        got.steps[0].action
        == '<think>hm\n</think>Let me look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parallel_calls_are_matched_by_id_in_the_order_of_the_calls(order):
    replies = [tool("sunny", "a"), tool("rainy", "b")]
    calls = [call("weather", '{"city": "A"}', "a"), call("weather", '{"city": "B"}', "b")]
    messages = [user("q"), says("", *calls), *(replies[i] for i in order), says("done")]
    got = one(*messages)
    assert got.steps[0].observation == (
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"
    )
    assert to_messages(got) == messages


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ([says("", call("f", "{}")), tool("x", "other")], "a tool reply to an unknown call: 'other'"),
        ([says("", call("f", "{}")), user("x")], "a tool call without a reply: 'c1'"),
        ([says("", call("f", "{}")), says("x")], "a tool call without a reply: 'c1'"),
        ([says("", call("f", "{}"), call("g", "{}", "c2")), tool("x", "c2")], "a tool call without a reply: 'c1'"),
        ([says("", call("f", "{}")), tool("x"), tool("y")], "two replies to one call: 'c1'"),
        ([says("", call("f", "{}"), call("g", "{}")), tool("x"), tool("y")], "two calls of one turn with the same id"),
        ([says("hello"), tool("x")], "a tool reply to an unknown call"),
        ([says("", call("f", "{}", None), call("g", "{}", None)), {"role": "tool", "content": "x"}], "must be as many"),
        (
            [says("", call("f", "{}", None)), {"role": "tool", "content": "x", "name": "g"}],
            "a tool reply to another tool",
        ),
        ([says("", {"id": "c1"})], "a tool call must be an object with a function"),
        ([says("", call("f", "{}", ["c1"])), tool("x")], "a tool call's id must be text"),
        ([says(7)], "content must be text, null or a list of parts"),
        ([says(True)], "content must be text, null or a list of parts"),
        ([{"role": "wizard", "content": "x"}], "unknown role: message 1 has 'wizard'"),
        (["x"], "a message must be an object: message 1 is 'x'"),
    ],
)
def test_what_does_not_fit_is_an_error_and_never_shifted(turn, reason):
    with pytest.raises(DataError, match="row 1: ") as error:
        chat(user("q"), *turn)
    assert reason in str(error.value)
    got = convert([{"messages": [user("q"), *turn]}, {"messages": [user("q"), says("a")]}], skip_bad=True)
    assert len(got.trajectories) == 1 and sum(got.skipped.values()) == 1 and got.read == 2


def test_ids_may_be_missing_where_order_says_it_all():
    calls = [{"function": {"name": n, "arguments": {}}} for n in "fg"]
    replies = [{"role": "tool", "content": n, "name": n} for n in "fg"]
    assert one(user("q"), says(None, *calls), *replies).steps[0].observation.split("\n")[1::3] == ["f", "g"]
    assert one(user("q"), says(None, calls[0]), tool("x", "made up")).steps[0].observation == "x"
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [user("q"), legacy, {"role": "function", "name": "f", "content": "r"}]
    got = one(*messages)
    assert got.steps == (Step('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "r"),)
    assert to_messages(got) == messages


@pytest.mark.parametrize(
    "raw", ['{"a": 1,}', "", "a b", '{"a": 1, "a": 2}', "NaN", '{"x": 1e999}', "9" * 5000, "[" * 100_000]
)
def test_faulty_arguments_stay_as_they_came(raw):
    messages = [user("q"), says(None, call("f", raw)), tool("error")]
    got = one(*messages)
    assert got.steps[0].action == f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>'
    assert to_messages(got) == messages


def test_no_assistant_turn_is_counted_and_a_last_call_may_stand_alone():
    got = convert([{"messages": [user("q")]}, {"messages": [user("q"), says("", call("f", "{}"))]}])
    assert got.skipped == {"no assistant turn": 1, "last tool call without a reply (its step is kept)": 1}
    assert [len(t.steps) for t in got.trajectories] == [1] and got.trajectories[0].steps[0].observation == ""
    with pytest.raises(DataError, match="a tool reply before any assistant turn: message 1"):
        chat(user("q"), tool("x"), says("a"))


def test_users_in_the_middle_and_at_the_end_are_observations():
    messages = [user("a"), user("b"), says("1"), user("c"), says("2"), says("3"), user("bye")]
    got = one(*messages)
    assert got.task == "a\n\nb"
    assert got.steps == (Step("1", "c"), Step("2"), Step("3", "bye"))
    assert to_messages(got) == messages
    mixed = [user("q"), says("", call("f", "{}")), user("and?"), tool("r"), says("x")]
    assert one(*mixed).steps[0].observation == "<tool_response>\nr\n</tool_response>\nand?"
    assert to_messages(one(*mixed)) == mixed


def test_a_task_without_a_user_is_the_system_prompt():
    rules = {"role": "developer", "content": "Sort the list."}
    assert one(rules, says("ok")).task == "Sort the list."
    greeting = [says("Hello, how can I help?"), user("q"), says("a")]
    assert one(*greeting).task == "" and to_messages(one(*greeting)) == greeting
    assert to_messages(one(rules, *greeting)) == [rules, *greeting]


def test_parts_and_images():
    parts = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": "x"}}, "here"]
    messages = [user(parts), {"role": "assistant", "content": None, "refusal": "No."}]
    got = chat(*messages)
    assert got.trajectories[0].task == "Look: here" and got.trajectories[0].steps[0].action == "No."
    assert got.skipped == {"content part that is not text: 'image_url'": 1}
    assert to_messages(got.trajectories[0]) == messages


def test_null_fields_as_from_a_table_are_absent():
    empty = {"tool_calls": None, "tool_call_id": None, "name": None}
    got = one({**user("q"), **empty}, {**says("a"), **empty})
    assert to_messages(got) == [user("q"), says("a")]


@pytest.mark.parametrize(
    ("row", "outcome"),
    [({"reward": 1}, 1.0), ({"reward": 0.25}, 0.25), ({"success": False, "reward": 1}, 0.0), ({"outcome": "1"}, None),
     ({"reward": 7.5}, None), ({"reward": float("inf")}, None), ({}, None), ({"outcome": None, "reward": 0}, 0.0)],
)  # fmt: skip
def test_outcome(row, outcome):
    if row.get("reward") != float("inf"):
        got = one(user("q"), says("a"), **row)
        assert got.outcome == outcome and type(got.outcome) in (float, type(None))
        assert all(got.meta[key] == value for key, value in row.items())
    else:
        with pytest.raises(DataError, match="row 1: meta must hold JSON values only"):
            one(user("q"), says("a"), **row)


def test_messages_follow_the_steps_and_not_what_was_stored():
    got = one(user("q"), says(None, call("f", "{}")), tool("r"), says("end"))
    prefix = Trajectory(got.task, got.steps[:1], meta=got.meta)
    assert to_messages(prefix) == [user("q"), says(None, call("f", "{}")), tool("r")]
    branch = Trajectory(got.task, (Step("other", "seen"), Step("more"), Step("x", "y")), meta=got.meta)
    assert to_messages(branch) == [
        user("q"), says("other"), user("seen"), says("more"), says("x"), user("y")
    ]  # fmt: skip
    moved = Trajectory("another task", got.steps, meta=got.meta)
    assert to_messages(moved)[0] == user("another task")
    to_messages(got)[1]["tool_calls"].clear()
    assert to_messages(got)[1]["tool_calls"]


@pytest.mark.parametrize(
    "stored",
    [1, [], {"head": 1, "turns": 2}, {"head": [{}], "turns": [[{}]]}, {"head": ["x"], "turns": [["x"], [3]]},
     {"head": [{"role": "user"}], "turns": [[{"role": "assistant", "tool_calls": [{"id": {}}]}]]},
     {"head": [], "turns": [[{"role": "system", "content": True}]]}, {"turns": [[]]}],
)  # fmt: skip
def test_stored_messages_of_another_shape_are_passed_over(stored):
    got = to_messages(Trajectory("q", (Step("a", "o"),), meta={"converted": stored}))
    assert got == [user("q"), says("a"), user("o")]


def test_a_key_of_the_row_is_not_overwritten():
    got = one(user("q"), says("a"), converted="mine")
    assert got.meta["converted"]["converted"] == "mine" and to_messages(got) == [user("q"), says("a")]


HOSTILE = [
    "\x00",
    "\ud800",
    "a\r\nb",
    "a\u2028b",
    "\ufeff",
    "<tool_call>\n{}\n</tool_call>",
    "x" * 1_000_000,
    "</think>",
    " ",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_kept(tmp_path, text):
    messages = [user(text), says(text, call(text, json.dumps({text: text}))), tool(text), says(text), user(text)]
    path = write(tmp_path / "in.jsonl", {"messages": messages})
    (got,) = convert(path).trajectories
    assert got.task == text and got.steps[1] == Step(text, text) and got.steps[0].observation == text
    assert to_messages(got) == messages
    append_jsonl(tmp_path / "out.jsonl", got)
    assert to_messages(read_jsonl(tmp_path / "out.jsonl", Trajectory)[0]) == messages


calls = st.lists(st.tuples(text, st.one_of(st.dictionaries(text, text, max_size=2).map(json.dumps), text)), max_size=3)
turns = st.lists(
    st.tuples(st.one_of(st.none(), text), calls, st.lists(text, max_size=2), st.randoms()), min_size=1, max_size=4
)


@given(st.lists(st.tuples(st.sampled_from(["system", "developer", "user"]), text), max_size=3), turns)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_chat_round_trip(head, turns):
    messages = [{"role": role, "content": content} for role, content in head]
    for content, made, said, random in turns:
        own = [call(name, arguments, f"c{i}") for i, (name, arguments) in enumerate(made)]
        replies = [tool(f"r{i}", f"c{i}") for i in range(len(own))]
        random.shuffle(replies)
        messages += [says(content, *own), *replies, *map(user, said)]
    got = one(*messages)
    assert to_messages(got) == messages
    assert len(got.steps) == len(turns)
    assert to_messages(Trajectory.from_dict(json.loads(json.dumps(got.to_dict())))) == messages
