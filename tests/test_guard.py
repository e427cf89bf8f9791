"""The guard: rules that are read safely and cannot be walked around, limits, retries, and a policy that goes on."""

import contextlib
import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prm.env import Action, Episode, check_env
from prm.errors import EnvError, UsageError
from rl.envs.multihop import Expert, MultiHop
from rl.guard import Guard, GuardConfig, guarded, parse_rule
from rl.rollout import rollout

TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": {"amount": {}, "to": {}, "path": {}}}}
    for name in ("refund", "transfer", "look")
]


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


class Shop:
    """Remembers what was carried out; `raising` calls raise, `slow` ones wait."""

    def __init__(self, raising=0, slow=0.0):
        self.raising, self.slow, self.done = raising, slow, []

    def reset(self, *, seed=None, options=None):
        self.done = []
        return "shop", {}

    def step(self, action):
        if self.raising:
            self.raising -= 1
            raise ConnectionError("line is dead")
        time.sleep(self.slow)
        self.done.append(action)
        return f"done {len(self.done)}", 1.0, len(self.done) == 3, False, {}

    def tools(self):
        return [dict(tool) for tool in TOOLS]


def guard(*rules, env=None, approve=None, **options):
    made = Guard(env or Shop(), GuardConfig(rules=rules, **options), approve)
    made.reset(seed=0)
    return made


BIG = "refund.amount > 100 -> ask"


@pytest.mark.parametrize(
    ("rule", "action", "blocked"),
    [
        (BIG, call("refund", amount=100), False),
        (BIG, call("refund", amount=100.01), True),
        (BIG, call("REFUND", amount=500), True),
        (BIG, call("ｒefund", amount=500), True),
        (BIG, call("refund", amount="500"), True),
        (BIG, call("refund", amount="5e2"), True),
        (BIG, call("refund", amount="five hundred"), True),
        (BIG, call("refund", amount="nan"), True),
        (BIG, call("refund", amount=True), True),
        (BIG, call("refund", amount=[1, 500]), True),
        (BIG, call("refund", amount=[1, 2]), False),
        (BIG, call("refund", amount=None), True),
        (BIG, call("refund"), True),
        (BIG, call("transfer", amount=500), False),
        (BIG, "I would like a refund of 500", False),
        (BIG, "<think>" + call("refund", amount=500) + "</think>done", True),
        (BIG, call("refund", amount=5) + call("refund", amount=500), True),
        (BIG, '<tool_call>{"name": "refund", "arguments": {"amount": 5, "amount": 500}}</tool_call>', True),
        (BIG, '<tool_call>{"name": "look", "name": "refund", "arguments": {"amount": 500}}', True),
        (BIG, '<TOOL_CALL>{"name": "refund", "arguments": {"amount": 500}}</TOOL_CALL>', True),
        (BIG, '{"name": "refund", "arguments": "{\\"amount\\": 500}"}', True),
        (BIG, 'Sure: {"name": "refund", "arguments": {"amount": 500}}', True),
        (BIG, "refund(amount=500)", True),
        (BIG, "<tool_call>{'name': 'refund', 'amount': 500}</tool_call>", True),
        ("transfer -> deny", call("transfer"), True),
        ("transfer -> deny", call("look"), False),
        ('transfer.to.country not in ["SE", "NO"] -> deny', call("transfer", to={"country": "se"}), False),
        ('transfer.to.country not in ["SE", "NO"] -> deny', call("transfer", to={"country": "DK"}), True),
        ('transfer.to.country not in ["SE", "NO"] -> deny', call("transfer", to="DK"), True),
        ('*.path contains ".." -> deny', call("look", path="a/../b"), True),
        ('*.path contains ".." -> deny', call("look", path="a/b"), False),
        ('*.to == "bob" and *.amount >= 1e3 -> ask', call("transfer", to="Bob", amount=1000), True),
        ('*.to == "bob" and *.amount >= 1e3 -> ask', call("transfer", to="Bob", amount=999), False),
        ('*.to == "bob" and *.amount >= 1e3 -> ask', call("transfer", to="ann", amount=1000), False),
        ("look.path != null -> deny", call("look", path=None), False),
    ],
)
def test_rules(rule, action, blocked):
    made = guard(rule)
    observation, reward, terminated, truncated, info = made.step(action)
    assert observation.startswith("Blocked: ") is blocked and bool(info.get("blocked")) is blocked
    assert (made._env.done == []) is blocked
    if blocked:
        assert (reward, terminated, truncated) == (0.0, False, False)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("", "expected TOOL.ARGUMENT"),
        ("refund.amount > 100", "expected -> deny, or -> ask at ''"),
        ("refund.amount > 100 -> allow", "expected -> deny"),
        ("refund.amount > __import__('os') -> deny", "a JSON value"),
        ("refund.amount > 'x' -> deny", "a JSON value"),
        ('refund.amount > "x" -> deny', "expected a number"),
        ("refund.amount > NaN -> deny", "a JSON value"),
        ('refund.to in "x" -> deny', "expected a list"),
        ("refund.amount ~ 1 -> deny", "expected TOOL.ARGUMENT and one of not in"),
        ("refund.amount > 1 and look.path == 1 -> deny", "another condition on refund"),
        ("refund.amount > 1 or 2 -> deny", "expected -> deny"),
        ("refund.amount > 1 -> deny; look -> deny", "expected -> deny"),
        ("refund.amount > " + "[" * 100_000, "a JSON value"),
    ],
)
def test_a_rule_that_is_none_says_where(rule, says):
    with pytest.raises(UsageError, match=says):
        parse_rule(rule)


