"""Warm start: the loss is on the policy's tokens only, computed as TRL computes it, and the policy learns."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from prm.env import History
from prm.errors import DataError, UsageError
from prm.records import Step, Trajectory
from rl import roles
from rl.policies import PolicyConfig, TransformersPolicy
from rl.sft import SFTConfig, sft


def episodes(observation="fine, go on"):
    steps = {word: [Step(f"go {word}", observation), Step("stop", "bye")] for word in "xyzxyz"}
    return [Trajectory(f"do {word}", steps[word], 1.0) for word in "xyzxyz"]


def config(out, **options):
    defaults = {"base": "tiny", "epochs": 200.0, "lr": 3e-3, "batch": 6, "width": 32, "layers": 2, "vocabulary": 300}
    return SFTConfig(out=str(out), **{**defaults, **options})


def test_it_learns_to_act_and_can_be_loaded(tmp_path):
    out = sft(episodes(), config(tmp_path / "warm"))
    policy = TransformersPolicy.load(str(out), PolicyConfig(str(out), temperature=0.0, max_action_tokens=8))
    start = [History(f"do {word}") for word in "xyz"]
    first = policy.act(start)
    assert [a.text for a in first] == ["go x", "go y", "go z"] and all(a.finish == "stop" for a in first)
    later = [h.then(a, "fine, go on") for h, a in zip(start, first, strict=True)]
    assert [a.text for a in policy.act(later)] == ["stop"] * 3


def test_the_loss_is_that_of_the_trainer(tmp_path, monkeypatch):
    ours = sft(episodes(), config(tmp_path / "ours", max_updates=4))
    monkeypatch.setattr(roles, "plain_head", lambda model: False)
    theirs = sft(episodes(), config(tmp_path / "theirs", max_updates=4))
    pair = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (ours, theirs)]
    assert all(torch.allclose(pair[0][k], pair[1][k], atol=1e-5) for k in pair[0])


def test_failures_are_left_out_unless_asked_for(tmp_path, capsys):
    bad = [Trajectory(t.task, t.steps, 0.0) for t in episodes()]
    with pytest.raises(DataError, match="none of 6 trajectories"):
        sft(bad, config(tmp_path / "none"))
    sft([*episodes(), *bad], config(tmp_path / "half", max_updates=1))
    assert "6 of 12 trajectories" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("micro_batch", -1), ("lr", float("nan")), ("lr", 0.0), ("epochs", -1.0), ("max_updates", 0),
     ("lora_rank", 0), ("copy_updates", -1), ("width", 0)],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        SFTConfig(base="tiny", out="out", **{name: value})
