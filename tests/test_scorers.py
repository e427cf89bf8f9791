"""Scorers without a PRM: what a call is, what earns a bonus, and that no amount of calling earns more."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prm.errors import UsageError
from prm.records import Step, Trajectory
from rl.calls import find_calls
from rl.envs.multihop import MultiHop
from rl.scorers import arguments, evidence, load_scorers, right_tool

TOOLS = [
    {"type": "function", "function": {"name": "refund", "parameters": {
        "type": "object", "properties": {"order": {"type": "string"}, "amount": {"type": "number"}},
        "required": ["order", "amount"]}}},
    {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}},
                                      "required": ["query"]}},
]  # fmt: skip
SEARCH = MultiHop().tools()


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def told(*steps, task="Question: what is 1+1?", **meta):
    return Trajectory(task, tuple(Step(*s) if isinstance(s, tuple) else Step(s) for s in steps), meta=meta)


@pytest.mark.parametrize(
    ("action", "names", "problem"),
    [
        (call("refund", order="a", amount=3), ["refund"], ""),
        ("I think so.\n" + call("search", query="x"), ["search"], ""),
        ("search: capital of Peru", ["search"], ""),
        ("  SEARCH : x", ["search"], ""),
        (call("Refund", order="a", amount=3), ["refund"], ""),
        ('{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}', ["search"], ""),
        ("<think>search: x</think>done", [], ""),
        ("refund: 300", [], ""),
        ("nothing to do", [], ""),
        (call("refund", order="a", amount="3"), ["refund"], "amount must be number"),
        (call("refund", order="a", amount=True), ["refund"], "amount must be number"),
        (call("refund", order="a"), ["refund"], "amount is missing"),
        (call("refund", order="a", amount=1, note="x"), ["refund"], "no argument 'note'"),
        (call("delete"), ["delete"], "no tool 'delete'; there are refund, search"),
        ("<tool_call>{'name': 'search'}</tool_call>", [""], "not JSON"),
        ('<tool_call>{"name": "refund", "arguments": {"order": "a", "amount": 1, "amount": 900}}', [""], "twice"),
        ('<tool_call>{"name": "refund", "arguments": {"order": "a", "amount": NaN}}</tool_call>', [""], "NaN"),
        ('<tool_call>["search"]</tool_call>', [""], "an object with name"),
        ("<tool_call>" + "[" * 50_000, [""], "not JSON"),
        ("x" * 100_001, [""], "at most"),
    ],
)
def test_calls(action, names, problem):
    found = find_calls(action, TOOLS)
    assert [c.name for c in found] == names
    assert all(problem in c.problem if problem else not c.problem for c in found)


def test_a_call_in_the_reasoning_is_found():
    hidden = "<think>" + call("refund", order="a", amount=900) + "</think>ok"
    assert [c.name for c in find_calls(hidden, TOOLS)] == ["refund"]
    two = call("search", query="x") + call("refund", order="a", amount=900)
    assert [c.name for c in find_calls(two, TOOLS)] == ["search", "refund"]


@given(st.text(max_size=300))
def test_any_text_is_read(text):
    for c in find_calls(text, TOOLS) + find_calls("<tool_call>" + text):
        assert isinstance(c.name, str)
    assert all(0 <= s <= 1 for s in evidence([told(text, (text, text))])[0])


def test_arguments_pay_once_and_a_broken_call_costs_for_good():
    fine, broken = "search: a", "<tool_call>{"
    assert arguments([told("hm", fine, fine, "so 2")], tools=SEARCH) == [[0, 1, 1, 1]]
    assert arguments([told(fine, broken, fine, fine)], tools=SEARCH) == [[1, 0.5, 0.5, 0.5]]
    assert arguments([told("2"), told()], tools=SEARCH) == [[0], []]


def test_an_example_in_the_task_or_in_a_result_earns_nothing():
    shown = told(("2", call("search", query="x")), task="Use " + call("search", query="x"))
    for scorer in (arguments, right_tool):
        extra = {"expected": ["search"]} if scorer is right_tool else {}
        assert scorer([shown], tools=SEARCH, **extra) == [[0]]


def test_right_tools_in_their_order():
    wanted = ["search", "answer"]
    assert right_tool([told("answer: 2", "search: x", "answer: 2")], expected=wanted, tools=SEARCH) == [[0, 0.5, 1]]
    assert right_tool([told(*["search: x"] * 9)], expected=wanted, tools=SEARCH) == [[0.5] * 9]
    own = told("answer: 2", expected_tools=["answer"])
    assert right_tool([own], expected=wanted, tools=SEARCH) == [[1]]
    with pytest.raises(UsageError, match="which tools are expected"):
        right_tool([told("a")])


def test_evidence_is_what_was_read_before():
    t = told(("search: capital Lima", "The capital of Peru is Lima."), ("search: currency Peru", "It is the sol."),
             "answer: sol", task="Question: What is the currency of the country with the capital Lima?")  # fmt: skip
    assert evidence([t], tools=SEARCH) == [[0, 1, 1]]
    guess = Trajectory(t.task, (t.steps[0], Step("answer: euro")))
    assert evidence([guess], tools=SEARCH) == [[0, 0]]
    copied = Trajectory(t.task, (t.steps[0], Step("answer: the country with the capital")))
    assert evidence([copied], tools=SEARCH)[0][1] == 0
    itself = Trajectory(t.task, (Step("euro euro euro"), Step("answer: euro")))
    assert evidence([itself], tools=SEARCH) == [[0, 0]]


def test_scorers_by_name():
    found = load_scorers(["arguments", "right-tool", "tests.test_scorers:ones"], tools=SEARCH, expected=["answer"])
    t = told("answer: x")
    assert {name: score([t]) for name, score in found.items()} == {
        "arguments": [[1]], "right-tool": [[1]], "tests.test_scorers:ones": [[1.0]]}  # fmt: skip
    with pytest.raises(UsageError, match="unknown scorer 'grammar'; known: arguments, evidence, right-tool"):
        load_scorers(["grammar"])


def ones(trajectories):
    return [[1.0] * len(t.steps) for t in trajectories]
