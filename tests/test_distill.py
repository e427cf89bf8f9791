"""Labels to a PRM: what is supervised, that nothing moves, and that the numbers do not depend on how they are made."""

import json
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from distill import calibrate
from distill.data import check_labels, merge, rows, split
from distill.train import DistillConfig, Run, default_lr, distill, objective
from prm import PRM, DataError, ModelError, Step, StepLabel, Trajectory, UsageError, append_jsonl, read_jsonl
from prm.cli import main
from prm.metrics import auc, ece
from prm.render import encode
from tests.tiny import TOKENIZERS, checkpoint, model, tokenizer

WORDS = ["capital", "river", "country", "France", "Paris", "search", "find", "long", "two", "numbers"]


def episodes(n, seed=0, tasks=None):
    """Trajectories whose steps are bad from the first that says "none", and their labels."""
    random = Random(seed)
    trajectories, labels = [], []
    for i in range(n):
        steps, scores, bad = [], [], False
        for _ in range(random.randint(1, 5)):
            words = [random.choice(WORDS) for _ in range(3)]
            if random.random() < 0.3:
                words[1], bad = "none", True
            steps.append(Step("search: " + " ".join(words), random.choice(["", "Paris is the capital."])))
            scores.append(0.1 if bad else 0.9)
        task = f"question {i % (tasks or n)}"
        trajectory = Trajectory(task, tuple(steps), meta={"row": i})
        trajectories.append(trajectory)
        labels += [StepLabel(trajectory.id, k, s, "mc:tiny", weight=4) for k, s in enumerate(scores)]
    return trajectories, labels


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data():
    return episodes(60)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    base, out = checkpoint(folder / "base", init=0.02), folder / "prm"
    return distill(*data, DistillConfig(base=base, out=str(out), epochs=8, lr=1e-2)), out


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# --- the whole --------------------------------------------------------------------------------------------------------


def test_it_learns_and_what_is_saved_is_what_is_returned(trained):
    prm, out = trained
    test, labels = episodes(40, seed=1)
    scores = prm.score(test)
    gold = {(o.trajectory_id, o.step): o.score for o in labels}
    good = [gold[t.id, i] > 0.5 for t in test for i in range(len(t.steps))]
    assert auc(good, [s for own in scores for s in own]) > 0.9
    loaded = PRM.load(out)
    assert loaded.score(test) == scores
    assert loaded.settings == prm.settings
    assert loaded.settings.calibration.kind == "temperature"
    assert prm.label(test)[0].source == f"prm:{out}"
    assert not (out / "training.pt").exists()


def test_the_log_has_every_update_and_epoch(trained, data):
    lines = log(trained[1])
    updates = [x for x in lines if "update" in x]
    assert [x["update"] for x in updates] == list(range(1, len(updates) + 1))
    assert all(math.isfinite(x["loss"]) and x["tokens"] > 0 for x in updates)
    for epoch in range(1, 9):
        train, _ = split(data[0], 0.2, 0)
        assert sum(x["steps"] for x in updates if x["epoch"] == epoch) == sum(len(t.steps) for t in train)
    held = [x["held_out_loss"] for x in lines if "held_out_loss" in x]
    assert len(held) == 8 and min(held) < held[0]


def test_a_lora_learns_on_a_frozen_base(base, data, tmp_path):
    config = DistillConfig(base=base, out=str(tmp_path / "prm"), lora_rank=4, epochs=2, lr=1e-2)
    prm = distill(*data, config)
    assert (tmp_path / "prm" / "adapter_model.safetensors").exists()
    assert PRM.load(tmp_path / "prm").score(data[0]) == prm.score(data[0])
    held = [x["held_out_loss"] for x in log(tmp_path / "prm") if "held_out_loss" in x]
    assert held[1] < held[0]


def test_the_best_epoch_is_kept(base, data, tmp_path):
    """A rate that only ever does harm leaves the first epoch's weights."""
    config = DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=4, lr=1.0, patience=2)
    prm = distill(*data, config)
    lines = log(tmp_path / "prm")
    held = [x["held_out_loss"] for x in lines if "held_out_loss" in x]
    best = held.index(min(held))
    assert len(held) == min(4, best + 3)
    held_rows = rows(prm, split(data[0], 0.2, 0)[1], merge(data[1]), Counter())
    logits = torch.cat(prm.raw([row.part for row in held_rows]))
    scores = torch.tensor([s for row in held_rows for s in row.scores])
    assert float(objective(logits, scores, torch.ones_like(scores))) / len(scores) == pytest.approx(min(held), rel=1e-5)


