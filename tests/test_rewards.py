"""Rewards: the formulas, and what cannot be earned by padding, repeating or calling."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prm.env import Action, Episode
from prm.errors import DataError, UsageError
from rl.rewards import Reward, RewardConfig, shape_scores, step_rewards

SCORES = [0.9, 0.8, 0.2]
PADDED = [0.9, 0.8, *[0.97] * 10, 0.2]


def test_progress_telescopes_and_padding_earns_nothing():
    assert shape_scores(SCORES) == pytest.approx([0.9, -0.1, -0.6])
    assert sum(shape_scores(SCORES)) == pytest.approx(0.2) == pytest.approx(sum(shape_scores(PADDED)))
    assert sum(shape_scores(SCORES, baseline=0.5)) == pytest.approx(-0.3)


@given(st.lists(st.floats(0, 1), min_size=1), st.lists(st.floats(0, 1)), st.integers(0, 5))
def test_steps_put_in_between_do_not_change_the_total(scores, junk, where):
    where = min(where, len(scores) - 1)
    padded = [*scores[:where], *junk, *scores[where:]]
    assert sum(shape_scores(padded)) == pytest.approx(sum(shape_scores(scores)))


def test_two_layouts_of_one_text_earn_the_same():
    assert sum(shape_scores([0.9, 0.2])) == pytest.approx(sum(shape_scores([0.2])))


def test_raw_is_allowed_by_name_with_a_warning():
    with pytest.warns(UserWarning, match="pays for every step"):
        assert sum(shape_scores(PADDED, "raw")) == pytest.approx(11.6)


def test_worst_is_about_the_lowest_score():
    weights = [math.exp(-s / 0.1) for s in SCORES]
    expected = [s * w / sum(weights) for s, w in zip(SCORES, weights, strict=True)]
    assert shape_scores(SCORES, "worst") == pytest.approx(expected)
    assert sum(shape_scores(PADDED, "worst")) == pytest.approx(sum(expected), abs=0.01)
    assert shape_scores([], "worst") == []


@pytest.mark.parametrize("bad", [1.5, -0.1, math.nan])
def test_a_score_out_of_range_is_named(bad):
    with pytest.raises(DataError, match="the score of step 1"):
        shape_scores([0.5, bad])


def test_an_unknown_shape_is_named():
    with pytest.raises(UsageError, match="unknown shape 'sum'"):
        shape_scores([0.5], "sum")


def test_the_parts_add_up():
    rewards = step_rewards(
        ["search: a", "Search:  A", "jump", "answer: x"],
        RewardConfig(environment_weight=0.5, limit_penalty=-0.25),
        scores=[0.5, 0.5, 0.5, 0.9],
        outcome=1.0,
        environment=[0, 0, -0.1, 1],
        infos=[{}, {}, {"error": "invalid"}, {}],
        out_of_steps=True,
    )
    assert rewards.process == pytest.approx([0.15, 0, 0, 0.12])
    assert rewards.outcome == [0, 0, 0, 1]
    assert rewards.penalties == {"repeat": [0, -0.1, 0, 0], "invalid": [0, 0, -0.1, 0], "limit": [0, 0, 0, -0.25],
                                 "blocked": [0] * 4}  # fmt: skip
    assert rewards.total == pytest.approx([0.15, -0.1, -0.15, 0.12 + 1 + 0.5 - 0.25])


def test_calls_are_not_paid_for():
    """Nine equal calls and a wrong answer, one call and a right one, no call at all."""
    config = RewardConfig()
    nine = step_rewards(["call 1+1"] * 9 + ["answer 3"], config, outcome=0.0)
    once = step_rewards(["call 1+1", "answer 2"], config, outcome=1.0)
    none = step_rewards(["answer 3"], config, outcome=0.0)
    assert sum(once.total) > sum(nine.total)
    assert sum(none.total) == 0


def test_lists_of_another_length_are_refused():
    with pytest.raises(DataError, match="2 actions have 1 scores"):
        step_rewards(["a", "b"], RewardConfig(), scores=[0.5])


def test_an_episode_without_steps_earns_nothing():
    assert step_rewards([], RewardConfig(), scores=[], outcome=1.0).total == []


class Quiz:
    """One step: "right" succeeds, "wrong" fails, anything else goes on."""

    def reset(self, *, seed=None, options=None):
        return "quiz", {}

    def step(self, action):
        over = action in ("right", "wrong")
        return "said", 0.0, over, False, {"success": action == "right"} if over else {}


@pytest.mark.parametrize("guess", [0.16, 0.9])
@pytest.mark.parametrize("shape", ["progress", "worst", "raw"])
@pytest.mark.filterwarnings("ignore:.*pays for every step")
def test_what_is_known_at_the_end_is_not_guessed(guess, shape):
    """A PRM that gives each answer one score teaches neither to answer anything nor never to answer."""
    reward = Reward(RewardConfig(shape=shape, process_weight=1.0), lambda ts: [[0.7] * len(t.steps) for t in ts])
    paid = {}
    for last in ("right", "wrong", "wait"):
        episode = Episode(Quiz(), 0)
        for action in ("look", last):
            episode.step(Action(action))
        scores = [[0.7, guess]]
        (own,) = reward([episode], [episode.trajectory()], scores)
        assert scores == [[0.7, guess]], "what the PRM said is logged as it said it"
        paid[last] = own.process
        as_scored = replace(reward, config=replace(reward.config, known_end=False))
        (own,) = as_scored([episode], [episode.trajectory()], scores)
        assert own.process == pytest.approx(shape_scores([0.7, guess], shape))
    assert paid["right"] == pytest.approx(shape_scores([0.7, 1.0], shape))
    assert paid["wrong"] == pytest.approx(shape_scores([0.7, 0.0], shape))
    assert paid["wait"] == pytest.approx(shape_scores([0.7, guess], shape)), "an episode that is not over is scored"
