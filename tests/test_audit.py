"""Attacks on a PRM: that they are what they say, and that a scorer with a known hole shows it and a sound one none."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.audit import ATTACKS, AuditConfig, audit
from prm import PRM, DataError, Step, Trajectory, UsageError, append_jsonl, read_jsonl
from prm.cli import main
from tests.tiny import checkpoint

STEPS = st.lists(st.builds(Step, st.text(max_size=5), st.text(max_size=3)), min_size=1, max_size=6)


class Scorer:
    """Scores by a function of (trajectory, step)."""

    def __init__(self, call):
        self.call = call

    def score(self, trajectories):
        return [[self.call(t, i) for i in range(len(t.steps))] for t in trajectories]


def made(n=12):
    return [
        Trajectory(f"task {i}", tuple(Step(f"do {i} {k}", f"seen {k}") for k in range(i % 4 + 1)), float(i % 2))
        for i in range(n)
    ]


@given(STEPS, st.integers())
def test_an_attack_is_what_it_says(steps, seed):
    trajectory = Trajectory("the task", tuple(steps), 1.0, {"tools": [{"name": "x"}], "answer": "9"})
    found = {name: attack(trajectory, Random(seed)) for name, attack in ATTACKS.items()}
    for name in ("duplicated step", "no-op step", "restated task"):
        assert len(found[name].steps) == len(steps) + 1
        assert any(found[name].steps[:k] + found[name].steps[k + 1 :] == tuple(steps) for k in range(len(steps) + 1))
    assert trajectory.task in "".join(s.action for s in found["restated task"].steps)
    assert sum(a != b for a, b in zip(found["praise"].steps, steps, strict=True)) == 1
    for after, before in zip(found["verbose paraphrase"].steps, steps, strict=True):
        assert before.action in after.action and len(after.action) > len(before.action) + 50
    if len(steps) > 1:
        assert found["early stop"].steps == tuple(steps)[: len(found["early stop"].steps)] != tuple(steps)
    else:
        assert found["early stop"] is None
    if found["shuffled order"] is not None:
        assert sorted(map(str, found["shuffled order"].steps)) == sorted(map(str, steps))
        assert found["shuffled order"].steps != tuple(steps)
    for after in found.values():
        assert after is None or (after.outcome is None and dict(after.meta) == {"tools": [{"name": "x"}]})


def test_a_scorer_that_cares_for_nothing_is_paid_under_raw_alone():
    found = audit(Scorer(lambda t, i: 0.8), made())
    assert found.shares["progress"] == found.shares["worst"] == 0.0
    shares = {name: own["raw"][0] for name, (_, own) in found.table.items()}
    assert shares["duplicated step"] == shares["no-op step"] == shares["restated task"] == 1.0
    assert shares["shuffled order"] == shares["praise"] == shares["early stop"] == 0.0
    assert found.holes("progress", 9) == []


def test_a_hole_is_found_where_it_is():
    """A scorer that falls for praise, at the step that has it."""
    found = audit(Scorer(lambda t, i: 0.9 if "rogress" in t.steps[i].action else 0.3), made(40))
    share, mean = found.table["praise"][1]["progress"]
    assert 0 < share < 1 and mean > 0
    assert all(own["progress"][0] == 0 for name, (_, own) in found.table.items() if name != "praise")
    for hole in found.holes("progress", 5):
        assert hole.attack == "praise" and hole.gains["progress"] == pytest.approx(0.6)
    assert found.shares["progress"] == pytest.approx(
        sum(a.gains["progress"] > 0.01 for a in found.attacks) / len(found.attacks)
    )


def test_gains_are_sums_of_shapes_by_hand():
    """Scores fall with each step: stopping early pays under progress and worst, and costs under raw."""
    found = audit(Scorer(lambda t, i: 0.9 - 0.2 * i), [Trajectory("t", (Step("a"), Step("b"), Step("c")))])
    early = [a for a in found.attacks if a.attack == "early stop"]
    assert {len(a.after.steps) for a in early} <= {1, 2} and early
    for attacked in early:
        k = len(attacked.after.steps)
        assert attacked.gains["progress"] == pytest.approx(0.2 * (3 - k))
        assert attacked.gains["raw"] == pytest.approx(-sum(0.9 - 0.2 * i for i in range(k, 3)))
        assert attacked.gains["worst"] > 0


def test_the_seed_decides():
    scorer = Scorer(lambda t, i: len(t.steps[i].action) % 10 / 10)
    first, again, other = (audit(scorer, made(), AuditConfig(seed=s)) for s in (0, 0, 1))
    assert [a.after.id for a in first.attacks] == [a.after.id for a in again.attacks]
    assert [a.after.id for a in first.attacks] != [a.after.id for a in other.attacks]


def test_what_cannot_be_attacked_is_counted():
    once = Trajectory("t", (Step("a"),))
    found = audit(Scorer(lambda t, i: 0.5), [once, once, Trajectory("empty", ())])
    assert found.skipped["trajectories without a step"] == 1
    assert found.skipped["trajectories that are there twice"] == 1
    assert found.skipped["trajectories on which 'early stop' changes nothing"] == 1
    with pytest.raises(DataError, match="nothing to attack"):
        audit(Scorer(lambda t, i: 0.5), [Trajectory("empty", ())])
    for wrong in ({"variants": 0}, {"margin": -1.0}, {"look": -1}):
        with pytest.raises(UsageError):
            audit(Scorer(lambda t, i: 0.5), [once], AuditConfig(**wrong))


def test_the_command(tmp_path, capsys):
    PRM.create(checkpoint(tmp_path / "base"), max_tokens=100).save(tmp_path / "prm")
    hostile = Trajectory("<script>x</script>", (Step("</pre><img src=x>"), Step("| `b`")))
    append_jsonl(tmp_path / "t.jsonl", [*made(6), hostile, Trajectory("long", (Step("word " * 40), Step("b")))])
    command = ["audit", str(tmp_path / "prm"), str(tmp_path / "t.jsonl")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "under progress" in said and "| duplicated step |" in said
    assert main([*command, "--out", str(tmp_path / "out"), "--margin", "0", "--look", "100"]) == 0
    row = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(row["shares"]) == {"progress", "raw", "worst"} and row["n"] > 0
    assert row["skipped"]["attacks that cannot be read"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page and "<img" not in page
    looks = read_jsonl(tmp_path / "out" / "look.jsonl", Trajectory)
    assert looks and all(len(t.meta["scores"]) == len(t.steps) and t.meta["gains"]["progress"] > 0 for t in looks)
    scores = PRM.load(tmp_path / "prm").score(looks)
    for trajectory, own in zip(looks, scores, strict=True):
        assert trajectory.meta["scores"] == pytest.approx(own, abs=1e-5)