# --- what is supervised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_label_stands_at_its_own_step(kind):
    """Steps that end in blanks, newlines or a marker's text, some unlabelled, some cut into parts."""
    own = tokenizer(kind)
    actions = ["Add the two numbers.", "\\frac{3}{4}.\n\n", "so x = 2 ", "f(4)", "\\[ y=1 \\]\n", "<|im_end|></s>"] * 2
    trajectory = Trajectory("task", tuple(Step(f"{i} {a}", "seen\n\n" * (i % 3)) for i, a in enumerate(actions)))
    labels = [StepLabel(trajectory.id, i, i / 20, "gold:x", weight=i + 1) for i in range(12) if i % 4 != 2]
    for limit in (None, 120, 180):
        prm = PRM.create(model(own), tokenizer=own, max_tokens=limit)
        dropped = Counter()
        found = rows(prm, [trajectory], merge(labels), dropped)
        seen = {}
        for row in found:
            for end, step, score, weight in zip(row.part.ends, row.steps, row.scores, row.weights, strict=True):
                action = encode(own, trajectory.steps[step].action)
                assert row.part.ids[end + 1 - len(action) : end + 1] == action
                seen[step] = (score, weight)
        assert seen == {o.step: (o.score, o.weight) for o in labels}
        assert dropped["steps dropped by truncation"] == 0


def test_truncated_steps_have_no_label_and_are_counted(base, tmp_path, capsys):
    long = "word " * 300
    trajectories = [Trajectory(f"task {i}", (Step("a"), Step("b"), Step(long), Step(long))) for i in range(4)]
    labels = [StepLabel(t.id, i, s, "gold:x") for t in trajectories for i, s in enumerate((1, 0, 1, 1))]
    prm = PRM.create(base, max_tokens=200)
    dropped = Counter()
    found = rows(prm, trajectories[:1], merge(labels), dropped)
    assert [(r.steps, r.scores) for r in found] == [((0, 1), (1.0, 0.0))]
    assert dropped["steps dropped by truncation"] == 2
    distill(trajectories, labels, DistillConfig(base=base, out=str(tmp_path / "prm"), max_tokens=200, epochs=1))
    printed = capsys.readouterr().out
    assert "6 supervised steps an epoch" in printed and "8 steps dropped by truncation" in printed


def test_no_label_is_no_loss(base, data, tmp_path, capsys):
    """Trajectories and parts without a label are read by nobody, and never make a NaN."""
    trajectories, labels = data
    some = [o for o in labels if o.step == 0 and trajectories[0].id != o.trajectory_id]
    config = DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=1, holdout=0.0, calibration="none")
    distill(trajectories, some, config)
    printed = capsys.readouterr().out
    assert f"{len(some)} supervised steps an epoch" in printed
    assert "1 trajectories without a label" in printed
    assert all(math.isfinite(x["loss"]) for x in log(tmp_path / "prm") if "loss" in x)
    assert float(objective(torch.zeros(0), torch.zeros(0), torch.zeros(0))) == 0.0


def test_nothing_labelled_is_an_error(base, data, tmp_path):
    config = DistillConfig(base=base, out=str(tmp_path / "prm"))
    with pytest.raises(DataError, match="none of 60 trajectories has a label"):
        distill(data[0], [], config)
    neutral = [StepLabel(t.id, 0, 0.5, "gold:x") for t in data[0]]
    with pytest.raises(DataError, match="has a label"):
        distill(data[0], neutral, DistillConfig(base=base, out=str(tmp_path / "prm"), neutral="drop"))
    short = DistillConfig(base=base, out=str(tmp_path / "prm"), max_tokens=3)
    with pytest.raises(DataError, match="dropped by truncation"):
        distill(*data, short)


def test_labels_of_unknown_steps_are_named(base, data, tmp_path):
    config = DistillConfig(base=base, out=str(tmp_path / "prm"))
    with pytest.raises(DataError, match="labels of 1 unknown trajectories, the first: feed"):
        distill(data[0], [*data[1], StepLabel("feed", 0, 1.0, "gold:x")], config)
    first = data[0][0]
    with pytest.raises(
        DataError, match=rf"step 99 \(0-based\) of trajectory {first.id}, which has {len(first.steps)} steps"
    ):
        distill(data[0], [*data[1], StepLabel(first.id, 99, 1.0, "gold:x")], config)
    assert not (tmp_path / "prm").exists()


