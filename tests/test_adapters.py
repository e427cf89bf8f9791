"""Other people's environments behind our protocol, tested against small doubles of their shapes."""

import asyncio
import inspect
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest

from prm.env import Action, Episode, check_env
from prm.errors import EnvError, UsageError
from rl.adapters import mcp, openenv, simple, to_trl, trl, verifiers
from rl.envs.multihop import MultiHop


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def play(make, seed, *actions):
    episode = Episode(make(), seed)
    for action in actions:
        episode.step(Action(action))
    return episode


class Counting:
    """reset() -> str, step(action) -> (str, float, bool), get_tools()."""

    def reset(self, seed=0):
        self.left = 2 + seed % 2
        return f"count {self.left}"

    def step(self, action):
        self.left -= 1
        return f"left {self.left}", float(self.left == 0), self.left == 0

    def get_tools(self):
        return [{"name": "down", "parameters": {}}]


class Seedless(Counting):
    def reset(self):
        return Counting.reset(self)


class Made(Counting):
    def __init__(self, seed=0):
        self.seed = seed

    def reset(self):
        return Counting.reset(self, self.seed)


@pytest.mark.parametrize("kind", [Counting, Made])
def test_simple(kind):
    check_env(simple(kind), ["a", "b"])
    episode = play(simple(kind), 1, "a", "b", "c")
    assert episode.history.task == "count 3" and episode.terminated and episode.outcome == 1.0
    assert episode.history.tools[0]["name"] == "down"


def test_an_environment_without_a_seed_says_so():
    with pytest.warns(UserWarning, match="Seedless takes no seed"):
        play(simple(Seedless), 5, "a")


@pytest.mark.parametrize(
    ("given", "says"), [(("x", 1.0), "expected \\(str, float, bool\\)"), ((3, 1.0, True), "expected text")]
)
def test_simple_of_another_shape_is_named(given, says):
    kind = type("Odd", (Counting,), {"step": lambda self, action: given})
    with pytest.raises(EnvError, match=says):
        play(simple(kind), 0, "a")


class Client:
    """An OpenEnv client."""

    def reset(self, seed=None):
        self.total = seed
        return SimpleNamespace(observation=SimpleNamespace(text=f"start {seed}"), reward=None, done=False)

    def step(self, action):
        self.total += action.amount
        done = self.total >= 10
        return SimpleNamespace(observation=SimpleNamespace(text=f"{self.total}"), reward=float(done), done=done)


def test_openenv():
    make = openenv(Client, action=lambda s: SimpleNamespace(amount=int(s)), text=lambda o: o.text)
    check_env(make, ["1", "x", "2"])
    episode = play(make, 4, "1", "five", "9")
    assert [s.observation for s in episode.history.steps][::2] == ["5", "14"]
    assert episode.history.steps[1].observation.startswith("Invalid action: invalid literal")
    assert episode.infos[1] == {"error": "invalid"} and episode.outcome == 1.0


class Notes:
    """A TRL environment."""

    def reset(self, **row):
        self.kept = {}
        return f" Remember {row['word']}."

    def write(self, key: str, value: str = "yes") -> str:
        """Keep a note.

        Args:
            key: name of it
            value: what to keep
        """
        self.kept[key] = value
        return "kept"

    async def read(self, key: str) -> str:
        """Read a note."""
        await asyncio.sleep(0)
        return self.kept[key]

    def get_reward(self) -> float:
        return float("a" in self.kept)


