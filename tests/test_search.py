"""Search with a PRM: what is found is the best of what was drawn, whatever shares the batch, and read once."""

import random

import pytest

from prm import PRM, EnvError, ReplayError, Trajectory, UsageError, read_jsonl
from prm.batching import aggregate
from prm.cli import main
from prm.env import Action
from rl.envs.multihop import Expert, MultiHop
from rl.rollout import rollout
from rl.search import METHODS, SearchConfig, beam, best_of_n, rejection, search
from tests.tiny import model, tokenizer


class Letters:
    """Five letters are written one by one; success is the share of them that is "a"."""

    made = 0

    def __init__(self):
        Letters.made += 1

    def reset(self, *, seed=None, options=None):
        self.text, self.seed = "", seed
        return f"task {seed}", {}

    def step(self, action):
        assert len(action) == 1
        self.text += action
        over = len(self.text) == 5
        return f"so far {self.text}", 0.0, over, False, {"success": self.text.count("a") / 5}


class Draws:
    """A letter of abcd, by the history's seed."""

    name, temperature = "draws", 1.0

    def __init__(self, fails=0.0):
        self.fails, self.seen = fails, []

    def act(self, histories):
        out = []
        for history in histories:
            draw = random.Random(f"{history.seed} {len(history.actions)} {[a.text for a in history.actions]}")
            letter = draw.choice("abcd")
            self.seen.append(history)
            failed = draw.random() < self.fails
            out.append(Action(letter, (ord(letter),), (-1.0,), "error" if failed else "stop"))
        return out


class Oracle:
    """Scores "a" 0.9, "b" 0.6 and the rest 0.2, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def score(self, trajectories):
        self.asked += trajectories
        return [[{"a": 0.9, "b": 0.6}.get(s.action, 0.2) for s in t.steps] for t in trajectories]


def config(**options):
    return SearchConfig(out="", **{"n": 4, "aggregate": "mean", "max_steps": 9, **options})


def text(found):
    return "".join(s.action for s in found.trajectory.steps)


def test_best_of_n_is_the_best_of_the_same_rollouts():
    seeds = [3, 4, 5, 6]
    found = list(search(Draws(), Letters, Oracle(), seeds, config(n=6)))
    for seed, one in zip(seeds, found, strict=True):
        played = rollout(Draws(), Letters, [seed] * 6)
        values = [aggregate(s, "mean") for s in Oracle().score(played)]
        assert one.value == max(values) and one.candidates == 6 and one.seed == seed
        assert one.trajectory.id == played[values.index(max(values))].id
        assert one.trajectory.meta["search"]["scores"] == list(one.scores)
        assert one.trajectory.meta["search"]["method"] == "best-of-n" and one.trajectory.meta["seed"] == seed
    alone = [next(iter(search(Draws(), Letters, Oracle(), [s], config(n=6)))) for s in seeds]
    assert [x.trajectory.id for x in alone] == [x.trajectory.id for x in found]


def brute_beam(seed, n, width, how):
    """Beam search on strings, with the policy's own draws."""
    from prm.env import History
    from rl.search import _draw

    beams, policy, count = [""], Draws(), 0
    for step in range(5):
        grown = []
        for b, text in enumerate(beams):
            new = []
            for i in range(n):
                history = History("", tuple(Action(c) for c in text), ("",) * step, seed=_draw(0, seed, step, b, i))
                letter = policy.act([history])[0].text
                if letter not in new:
                    new.append(letter)
            grown += [text + letter for letter in new]
        count += len(grown)
        grown.sort(key=lambda t: -aggregate([{"a": 0.9, "b": 0.6}.get(c, 0.2) for c in t], how))
        beams = grown[:width]
    return beams[0], count


@pytest.mark.parametrize(("n", "width", "how"), [(3, 2, "mean"), (2, 3, "product"), (4, 1, "min"), (2, 2, "last")])
def test_beam_search_is_beam_search(n, width, how):
    seeds = [0, 1, 2]
    found = list(search(Draws(), Letters, Oracle(), seeds, config(method="beam", n=n, width=width, aggregate=how)))
    for seed, one in zip(seeds, found, strict=True):
        expected, count = brute_beam(seed, n, width, how)
        assert text(one) == expected and one.candidates == count
        assert one.trajectory.outcome == expected.count("a") / 5
        assert one.trajectory.steps[-1].observation == f"so far {expected}"
    grouped = list(
        search(Draws(), Letters, Oracle(), seeds, config(method="beam", n=n, width=width, aggregate=how, batch=1))
    )
    assert [x.trajectory.id for x in grouped] == [x.trajectory.id for x in found]


def test_beam_search_keeps_what_was_sampled():
    policy = Draws()
    beam(policy, Letters, Oracle(), [0], config(n=3))
    assert all(a.token_ids == (ord(a.text),) for h in policy.seen for a in h.actions)
    assert len({h.seed for h in policy.seen}) == len(policy.seen)