def test_a_step_token_of_several_pieces_is_refused_before_training(base, data, tmp_path):
    with pytest.raises(ModelError, match="encodes to"):
        distill(*data, DistillConfig(base=base, out=str(tmp_path / "prm"), step_token="<step_end>"))
    options = {"step_token": "<step_end>", "add_tokens": ("<step_end>",), "lora_rank": 2, "epochs": 1}
    prm = distill(*data, DistillConfig(base=base, out=str(tmp_path / "prm"), **options))
    assert PRM.load(tmp_path / "prm").score(data[0]) == prm.score(data[0])


def test_labels_of_several_sources_are_averaged_by_weight():
    labels = [
        StepLabel("t", 0, 1.0, "mc:a", weight=3),
        StepLabel("t", 0, 0.0, "judge:b", weight=1),
        StepLabel("t", 1, 0.0, "human:c"),
        StepLabel("t", 1, 1.0, "human:c"),
    ]
    targets = merge(labels)
    assert targets.of == {"t": {0: (0.75, 4.0), 1: (1.0, 1.0)}}
    assert len(targets) == 2
    assert targets.notes == [
        "1 labels replaced by a later one of the same source",
        "1 steps have labels of several sources: their weighted mean is taken",
    ]
    check_labels([], merge([]))


# --- splits -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "A ", "b", "b\n", "c", "d e", "d  E", "f"]), min_size=2, max_size=30),
    st.floats(0.01, 0.9),
)
def test_no_task_is_on_both_sides(tasks, holdout):
    trajectories = [Trajectory(t, (Step(str(i)),)) for i, t in enumerate(tasks)]
    names = {" ".join(t.casefold().split()) for t in tasks}
    if len(names) < 2:
        with pytest.raises(DataError, match="none can be held out"):
            split(trajectories, holdout, 0)
        return
    train, held = split(trajectories, holdout, 0)
    assert train and held and len(train) + len(held) == len(trajectories)
    sides = [{" ".join(t.task.casefold().split()) for t in side} for side in (train, held)]
    assert not sides[0] & sides[1]
    assert split(trajectories, holdout, 0) == (train, held)


def test_nothing_held_out_by_choice():
    trajectories = [Trajectory("t", (Step("a"),))]
    assert split(trajectories, 0.0, 0) == (trajectories, [])
    with pytest.raises(UsageError, match="holdout"):
        split(trajectories, 1.0, 0)


# --- the same numbers -------------------------------------------------------------------------------------------------


def run(base, data, out, **options):
    config = DistillConfig(base=base, out=str(out), **{"epochs": 2, "lr": 1e-3, **options})
    prm = distill(*data, config)
    return [x["loss"] for x in log(out) if "loss" in x], prm.score(data[0])


def test_pieces_do_not_change_the_objective(base, data, tmp_path):
    whole, _ = run(base, data, tmp_path / "whole")
    pieces, _ = run(base, data, tmp_path / "pieces", batch_tokens=60)
    assert pieces == pytest.approx(whole, abs=1e-5)
    half, _ = run(base, data, tmp_path / "checkpointing", gradient_checkpointing=True, batch_tokens=200)
    assert half == pytest.approx(whole, abs=1e-5)


