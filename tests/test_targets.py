"""What is trained towards (neutral, missing, a teacher), going on from a PRM, and several processes as one."""

import dataclasses
import json
import multiprocessing
import os
import socket
from collections import Counter

import peft  # noqa: F401 (once, before the processes part)
import pytest
import torch
from accelerate import PartialState

from distill import calibrate
from distill.data import Targets, group_of, split
from distill.targets import mixed, settle, teach
from distill.train import DistillConfig, distill
from prm import PRM, ModelError, Step, StepLabel, Trajectory, UsageError, append_jsonl
from prm.cli import main
from prm.metrics import accuracy, auc
from tests.test_distill import episodes
from tests.tiny import checkpoint, model, tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("base"), init=0.02)


@pytest.fixture(scope="module")
def data():
    return episodes(60)


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# --- neutral and unlabelled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("neutral", "expected"),
    [
        ("keep", {0: (0.5, 2.0), 1: (0.9, 1.0)}),
        ("drop", {1: (0.9, 1.0)}),
        ("good", {0: (1.0, 2.0), 1: (0.9, 1.0)}),
        ("bad", {0: (0.0, 2.0), 1: (0.9, 1.0)}),
    ],
)
def test_neutral_labels_are_what_the_option_says(neutral, expected):
    targets, counts = Targets({"a": {0: (0.5, 2.0), 1: (0.9, 1.0)}, "b": {0: (0.5, 1.0)}}), Counter()
    settle(targets, [], neutral, "ignore", counts)
    assert targets.of["a"] == expected
    assert ("b" in targets.of) == (neutral != "drop")
    assert sum(counts.values()) == (0 if neutral == "keep" else 2)


def test_what_comes_after_an_error_is_bad_on_request():
    made = [Trajectory(name, tuple(Step(f"{name}{k}") for k in range(4))) for name in "abc"]
    own = {made[0].id: {0: (1.0, 1.0), 1: (0.2, 3.0), 3: (0.9, 1.0)}, made[1].id: {0: (1.0, 1.0)}}
    targets, counts = Targets({k: dict(v) for k, v in own.items()}), Counter()
    settle(targets, made, "keep", "ignore", counts)
    assert targets.of == own and not counts
    settle(targets, made, "keep", "bad-after-error", counts)
    assert targets.of == {made[0].id: {**own[made[0].id], 2: (0.0, 3.0)}, made[1].id: own[made[1].id]}
    assert counts == {"unlabelled steps after an error taken as bad": 1}


# --- a teacher --------------------------------------------------------------------------------------------------------


class Oracle:
    """Knows what `episodes` made: bad from the first step that says "none"."""

    def __init__(self, flip=False):
        self.flip = flip

    def score(self, trajectories):
        out = []
        for t in trajectories:
            bad, own = False, []
            for step in t.steps:
                bad = bad or "none" in step.action
                own.append(0.1 if bad != self.flip else 0.9)
            out.append(own)
        return out


def test_both_is_the_mean_and_the_teacher_alone_where_there_is_no_label():
    labels = Targets({"a": {0: (1.0, 4.0)}, "b": {0: (0.0, 2.0)}})
    taught = Targets({"a": {0: (0.2, 1.0), 1: (0.3, 1.0)}, "c": {0: (0.7, 1.0)}})
    found = mixed(labels, taught, "both", 0.25).of
    assert found["a"] == {0: (pytest.approx(0.8), 4.0), 1: (0.3, 0.75)}
    assert found["b"] == {0: (0.0, 2.0)} and found["c"] == {0: (0.7, 0.75)}
    assert mixed(labels, taught, "labels", 0.25) is labels and mixed(labels, taught, "teacher", 0.25) is taught
    assert teach(Oracle(), [Trajectory("none", ())]).of == {}


def test_a_student_of_a_teacher_needs_no_label(base, data, tmp_path):
    config = DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=10, lr=1e-2, target="teacher")
    prm = distill(data[0], [], config, teacher=Oracle())
    test, gold = episodes(40, seed=1)
    scores = [s for own in prm.score(test) for s in own]
    assert auc([x.score > 0.5 for x in gold], scores) > 0.9
    (line,) = [x["calibrated"] for x in log(tmp_path / "prm") if "calibrated" in x]
    assert line["gold"] is None and line["teacher"]["agreement"] > 0.8


