"""Two label files compared: what is matched, what is said about the rest, reports that hostile text cannot touch."""

import json
import re
from html.parser import HTMLParser

import pytest

from distill.evaluate import evaluate, write
from prm import DataError, Step, StepLabel, Trajectory, UsageError, append_jsonl
from prm.cli import main


def labels(rows, source="gold:x", **fields):
    """{trajectory: scores} as labels; None is no label."""
    return [StepLabel(t, i, s, source, **fields) for t, own in rows.items() for i, s in enumerate(own) if s is not None]


def test_figures_by_hand():
    gold = {"a": [1, 1, 0], "b": [0, 0], "c": [1, 1, 1, 0], "d": [1, 0], "e": [1], "f": [1, 1], "g": [1, 1]}
    said = {"a": [0.9, 0.8, 0.1], "b": [0.7, 0.2], "c": [0.9, 0.6, 0.5, 0.3], "d": [0.8, 0.6], "e": [0.9]}
    said |= {"f": [0.8, 0.7], "g": [0.4, 0.9]}
    found = evaluate(labels(gold), labels(said, "prm:m"))
    assert found.n == 16 and found.trajectories == 7
    first = found.first_error
    assert (first.error_accuracy, first.correct_accuracy) == (0.5, 2 / 3)
    assert first.f1 == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert found.step_accuracy == 13 / 16
    assert found.brier == pytest.approx(
        sum((s - g) ** 2 for t in gold for g, s in zip(gold[t], said[t], strict=True)) / 16
    )
    assert found.notes == ()
    row = found.to_dict()
    assert {"first_error", "auc", "ece", "brier", "kappa", "step_accuracy", "balanced_accuracy", "n"} <= set(row)
    assert {"f1", "error_accuracy", "correct_accuracy"} <= set(row["first_error"])


def test_labels_against_themselves():
    gold = labels({"a": [1.0, 0.0], "b": [1.0, 1.0]})
    found = evaluate(gold, gold)
    assert found.first_error.f1 == found.auc == found.kappa == found.step_accuracy == 1.0
    assert found.ece == found.brier == 0.0


def test_what_is_not_matched_is_counted():
    gold = labels({"a": [1, 0], "b": [1, 1], "c": [1]})
    said = labels({"a": [0.9, 0.1], "b": [0.9, None], "z": [0.5, 0.5, 0.5]}, "prm:m")
    found = evaluate(gold, said)
    assert found.n == 3
    assert "2 of 5 gold labels have no prediction" in found.notes
    assert "3 of 6 predictions have no gold label" in found.notes
    assert found.first_error.n_correct == 2 and found.first_error.correct_accuracy == 0.0
    assert found.first_error.notes == ("2 without an answer, counted as wrong",)


def test_a_first_error_that_gold_does_not_settle_is_left_out():
    gold = labels({"a": [None, 0], "b": [1, 1], "c": [1, 0, None]})
    said = labels({"a": [0.1, 0.1], "b": [0.9, 0.9, 0.1], "c": [0.9, 0.1, 0.1]}, "prm:m")
    found = evaluate(gold, said)
    assert (found.first_error.n_error, found.first_error.n_correct, found.first_error.f1) == (1, 1, 1.0)
    assert "first error: 1 trajectories left out, gold does not settle where it is" in found.notes


def test_with_trajectories_all_steps_must_be_labelled_good():
    made = {n: Trajectory(n, tuple(Step(f"{n}{i}") for i in range(3))) for n in "abc"}
    gold = labels({made["a"].id: [1, 1], made["b"].id: [1, 1, 1], made["c"].id: [1, 0]})
    said = labels({t.id: [0.9, 0.9 if t.task != "c" else 0.1, 0.9] for t in made.values()}, "prm:m")
    assert evaluate(gold, said).first_error.n_correct == 2
    found = evaluate(gold, said, trajectories=list(made.values()))
    assert (found.first_error.n_correct, found.first_error.n_error, found.first_error.f1) == (1, 1, 1.0)
    with pytest.raises(DataError, match="unknown trajectories"):
        evaluate(gold, said, trajectories=[made["a"]])
    beyond = [*said, StepLabel(made["a"].id, 7, 0.5, "prm:m")]
    with pytest.raises(DataError, match="step 7"):
        evaluate(gold, beyond, trajectories=list(made.values()))


