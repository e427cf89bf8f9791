"""Labels from continuations: right against exact chances of success, cheap, honest about failures, and resumable."""

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from labeling import continuations
from labeling.adaptive import State, plan_of
from labeling.adaptive import values as shared_values
from labeling.draws import MonteCarloConfig
from labeling.intervals import Plan, ends, estimate, wilson
from labeling.montecarlo import first_error_labels, rollout_labels
from labeling.search import posterior
from prm.cli import main
from prm.env import Action, Episode
from prm.errors import EnvError, ReplayError, UsageError
from prm.records import Step, StepLabel, Trajectory, append_jsonl, read_jsonl
from tests.chain import Chain, LongChain, Walker, values, walks

pytestmark = pytest.mark.filterwarnings("ignore:.*rest on one distinct continuation")
PLAIN, ADAPTIVE = MonteCarloConfig(), MonteCarloConfig(adaptive=True)
STOPPING = MonteCarloConfig(adaptive=True, width=0.55)


class Counting:
    """A policy that counts its calls and histories, and may stop the run at one of them."""

    def __init__(self, policy, stop=None):
        self.policy, self.stop, self.name, self.calls, self.sizes = policy, stop, policy.name, 0, []

    def act(self, histories):
        if self.calls == self.stop:
            raise KeyboardInterrupt
        self.calls += 1
        self.sizes.append(len(histories))
        return self.policy.act(histories)


@pytest.fixture
def runners(monkeypatch):
    """The runners that were made, for what they launched."""
    made = []
    original = continuations.Runner.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(continuations.Runner, "__init__", remember)
    return made


def errors(labels, walker, trajectories, length=8):
    """(label, its error) of the steps whose chance of success is neither 0 nor 1."""
    truth = {one.id: values(one, walker, length) for one in trajectories}
    pairs = [(label, truth[label.trajectory_id][label.step]) for label in labels]
    return [(label, label.score - value, value) for label, value in pairs if 0 < value < 1]


# --- against truth ----------------------------------------------------------------------------------------------------


WALKERS = (Walker(), Walker(slip=0.3), Walker(slip=0.25, again=0.2, fix=0.4), Walker(words=3))


@pytest.mark.parametrize("config", [PLAIN, ADAPTIVE, STOPPING])
def test_labels_are_unbiased_and_their_intervals_cover(config):
    means, covered = [], []
    for walker in WALKERS:
        trajectories = walks(walker, 60)
        found = errors(rollout_labels(trajectories, Chain, walker, config), walker, trajectories)
        by_trajectory = {}
        for label, error, _ in found:
            by_trajectory.setdefault(label.trajectory_id, []).append(error)
        means += [statistics.mean(e) for e in by_trajectory.values()]
        covered += [low <= value <= high for label, _, value in found for low, high in [label.meta["interval"]]]
    assert abs(statistics.mean(means)) < 2.5 * statistics.stdev(means) / len(means) ** 0.5
    assert abs(statistics.mean(means)) < 0.015
    assert 0.93 <= statistics.mean(covered) <= 0.97


def test_the_estimate_after_early_stopping_is_exactly_unbiased():
    for plan in (plan_of(STOPPING), Plan((2, 4, 9), 0.7), Plan((3, 8, 20), 0.5, 0.5, 3), Plan((6,))):
        for p in (0.01, 0.3, 0.77, 1.0):
            chance = {at: n[0] * p ** at[0] * (1 - p) ** (at[1] - at[0]) for at, n in ends(plan).items()}
            assert sum(chance.values()) == pytest.approx(1)
            assert sum(c * estimate(plan, *at) for at, c in chance.items()) == pytest.approx(p)
    assert estimate(Plan((8,)), 3, 8) == 3 / 8
    plain = sum(c * at[0] / at[1] for at, c in chance_of(Plan((2, 20), 0.7), 0.8).items())
    assert plain > 0.83  # what it is for


def chance_of(plan, p):
    return {at: n[0] * p ** at[0] * (1 - p) ** (at[1] - at[0]) for at, n in ends(plan).items()}