def test_search_does_better_than_drawing():
    seeds = list(range(30))
    drawn = sum(t.outcome for t in rollout(Draws(), Letters, seeds)) / 30
    means = {}
    for method in ("best-of-n", "beam"):
        found = search(Draws(), Letters, Oracle(), seeds, config(method=method, n=4))
        means[method] = sum(x.trajectory.outcome for x in found) / 30
    assert means["best-of-n"] > drawn + 0.05 and means["beam"] > means["best-of-n"] + 0.1


def test_rejection_takes_the_first_that_is_good_enough():
    seeds = list(range(20))
    found = rejection(Draws(), Letters, Oracle(), seeds, config(n=5, threshold=0.55))
    assert {x.trajectory is None for x in found} == {True, False}
    for one in found:
        assert 1 <= one.candidates <= 5
        if one.trajectory is None:
            assert one.candidates == 5
        else:
            assert one.value >= 0.55
    assert any(x.candidates < 5 for x in found if x.trajectory)
    all_of_them = rejection(Draws(), Letters, Oracle(), seeds, config(n=5, threshold=0.0))
    assert [x.candidates for x in all_of_them] == [1] * 20


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_that_fails_is_counted(method):
    found = list(search(Draws(fails=0.15), Letters, Oracle(), range(8), config(method=method, n=3, threshold=0.0)))
    assert sum(x.failed for x in found) > 0 and any(x.trajectory for x in found)
    for one in search(Draws(fails=1.0), Letters, Oracle(), range(3), config(method=method)):
        assert one.trajectory is None and one.failed and one.candidates == 0


def test_an_environment_that_is_not_the_same_again_is_named():
    class Drifts(Letters):
        def step(self, action):
            observation, *rest = super().step(action)
            return (f"{observation} {Letters.made}", *rest)

    with pytest.raises(ReplayError, match="step 0"):
        beam(Draws(), Drifts, Oracle(), [0], config(n=4))


def test_options_that_make_no_sense():
    for wrong in ({"n": 0}, {"width": 0}, {"threshold": 1.5}):
        with pytest.raises(UsageError):
            config(**wrong)
    greedy = Draws()
    greedy.temperature = 0
    with pytest.raises(UsageError, match="temperature 0 are one draw"):
        list(search(greedy, Letters, Oracle(), [0], config()))
    with pytest.raises(UsageError, match="0 scores for 5 steps"):
        best_of_n(Draws(), Letters, lambda ts: [[] for _ in ts], [0], config())

    class Short(Draws):
        def act(self, histories):
            return super().act(histories)[:-1]

    with pytest.raises(EnvError):
        beam(Short(), Letters, Oracle(), [0], config())


def test_an_episode_that_does_not_end_is_cut():
    class Endless(Letters):
        def step(self, action):
            return "on", 0.0, False, False, {}

    for method in METHODS:
        found = next(iter(search(Draws(), Endless, Oracle(), [0], config(method=method, max_steps=3, threshold=0.0))))
        assert len(found.trajectory.steps) == 3 and found.trajectory.outcome is None
        assert found.trajectory.meta["truncated"]


def test_each_token_is_read_once():
    prm = PRM.create(model(), tokenizer=tokenizer())
    read, asked = [], []

    class Watched:
        def session(self):
            self.inner = prm.session()
            read.append(self.inner)
            return self

        def score(self, trajectories):
            asked.extend(trajectories)
            return self.inner.score(trajectories)

    policy = Expert(error=0.4)
    beam(policy, MultiHop, Watched(), [0, 1], config(n=4, width=2))
    parts = [p.ids for t in asked for p in prm.render(t)]
    unique = len({tuple(p[:n]) for p in parts for n in range(1, len(p) + 1)})
    assert read[0].read_tokens == unique < sum(map(len, parts)) / 2


@pytest.mark.parametrize("method", METHODS)
def test_the_command(tmp_path, method, capsys):
    PRM.create(model(), tokenizer=tokenizer()).save(tmp_path / "prm")
    out = tmp_path / "found.jsonl"
    argv = ["search", "--env", "rl.envs.multihop:MultiHop", "--policy", "rl.envs.multihop:sloppy", "--prm"]
    argv += [str(tmp_path / "prm"), "--method", method, "--n", "2", "--threshold", "0", "--out", str(out)]
    assert main([*argv, "--tasks", "3"]) == 0
    assert "3 trajectories, 0 from before" in capsys.readouterr().out
    first = read_jsonl(out, Trajectory)
    assert [t.meta["seed"] for t in first] == [0, 1, 2] and first[0].meta["env"] == "rl.envs.multihop:MultiHop"
    assert main([*argv, "--tasks", "5"]) == 0
    assert "5 trajectories, 3 from before" in capsys.readouterr().out
    assert read_jsonl(out, Trajectory)[:3] == first