def test_the_threshold_and_where_it_came_from():
    gold, said = {"a": [1, 0], "b": [1, 1]}, {"a": [0.4, 0.2], "b": [0.9, 0.35]}
    stored = evaluate(labels(gold), labels(said, "prm:m", meta={"model": "x", "threshold": 0.3}))
    assert (stored.threshold, stored.threshold_from) == (0.3, "stored with the predictions")
    assert stored.first_error.f1 == 1.0
    default = evaluate(labels(gold), labels(said, "prm:m"))
    assert (default.threshold, default.threshold_from) == (0.5, "default")
    assert default.first_error.f1 == 0.0
    given = evaluate(labels(gold), labels(said, "prm:m"), threshold=0.3, threshold_from="tuned on these very labels")
    assert given.first_error.f1 == 1.0 and given.threshold_from == "tuned on these very labels"
    mixed = labels({"a": said["a"]}, "prm:m", meta={"threshold": 0.3}) + labels({"b": said["b"]}, "prm:m")
    assert evaluate(labels(gold), mixed).threshold_from == "default"
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="threshold must lie in"):
            evaluate(labels(gold), labels(said, "prm:m"), threshold=wrong)


def test_several_labels_of_a_step_are_averaged_and_said():
    gold = labels({"a": [1.0]}, "human:x", weight=3) + labels({"a": [0.0]}, "human:y")
    found = evaluate(gold, labels({"a": [0.75]}, "prm:m"))
    assert found.brier == 0.0
    assert found.notes == ("gold: 1 steps have labels of several sources: their weighted mean is taken",)


def test_one_class_only_is_not_defined():
    found = evaluate(labels({"a": [1, 1]}), labels({"a": [0.9, 0.9]}, "prm:m"))
    assert found.auc is None and found.kappa is None and found.first_error.f1 is None
    assert found.step_accuracy == 1.0


def test_nothing_to_compare():
    some = labels({"a": [1]})
    for gold, said, message in (([], some, "gold: there are no labels"), (some, [], "predicted: there are no labels")):
        with pytest.raises(DataError, match=message):
            evaluate(gold, said)
    with pytest.raises(DataError, match="no step in common"):
        evaluate(some, labels({"b": [1]}))


# --- reports ----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.links = set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action", "srcset")]
        assert not any(k.startswith("on") for k, _ in attrs)


def parsed(page):
    tags = Tags()
    tags.feed(page)
    return tags


def test_reports_are_whole_and_offline(tmp_path):
    gold, said = {"a": [1, 0], "b": [1, 1], "c": [0]}, {"a": [0.95, 0.2], "b": [0.9, 0.6], "c": [0.4]}
    found = evaluate(labels(gold), labels(said, "prm:m"))
    write(found, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    row = json.loads((tmp_path / "out" / "report.json").read_text())
    assert row == json.loads(json.dumps(found.to_dict()))
    page = (tmp_path / "out" / "report.html").read_text()
    tags = parsed(page)
    assert {"svg", "table", "polyline"} <= tags.seen
    assert not {"script", "link", "img", "iframe", "object"} & tags.seen and not tags.links
    assert "url(" not in page and "@import" not in page
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| first-error F1 | 1.0000 |" in text and "first-error F1" in page


def test_undefined_figures_are_a_dash_and_null(tmp_path):
    found = evaluate(labels({"a": [1]}), labels({"a": [0.9]}, "prm:m"))
    write(found, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["auc"] is None
    assert "| AUC | – |" in (tmp_path / "report.md").read_text()
    assert "not defined: no solution has an error" in (tmp_path / "report.md").read_text()


def test_hostile_names_stay_text(tmp_path, capsys):
    name = "<script>alert(1)</script>| `x`\n# head.jsonl"
    (tmp_path / "in").mkdir()
    gold = tmp_path / "in" / name.replace("/", "_")
    append_jsonl(gold, labels({"a": [1, 0]}, "human:<img src=x onerror=alert(1)>"))
    assert main(["evaluate", str(gold), str(gold), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert not {"script", "img"} & parsed(page).seen
    heading = (tmp_path / "out" / "report.md").read_text().splitlines()[0]
    assert heading.startswith("# ") and not re.search(r"(?<!\\)[<|`]", heading)
    assert (tmp_path / "out" / "evaluate.config.yaml").exists()


def test_the_command_takes_trajectories_and_a_threshold(tmp_path, capsys):
    made = Trajectory("t", (Step("a"), Step("b")))
    append_jsonl(tmp_path / "t.jsonl", made)
    append_jsonl(tmp_path / "g.jsonl", labels({made.id: [1, 0]}))
    append_jsonl(tmp_path / "p.jsonl", labels({made.id: [0.9, 0.7]}, "prm:m"))
    files = [str(tmp_path / "g.jsonl"), str(tmp_path / "p.jsonl")]
    options = ["--trajectories", str(tmp_path / "t.jsonl"), "--threshold", "0.8", "--out", str(tmp_path / "out")]
    assert main(["evaluate", *files, *options]) == 0
    row = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (row["threshold"], row["threshold_from"], row["step_accuracy"]) == (0.8, "given", 1.0)
    assert "2 steps of 1 trajectories" in capsys.readouterr().out