def test_intervals_cover_95_percent_whatever_the_plan():
    for plan in (Plan((8,)), plan_of(STOPPING), Plan((4, 8, 16), 0.55), Plan((5, 8), 0.5, 0.5, 2)):
        covered = []
        for i in range(1, 50):
            p = i / 50
            covered.append(sum(c * (wilson(*at)[0] <= p <= wilson(*at)[1]) for at, c in chance_of(plan, p).items()))
        assert 0.93 <= statistics.mean(covered) <= 0.97


def test_looking_often_does_not_decide_wrongly_more_often():
    plan = Plan((4, 8, 16, 32), 0.0, 0.5, 4)
    for p in (0.45, 0.5):
        wrong = sum(c for at, c in chance_of(plan, p).items() if at[1] < 32 and at[0] / at[1] > 0.5)
        assert wrong < 0.025


def test_a_step_that_ends_the_episode_is_its_outcome_at_no_cost(runners):
    trajectories = walks(Walker(), 20)
    labels = rollout_labels(trajectories, Chain, Walker())
    last = {label.trajectory_id: label for label in labels if label.step == 7}
    for one in trajectories:
        assert (last[one.id].score, last[one.id].weight) == (one.outcome, 8)
        assert last[one.id].meta["over"] and last[one.id].meta["n_requested"] == 0
    assert runners[0].launched == 20 * 7 * 8
    assert [(x.trajectory_id, x.step) for x in labels] == [(one.id, t) for one in trajectories for t in range(8)]
    assert {x.source for x in labels} == {"mc:walker"}


def test_hard_labels_and_outcomes_that_are_shares():
    class Half(Chain):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, {"success": info["success"] / 2} if info else info

    trajectories = walks(Walker(), 10)
    soft = rollout_labels(trajectories, Half, Walker())
    assert {x.score <= 0.5 for x in soft} == {True} and 0.5 in {x.score for x in soft}
    assert rollout_labels(trajectories, Half, Walker(), MonteCarloConfig(adaptive=True))
    hard = rollout_labels(trajectories, Half, Walker(), MonteCarloConfig(hard=True))
    assert [x.score for x in hard] == [float(x.score > 0) for x in soft]


# --- cheaper ----------------------------------------------------------------------------------------------------------


def test_shared_continuations_cost_a_third(runners):
    walker = Walker(slip=0.08)
    trajectories = walks(walker, 30, LongChain)
    spread = []
    for config in (PLAIN, ADAPTIVE):
        labels = rollout_labels(trajectories, LongChain, walker, config)
        assert all(x.weight >= 8 for x in labels)
        spread.append(statistics.mean(abs(e) for _, e, _ in errors(labels, walker, trajectories, 20)))
    assert runners[1].launched < runners[0].launched / 3
    assert spread[1] < spread[0]


def test_what_is_drawn_further_on_counts_further_back():
    def draw(outcome, *words):
        return continuations.Continuation("ended", outcome, tuple(Step(w) for w in words))

    a, ab = (Step("a"),), (Step("a"), Step("b"))
    states = {path: State(Trajectory("t", ab), len(path)) for path in (a, ab)}
    states[a].drawn = [draw(0.0, "b", "x"), draw(0.0, "b", "y"), draw(1.0, "c"), draw(1.0, "c")]
    states[ab].drawn = [draw(0.0, "x"), draw(0.0, "y"), draw(1.0, "z"), draw(1.0, "z")]
    found = shared_values(states)
    assert found[ab] == (0.5, pytest.approx(4)) and found[a][0] == (2 * 0.5 + 2) / 4 and found[a][1] >= 4


def test_equal_prefixes_are_run_once(runners):
    one = walks(Walker(slip=0), 1)[0]
    other = Trajectory(one.task, [*one.steps[:6], Step("slip 0", "1"), Step("fix 0", "0")], 1.0, one.meta)
    labels = rollout_labels([one, other], Chain, Walker())
    assert runners[0].launched == (7 + 1) * 8
    assert [x.score for x in labels[:6]] == [x.score for x in labels[8:14]]


def test_clear_cases_stop_early(runners):
    sure = Walker(slip=0, words=100)  # always right, never in the same words
    trajectories = walks(sure, 10)
    for options, most in (({"width": 0.55}, 5), ({"threshold": 0.3}, 5), ({}, 8)):
        labels = rollout_labels(trajectories, Chain, sure, MonteCarloConfig(adaptive=True, **options))
        assert 0.9 * most < runners[-1].launched / 70 <= most and {x.score for x in labels} == {1.0}


