"""Measures against their definitions and against scikit-learn, and what they say where they are not defined."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from prm import DataError, metrics
from prm.metrics import FirstError, first_error_f1

BITS = st.lists(st.booleans(), min_size=1, max_size=40)
NEAR = {"rel": 1e-9, "abs": 1e-9}


def paired(data, kind):
    good = data.draw(BITS)
    return good, data.draw(st.lists(kind, min_size=len(good), max_size=len(good)))


# --- ProcessBench -----------------------------------------------------------------------------------------------------


def test_first_error_f1_to_the_digit():
    gold = [2, 0, 3, 1, -1, -1, -1, -1, -1]
    predicted = [2, 1, 3, -1, -1, -1, 0, -1, -1]
    found = first_error_f1(gold, predicted)
    assert (found.error_accuracy, found.correct_accuracy) == (0.5, 0.8)
    assert found.f1 == 2 * 0.5 * 0.8 / (0.5 + 0.8)
    assert round(found.f1, 4) == 0.6154
    assert (found.n_error, found.n_correct, found.notes) == (4, 5, ())


def test_all_wrong_is_zero_with_a_note():
    found = first_error_f1([2, 0, -1], [1, -1, 0])
    assert found.f1 == 0.0 and "both accuracies are 0" in found.notes[0]


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ([2, 1], [2, 0], (None, 0.5, None)),
        ([-1, -1], [-1, 0], (None, None, 0.5)),
        ([], [], (None, None, None)),
    ],
)
def test_an_empty_subset_is_not_defined(gold, predicted, expected):
    found = first_error_f1(gold, predicted)
    assert (found.f1, found.error_accuracy, found.correct_accuracy) == expected
    assert all(note.startswith("not defined") for note in found.notes) and found.notes


def test_no_answer_is_wrong_and_not_minus_one():
    found = first_error_f1([1, -1, -1], [None, None, -1])
    assert (found.error_accuracy, found.correct_accuracy, found.f1) == (0.0, 0.5, 0.0)
    assert found.notes == ("2 without an answer, counted as wrong",)


def test_an_index_beyond_the_solution_is_wrong():
    assert first_error_f1([1, -1], [99, 99]) == FirstError(
        0.0, 0.0, 0.0, 1, 1, ("both accuracies are 0, so F1 is taken as 0",)
    )


@pytest.mark.parametrize("wrong", [True, 1.0, -2, "1", None])
def test_what_is_no_index_is_refused(wrong):
    with pytest.raises(DataError, match="row 1: an index must be an integer"):
        first_error_f1([0, wrong], [0, 0])
    if wrong is not None:
        with pytest.raises(DataError, match="row 1: an index must be an integer"):
            first_error_f1([0, 0], [0, wrong])


@given(st.data())
def test_first_error_f1_is_its_definition(data):
    index = st.integers(-1, 4)
    gold = data.draw(st.lists(index, max_size=30))
    predicted = data.draw(st.lists(st.none() | index, min_size=len(gold), max_size=len(gold)))
    found = first_error_f1(gold, predicted)
    error = [g == p for g, p in zip(gold, predicted, strict=True) if g != -1]
    correct = [g == p for g, p in zip(gold, predicted, strict=True) if g == -1]
    if error and correct:
        a, b = sum(error) / len(error), sum(correct) / len(correct)
        assert found.f1 == (2 * a * b / (a + b) if a + b else 0.0)
    else:
        assert found.f1 is None


def test_first_bad():
    assert metrics.first_bad([0.9, 0.5, 0.4], 0.5) == 2
    assert metrics.first_bad([0.9, 0.5], 0.5) == -1
    assert metrics.first_bad([], 0.5) == -1


# --- against scikit-learn ---------------------------------------------------------------------------------------------


@given(st.data())
def test_auc(data):
    good, scores = paired(data, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]))
    found = metrics.auc(good, scores)
    if all(good) or not any(good):
        assert found is None
    else:
        assert found == pytest.approx(reference.roc_auc_score(good, scores), **NEAR)


@given(st.data())
def test_accuracies_and_kappa(data):
    good, said = paired(data, st.booleans())
    assert metrics.accuracy(good, said) == pytest.approx(reference.accuracy_score(good, said), **NEAR)
    balanced, kappa = metrics.balanced_accuracy(good, said), metrics.cohen_kappa(good, said)
    if len(set(good)) == 2:
        assert balanced == pytest.approx(reference.balanced_accuracy_score(good, said), **NEAR)
    else:
        assert balanced is None
    if len({*good, *said}) == 1:
        assert kappa is None
    else:
        assert kappa == pytest.approx(reference.cohen_kappa_score(good, said), **NEAR)


@given(st.data())
def test_brier(data):
    good, scores = paired(data, st.floats(0, 1))
    if len(set(good)) == 2:
        expected = reference.brier_score_loss(good, scores)
        assert metrics.brier(scores, [float(g) for g in good]) == pytest.approx(expected, **NEAR)


def test_soft_targets():
    assert metrics.brier([0.5, 1.0], [0.75, 0.0]) == (0.0625 + 1) / 2
    assert metrics.ece([0.72, 0.78], [0.5, 1.0]) == pytest.approx(0.0)


# --- calibration ------------------------------------------------------------------------------------------------------


def test_ece_by_hand():
    scores, targets = [0.05, 0.15, 0.15, 0.95, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0]
    assert metrics.ece(scores, targets) == pytest.approx((0.05 * 1 + 0.35 * 2 + 0.025 * 2) / 5)
    bins = metrics.reliability(scores, targets)
    assert [(b.low, b.high, b.n) for b in bins] == [(0.0, 0.1, 1), (0.1, 0.2, 2), (0.9, 1.0, 2)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_bins_hold_every_score_once(scores):
    bins = metrics.reliability(scores, scores)
    assert sum(b.n for b in bins) == len(scores)
    assert metrics.ece(scores, scores) == pytest.approx(0.0, abs=1e-12)


def test_a_calibrated_score_has_a_small_error():
    random_ = random.Random(0)
    scores = [random_.random() for _ in range(20000)]
    targets = [float(random_.random() < s) for s in scores]
    assert metrics.ece(scores, targets) < 0.02
    assert metrics.ece(scores, [1 - t for t in targets]) > 0.3


# --- where nothing is defined -----------------------------------------------------------------------------------------


def test_nothing_is_none():
    for measure in (metrics.auc, metrics.accuracy, metrics.balanced_accuracy, metrics.ece, metrics.brier):
        assert measure([], []) is None
    assert metrics.cohen_kappa([], []) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_number_are_refused(bad):
    for measure in (metrics.ece, metrics.brier):
        with pytest.raises(DataError, match="score 1 is"):
            measure([0.5, bad], [0.5, 0.5])
    with pytest.raises(DataError, match="score 1 is"):
        metrics.auc([True, False], [0.5, bad])


def test_lists_of_different_length_are_refused():
    for measure in (metrics.auc, metrics.accuracy, metrics.brier, metrics.ece, metrics.cohen_kappa, first_error_f1):
        with pytest.raises(DataError, match="as many predictions as gold"):
            measure([0], [0, 0])
