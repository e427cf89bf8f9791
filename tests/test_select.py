"""The queue of what to label next: each ground for choosing on its own, the budget, and who reads the file."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.select import SelectConfig, embed, select
from labeling.annotate.assign import read_queue
from prm import PRM, DataError, Step, StepLabel, Trajectory, UsageError, append_jsonl
from prm.cli import main
from tests.tiny import model, tokenizer


def pool(texts):
    return [Trajectory(f"task {i}", tuple(map(Step, own))) for i, own in enumerate(texts)]


def scored(trajectories, rows, source="prm:m"):
    return [
        StepLabel(t.id, k, s, source)
        for t, own in zip(trajectories, rows, strict=True)
        for k, s in enumerate(own)
        if s is not None
    ]


def ids(found):
    return [c.trajectory_id for c in found.choices]


def test_uncertainty_alone():
    made = pool([["a"], ["b"], ["c"], ["d"]])
    labels = scored(made, [[0.9], [0.45], [0.2], [None]])
    found = select(made, labels, SelectConfig(n=4, diversity=0.0, disagreement=0.0))
    assert ids(found) == [made[i].id for i in (3, 1, 2, 0)]
    assert [c.uncertainty for c in found.choices] == pytest.approx([1.0, 0.99, 0.64, 0.36])
    priorities = [c.priority for c in found.choices]
    assert priorities == sorted(priorities, reverse=True) and priorities[-1] > 0 and priorities[0] == 1


def test_disagreement_alone_of_sources_or_heads():
    made = pool([["a"], ["b"], ["c"]])
    labels = scored(made, [[0.9], [0.9], [0.5]]) + scored(made, [[0.8], [0.1], [0.5]], "judge:x")
    found = select(made, labels, SelectConfig(n=3, diversity=0.0, uncertainty=0.0))
    assert ids(found)[0] == made[1].id and found.choices[0].disagreement == pytest.approx(0.8)
    assert found.choices[-1].disagreement == 0.0


def test_diversity_alone_takes_one_of_each_kind_first():
    made = pool([["search the river now", "go"]] * 1 + [["search the river today", "go"], ["open the red box", "x"]])
    found = select(made, [], SelectConfig(n=3, diversity=1.0))
    assert {ids(found)[0], ids(found)[1]} & {made[2].id} and ids(found)[2] != made[2].id
    assert found.choices[2].distance < found.choices[1].distance


def test_what_is_labelled_already_is_not_chosen_and_is_stayed_away_from():
    made = pool([["search river"], ["search river again"], ["open box"]])
    gold = [StepLabel(made[0].id, 0, 1.0, "human:ana")]
    found = select(made, gold, SelectConfig(n=9, diversity=1.0))
    assert ids(found) == [made[2].id, made[1].id] and found.candidates == 2
    half = pool([["a", "b", "c"]])
    labels = [StepLabel(half[0].id, 0, 1.0, "gold:x"), StepLabel(half[0].id, 1, 0.5, "judge:y")]
    steps = select(half, labels, SelectConfig(n=9, unit="steps"))
    assert sorted(c.step for c in steps.choices) == [1, 2]
    bought = select(half, labels, SelectConfig(n=9, unit="steps", settled=("gold", "judge:y")))
    assert [c.step for c in bought.choices] == [2]
    with pytest.raises(DataError, match="nothing left"):
        select(made[:1], gold, SelectConfig(n=1))


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.text("ab c", max_size=6), max_size=3), min_size=1, max_size=8),
    st.integers(1, 12),
    st.sampled_from(["trajectories", "steps"]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_within_the_budget_and_nothing_twice(texts, n, unit, diversity):
    made = pool([own or ["x"] for own in texts])
    found = select(made, [], SelectConfig(n=n, unit=unit, diversity=diversity))
    keys = [(c.trajectory_id, c.step) for c in found.choices]
    there = len(made) if unit == "trajectories" else sum(len(t.steps) for t in made)
    assert len(keys) == len(set(keys)) == min(n, there) and found.candidates == there
    assert all((c.step is None) == (unit == "trajectories") and 0 <= c.distance <= 1 for c in found.choices)


def test_own_embeddings_and_those_of_a_model():
    prm = PRM.create(model(), tokenizer=tokenizer())
    made = pool([["search river", "go"], ["open box"]])
    states = embed(prm, made)
    assert [states[t.id].shape for t in made] == [(2, 32), (1, 32)]
    logits = prm.raw([part for t in made for part in prm.render(t)])
    with np.errstate(all="ignore"):
        import torch

        assert torch.allclose(prm.readout(torch.tensor(states[made[0].id])), logits[0], atol=1e-4)
    vectors = {made[0].id: np.array([1.0, 0.0]), made[1].id: np.array([1.0, 1e-9])}
    found = select(made, [], SelectConfig(n=2, diversity=1.0), embeddings=vectors)
    assert found.choices[1].distance == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(DataError, match="embeddings"):
        select(made, [], SelectConfig(n=2), embeddings={made[0].id: np.zeros(2)})


def test_the_command_and_the_annotation_queue(tmp_path, capsys):
    made = pool([["a", "b"], ["c"], ["d"]])
    append_jsonl(tmp_path / "t.jsonl", made)
    append_jsonl(tmp_path / "l.jsonl", scored(made, [[0.5, 0.9], [0.9], [0.1]]))
    append_jsonl(tmp_path / "m.jsonl", [StepLabel("feed", 0, 0.5, "judge:x")])
    files = [str(tmp_path / "t.jsonl"), "--labels", str(tmp_path / "l.jsonl"), str(tmp_path / "m.jsonl")]
    command = ["select", *files, "--n", "2", "--out", str(tmp_path / "queue.jsonl")]
    assert main(command) == 0
    rows = read_queue(str(tmp_path / "queue.jsonl"))
    assert len(rows) == 2 and all(step is None for _, step, _ in rows)
    said = capsys.readouterr()
    assert "2 of 3 trajectories" in said.out and "1 labels of other trajectories" in said.err
    assert main(command) == 2
    steps = ["select", *files, "--n", "2", "--unit", "steps", "--diversity", "0", "--out", str(tmp_path / "s.jsonl")]
    assert main(steps) == 0
    assert read_queue(str(tmp_path / "s.jsonl"))[0][:2] == (made[0].id, 0)
    assert {"uncertainty", "disagreement", "distance"} <= set(
        json.loads((tmp_path / "s.jsonl").read_text().split("\n")[0])
    )
    PRM.create(model(), tokenizer=tokenizer()).save(tmp_path / "prm")
    out = str(tmp_path / "q.jsonl")
    assert main(["select", *files, "--n", "3", "--model", str(tmp_path / "prm"), "--out", out]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 1, "unit": "x"}, "unit"),
        ({"n": 1, "diversity": 2.0}, "diversity"),
        ({"n": 1, "uncertainty": -1.0}, "weights"),
        ({"n": 1, "uncertainty": 0.0, "disagreement": 0.0, "diversity": 0.0}, "nothing is to choose by"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(UsageError, match=message):
        select(pool([["a"]]), [], SelectConfig(**options))