def test_an_interrupted_run_ends_with_the_same_numbers(base, data, tmp_path, monkeypatch, capsys):
    whole = run(base, data, tmp_path / "whole", epochs=3, checkpoint_every=2)
    update = Run.update
    for stop in (1, 5, 6, 7, 13, 18):
        out = tmp_path / f"stopped at {stop}"
        seen = []

        def stopping(self, rows_, epoch, seen=seen, stop=stop):
            seen.append(epoch)
            if len(seen) == stop:
                raise KeyboardInterrupt
            update(self, rows_, epoch)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "update", stopping)
            with pytest.raises(KeyboardInterrupt):
                run(base, data, out, epochs=3, checkpoint_every=2)
        assert not (out / "prm.json").exists()
        assert run(base, data, out, epochs=3, checkpoint_every=2) == whole
        assert ("goes on after update" in capsys.readouterr().out) == (stop > 2)
        assert (out / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()


def test_bfloat16_is_near(base, data, tmp_path):
    for rank in (None, 4):
        exact, near = (
            run(base, data, tmp_path / f"{rank} {dtype}", epochs=1, lora_rank=rank, dtype=dtype)[0]
            for dtype in ("float32", "bfloat16")
        )
        assert near == pytest.approx(exact, abs=0.05) and near != exact


def test_another_model_is_not_written_over(base, data):
    with pytest.raises(ModelError, match="but no PRM"):
        distill(*data, DistillConfig(base=base, out=base))


def test_a_run_of_other_data_is_not_continued(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "fit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(base, data, tmp_path / "prm", checkpoint_every=1)
    with pytest.raises(UsageError, match="unfinished run of other data"):
        run(base, data, tmp_path / "prm", checkpoint_every=1, lr=5e-4)
    with pytest.raises(UsageError, match="unfinished run of other data"):
        run(base, (data[0], data[1][:-1]), tmp_path / "prm", checkpoint_every=1)


def test_the_seed_decides(base, data, tmp_path):
    first = run(base, data, tmp_path / "1", epochs=1)
    assert run(base, data, tmp_path / "2", epochs=1) == first
    assert run(base, data, tmp_path / "3", epochs=1, seed=1)[0] != first[0]


def test_a_dropout_in_the_base_changes_nothing(data, tmp_path):
    own = tokenizer()
    plain, dropped = model(own), model(own)
    dropped.config.attention_dropout = 0.5
    for name, source in (("plain", plain), ("dropped", dropped)):
        source.save_pretrained(tmp_path / name)
        own.save_pretrained(tmp_path / name)
    options = {"epochs": 1, "gradient_checkpointing": True}
    losses = [run(str(tmp_path / n), data, tmp_path / f"{n} prm", **options)[0] for n in ("plain", "dropped")]
    assert losses[0] == losses[1]


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_objective_is_cross_entropy_with_soft_labels():
    logits, scores = torch.tensor([0.3, -2.0, 4.0]), torch.tensor([0.9, 0.2, 0.5])
    p = torch.sigmoid(logits)
    each = -(scores * p.log() + (1 - scores) * (1 - p).log())
    weights = torch.tensor([1.0, 2.0, 0.5])
    assert float(objective(logits, scores, weights)) == pytest.approx(float((each * weights).sum()), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"weights": False}, {"balance": True}])
def test_weights_and_balance(base, options):
    trajectories = [Trajectory(f"task {i}", (Step("a"), Step("b"), Step("c"))) for i in range(4)]
    labels = [StepLabel(t.id, k, s, "gold:x", weight=k + 1) for t in trajectories for k, s in enumerate((1, 1, 0))]
    prm = PRM.create(base)
    config = DistillConfig(base=base, out="unused", **options)
    made = rows(prm, trajectories, merge(labels), Counter())
    this = Run.__new__(Run)
    this.config = config
    from distill.train import _balance

    this.balance = _balance(made, config)
    total = sum(this.weight(row) for row in made)
    assert total == pytest.approx({"weights": 12}.get(next(iter(options), ""), 24))
    good, bad = this.balance
    share = (
        good
        * sum(s * (w if config.weights else 1) for r in made for s, w in zip(r.scores, r.weights, strict=True))
        / total
    )
    assert share == pytest.approx(0.5 if config.balance else 2 / 3 if not config.weights else 0.5, abs=0.01)
    assert (good, bad) == (1, 1) if not config.balance else good > 0


def test_equal_weights_change_nothing(base, data, tmp_path):
    light = [StepLabel(o.trajectory_id, o.step, o.score, o.source) for o in data[1]]
    first = run(base, data, tmp_path / "4", epochs=1)[0]
    assert run(base, (data[0], light), tmp_path / "1", epochs=1)[0] == pytest.approx(first, abs=1e-6)


def test_the_default_rate_falls_with_size(base):
    assert default_lr(PRM.create(base)) == 1e-3
    assert default_lr(PRM.create(base, lora_rank=2)) == 2e-4


# --- calibration ------------------------------------------------------------------------------------------------------