def test_agreement_with_the_teacher_stands_apart_from_gold(base, data, tmp_path, capsys):
    """A teacher that is always wrong: who follows it agrees with it, and not with gold."""
    config = DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=10, lr=1e-2, target="teacher")
    distill(*data, config, teacher=Oracle(flip=True))
    (line,) = [x["calibrated"] for x in log(tmp_path / "prm") if "calibrated" in x]
    assert line["teacher"]["auc"] > 0.8 > 0.5 > line["gold"]["auc"]
    said = capsys.readouterr().out
    assert "held out, with gold" in said and "held out, with teacher" in said


def test_the_student_agrees_with_its_teacher_where_the_noise_allows_it(tmp_path):
    """Labels of a synthetic teacher, of which one in twenty is flipped: 0.95 is the most, 0.90 is asked for."""
    import random

    flip = random.Random(7)
    trajectories, labels = episodes(240)
    noisy = [
        StepLabel(x.trajectory_id, x.step, 1 - x.score if flip.random() < 0.05 else x.score, x.source) for x in labels
    ]
    base = checkpoint(tmp_path / "base", init=0.02)
    prm = distill(trajectories, noisy, DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=8, lr=1e-2))
    test, gold = episodes(80, seed=11)
    scores = [s for own in prm.score(test) for s in own]
    assert accuracy([x.score > 0.5 for x in gold], [s >= prm.settings.threshold for s in scores]) >= 0.9


def test_a_teacher_from_a_folder_by_the_command(base, data, tmp_path, capsys):
    PRM.create(model(init=0.3), tokenizer=tokenizer()).save(tmp_path / "teacher")
    append_jsonl(tmp_path / "t.jsonl", data[0][:20])
    append_jsonl(tmp_path / "l.jsonl", [x for x in data[1] if x.trajectory_id in {t.id for t in data[0][:10]}])
    files = [str(tmp_path / "t.jsonl"), str(tmp_path / "l.jsonl")]
    command = ["distill", *files, "--base", base, "--epochs", "1", "--target", "both", "--teacher", "TEACHER"]
    command[-1] = str(tmp_path / "teacher")
    assert main([*command, "--out", str(tmp_path / "prm")]) == 0
    assert "with teacher" in capsys.readouterr().out


# --- going on from a PRM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 4])
def test_a_refresh_starts_where_the_prm_was(base, data, tmp_path, rank):
    config = DistillConfig(base=base, out=str(tmp_path / "a"), epochs=2, lr=1e-2, lora_rank=rank)
    first = distill(*data, config)
    again = DistillConfig(from_=str(tmp_path / "a"), out=str(tmp_path / "b"), epochs=1, lr=1e-9)
    second = distill(*data, again)
    before, after = (
        torch.cat(prm.raw([part for t in data[0][:9] for part in prm.render(t)])) for prm in (first, second)
    )
    assert torch.allclose(before, after, atol=1e-4)
    third = distill(*data, DistillConfig(from_=str(tmp_path / "a"), out=str(tmp_path / "c"), epochs=2, lr=1e-2))
    held = [x["held_out_loss"] for x in log(tmp_path / "c") if "held_out_loss" in x]
    assert min(held) < next(x["held_out_loss"] for x in log(tmp_path / "a") if "held_out_loss" in x)
    assert PRM.load(tmp_path / "c").score(data[0]) == third.score(data[0])
    assert third.settings.lora == (rank is not None)


