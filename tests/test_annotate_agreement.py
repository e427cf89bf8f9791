"""Kappa and alpha against other people's figures and code; first errors; the report."""

import pytest

from labeling.annotate.agreement import (
    alpha,
    cohen_kappa,
    compare,
    error_type_agreement,
    first_error,
    krippendorff_alpha,
)
from labeling.annotate.assign import make_plan
from labeling.annotate.review import disagreements, rating_of, report
from labeling.annotate.run import import_labels
from labeling.annotate.store import Event, Store
from prm import Step, StepLabel, Trajectory


def test_kappa_of_known_tables():
    """A 2 x 2 table with 0.7 observed and 0.5 expected agreement; a 3 x 3 one with 0.75 and 0.3495."""
    assert cohen_kappa([(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15) == pytest.approx(0.4)
    table = {(0, 0): 20, (0, 1): 5, (1, 0): 3, (1, 1): 30, (1, 2): 7, (2, 1): 10, (2, 2): 25}
    pairs = [pair for pair, times in table.items() for _ in range(times)]
    assert cohen_kappa(pairs) == pytest.approx((0.75 - 0.3495) / (1 - 0.3495))


def test_alpha_is_that_of_krippendorffs_worked_example():
    """Hayes and Krippendorff's reliability data: four observers, twelve units; ordinal 0.815, nominal 0.743."""
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[row[k] for row in rows if row[k] is not None] for k in range(12)]
    assert krippendorff_alpha(units) == pytest.approx(0.815, abs=5e-4)
    assert krippendorff_alpha(units, ordinal=False) == pytest.approx(0.743, abs=5e-4)


def test_what_is_undefined_is_none():
    assert cohen_kappa([]) is None
    assert cohen_kappa([(1, 1), (1, 1)]) is None
    assert krippendorff_alpha([]) is None
    assert krippendorff_alpha([[1], [0]]) is None
    assert krippendorff_alpha([[1, 1], [1, 1]]) is None
    assert cohen_kappa([(1, 0), (0, 1)]) == -1
    assert krippendorff_alpha([[0, 0], [1, 1]]) == 1


def test_first_error():
    assert first_error({0: 1, 1: 0, 2: 0}, 5) == 1
    assert first_error({0: 1, 1: 0.5}, 2) == -1
    assert first_error({0: 1}, 2) is None, "not all rated: unknown"
    assert first_error({0: 1}, None) is None
    left = {"a": {0: 1, 1: 0}, "b": {0: 0}, "c": {0: 1, 1: 1}, "d": {0: 1, 1: 1}}
    right = {"a": {0: 1, 1: 0}, "b": {0: 1, 1: 0}, "c": {0: 0, 1: 1}, "d": {0: 1}}
    found = compare(left, right, {"a": 2, "b": 2, "c": 2, "d": 2})
    assert (found["steps"], found["trajectories"]) == (6, 3)
    assert found["first_error"] == pytest.approx(1 / 3)
    assert found["within_one"] == pytest.approx(2 / 3), "no error is not one step from an error at the start"


def test_error_types_are_compared_where_both_rated():
    rated = {"ana": {"t": {0: 0, 1: 0, 2: 0}}, "bo": {"t": {0: 0, 1: 0}}}
    marks = {
        "ana": {("t", 0): frozenset({"tool"}), ("t", 2): frozenset({"tool"})},
        "bo": {("t", 0): frozenset({"tool", "loop"}), ("t", 1): frozenset({"tool"})},
    }
    found = {row["type"]: row for row in error_type_agreement(marks, rated)}
    assert (found["tool"]["steps"], found["tool"]["both"]) == (2, 1)
    assert found["tool"]["agree"] == pytest.approx(2 / 3)
    assert found["loop"]["agree"] == 0
    assert alpha({}) is None


@pytest.fixture
def reviewed(tmp_path):
    items = [Trajectory(str(k), tuple(Step(f"{k}{n}") for n in range(4))) for k in range(4)]
    store = Store(tmp_path / "l.db")
    said = [StepLabel(t.id, k, 0.9, "prm:m") for t in items[:3] for k in range(4)]
    gold = [StepLabel(items[3].id, k, s, "gold:x") for k, s in enumerate((1, 0, 0, 1))]
    plan = make_plan(items, store.project, prelabels=said, gold=gold, blind=0)
    rows = []
    for name, votes in (("ana", ("3331", "3113", "3311", "3113")), ("bo", ("3331", "3313", "3331", "3333"))):
        for t, line in zip(items, votes, strict=True):
            for k, vote in enumerate(line):
                meta = {"provenance": "manual" if k % 2 else "bulk", "prelabel": {"score": 0.9, "source": "prm:m"}}
                meta |= {"blind": True} if t == items[0] else {}
                rows.append(StepLabel(t.id, k, (int(vote) - 1) / 2, f"human:{name}", meta=meta))
    import_labels(store, rows)
    yield store, plan, items
    store.close()


def test_the_report_has_pairs_gold_and_both_sides_of_the_blind_slice(reviewed):
    store, plan, _ = reviewed
    found = report(store, plan)
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["steps"], pair["trajectories"]) == ("ana", "bo", 16, 4)
    assert pair["first_error"] == 0.25 and pair["within_one"] == 0.75
    assert {row["person"]: row["agree"] for row in found["gold"]} == {"ana": 1.0, "bo": 0.5}
    assert {(row["person"], row["assist"]): row["steps"] for row in found["model"]} == {
        ("ana", "shown"): 12,
        ("bo", "shown"): 12,
        ("ana", "blind"): 4,
        ("bo", "blind"): 4,
    }
    assert 0 < found["alpha"] < 1
    assert report(store, plan, ["manual"])["pairs"][0]["steps"] == 8
    assert report(store, plan, ["first_error_fill"])["pairs"] == []


def test_disagreements_have_votes_without_names_and_the_decision(reviewed):
    store, plan, items = reviewed
    found = disagreements(store, plan)
    places = [(items[1].id, 1), (items[2].id, 2), (items[3].id, 1), (items[3].id, 2)]
    assert sorted((row["trajectory_id"], row["step"]) for row in found) == sorted(places)
    assert not any(name in repr(found) for name in ("ana", "bo'", "human"))
    t, k = found[0]["trajectory_id"], found[0]["step"]
    store.append([Event("d", "rita", t, k, "decision", {"rating": "bad"})]).result()
    assert disagreements(store, plan)[0]["decision"] == {"rating": "bad"}
    assert len(report(store, plan)["pairs"]) == 1, "a decision is nobody's rating"


def test_a_score_has_the_nearest_rating():
    assert [rating_of(s) for s in (0, 0.33, 0.34, 0.5, 0.66, 0.67, 1)] == ["bad"] * 2 + ["neutral"] * 3 + ["good"] * 2