def noisy(temperature, n=4000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(n, generator=generator) * 2
    return true * temperature, torch.bernoulli(torch.sigmoid(true), generator=generator)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_a_temperature_is_recovered(temperature):
    logits, targets = noisy(temperature)
    found = calibrate.fit("temperature", logits, targets, torch.ones(len(logits)))
    assert found.temperature == pytest.approx(temperature, rel=0.1)
    values = calibrate.summary(logits, targets, found(logits))
    assert values["ece_after"] <= values["ece_before"] + 0.01
    assert values["brier_after"] <= values["brier_before"] + 1e-4


def test_isotonic_is_scikit_learns():
    logits, targets = noisy(3.0, n=500)
    weights = torch.rand(500) + 0.5
    found = calibrate.fit("isotonic", logits, targets, weights)
    line = IsotonicRegression(out_of_bounds="clip").fit(logits.numpy(), targets.numpy(), sample_weight=weights.numpy())
    at = torch.linspace(-20, 20, 999)
    assert np.allclose(found(at), line.predict(at.numpy()), atol=1e-5)
    assert ece(found(logits).tolist(), targets.tolist()) < 0.02


def test_without_calibration_a_score_is_a_sigmoid(base, data, tmp_path):
    config = DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=1, calibration="none")
    prm = distill(*data, config)
    part = prm.render(data[0][0])[0]
    assert prm.score(data[0][:1])[0] == torch.sigmoid(prm.raw([part])[0]).tolist()


def test_isotonic_is_stored(base, data, tmp_path):
    prm = distill(*data, DistillConfig(base=base, out=str(tmp_path / "prm"), epochs=1, calibration="isotonic"))
    assert PRM.load(tmp_path / "prm").score(data[0]) == prm.score(data[0])
    assert prm.settings.calibration.kind == "isotonic"


