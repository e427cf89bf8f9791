"""Advantages by groups, against their definition; those of a critic are tested with PPO."""

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prm.errors import DataError
from rl.advantages import group_advantages, returns_to_go, step_credit


def togo(rewards, gamma):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


@pytest.mark.parametrize("scale", [False, True])
def test_groups_by_their_definition(scale):
    rng = random.Random(0)
    episodes = [[rng.gauss(0, 1) for _ in range(rng.randrange(1, 6))] for _ in range(12)]
    got = group_advantages([torch.tensor(e) for e in episodes], 4, 0.9, scale=scale)
    for i, rewards in enumerate(episodes):
        group = episodes[i // 4 * 4 : i // 4 * 4 + 4]
        totals = [togo(e, 0.9)[0] for e in group]
        if scale:
            want = [(g - statistics.fmean(totals)) / statistics.pstdev(totals) for g in togo(rewards, 0.9)]
        else:
            others = [t for j, t in enumerate(totals) if j != i % 4]
            want = [g - statistics.fmean(others) for g in togo(rewards, 0.9)]
        assert got[i].tolist() == pytest.approx(want, abs=1e-5)


def test_the_leave_one_out_baseline_does_not_know_the_episode():
    """What an episode does changes its own advantages by exactly what it earns more: the baseline stays."""
    rest = [torch.tensor([1.0, 2.0]), torch.tensor([0.5])]
    before = group_advantages([torch.tensor([0.0, 1.0]), *rest], 3, 1.0, scale=False)[0]
    after = group_advantages([torch.tensor([0.0, 1.0, 0.0, 4.0]), *rest], 3, 1.0, scale=False)[0]
    assert (after[0] - before[0]).item() == pytest.approx(4.0)


def test_groups_that_teach_nothing_and_empty_episodes_stay_finite():
    same = group_advantages([torch.tensor([0.5])] * 2, 2, 1.0, scale=True)
    assert [a.tolist() for a in same] == [[0.0], [0.0]]
    empty = group_advantages([torch.tensor([]), torch.tensor([1.0])], 2, 1.0, scale=False)
    assert [a.tolist() for a in empty] == [[], [1.0]]


@pytest.mark.parametrize(("n", "group"), [(3, 2), (4, 1), (2, 4)])
def test_half_a_group_is_refused(n, group):
    with pytest.raises(DataError, match="no whole groups"):
        group_advantages([torch.tensor([1.0])] * n, group, 1.0, scale=False)


def test_returns():
    assert returns_to_go(torch.tensor([0.3, 0.0, 0.7]), 0.5).tolist() == pytest.approx([0.475, 0.35, 0.7])


def test_a_step_is_credited_with_its_own_progress_alone():
    """Episodes of two and three steps, tokens repeated: the mean of the step's number is taken off, step by step."""
    process = [torch.tensor([0.5, 0.5, -0.2]), torch.tensor([0.1, 0.4, 0.4, 0.3])]
    turns = [torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 2])]
    got = step_credit(process, turns)
    assert got[0].tolist() == pytest.approx([0.2, 0.2, -0.3])
    assert got[1].tolist() == pytest.approx([-0.2, 0.3, 0.3, 0.0]), "a step alone with its number gets nothing"
    assert step_credit([], []) == []


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(1, 4))
def test_step_credit_knows_no_tokens_and_no_later_steps(episodes, tokens):
    turns = [torch.arange(len(e)) for e in episodes]
    whole = step_credit([torch.tensor(e) for e in episodes], turns)
    longer = step_credit(
        [torch.tensor(e).repeat_interleave(tokens) for e in episodes], [t.repeat_interleave(tokens) for t in turns]
    )
    for one, more in zip(whole, longer, strict=True):
        assert torch.allclose(one.repeat_interleave(tokens), more, atol=1e-6)
    first = step_credit([torch.tensor(e[:1]) for e in episodes], [t[:1] for t in turns])
    assert [f[0].item() for f in first] == pytest.approx([w[0].item() for w in whole], abs=1e-6)
