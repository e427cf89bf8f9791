"""Memory planned from a configuration: counts against real models, the peak against a real run, what is said to fit."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from distill.data import merge, rows
from distill.plan import GIB, PlanConfig, plan, presets, size
from distill.train import DistillConfig, Run
from prm import PRM, ModelError, Step, StepLabel, Trajectory, UsageError
from prm.cli import main
from tests.tiny import checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("base"), kind="qwen2")


@pytest.fixture
def config(base):
    """Only the configuration is there: nothing else may be read."""
    return PlanConfig(base=base, length=128, batch=4, batch_tokens=512, dtype="float32")


def test_no_weights_are_read(base, config, tmp_path):
    (tmp_path / "config.json").write_text((Path(base) / "config.json").read_text())
    alone = dataclasses.replace(config, base=str(tmp_path))
    assert plan(alone) == plan(config)


@pytest.mark.parametrize("rank", [None, 4])
def test_counts_are_those_of_the_real_model(base, config, rank):
    prm = PRM.create(base, lora_rank=rank)
    found = plan(dataclasses.replace(config, lora_rank=rank))
    assert found.parameters == sum(p.numel() for p in prm.model.parameters())
    assert found.trained == sum(p.numel() for p in prm.model.parameters() if p.requires_grad)
    assert found.weights == sum(p.numel() * p.element_size() for p in prm.model.parameters())
    assert (found.optimiser, found.gradients) == (8 * found.trained, 4 * found.trained)


@pytest.mark.parametrize("rank", [None, 4])
def test_ppo_counts_are_those_of_the_roles(base, config, rank):
    from transformers import AutoModelForCausalLM

    from rl.roles import Roles

    roles = Roles(AutoModelForCausalLM.from_pretrained(base), lora_rank=rank)
    found = plan(dataclasses.replace(config, lora_rank=rank), "ppo")
    learned = [p for role in ("policy", "critic") for p in roles.parameters(role).values()]
    assert found.trained == pytest.approx(sum(p.numel() for p in learned), abs=100)  # but for the value head
    held = {id(p): p for model in (roles.model, roles.reference, roles.critic) for p in model.parameters()}
    own = sum(p.numel() for p in held.values())
    prm = (
        sum(p.numel() for p in roles.parameters("critic").values())
        if rank
        else sum(p.numel() for p in roles.critic.parameters())
    )
    assert found.weights == pytest.approx(4 * (own + prm), abs=400)


def measured(base, config, tmp_path):
    """The allocator's own record of the most bytes at once in the second of two updates."""
    prm = PRM.create(base, lora_rank=config.lora_rank)
    text = "word " * (config.length // 8)
    made = [Trajectory(f"task {i}", tuple(Step(text) for _ in range(4))) for i in range(config.batch)]
    labels = [StepLabel(t.id, k, 1.0, "gold:x") for t in made for k in range(4)]
    own = rows(prm, made, merge(labels), Counter())
    length = max(len(row.part.ids) for row in own)
    options = DistillConfig(base=base, out=str(tmp_path), batch=config.batch, batch_tokens=length * config.batch)
    run = Run(prm, own, [], options, "")
    run.update(range(len(own)), 0)
    still = sum(p.numel() * p.element_size() for p in prm.model.parameters())
    still += sum(v.numel() * 4 for state in run.optimiser.state.values() for v in state.values() if v.ndim)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run.update(range(len(own)), 0)
    now = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return still + most, length


@pytest.mark.parametrize("rank", [None, 4])
def test_the_peak_is_that_of_a_real_run(base, config, tmp_path, rank):
    own = dataclasses.replace(config, lora_rank=rank)
    peak, length = measured(base, own, tmp_path)
    found = plan(dataclasses.replace(own, length=length, batch_tokens=length * own.batch))
    assert found.peak == pytest.approx(peak, rel=0.15)


def test_layers_are_extrapolated(base, config):
    """Six layers planned from two and four are six layers run."""
    from transformers import AutoConfig

    from distill import plan as module

    whole = AutoConfig.from_pretrained(base)
    whole.num_hidden_layers, whole.layer_types = 6, ["full_attention"] * 6
    for checkpointing in (False, True):
        own = dataclasses.replace(config, gradient_checkpointing=checkpointing)
        found = plan(own, model_config=whole).activations
        assert found == pytest.approx(module._activations(whole, own, "distil", 4), rel=0.02)


def test_what_saves_memory_saves_it(config):
    whole = dataclasses.replace(config, length=512, batch_tokens=2048)
    full, slim, lora, both = (plan(own) for own in presets(whole).values())
    assert slim.activations < full.activations and both.activations < lora.activations
    assert lora.optimiser < full.optimiser and both.peak < lora.peak < full.peak
    ppo = plan(whole, "ppo")
    assert plan(dataclasses.replace(whole, batch_tokens=512), "ppo").activations < ppo.activations
    assert plan(dataclasses.replace(whole, policy_share=0.1), "ppo").activations < ppo.activations


def test_the_largest_that_fits_fits(config):
    for stage in ("distil", "ppo"):
        own = dataclasses.replace(config, gpu="60MB", reserve="0", batch=1000, episodes=1)
        largest = plan(own, stage).largest
        assert largest > 0 and largest % own.length == 0
        assert plan(dataclasses.replace(own, batch_tokens=largest), stage).fits
        assert not plan(dataclasses.replace(own, batch_tokens=largest + 2 * own.length), stage).fits
    assert plan(dataclasses.replace(config, gpu="1MB", reserve="0")).largest == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("24GB", 24), ("24 GiB", 24), ("24", 24), ("512MB", 0.5), ("1.5g", 1.5)]
)
def test_sizes(text, expected):
    assert size(text) == expected * GIB


def test_the_command(base, tmp_path, capsys):
    command = ["plan", "--base", base, "--gpu", "24GB", "--lora-rank", "4", "--length", "128"]
    assert main([*command, "--out", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert "| distil |" in said and "| ppo |" in said and "M parameters learn" in said
    row = json.loads((tmp_path / "plan.json").read_text())
    assert {"weights", "optimiser", "gradients", "activations", "peak"} <= set(row["distil"]) & set(row["ppo"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "much"], "a size is a number"),
        (["--length", "0"], "length must be"),
        (["--lora-rank", "0"], "lora_rank"),
        (["--policy-share", "0"], "policy_share"),
        (["--base", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(base, capsys, options, message):
    assert main(["plan", "--base", base, *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]


def test_what_is_no_model_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        plan(PlanConfig(base=str(tmp_path)))
    with pytest.raises(UsageError):
        plan(PlanConfig(base=str(tmp_path)), "sft")
