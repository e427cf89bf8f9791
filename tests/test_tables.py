"""Intervals and tables: that intervals cover, agree with the figures, and that rows land where they belong."""

from random import Random

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from distill.evaluate import evaluate, write
from distill.tables import prm_score
from prm import Step, StepLabel, Trajectory


def made(n=60, seed=0, noise=0.3):
    """Trajectories of several domains and lengths, gold, and predictions that are right but for some noise."""
    random, trajectories, gold, said = Random(seed), [], [], []
    for i in range(n):
        steps = tuple(Step(f"{i} {k}") for k in range(random.choice([2, 5, 12])))
        meta = {"domain": random.choice(["web", "math"]), "category": random.choice(["nr", "ci"])}
        trajectory = Trajectory(f"task {i // 2}", steps, None, meta)
        trajectories.append(trajectory)
        for k in range(len(steps)):
            good = random.random() < 0.7
            wrong = random.random() < noise
            gold.append(StepLabel(trajectory.id, k, float(good), f"gold:{'ab'[i % 2]}"))
            said.append(StepLabel(trajectory.id, k, (0.2 + 0.6 * (good != wrong)) + random.random() / 5, "prm:m"))
    return trajectories, gold, said


def test_tables_hold_every_step_once():
    trajectories, gold, said = made()
    found = evaluate(gold, said, trajectories=trajectories)
    assert set(found.tables) == {"source", "domain", "length", "category"}
    for lines in found.tables.values():
        assert sum(line.n for line in lines) == found.n
        assert sum(line.trajectories for line in lines) == len(trajectories)
    assert [line.name for line in found.tables["length"]] == ["1 to 3 steps", "4 to 6 steps", "11 to 20 steps"]
    web = {t.id for t in trajectories if t.meta["domain"] == "web"}
    alone = evaluate([x for x in gold if x.trajectory_id in web], [x for x in said if x.trajectory_id in web])
    (line,) = [line for line in found.tables["domain"] if line.name == "web"]
    assert line.figures["step_accuracy"] == alone.step_accuracy and line.figures["auc"] == pytest.approx(alone.auc)
    assert line.figures["first_error_f1"] == alone.first_error.f1


def test_what_is_of_one_kind_only_has_no_table():
    found = evaluate([StepLabel("a", 0, 1.0, "gold:x")], [StepLabel("a", 0, 0.9, "prm:m")])
    assert found.tables == {} and found.intervals == {}


def test_intervals_hold_the_figures_and_narrow_with_data():
    few, many = (evaluate(*made(n)[1:], trajectories=made(n)[0]) for n in (30, 400))
    for name, (low, high) in many.intervals.items():
        value = getattr(many, name, None)
        value = getattr(many.first_error, name.replace("first_error_", ""), None) if value is None else value
        assert low <= value <= high, name
        assert name not in few.intervals or high - low < few.intervals[name][1] - few.intervals[name][0]
    assert {"auc", "ece", "brier", "kappa", "step_accuracy", "balanced_accuracy", "first_error_f1"} <= set(
        many.intervals
    )


def test_intervals_cover():
    """The accuracy of a known noise lies within nine of ten 95 % intervals and more."""
    hits = 0
    for seed in range(60):
        trajectories, gold, said = made(40, seed, noise=0.25)
        low, high = evaluate(gold, said, trajectories=trajectories, draws=200).intervals["step_accuracy"]
        hits += low <= 0.75 <= high
    assert hits >= 51


def test_steps_of_a_task_are_drawn_together():
    """Copies of a trajectory under one task add no certainty."""
    trajectories, gold, said = made(20)
    one = evaluate(gold, said, trajectories=trajectories).intervals["step_accuracy"]
    copies = [
        (Trajectory(t.task, (*t.steps[:-1], Step(f"{t.steps[-1].action} again {c}"))), t)
        for t in trajectories
        for c in range(8)
    ]
    again = [
        [StepLabel(copy.id, x.step, x.score, x.source) for copy, t in copies for x in some if x.trajectory_id == t.id]
        for some in (gold, said)
    ]
    eight = evaluate(*again, trajectories=[copy for copy, _ in copies]).intervals["step_accuracy"]
    assert eight[1] - eight[0] == pytest.approx(one[1] - one[0], rel=0.25)
    none = evaluate(*again, draws=500).intervals["step_accuracy"]
    assert none[1] - none[0] < 0.6 * (one[1] - one[0])


def test_the_weighted_auc_is_scikit_learns():
    from distill.tables import Compared, _auc

    random = np.random.default_rng(0)
    clusters, weights = [], random.integers(0, 4, (3, 12)).astype(float)
    for _ in range(12):
        n = random.integers(1, 6)
        good, said = random.random(n) < 0.5, np.round(random.random(n), 1)
        clusters.append([Compared("", "", (), tuple(said), tuple(good), (), None)])
    good = np.concatenate([c[0].good for c in clusters])
    said = np.concatenate([c[0].predicted for c in clusters])
    for own, found in zip(weights, _auc(clusters, weights), strict=True):
        each = np.concatenate([[w] * len(c[0].good) for w, c in zip(own, clusters, strict=True)])
        assert found == pytest.approx(roc_auc_score(good, said, sample_weight=each))


def test_prm_score_is_the_mean_of_both_f1():
    random = np.random.default_rng(1)
    good, said = random.random(50) < 0.7, random.random(50) < 0.6
    expected = (f1_score(good, said) + f1_score(~good, ~said)) / 2
    assert prm_score(good.tolist(), said.tolist()) == pytest.approx(expected)
    assert prm_score([True], [True]) is None


def test_originals_beside_planted_errors_are_in_no_category():
    plain = Trajectory("t", (Step("a"),), None, {"category": "ci", "version": "original"})
    planted = Trajectory("t", (Step("b"),), None, {"category": "ci", "version": "modified"})
    labels = [StepLabel(t.id, 0, 1.0, "gold:x") for t in (plain, planted)]
    (line,) = evaluate(labels, labels, trajectories=[plain, planted]).tables["category"]
    assert (line.name, line.n) == ("ci", 1)


def test_teacher_and_tuning(tmp_path):
    trajectories, gold, said = made()
    teacher = [StepLabel(x.trajectory_id, x.step, 1 - x.score, "judge:t") for x in gold[::2]]
    found = evaluate(gold, said, trajectories=trajectories, teacher=teacher, tune=True)
    assert found.teacher["gold"]["agreement"] == 0.0 and found.teacher["gold"]["n"] == len(teacher)
    assert found.teacher["predictions"]["agreement"] < 0.5 < found.step_accuracy
    assert "an upper bound" in found.threshold_from
    write(found, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "By length" in text and "predictions with the teacher" in text and "upper bound" in text