@pytest.mark.parametrize("length", [16, 24])
def test_the_first_error_is_found_for_a_tenth(length, runners):
    class Long(Chain):
        pass

    Long.length = length
    walker = Walker(slip=0.03, again=1.0, fix=0.0)
    failed = [one for one in walks(walker, 120, Long) if one.outcome == 0][:30]
    labels = first_error_labels(failed, Long, walker)
    firsts = {}
    for label in labels:
        firsts.setdefault(label.trajectory_id, label.meta["first_error"])
        assert (label.score > 0.5) == (label.step < label.meta["first_error"])
    right = [firsts.get(one.id) == values(one, walker, length).index(0) for one in failed]
    assert statistics.mean(right) >= 0.9
    assert runners[0].launched <= len(failed) * (length - 1) * 8 / 10


def test_first_errors_of_episodes_that_succeed_or_cannot(runners):
    good = next(one for one in walks(Walker(), 30) if one.outcome == 1)
    labels = first_error_labels([good], Chain, Walker())
    assert [(x.score, x.meta["first_error"]) for x in labels] == [(1.0, None)] * 8 and runners[0].launched == 0
    hopeless = Walker(slip=1.0, again=1.0, fix=0.0)
    with pytest.raises(EnvError, match="led to a label"):
        first_error_labels(walks(hopeless, 1), Chain, hopeless)


def test_the_posterior_of_the_first_error():
    nothing = posterior([0] * 4, [0] * 4, 4)
    assert nothing == pytest.approx([0.25] * 4)
    cleared = posterior([0, 1, 0, 0], [0] * 4, 4)
    assert cleared[:2] == [0, 0] and cleared[2] == pytest.approx(0.5)
    assert posterior([0, 1, 0, 0], [0, 0, 3, 0], 4)[2] > 0.8


# --- budget, choice, in flight ----------------------------------------------------------------------------------------


TWO_STAGES = {"adaptive": True, "width": 0.55}


@pytest.mark.parametrize("config", [{"budget": 300}, {"budget_tokens": 3000}, {"budget": 300, **TWO_STAGES}])
def test_a_budget_is_kept(config, runners):
    trajectories = walks(Walker(), 40)
    labels = rollout_labels(trajectories, Chain, Walker(), MonteCarloConfig(batch=16, **config))
    runner = runners[0]
    assert runner.launched <= config.get("budget", 10**6)
    assert runner.tokens < config.get("budget_tokens", 10**6) + 16 * 8 * 3  # what was in flight is finished
    assert labels and all(x.weight <= 8 for x in labels)
    if "adaptive" in config:  # the first stage goes round before the second begins
        drawn = {x.trajectory_id for x in labels if not x.meta.get("over")}
        assert len(drawn) > 30


def test_a_random_subset_depends_on_the_seed_alone():
    trajectories = walks(Walker(), 12)
    config = MonteCarloConfig(k=1, max_trajectories=5, max_steps_per_trajectory=3)
    chosen = [(x.trajectory_id, x.step) for x in rollout_labels(trajectories, Chain, Walker(), config)]
    again = [(x.trajectory_id, x.step) for x in rollout_labels(trajectories[::-1], Chain, Walker(), config)]
    assert len(chosen) == 15 and sorted(chosen) == sorted(again)


def test_many_episodes_share_one_call_and_siblings_are_neighbours():
    seen = []

    class Watching(Walker):
        def act(self, histories):
            seen.append([(h.task, len(h.actions)) for h in histories])
            return super().act(histories)

    rollout_labels(walks(Walker(), 12), Chain, Watching(), MonteCarloConfig(batch=64))
    assert max(map(len, seen)) == 64 and statistics.mean(map(len, seen)) > 50
    assert len(set(seen[0][:8])) == 1  # K histories of one prefix side by side


def test_an_environment_that_copies_itself_is_replayed_once():
    replays = []

    class Copies(Chain):
        def reset(self, **kwargs):
            replays.append(1)
            return super().reset(**kwargs)

        def copy(self):
            twin = type(self)()
            twin.__dict__ |= self.__dict__
            return twin

    trajectories = walks(Walker(), 10)
    copied = rollout_labels(trajectories, Copies, Walker())
    assert len(replays) == 10 + 10 * 7
    assert copied == rollout_labels(trajectories, Chain, Walker())


