"""The environment protocol: replay, honest errors, isolation and seeds (also as a check that users can run)."""

import random
import sys

import pytest

from prm.env import Action, Env, EnvConfig, Episode, History, check_env, load_attribute, replay
from prm.errors import EnvError, ReplayError, UsageError
from prm.records import Step, Trajectory


class Notes:
    """write K V / read K; the task names a letter drawn by the seed."""

    def reset(self, *, seed=None, options=None):
        self.notes, self.count = {}, 0
        return f"letter {random.Random(seed).choice('abcdef')}", {}

    def step(self, action):
        self.count += 1
        verb, _, rest = action.partition(" ")
        if verb == "write":
            key, _, value = rest.partition(" ")
            self.notes[key] = value
            return "written", 0.0, False, False, {}
        if verb == "read":
            return self.notes.get(rest, "nothing"), 0.0, False, False, {}
        if verb == "stop":
            return "bye", 1.0, True, False, {"success": rest == "well"}
        raise RuntimeError("no such verb")


ACTIONS = ["write k v", "read k", "read z", "stop well"]


def play(env, actions, seed=3):
    episode = Episode(env, seed)
    for action in actions:
        episode.step(Action(action))
    return episode


def test_an_episode_becomes_a_record_that_replays():
    record = play(Notes(), ACTIONS).trajectory(policy="me")
    assert record.outcome == 1.0 and record.meta["seed"] == 3 and record.meta["policy"] == "me"
    assert [s.observation for s in record.steps] == ["written", "v", "nothing", "bye"]
    for cut in range(5):
        again = replay(Notes(), record, cut)
        assert again.history.steps == record.steps[:cut]
    assert replay(Notes(), record).done


def test_a_replay_that_differs_names_the_step():
    record = play(Notes(), ACTIONS).trajectory()
    forged = Trajectory(record.task, [record.steps[0], Step("read k", "other"), *record.steps[2:]], meta=record.meta)
    with pytest.raises(ReplayError, match="step 1: observed 'v', recorded was 'other'"):
        replay(Notes(), forged)
    with pytest.raises(ReplayError, match="the task is"):
        replay(Notes(), Trajectory("letter z", record.steps, meta=record.meta))
    longer = Trajectory(record.task, [*record.steps, Step("read k", "v")], meta=record.meta)
    with pytest.raises(ReplayError, match="step 4: the episode was already over"):
        replay(Notes(), longer)


def test_an_environment_that_raises_or_breaks_the_protocol_is_named():
    with pytest.raises(EnvError, match="environment Notes, seed 3, step 1: raised RuntimeError: no such verb"):
        play(Notes(), ["read k", "jump"])

    class Old(Notes):
        def step(self, action):
            return "text", 0.0, True

    with pytest.raises(EnvError, match=r"step 0: expected \(str, float, terminated, truncated, dict\)"):
        play(Old(), ["read k"])


def test_check_env_passes_a_good_one():
    check_env(Notes, ACTIONS)
    assert isinstance(Notes(), Env)


class SharedNotes(Notes):
    notes: dict = {}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return f"letter {random.Random(seed).choice('abcdef')}", {}


class Forgetful(Notes):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=random.SystemRandom().random())


class GlobalSeed(Notes):
    def reset(self, *, seed=None, options=None):
        random.seed(seed)
        return super().reset(seed=seed)


class Leaky(Notes):
    """Hands out its own tool list."""

    kept = ({"name": "read"}, {"name": "write"})

    def tools(self):
        return self.kept


class Unclean(Notes):
    def reset(self, *, seed=None, options=None):
        kept = getattr(self, "notes", {})
        task = super().reset(seed=seed)
        self.notes = kept
        return task


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (SharedNotes, "same seed gave another episode|class attribute changed"),
        (Forgetful, "same seed gave another episode"),
        (GlobalSeed, "global random generator"),
        (Leaky, "same seed gave another episode on the same object"),
        (Unclean, "same seed gave another episode on the same object"),
    ],
)
def test_check_env_catches(broken, says):
    actions = ["read k", "write k v", "read k", "stop well"]
    with pytest.raises(EnvError, match=says):
        check_env(broken, actions)


def test_histories_grow_without_changing():
    start = History("task")
    later = start.then(Action("a"), "b")
    assert start.steps == () and later.steps == (Step("a", "b"),)
    assert History.of(Trajectory("task", [Step("a", "b"), Step("c")]), 1) == later


@pytest.mark.parametrize(
    ("name", "says"),
    [("nomodule", "expected module:attribute"), ("no.such:X", "cannot import"), ("prm.env:Nothing", "no attribute")],
)
def test_names_that_lead_nowhere(name, says):
    with pytest.raises(UsageError, match=says):
        load_attribute(name)


def test_env_args(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class E:\n    def __init__(self, size=1):\n        self.size = size\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert EnvConfig("mine:E", '{"size": 3}').factory()().size == 3
    with pytest.raises(UsageError, match="--env-args"):
        EnvConfig("mine:E", "{size}").factory()
    with pytest.raises(EnvError, match="cannot be made: TypeError"):
        EnvConfig("mine:E", '{"colour": 3}').factory()


class Odd:
    """Breaks the protocol in one place."""

    what, value = "", None

    def reset(self, *, seed=None, options=None):
        return "task", {}

    def step(self, action):
        own = {"reward": 0.0, "info": {"success": 1.0}} | {self.what: self.value}
        return "", own["reward"], True, False, {"success": own["success"]} if "success" in own else own["info"]

    def tools(self):
        return self.value if self.what == "tools" else []


@pytest.mark.parametrize(
    ("what", "value", "says"),
    [
        ("reward", None, "step 0: expected reward as a finite number, got None"),
        ("reward", "1", "step 0: expected reward as a finite number, got '1'"),
        ("reward", float("nan"), "step 0: expected reward as a finite number, got nan"),
        ("info", None, "step 0: expected info as a dict, got None"),
        ("success", "yes", r"step 0: expected success as a number in \[0, 1\], got 'yes'"),
        ("success", 2, r"step 0: expected success as a number in \[0, 1\], got 2"),
        ("success", float("nan"), r"step 0: expected success as a number in \[0, 1\], got nan"),
        ("tools", None, "tools: expected a list of objects, got None"),
        ("tools", 5, "tools: expected a list of objects, got 5"),
        ("tools", ["x"], r"tools: expected a list of objects, got \['x'\]"),
    ],
)
def test_what_breaks_the_protocol_is_named(what, value, says):
    own = type("Own", (Odd,), {"what": what, "value": value})()
    with pytest.raises(EnvError, match="environment Own, seed 7, " + says):
        Episode(own, 7).step(Action("go"))


@pytest.mark.parametrize("text", ["def f(:", "raise ValueError('no')", "1 / 0", "import sys; sys.exit(3)"])
def test_a_module_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, text):
    (tmp_path / "broken_module_of_a_user.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot import broken_module_of_a_user: it raised"):
        load_attribute("broken_module_of_a_user:Env")