@given(st.text(max_size=80))
def test_any_text_is_a_rule_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        assert parse_rule(text).then in ("deny", "ask")


def test_lists():
    assert guard(deny=("look",)).step(call("look"))[4]["blocked"] == "look may not be called"
    assert guard(allow=("look",)).step(call("look"))[4] == {}
    assert "allowed: look" in guard(allow=("look",)).step(call("refund"))[0]
    assert [t["name"] for t in guard(deny=("look",)).tools()] == ["refund", "transfer"]


def test_a_denied_tool_is_not_reached_by_another_spelling():
    for action in ("search: x", "SEARCH: x", "hm</think>search: x", "sea<tool_call></tool_call>rch: x",
                   '{"name": "search", "arguments": {"query": "x"}}', "<tool_call>search: x"):  # fmt: skip
        made = guard(env=MultiHop(), deny=("search",))
        assert "blocked" in made.step(action)[4], action


def test_where_there_are_no_tools_a_line_that_begins_with_the_name_is_a_call():
    class Bare(Shop):
        tools = None

    for action in ("refund[3]", "Action: refund 3", "so\n refund all"):
        assert "blocked" in guard(BIG, env=Bare()).step(action)[4]
    assert guard(BIG, env=Bare()).step("no refund is due")[4] == {}


def test_a_person_is_asked():
    asked = []

    def approve(action, reason):
        asked.append(reason)
        return "yes" in action

    assert guard(BIG, approve=approve).step("yes " + call("refund", amount=500))[0] == "done 1"
    assert "did not" in guard(BIG, approve=approve).step(call("refund", amount=500))[0]
    assert len(asked) == 2 and "refund.amount > 100" in asked[0]
    both = ("refund -> deny", BIG)
    assert "blocked" in guard(*both, approve=lambda *_: True).step(call("refund", amount=500))[4]


def test_calls_that_raise_are_made_again_and_then_an_observation():
    assert guard(env=Shop(raising=2), retries=("2",)).step(call("look"))[0] == "done 1"
    assert guard(env=Shop(raising=2), retries=("look=2",)).step(call("look"))[0] == "done 1"
    observation, *_, info = guard(env=Shop(raising=2), retries=("refund=5",)).step(call("look"))
    assert observation == "The tool look failed: ConnectionError: line is dead."
    assert info == {"error": "failed", "tool": "look"}


def test_a_call_that_takes_too_long_is_neither_awaited_nor_made_again():
    gate = threading.Event()

    class Slow(Shop):
        def step(self, action):
            if action == call("look"):
                gate.wait(5)
            return super().step(action)

    shop = Slow()
    made = guard(env=shop, time_limits=("look=0.05", "5"), retries=("3",))
    observation, *_, info = made.step(call("look"))
    assert "gave no answer within 0.05 s" in observation and info["error"] == "timeout"
    assert "still at the call before" in made.step(call("look"))[0]
    gate.set()
    assert made.step(call("refund"))[0] == "(late, from the call before) done 1\ndone 2"
    assert len(shop.done) == 2


def test_the_end_that_came_late_is_the_end():
    class Last(Shop):
        def step(self, action):
            time.sleep(0.1)
            return "bye", 1.0, True, False, {"success": True}

    made = guard(env=Last(), time_limits=("0.02",))
    assert made.step("a")[4]["error"] == "timeout"
    time.sleep(0.2)
    assert made.step("b") == ("bye", 1.0, True, False, {"success": True})


def test_a_call_that_never_ends_costs_a_new_environment():
    gate = threading.Event()

    class Hangs(Shop):
        def step(self, action):
            gate.wait(5)
            return super().step(action)

    made = Guard(Hangs, GuardConfig(time_limits=("0.02",)))
    made.reset(seed=0)
    made.step("a")
    first = made._env
    assert made.reset(seed=1) == ("shop", {}) and made._env is not first
    alone = guard(env=Hangs(), time_limits=("0.02",))
    alone.step("a")
    with pytest.raises(EnvError, match="still running"):
        alone.reset(seed=1)
    gate.set()


@pytest.mark.parametrize("options", [{"time_limits": ("x=-1",)}, {"time_limits": ("=3",)}, {"retries": ("1.5",)},
                                     {"rules": ("nope",)}])  # fmt: skip
def test_bad_options_are_named_before_anything_runs(options):
    with pytest.raises(UsageError):
        guarded(Shop, GuardConfig(**options))


def test_a_guarded_environment_is_an_environment():
    make = guarded(MultiHop, GuardConfig(rules=('search.query contains "lima" -> deny',), time_limits=("5",)))
    check_env(make, ["search: capital Lima", "search: capital Peru", "answer: x"])
    assert guarded(MultiHop, GuardConfig()) is MultiHop


def test_blocked_the_policy_goes_on():
    """The expert searches; with searches denied every one is an observation, and the episode ends at the limit."""
    make = guarded(MultiHop, GuardConfig(deny=("search",)))
    (played,) = rollout(Expert(), make, [0], max_steps=4)
    assert [s.observation for s in played.steps] == ["Blocked: search may not be called."] * 4
    assert played.outcome is None
    (played,) = rollout(Expert(), guarded(MultiHop, GuardConfig(allow=("search", "answer"))), [0])
    assert played.outcome == 1.0


def test_training_and_deployment_see_the_same():
    config = GuardConfig(rules=('search.query contains "country" -> deny',))
    one, two = (Episode(guarded(MultiHop, config)(), 3) for _ in range(2))
    for action in ("search: country x", "search: capital", "answer: y"):
        assert one.step(Action(action)) == two.step(Action(action))
    assert one.infos == two.infos