# --- what is no failure -----------------------------------------------------------------------------------------------


def test_cut_continuations_are_counted_but_are_no_failures():
    class Long(Walker):
        def _act(self, history):
            cut = random.Random(f"cut {history.seed}").random() < 0.5
            return Action("ok", token_ids=(1,), finish="length") if cut else super()._act(history)

    one = walks(Walker(slip=0), 1)
    labels = rollout_labels(one, Chain, Long(slip=0), MonteCarloConfig(k=16))
    for label in labels[:-1]:
        assert label.score == 1 and label.weight == label.meta["valid"] == 16 - label.meta["truncated"] < 16
    labels = rollout_labels(one, Chain, Walker(), MonteCarloConfig(max_steps=3))
    assert [x.step for x in labels] == [4, 5, 6, 7]  # from the others the end is out of reach


def test_an_outside_time_limit_is_no_outcome_but_an_environment_s_own_verdict_is():
    class Cut(Chain):
        def step(self, action):
            observation, reward, over, _, info = super().step(action)
            return observation, reward, False, over, info if self.tells else {}

        tells = False

    class Tells(Cut):
        tells = True

    one = walks(Walker(), 1, Tells)
    assert len(rollout_labels(one, Tells, Walker())) == 8
    with pytest.raises(EnvError, match="the environment's limit"):
        rollout_labels(walks(Walker(), 1, Cut), Cut, Walker())


class Fragile(Chain):
    """Raises, hangs or dies on a word."""

    def step(self, action):
        if "raise" in action:
            raise RuntimeError("broken")
        if "hang" in action:
            time.sleep(60)
        if "die" in action:
            os._exit(3)
        return super().step(action)


class Rude(Walker):
    def _act(self, history):
        draw = random.Random(f"rude {history.seed} {len(history.actions)}").random()
        if draw < 0.12:
            return Action("ok " + ("raise" if draw < 0.04 else "hang" if draw < 0.08 else "die"))
        return super()._act(history)


def test_an_environment_that_raises_hangs_or_dies_costs_one_continuation(runners):
    one = walks(Walker(slip=0), 1)
    config = MonteCarloConfig(k=8, workers=6, timeout=0.3, max_steps_per_trajectory=3)
    labels = rollout_labels(one, Fragile, Rude(slip=0), config)
    drawn = [x for x in labels if not x.meta.get("over")]
    lost = sum(x.meta["errors"] for x in drawn)
    assert lost > 2 and {x.score for x in labels} == {1.0}
    assert sum(x.weight for x in drawn) + lost == runners[0].launched == 8 * len(drawn)


def test_workers_give_the_same_labels_and_refuse_what_they_cannot_import():
    trajectories = walks(Walker(), 4)
    config = MonteCarloConfig(k=2, workers=3)
    assert rollout_labels(trajectories, Chain, Walker(), config) == rollout_labels(
        trajectories, Chain, Walker(), MonteCarloConfig(k=2)
    )
    with pytest.raises(UsageError, match="cannot run in a process of its own"):
        rollout_labels(trajectories, lambda: Chain(), Walker(), config)


def test_an_endpoint_that_fails_is_no_failure_of_the_step():
    class Away(Walker):
        def _act(self, history):
            return Action("", finish="error") if history.seed % 3 == 0 else super()._act(history)

    labels = rollout_labels(walks(Walker(slip=0), 3), Chain, Away(slip=0))
    assert {x.score for x in labels} == {1.0} and any(x.meta.get("errors") for x in labels)


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PLAIN, STOPPING])
def test_a_run_that_was_stopped_anywhere_goes_on_and_repeats_nothing(config, tmp_path, runners):
    walker = Walker(words=2)
    trajectories = walks(walker, 25)
    whole = Counting(walker)
    expected = rollout_labels(trajectories, Chain, whole, config)
    out = tmp_path / "labels.jsonl"
    launched = 0
    for stop in (3, 9, 11, 16, None):
        policy = Counting(walker, stop)
        try:
            labels = rollout_labels(trajectories, Chain, policy, config, out=out)
        except KeyboardInterrupt:
            for torn in (out, f"{out}.continuations"):
                with open(torn, "ab") as file:
                    file.write(b'{"trajectory_id": "00')
            kept = len(read_kept(f"{out}.continuations"))
            assert kept >= launched
            launched = kept
    assert key(labels) == key(expected) == key(read_jsonl(out, StepLabel))
    assert not (tmp_path / "labels.jsonl.continuations").exists()
    again = Counting(walker)
    assert key(rollout_labels(trajectories, Chain, again, config, out=out)) == key(expected) and again.calls == 0
    more = walks(walker, 27)
    rollout_labels(more, Chain, again, config, out=out)
    assert len(read_jsonl(out, StepLabel)) == 27 * 8


