"""Choosing among answers: curves against every subset there is, pairs by hand, and what has no score."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.choices import best_of_n, pair_accuracy, scored
from prm import Step, StepLabel, Trajectory, append_jsonl, convert
from prm.cli import main


def answers(task, rows):
    """(outcome, answer, step scores) -> trajectories and scores."""
    made, scores = [], {}
    for i, (outcome, answer, own) in enumerate(rows):
        steps = tuple(Step(f"{task} {i} {k}") for k in range(len(own)))
        meta = {"answer": answer} if answer is not None else {}
        made.append(Trajectory(task if steps else f" {task}", steps, outcome, meta))
        scores[made[-1].id] = dict(enumerate(own))
    return made, scores


def by_hand(rows, n, how):
    """The mean over all subsets of the success of the best; ties share, no score is worth nothing."""
    total = []
    for drawn in itertools.combinations(rows, n):
        known = [(how(own), outcome) for outcome, _, own in drawn if own]
        best = max((s for s, _ in known), default=None)
        tied = [outcome for s, outcome in known if s == best]
        total.append(sum(tied) / len(tied) if tied else 0.0)
    return sum(total) / len(total)


ROWS = st.tuples(
    st.sampled_from([0.0, 1.0]), st.sampled_from("ab"), st.lists(st.sampled_from([0.1, 0.5, 0.9]), max_size=3)
)
HOW = {"min": min, "last": lambda s: s[-1], "mean": lambda s: sum(s) / len(s), "product": math.prod}


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=2, max_size=6))
def test_curves_are_means_over_all_subsets(rows):
    made, scores = answers("task", rows)
    found = best_of_n(made, scores)
    assert found.n[0] == 1 and found.n[-1] == len(rows) and found.tasks == 1
    for i, n in enumerate(found.n):
        for how, call in HOW.items():
            assert found.by[how][i] == pytest.approx(by_hand(rows, n, call))
        right = [any(outcome for outcome, _, _ in drawn) for drawn in itertools.combinations(rows, n)]
        assert found.pass_at_n[i] == pytest.approx(sum(right) / len(right))
        assert max(found.by[how][i] for how in HOW) <= found.pass_at_n[i] + 1e-12


def test_the_majority_against_the_score():
    """Three agree on a wrong answer, one right answer scores highest."""
    rows = [(0.0, " 7", [0.4]), (0.0, "7 ", [0.3]), (0.0, 7, [0.2]), (1.0, "8", [0.9])]
    made, scores = answers("task", rows)
    found = best_of_n(made, scores)
    assert found.n == (1, 2, 4)
    assert found.by["min"] == (0.25, 0.5, 1.0) and found.majority[-1] == 0.0
    assert found.majority[0] == pytest.approx(0.25, abs=0.1) and found.pass_at_n == (0.25, 0.5, 1.0)


def test_ties_of_the_majority_share():
    made, scores = answers("task", [(1.0, "a", [0.1]), (0.0, "b", [0.1])])
    assert best_of_n(made, scores).majority[-1] == 0.5


def test_up_to_64_and_what_is_left_out_is_said():
    tasks = [answers(f"task {i}", [(float(k % 2), "x", [0.5, k / 100]) for k in range(80)]) for i in range(10)]
    made = [t for own, _ in tasks for t in own] + answers("few", [(1.0, "x", [0.5])] * 1)[0]
    made.append(Trajectory("task 0", (Step("open"),)))
    scores = {i: s for _, own in tasks for i, s in own.items()}
    found = best_of_n(made, scores)
    assert found.n == (1, 2, 4, 8, 16, 32, 64) and found.tasks == 10
    assert "1 answers left out: their outcome is unknown" in found.notes
    assert "1 tasks left out: fewer than 64 answers" in found.notes
    assert best_of_n(made[:1], scores) is None


def test_no_step_and_a_step_without_a_score_are_no_score():
    t = Trajectory("t", (Step("a"), Step("b")))
    assert scored(Trajectory("t", ()), {}, "mean") is None
    assert scored(t, {0: 0.9}, "min") is None
    assert scored(t, {0: 0.9, 1: 0.5}, "product") == pytest.approx(0.45)


def test_pairs_by_hand(tmp_path):
    rows = [
        {"prompt": "q1", "chosen": "good\n\nbetter", "rejected": "bad", "subset": "x"},
        {"prompt": "q2", "chosen": "c", "rejected": "r", "subset": "x", "id": 7},
        {"prompt": "q3", "chosen": "c", "rejected": "r", "subset": "y"},
        {"prompt": "q4", "chosen": "c", "rejected": "   ", "subset": "y"},
        {"prompt": "q5", "chosen": "same", "rejected": "same", "subset": "y"},
    ]
    converted = convert(rows, split="blank-line")
    assert converted.kind == "preference" and converted.skipped == {"a pair whose two answers are the same": 1}
    made = {(t.task, t.meta["role"]): t for t in converted.trajectories}
    assert [len(made["q1", role].steps) for role in ("chosen", "rejected")] == [2, 1]
    given = {
        ("q1", "chosen"): [0.9, 0.3],
        ("q1", "rejected"): [0.4],
        ("q2", "chosen"): [0.8],
        ("q2", "rejected"): [0.1],
    }
    given |= {("q3", "chosen"): [0.5], ("q3", "rejected"): [0.5], ("q4", "chosen"): [0.9]}
    scores = {made[key].id: dict(enumerate(own)) for key, own in given.items()}
    found = pair_accuracy(converted.trajectories, scores)
    assert found.n == 3 and found.notes == ("1 pairs left out: an answer has no score",)
    assert found.by == {"min": 0.5, "last": 0.5, "mean": pytest.approx(2.5 / 3), "product": 0.5}
    assert found.subsets == {"x": (2, 0.5), "y": (1, 0.5)}
    assert pair_accuracy([Trajectory("t", ())], {}) is None


def test_the_command_takes_pairs_and_outcomes_for_gold(tmp_path, capsys):
    rows = [{"prompt": f"q{i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, out = str(tmp_path / "pairs.jsonl"), tmp_path / "out"
    assert main(["convert", pairs, "--to", "trajectories", "--out", str(tmp_path / "t.jsonl")]) == 0
    made = convert(rows).trajectories
    append_jsonl(
        tmp_path / "p.jsonl", [StepLabel(t.id, 0, 0.9 if "yes" in t.steps[0].action else 0.2, "prm:m") for t in made]
    )
    for gold in (pairs, str(tmp_path / "t.jsonl")):
        assert main(["evaluate", gold, str(tmp_path / "p.jsonl"), "--out", str(out)]) == 0
        row = json.loads((out / "report.json").read_text())
        assert row["pairs"]["by"]["min"] == 1.0 and row["auc"] is None and row["first_error"]["f1"] is None
    own, scores = answers("task", [(0.0, "7", [0.4]), (1.0, "8", [0.9])])
    append_jsonl(tmp_path / "o.jsonl", own)
    append_jsonl(tmp_path / "s.jsonl", [StepLabel(i, k, s, "prm:m") for i, x in scores.items() for k, s in x.items()])
    assert main(["evaluate", str(tmp_path / "o.jsonl"), str(tmp_path / "s.jsonl"), "--out", str(out)]) == 0
    assert json.loads((out / "report.json").read_text())["best_of_n"]["by"]["mean"] == [0.5, 1.0]
    assert "majority vote" in (out / "report.md").read_text()
    assert "<svg" in (out / "report.html").read_text()
    append_jsonl(tmp_path / "one.jsonl", own[:1])
    assert main(["evaluate", str(tmp_path / "one.jsonl"), str(tmp_path / "s.jsonl"), "--out", str(out)]) == 2
    assert "nothing to choose from" in capsys.readouterr().err


def test_a_dataset_by_the_command(tmp_path, capsys):
    from datasets import load_from_disk

    rows = [{"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    command = ["convert", str(tmp_path / "rows.jsonl"), "--to", "dataset", "--out", str(tmp_path / "d")]
    assert main(command) == 0
    (row,) = load_from_disk(str(tmp_path / "d"))
    assert row["actions"] == ["a", "b"] and [x["score"] for x in row["labels"]] == [1.0, 0.0]
    assert capsys.readouterr().err == "read 1 row: 1 trajectory, 2 steps, 2 labels\n"
    assert (tmp_path / "d" / "convert.config.yaml").exists() and main(command) == 2