def test_a_refresh_by_the_command_and_from_a_config(base, data, tmp_path, capsys):
    append_jsonl(tmp_path / "t.jsonl", data[0][:20])
    append_jsonl(tmp_path / "l.jsonl", [x for x in data[1] if x.trajectory_id in {t.id for t in data[0][:20]}])
    files = [str(tmp_path / "t.jsonl"), str(tmp_path / "l.jsonl")]
    assert main(["distill", *files, "--base", base, "--epochs", "1", "--out", str(tmp_path / "a")]) == 0
    assert main(["distill", *files, "--from", str(tmp_path / "a"), "--epochs", "1", "--out", str(tmp_path / "b")]) == 0
    written = tmp_path / "b" / "distill.config.yaml"
    assert f"from_: {tmp_path / 'a'}" in written.read_text()
    assert main(["distill", *files, "--config", str(written), "--out", str(tmp_path / "c")]) == 0
    scores = [PRM.load(tmp_path / name).score(data[0][:5]) for name in "bc"]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, UsageError, "--base is required"),
        ({"from_": "x", "lora_rank": 4}, UsageError, "keeps the PRM's own lora_rank"),
        ({"from_": "OUT"}, UsageError, "same folder"),
        ({"from_": "NOWHERE"}, ModelError, "no such folder"),
        ({"base": "x", "target": "both"}, UsageError, "a teacher goes with"),
        ({"base": "x", "teacher": "y"}, UsageError, "a teacher goes with"),
        ({"base": "x", "teacher_share": 1.0}, UsageError, "teacher_share"),
        ({"base": "x", "neutral": "maybe"}, UsageError, "neutral"),
    ],
)
def test_options_that_make_no_sense(data, tmp_path, options, error, message):
    given = {
        k: str(tmp_path / "prm") if v == "OUT" else "/nowhere" if v == "NOWHERE" else v for k, v in options.items()
    }
    with pytest.raises(error, match=message):
        distill(*data, DistillConfig(out=str(tmp_path / "prm"), **given))


# --- splits, calibration, padding, processes --------------------------------------------------------------------------


def test_variants_of_a_problem_stay_on_one_side():
    made = []
    for i in range(30):
        for version in ("asked", "changed"):
            made.append(Trajectory(f"{version} {i}", (Step(f"{i}"),), None, {"group": f"Problem  {i}"}))
        made.append(Trajectory(f"changed {i}", (Step(f"{i} again"),), None, {}))  # tied by its task alone
    for seed in range(5):
        train, held = split(made, 0.3, seed)
        assert held and train
        sides = [{t.steps[0].action.split()[0] for t in side} for side in (train, held)]
        assert not sides[0] & sides[1]
    assert group_of(made[0]) == group_of(made[1]) == "problem 0"


def test_figures_after_calibration_are_of_the_other_half():
    """Isotonic regression fits any few points; cross-fitted, noise stays noise."""
    torch.manual_seed(0)
    logits, targets = torch.randn(40), (torch.rand(40) < 0.5).float()
    ones, half = torch.ones(40), torch.arange(40) % 2
    own = calibrate.fit("isotonic", logits, targets, ones)(logits)
    crossed = calibrate.cross_fitted("isotonic", logits, targets, ones, half)
    there = calibrate.fit("isotonic", logits[half == 1], targets[half == 1], ones[half == 1])(logits[half == 0])
    assert torch.equal(crossed[half == 0], there)
    assert ((crossed - targets) ** 2).mean() > ((own - targets) ** 2).mean() + 0.05
    assert torch.equal(calibrate.cross_fitted("isotonic", logits, targets, ones, torch.zeros(40)), own)


def test_little_is_spent_on_padding(base, tmp_path):
    long = episodes(120)[0]
    made = [Trajectory(t.task, t.steps * (1 + i % 6)) for i, t in enumerate(long)]
    labels = [StepLabel(t.id, k, 1.0, "gold:x") for t in made for k in range(len(t.steps))]
    distill(made, labels, DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=1))
    updates = [x for x in log(tmp_path / "prm") if "update" in x]
    padding, tokens = (sum(x[name] for x in updates) for name in ("padding", "tokens"))
    assert 0 <= padding < 0.12 * tokens


def work(rank, port, data, options):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    PartialState._reset_state()
    distill(*data, options)


def test_two_processes_give_the_losses_of_one(base, data, tmp_path):
    """As `accelerate launch` starts them."""
    options = DistillConfig(base=base, out=str(tmp_path / "one"), epochs=2, lr=1e-2, balance=True)
    one = distill(*data, options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    two = dataclasses.replace(options, out=str(tmp_path / "two"))
    both = [context.Process(target=work, args=(rank, port, data, two)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    lines = [log(tmp_path / name) for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1])
    for mine, other in zip(*lines, strict=True):
        for name in ("loss", "held_out_loss", "grad_norm"):
            assert (name in mine) == (name in other)
            assert mine.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-3)
    scores = PRM.load(tmp_path / "two").score(data[0])
    assert one.score(data[0]) == [pytest.approx(own, abs=1e-3) for own in scores]