def key(labels):
    return sorted(json.dumps(label.to_dict(), sort_keys=True) for label in labels)


def read_kept(path):
    return open(path, "rb").read().splitlines() if os.path.exists(path) else []


def test_a_killed_process_goes_on(tmp_path):
    append_jsonl(tmp_path / "t.jsonl", walks(Walker(), 40))
    (tmp_path / "slow.py").write_text(
        "import time\nfrom tests.chain import Walker\n"
        "class Slow(Walker):\n    def act(self, h):\n        time.sleep(0.05)\n        return super().act(h)\n"
    )
    command = [sys.executable, "-m", "prm.cli", "mc", "t.jsonl", "--env", "tests.chain:Chain", "--policy", "slow:Slow"]
    command += ["--batch", "64", "--out", "l.jsonl"]
    path = os.pathsep.join([os.getcwd(), str(tmp_path)])
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if len(read_kept(tmp_path / "l.jsonl.continuations")) > 200:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    kept = len(read_kept(tmp_path / "l.jsonl.continuations"))
    counting = Counting(Walker())
    labels = rollout_labels(read_jsonl(tmp_path / "t.jsonl", Trajectory), Chain, counting, out=tmp_path / "l.jsonl")
    assert key(labels) == key(rollout_labels(walks(Walker(), 40), Chain, Walker()))
    assert kept > 200 and counting.sizes[0] == 256


def test_a_replay_that_differs_names_the_step():
    one = walks(Walker(slip=0), 1)[0]
    forged = Trajectory(one.task, [*one.steps[:3], Step("ok 0", "5"), *one.steps[4:]], meta=one.meta)
    with pytest.raises(ReplayError, match="step 3: observed '0', recorded was '5'"):
        rollout_labels([forged], Chain, Walker())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    append_jsonl("t.jsonl", walks(Walker(), 6))
    base = ["mc", "t.jsonl", "--env", "tests.chain:Chain", "--policy", "tests.chain:Walker"]
    for method, source in (("rollouts", "mc:walker"), ("first-error", "mc:walker"), ("tree", "tree:walker")):
        out = f"{method}.jsonl"
        assert main([*base, "--method", method, "--out", out, "--k", "4"]) == 0
        assert {x.source for x in read_jsonl(out, StepLabel)} == {source}
    named = {x.trajectory_id for x in read_jsonl("tree.jsonl", StepLabel)}
    known = {x.id for f in ("t.jsonl", "tree.jsonl.trajectories.jsonl") for x in read_jsonl(f, Trajectory)}
    assert named <= known
    assert main([*base, "--out", "w.jsonl", "--k", "2", "--workers", "2"]) == 0
    capsys.readouterr()
    assert main([*base, "--out", "x.jsonl", "--k", "0"]) == 2
    assert "k must be >= 1, got 0" in capsys.readouterr().err


# --- P12: rollouts that are one rollout -------------------------------------------------------------------------------


def client(reply):
    """A stand-in for `openai.OpenAI`: both routes give `reply(call)`, the calls are kept."""
    calls, lock = [], threading.Lock()

    def create(**call):
        with lock:
            calls.append(call)
        text = reply(call)
        choice = SimpleNamespace(text=text, finish_reason="stop", message=None)
        return SimpleNamespace(choices=[choice], usage=SimpleNamespace(completion_tokens=3))

    return SimpleNamespace(completions=SimpleNamespace(create=create), calls=calls)


SUM = {"task": "1 + 1 =", "answer": "2"}


def solved(*steps, **meta):
    return Trajectory(SUM["task"], [Step(s) for s in steps], meta={"options": SUM} | meta)