ROWS = [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi."}], "word": w} for w in "xy"]


def test_trl():
    make = trl(Notes, ROWS)
    check_env(make, [call("write", key="a"), call("read", key="a"), "done"])
    episode = play(
        make, 1, call("write", key="a"), call("read", key="a") + call("read", key="b"), call("write"), "done"
    )
    assert episode.history.task == "Hi. Remember y."
    assert [s.observation for s in episode.history.steps] == [
        "kept", "yes\nThe tool read failed: 'b'", "Invalid call: key is missing", ""]  # fmt: skip
    assert [info.get("error") for info in episode.infos] == [None, "failed", "invalid", None]
    assert episode.outcome == 1.0
    names = {tool["name"]: tool["parameters"]["required"] for tool in episode.history.tools}
    assert names == {"read": ["key"], "write": ["key"]}


def test_our_environment_as_trls_factory():
    environment = to_trl(MultiHop)()
    task = environment.reset(seed=3, prompt="ignored")
    assert task == MultiHop().reset(seed=3)[0]
    signature = inspect.signature(environment.search)
    assert list(signature.parameters) == ["query"] and signature.parameters["query"].annotation is str
    assert "Args:" in environment.search.__doc__ and "query" in environment.search.__doc__
    assert environment.search(query="capital Lima").startswith("The capital of Peru")
    assert environment.answer(text="x") == "Wrong." and environment.get_reward() == pytest.approx(-0.6)
    assert environment.search(query="x") == "The episode is over."
    again = play(trl(to_trl(MultiHop), [{"prompt": "", "seed": 3}]), 0, call("search", query="capital Lima"))
    assert again.history.steps[0].observation.startswith("The capital of Peru")
    with pytest.raises(UsageError, match="without tools"):
        to_trl(Client)


def test_trls_own_reader_takes_the_methods():
    from transformers.utils import get_json_schema

    schema = get_json_schema(to_trl(MultiHop)().search)
    assert schema["function"]["parameters"]["required"] == ["query"]


class Guess:
    """A multi-turn environment as verifiers has them."""

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state):
        state["tries"] += 1
        return [{"role": "user", "content": f"no, try {state['tries']}"}]

    async def is_completed(self, state):
        return bool(state["completion"]) and state["completion"][-1]["content"] == state["answer"]


def test_verifiers():
    rows = [{"prompt": [{"role": "user", "content": "guess"}], "answer": a} for a in ("7", "8")]
    env = Guess()
    make = verifiers(env, rows, reward=lambda state: 1 / (1 + state["tries"]))
    check_env(make, ["1", "2", "8"])
    one, two = Episode(make(), 0), Episode(make(), 1)
    for action in ("1", "7"):
        one.step(Action(action))
        two.step(Action(action))
    assert one.terminated and one.rewards == [0.0, 0.5] and not two.done, "episodes of one object share nothing"
    assert two.history.steps[-1].observation == "no, try 2"
    with pytest.raises(EnvError, match="holds no reward"):
        play(verifiers(env, rows), 0, "7")


SERVER = textwrap.dedent("""
    import json, sys
    notes = {}
    for line in sys.stdin:
        m = json.loads(line)
        if "id" not in m:
            continue
        p = m.get("params", {})
        if m["method"] == "initialize":
            r = {"protocolVersion": p["protocolVersion"], "capabilities": {}, "serverInfo": {}}
        elif m["method"] == "tools/list":
            schema = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}
            r = {"tools": [{"name": n, "inputSchema": schema} for n in ("put", "get", "die")]}
        elif p["name"] == "die":
            sys.exit()
        elif p["name"] == "put":
            notes[p["arguments"]["k"]] = 1
            r = {"content": [{"type": "text", "text": "ok"}, {"type": "image", "data": ""}]}
        else:
            there = p["arguments"]["k"] in notes
            r = {"content": [{"type": "text", "text": str(there)}], "isError": not there}
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
        print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
""")


def test_mcp():
    make = mcp([sys.executable, "-c", SERVER], ["keep a", "keep b"], lambda task, answer: float(answer == task[-1]))
    first, second = Episode(make(), 0), Episode(make(), 1)
    assert first.history.task == "keep a" and [t["name"] for t in first.history.tools] == ["put", "get", "die"]
    assert first.step(Action(call("put", k="a"))) == "ok" and first.step(Action(call("get", k="a"))) == "True"
    assert second.step(Action(call("get", k="a"))) == "The tool get failed: False", "each episode has its own server"
    assert second.step(Action(call("put"))) == "Invalid call: k is missing"
    first.step(Action("a"))
    assert first.outcome == 1.0
    with pytest.raises(EnvError, match="ended before it answered"):
        second.step(Action(call("die", k="")))
    for episode in (first, second):
        episode.env.close()
    with pytest.raises(EnvError, match="no-such-server"):
        Episode(mcp(["no-such-server"], ["t"], lambda *_: 0.0)(), 0)


def test_there_must_be_a_task():
    for make in (lambda: trl(Notes, []), lambda: verifiers(Guess(), []), lambda: mcp(["x"], [], lambda *_: 0.0)):
        with pytest.raises(UsageError):
            make()
