"""Several sources to one label: who overrides, what EM finds out about each source, what the label says of itself."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labeling.fuse import FuseConfig, fuse, fusion
from prm import DataError, StepLabel, UsageError, append_jsonl, read_jsonl
from prm.cli import main


def label(source, score, trajectory="t", step=0, **more):
    return StepLabel(trajectory, step, score, source, **more)


def only(labels, **options):
    (found,) = fuse(labels, FuseConfig(**options))
    return found


# --- who decides ------------------------------------------------------------------------------------------------------


def test_gold_then_people_then_the_rest():
    rest = [label("judge:x", 1.0), label("mc:p", 0.9, weight=8)]
    found = only([*rest, label("human:ana", 0.0), label("human:bo", 1.0, weight=3)])
    assert (found.score, found.weight, found.meta["method"]) == (0.75, 4.0, "people")
    assert found.meta["from"] == {"judge:x": 1.0, "mc:p": 0.9, "human:ana": 0.0, "human:bo": 1.0}
    found = only([*rest, label("human:ana", 1.0), label("gold:y", 0.0)])
    assert (found.score, found.meta["method"], found.source) == (0.0, "gold", "fused")
    assert only([*rest, label("human:ana", 0.0)], people="join", method="mean").score == pytest.approx(8.2 / 10)


def test_the_mean_by_weight_and_trust():
    labels = [label("judge:x", 1.0), label("mc:p", 0.25, weight=8)]
    found = only(labels, method="mean")
    assert (found.score, found.weight) == (pytest.approx(1 / 3), 9.0)
    assert only(labels, method="mean", trust=("mc=0.125",)).score == pytest.approx(0.625)
    assert only(labels, method="mean", trust=("mc=9", "mc:p=0.125")).score == pytest.approx(0.625)


def test_consensus_keeps_what_all_agree_on():
    labels = [
        *(label("judge:x", 1.0, step=i) for i in range(5)),
        label("mc:p", 0.75, step=0),
        label("mc:p", 0.25, step=1),
        label("mc:p", 0.0, step=2),
        label("mc:p", 0.5, step=3),
        label("human:ana", 0.0, step=5),
    ]
    found = fusion(labels, FuseConfig("consensus"))
    assert [(x.step, x.score) for x in found.labels] == [(0, 0.875), (5, 0.0)]
    assert found.dropped == {"steps on which the sources disagree": 3, "steps with one source only": 1}
    found = fusion(labels, FuseConfig("consensus", rollouts_good=0.0))
    assert [x.step for x in found.labels] == [0, 1, 3, 5]


def test_a_later_label_of_a_source_replaces_its_earlier_one():
    found = fusion([label("judge:x", 0.0), label("judge:x", 1.0)], FuseConfig("mean"))
    assert found.labels[0].score == 1.0
    assert found.dropped == {"labels replaced by a later one of the same source": 1}


def test_too_few_sources_are_left_out_and_counted():
    labels = [label("judge:x", 1.0), label("mc:p", 1.0), label("judge:x", 1.0, step=1), label("human:a", 0.0, step=2)]
    found = fusion(labels, FuseConfig("mean", min_sources=2))
    assert [x.step for x in found.labels] == [0, 2] and found.dropped == {"steps with too few sources": 1}


@given(
    st.lists(
        st.builds(
            StepLabel,
            st.sampled_from("ab"),
            st.integers(0, 2),
            st.floats(0, 1),
            st.sampled_from(["judge:x", "mc:p", "human:a", "prm:m"]),
            st.floats(0.1, 20),
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(["soft", "dawid-skene", "mean"]),
)
def test_one_label_for_each_labelled_step_and_none_for_others(labels, method):
    found = fuse(labels, FuseConfig(method))
    assert [(x.trajectory_id, x.step) for x in found] == list(dict.fromkeys((x.trajectory_id, x.step) for x in labels))
    assert all(x.source == "fused" and x.meta["from"] for x in found)


# --- a synthetic teacher ----------------------------------------------------------------------------------------------


RATES = {"judge:good": 0.12, "judge:poor": 0.30, "prm:fair": 0.20, "prm:old": 0.25}


def made(n=3000, seed=0, good=0.7):
    """Truth, four sources that err with known rates, and 8 rollouts, whose success says little."""
    random = Random(seed)
    truth, labels = [], []
    for i in range(n):
        z = random.random() < good
        truth.append(z)
        for name, wrong in RATES.items():
            labels.append(label(name, float(z != (random.random() < wrong)), step=i))
        k = sum(random.random() < (0.6 if z else 0.35) for _ in range(8))
        labels.append(label("mc:p", k / 8, step=i, weight=8))
    return truth, labels


def right(found, truth):
    return sum((x.score > 0.5) == truth[x.step] for x in found) / len(found)


@pytest.mark.parametrize("method", ["soft", "dawid-skene"])
def test_em_beats_the_best_source_and_the_mean_and_knows_who_errs(method):
    truth, labels = made()
    hard = [x for x in labels if x.source != "mc:p"]
    alone = max(right([x for x in hard if x.source == s], truth) for s in RATES)
    mean = right(fuse(hard, FuseConfig("mean")), truth)
    found = fusion(hard, FuseConfig(method))
    assert right(found.labels, truth) > max(alone, mean)
    for name, wrong in RATES.items():
        own = [x for x in hard if x.source == name]
        assert found.sources[name].error == pytest.approx(1 - right(own, truth), abs=0.03)
        assert found.sources[name].error == pytest.approx(wrong, abs=0.03)
    everything = fusion(labels, FuseConfig(method))
    mean = right(fuse(labels, FuseConfig("mean")), truth)
    assert right(everything.labels, truth) > max(right(found.labels, truth), mean)
    own = [x for x in labels if x.source == "mc:p"]
    wrong = sum(0.5 if x.score == 0.5 else (x.score > 0.5) != truth[x.step] for x in own) / len(own)
    assert everything.sources["mc:p"].error == pytest.approx(wrong, abs=0.03)


def test_hesitation_is_taken_for_what_it_turned_out_to_mean():
    """A source whose 0.6 is as good as a coin, and whose 1 and 0 are right; three of them."""
    random, truth, labels = Random(3), [], []
    for i in range(2000):
        z = random.random() < 0.5
        truth.append(z)
        for name in ("judge:a", "judge:b", "judge:c"):
            sure = random.random() < 0.4
            side = z if random.random() < (0.97 if sure else 0.5) else not z
            labels.append(label(name, (1.0 if side else 0.0) if sure else (0.7 if side else 0.3), step=i))
    soft, hard = (right(fuse(labels, FuseConfig(m)), truth) for m in ("soft", "dawid-skene"))
    assert soft > hard + 0.05


def test_posteriors_are_calibrated():
    truth, labels = made(4000, seed=1)
    found = fuse([x for x in labels if x.source != "mc:p"])
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 0.95), (0.95, 1.01)):
        own = [x for x in found if low <= x.score < high]
        if len(own) > 100:
            assert sum(truth[x.step] for x in own) / len(own) == pytest.approx(
                sum(x.score for x in own) / len(own), abs=0.06
            )


def test_gold_tells_two_sources_apart():
    """Two sources alone cannot be told apart; said, and a few gold labels settle it."""
    truth, labels = made(1500, seed=2)
    two = [x for x in labels if x.source in ("judge:good", "judge:poor")]
    assert "cannot be told" in fusion(two).notes[0]
    gold = [label("gold:us", float(truth[i]), step=i) for i in range(300)]
    found = fusion([*two, *gold])
    assert not found.notes
    assert found.sources["judge:good"].error == pytest.approx(0.12, abs=0.03)
    assert found.sources["judge:poor"].error == pytest.approx(0.30, abs=0.03)
    assert found.sources["judge:good"].anchored == 300
    rest = [x for x in found.labels if x.step >= 300]
    assert right(rest, truth) >= right([x for x in two if x.source == "judge:good" and x.step >= 300], truth)


def test_a_source_that_is_always_wrong_is_turned_around():
    random, labels, truth = Random(5), [], []
    for i in range(800):
        z = random.random() < 0.5
        truth.append(z)
        labels += [label(f"judge:{j}", float(z != (random.random() < 0.15)), step=i) for j in range(3)]
        labels.append(label("judge:liar", float(not z), step=i))
    found = fusion(labels)
    assert found.sources["judge:liar"].error > 0.9
    assert right(found.labels, truth) > 0.97


def test_one_class_only_is_finite():
    found = fusion([label(f"judge:{j}", 1.0, step=i) for i in range(5) for j in range(3)])
    assert all(x.score > 0.9 for x in found.labels)
    assert found.sources["judge:0"].error < 0.1


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    _, labels = made(50)
    append_jsonl(tmp_path / "a.jsonl", labels[:100])
    append_jsonl(tmp_path / "b.jsonl", labels[100:])
    out = tmp_path / "fused.jsonl"
    assert main(["fuse", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--out", str(out)]) == 0
    assert read_jsonl(out) == fuse(labels)
    said = capsys.readouterr().out
    assert "judge:poor: 50 labels, error" in said and "50 labels" in said
    assert json.loads((tmp_path / "fused.jsonl.sources.json").read_text())["labels"] == 50
    assert (tmp_path / "fused.jsonl.config.yaml").exists()
    assert main(["fuse", str(tmp_path / "a.jsonl"), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_no_label_left_is_an_error(tmp_path, capsys):
    append_jsonl(tmp_path / "a.jsonl", label("judge:x", 1.0))
    arguments = ["fuse", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "o"), "--method", "consensus"]
    assert main(arguments) == 2
    assert "steps with one source only" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method must be"),
        ({"people": "x"}, "people must be"),
        ({"rollouts_good": 1.0}, "rollouts_good"),
        ({"min_sources": 0}, "min_sources"),
        ({"method": "mean", "trust": ("judge",)}, "SOURCE=X"),
        ({"method": "mean", "trust": ("judge=-1",)}, "SOURCE=X"),
        ({"trust": ("judge=1",)}, "method mean"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(UsageError, match=message):
        fuse([label("judge:x", 1.0)], FuseConfig(**options))
    with pytest.raises(DataError, match="no labels"):
        fuse([])