def endpoint(reply, **options):
    from rl.policies import EndpointPolicy, PolicyConfig

    return EndpointPolicy("m", PolicyConfig("openai:m", layout="text", **options), client(reply))


def random_reply(call):
    draw = random.Random(call["seed"])
    return f"I say {draw.randrange(10**6)}, so the answer is {draw.choice('23')}."


def test_an_endpoint_that_gives_one_choice_is_asked_k_times_with_other_seeds():
    from labeling.reasoning import Reasoning

    policy = endpoint(random_reply)
    label = rollout_labels([solved(" let us see\n")], Reasoning, policy)[0]
    assert label.meta["n_requested"] == label.meta["n_distinct"] == label.weight == 8
    assert len({call["seed"] for call in policy.client.calls}) == 8 and 0 < label.score < 1
    assert not label.meta["low_confidence"] and label.meta["tokens"] == 24


@pytest.mark.parametrize("reply", [lambda call: "The answer is 2.", lambda call: f"{len(call['prompt'])}, answer: 2"])
def test_rollouts_that_are_one_are_told(reply):
    from labeling.reasoning import Reasoning

    with pytest.warns(UserWarning, match="1 of 1 labels rest on one distinct continuation"):
        label = rollout_labels([solved(" let us see\n")], Reasoning, endpoint(reply))[0]
    assert (label.meta["n_requested"], label.meta["n_distinct"], label.meta["low_confidence"]) == (8, 1, True)


def test_temperature_0_is_refused_with_more_than_one_rollout():
    from labeling.reasoning import Reasoning

    policy = endpoint(random_reply, temperature=0.0)
    for config in (PLAIN, ADAPTIVE):
        with pytest.raises(UsageError, match="temperature 0"):
            rollout_labels([solved(" so\n")], Reasoning, policy, config)
    assert rollout_labels([solved(" so\n")], Reasoning, policy, MonteCarloConfig(k=1))[0].weight == 1


# --- P13: continuing from a prefix changes nothing in it --------------------------------------------------------------

PREFIXES = ["Let x = 4.\n\n", "Then 2x = 8. ", "    indented code\n"]


def test_an_endpoint_gets_the_prompt_and_the_prefix_byte_for_byte():
    from labeling.reasoning import Reasoning

    class Spaced(Reasoning):
        def __init__(self):
            super().__init__(separator=" ")

        def step(self, action):
            observation, reward, _, truncated, info = super().step(action + " " if action in PREFIXES else action)
            return observation, reward, bool(info), truncated, info

    policy = endpoint(lambda call: "answer: 2")
    rollout_labels([solved(*PREFIXES)], Spaced, policy, MonteCarloConfig(k=1))
    sent = sorted({call["prompt"] for call in policy.client.calls}, key=len)
    assert sent == [SUM["task"] + "".join(PREFIXES[:n]) for n in (1, 2, 3)]


def test_cut_and_continued_is_what_greedy_writes_in_one_go():
    from labeling.reasoning import Reasoning
    from rl.policies import PolicyConfig, TransformersPolicy
    from rl.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer(["1 + 1 = Let x = 4.\n\nThen 2x = 8. the answer\n"] * 20, 300)
    model = tiny_model(tokenizer, width=32, layers=2, context=256)
    config = PolicyConfig("tiny", layout="text", temperature=0.0, max_action_tokens=24)
    prompt = solved().task

    def greedy(*steps):
        from prm.env import History

        policy = TransformersPolicy(model, tokenizer, config)
        return policy.act([History.of(Trajectory(prompt, [Step(s) for s in steps]))])[0]

    whole = greedy()
    pieces = [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in whole.token_ids]
    assert "".join(pieces) == whole.text  # no character in two tokens, so that every cut is one between tokens
    for cut in (1, 5, 11):
        head = "".join(pieces[:cut])
        if tokenizer(head, add_special_tokens=False).input_ids == list(whole.token_ids[:cut]):
            rest = greedy(head).text
            assert (head + rest)[: len(whole.text)] == whole.text
    policy = TransformersPolicy(model, tokenizer, PolicyConfig("tiny", layout="plain", temperature=1.0))
    with pytest.raises(UsageError, match=r"acts in turns \(layout plain\) and cannot continue a text"):
        rollout_labels([solved(" so\n")], Reasoning, policy)