def test_nothing_to_calibrate_on():
    with pytest.raises(DataError, match="nothing can be calibrated on"):
        calibrate.fit("temperature", torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert calibrate.fit("none", torch.zeros(0), torch.zeros(0), torch.zeros(0)).kind == "none"
    with pytest.raises(UsageError):
        calibrate.fit("platt", torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_the_threshold_finds_first_errors():
    gold = [[1, 1, 0], [1, 0, 0], [1, 1], [1, 1, 1]]
    scores = [[0.9, 0.8, 0.6], [0.8, 0.65, 0.1], [0.9, 0.75], [0.72, 0.8, 0.9]]
    threshold, by = calibrate.choose_threshold(gold, scores)
    assert 0.65 < threshold < 0.72 and by == "held-out first-error F1"
    threshold, by = calibrate.choose_threshold(gold[:2], scores[:2])
    assert 0.65 < threshold < 0.8 and by == "held-out balanced accuracy"
    assert calibrate.choose_threshold([[1, 1]], [[0.2, 0.3]]) == (0.5, "default")
    assert calibrate.choose_threshold([], []) == (0.5, "default")


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def files(data, tmp_path):
    append_jsonl(tmp_path / "t.jsonl", data[0])
    append_jsonl(tmp_path / "l.jsonl", data[1])
    return tmp_path


def test_the_commands(base, data, files, capsys):
    t, labels, out = str(files / "t.jsonl"), str(files / "l.jsonl"), str(files / "prm")
    distilled = ["distill", t, labels, "--base", base, "--out", out, "--epochs", "1"]
    assert main(distilled) == 0
    assert (files / "prm" / "distill.config.yaml").exists()
    assert main(distilled) == 2
    assert "exists already" in capsys.readouterr().err
    scored = ["score", out, t, "--out", str(files / "s.jsonl")]
    assert main(scored) == 0
    written = (files / "s.jsonl").read_bytes()
    found = read_jsonl(files / "s.jsonl", StepLabel)
    expected = PRM.load(out).score(data[0])
    assert [(o.trajectory_id, o.step) for o in found] == [(x.id, i) for x in data[0] for i in range(len(x.steps))]
    assert [o.score for o in found] == pytest.approx([s for own in expected for s in own], abs=1e-6)
    assert {o.source for o in found} == {f"prm:{out}"}
    assert main(scored) == 0 and (files / "s.jsonl").read_bytes() == written
    assert f"0 steps scored, {len(found)} from before" in capsys.readouterr().out


def test_scoring_goes_on_where_it_was_killed(trained, data, files, capsys):
    scored = ["score", str(trained[1]), str(files / "t.jsonl"), "--out", str(files / "s.jsonl")]
    assert main(scored) == 0
    written = (files / "s.jsonl").read_bytes()
    found = {(o.trajectory_id, o.step): o for o in read_jsonl(files / "s.jsonl", StepLabel)}
    for cut in (len(written) // 3, len(written) - 1, written.index(b"\n") + 1):
        (files / "s.jsonl").write_bytes(written[:cut].rpartition(b"\n")[0] + b"\n")
        assert main(scored) == 0
        again = {(o.trajectory_id, o.step): o for o in read_jsonl(files / "s.jsonl", StepLabel)}
        assert again.keys() == found.keys()
        assert len(again) == len((files / "s.jsonl").read_bytes().splitlines())
        assert all(abs(again[k].score - found[k].score) < 1e-6 for k in found)


def test_scores_of_another_model_are_not_mixed(trained, base, files, capsys, tmp_path):
    PRM.create(base, seed=5).save(tmp_path / "other")
    assert main(["score", str(trained[1]), str(files / "t.jsonl"), "--out", str(files / "s.jsonl")]) == 0
    assert main(["score", str(tmp_path / "other"), str(files / "t.jsonl"), "--out", str(files / "s.jsonl")]) == 2
    assert "did not write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["distill", "T", "L", "--base", "NOWHERE", "--out", "O"], "no such folder"),
        (["distill", "T", "MISSING", "--base", "B", "--out", "O"], "no such file"),
        (["distill", "EMPTY", "L", "--base", "B", "--out", "O"], "holds no trajectory"),
        (["distill", "T", "EMPTY", "--base", "B", "--out", "O"], "holds no label"),
        (["distill", "T", "NAN", "--base", "B", "--out", "O"], "nan.jsonl:1: "),
        (["distill", "T", "STRANGE", "--base", "B", "--out", "O"], "unknown trajectories"),
        (["distill", "T", "T", "--base", "B", "--out", "O"], "expected a step label"),
        (["distill", "T", "L", "--base", "B", "--out", "O", "--epochs", "0"], "epochs must be at least 1"),
        (["distill", "T", "L", "--base", "B", "--out", "O", "--layout", "plain", "--step-token", "<s>!"], "encodes to"),
        (["distill", "T", "L", "--out", "O"], "--base is required"),
        (["score", "NOWHERE", "T", "--out", "S"], "no such folder"),
        (["score", "B", "T", "--out", "S"], "no prm.json"),
        (["score", "P", "EMPTY", "--out", "S"], "holds no trajectory"),
        (["score", "P", "L", "--out", "S"], "expected a trajectory"),
        (["evaluate", "L", "EMPTY", "--out", "E"], "holds no label"),
        (["evaluate", "L", "STRANGE", "--out", "E"], "no step in common"),
        (["evaluate", "L", "L", "--out", "E", "--threshold", "2"], "threshold must lie in"),
    ],
)
def test_bad_input_is_one_line_and_status_2(base, trained, files, capsys, arguments, message):
    names = {"T": "t.jsonl", "L": "l.jsonl", "O": "o", "S": "s.jsonl", "E": "e", "NOWHERE": "nowhere"}
    names |= {"MISSING": "missing.jsonl", "EMPTY": "empty.jsonl", "NAN": "nan.jsonl", "STRANGE": "strange.jsonl"}
    known = {name: str(files / file) for name, file in names.items()} | {"B": base, "P": str(trained[1])}
    (files / "empty.jsonl").write_text("\n")
    (files / "nan.jsonl").write_text('{"trajectory_id": "a", "step": 0, "score": NaN, "source": "gold:x"}\n')
    append_jsonl(files / "strange.jsonl", StepLabel("feed", 0, 1.0, "gold:x"))
    before = sorted(p.name for p in files.iterdir())
    assert main([known.get(a, a) for a in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]
    assert sorted(p.name for p in files.iterdir()) == before


def test_a_step_too_long_to_score(base, files, capsys):
    PRM.create(base, max_tokens=64).save(files / "small")
    long = Trajectory("task", (Step("a"), Step("word " * 100)))
    append_jsonl(files / "long.jsonl", [long, Trajectory("task", (Step("a"),)), Trajectory("none", ())])
    arguments = ["score", str(files / "small"), str(files / "long.jsonl"), "--out", str(files / "s.jsonl")]
    assert main(arguments) == 2
    assert f"trajectory {long.id}: step 1 with the task" in capsys.readouterr().err
    assert main([*arguments, "--skip-bad"]) == 0
    said = capsys.readouterr()
    assert "1 trajectories left out" in said.err and "1 steps scored" in said.out