def test_an_endpoint_that_opens_turns_is_refused():
    from labeling.reasoning import Reasoning
    from rl.policies import EndpointPolicy, PolicyConfig

    policy = EndpointPolicy("m", PolicyConfig("openai:m"), client(random_reply))
    with pytest.raises(UsageError, match="use the layout text"):
        rollout_labels([solved(" so\n")], Reasoning, policy)


# --- P24, P25: episodes side by side, and seeds -----------------------------------------------------------------------


class Notes:
    """The task names a letter; the end succeeds if what was written is read back."""

    def reset(self, *, seed=None, options=None):
        self.notes, self.read, self.count = {}, None, 0
        return f"write and read back {random.Random(seed).choice('abcdef')}", {}

    def step(self, action):
        self.count += 1
        verb, _, rest = action.partition(" ")
        if verb == "write":
            name, _, value = rest.partition(" ")
            self.notes[name] = value
            return "written", 0.0, False, False, {}
        time.sleep(random.Random(action).random() / 500)
        return str(self.notes.get("k")), 0.0, True, False, {"success": self.notes.get("k") == rest}


class Writer:
    """Writes its own number, then wants it back."""

    name = "writer"

    def act(self, histories):
        return [Action(f"read {h.seed}" if h.actions[1:] else f"write k {h.seed}") for h in histories]


class SharedNotes(Notes):
    notes: dict = {}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        notes = self.notes
        task = super().reset(seed=seed)
        self.notes = notes
        return task


@pytest.mark.parametrize("workers", [0, 4])
def test_continuations_side_by_side_share_nothing(workers):
    one = Trajectory(Episode(Notes(), 3).history.task, [Step("write z 1", "written")], meta={"seed": 3})
    label = rollout_labels([one], Notes, Writer(), MonteCarloConfig(k=16, workers=workers))[0]
    assert (label.score, label.weight, label.meta["n_distinct"]) == (1.0, 16, 16)
    assert rollout_labels([one], SharedNotes, Writer(), MonteCarloConfig(k=16))[0].score < 1  # and it would be seen


def test_the_environment_s_seed_is_the_trajectory_s_and_the_draw_s_differs():
    seeds, tasks = [], []

    class Watching(Writer):
        def act(self, histories):
            seeds.extend(h.seed for h in histories if not h.actions[1:])
            tasks.extend(h.task for h in histories)
            return super().act(histories)

    episodes = {s: Episode(Notes(), s).history.task for s in (3, 123)}
    given = [Trajectory(task, [Step("write z 1", "written")], meta={"seed": s}) for s, task in episodes.items()]
    before = random.getstate()
    labels = rollout_labels(given, Notes, Watching(), MonteCarloConfig(k=4))
    assert random.getstate() == before
    assert len(set(seeds)) == 8 and set(tasks) == set(episodes.values())
    other = rollout_labels(given, Notes, Watching(), MonteCarloConfig(k=4, seed=1))
    assert len(set(seeds)) == 16 and [x.score for x in labels] == [x.score for x in other]


def test_the_same_labels_in_any_process(tmp_path):
    append_jsonl(tmp_path / "t.jsonl", walks(Walker(), 4))
    code = (
        "from labeling.montecarlo import *; from tests.chain import *; from prm.records import *; import sys\n"
        f"labels = rollout_labels(read_jsonl({str(tmp_path / 't.jsonl')!r}), Chain, Walker(), MonteCarloConfig(k=3))\n"
        "print([x.score for x in labels])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(n), "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in (1, 2)
    }
    assert len(said) == 1


def test_steps_without_a_label_are_counted():
    """Continuations that a limit cuts say nothing; that a step is left without a label is said."""
    walker = Walker()
    given = walks(walker, 6)
    with pytest.warns(UserWarning, match=r"of \d+ steps have no label: each of their continuations was cut"):
        labels = rollout_labels(given, Chain, walker, MonteCarloConfig(k=2, max_steps=1))
    with pytest.warns(UserWarning) as said:
        rollout_labels(given, Chain, walker, MonteCarloConfig(k=2, budget=1))
    assert "the budget was spent" in str(said[0].message)
    steps = sum(len(walk.steps) for walk in given)
    assert 0 < len(labels) < steps
