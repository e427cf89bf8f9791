"""What a run writes about itself: the series, alarms with the trajectories behind them, and what a kill leaves."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from prm.errors import UsageError
from prm.records import Step, Trajectory, read_jsonl
from rl.monitor import Monitor, MonitorConfig, Played, audit, describe, find_alarms
from rl.rewards import RewardConfig, step_rewards

QUIET = MonitorConfig(boards=("none",), audit_every=0)


def played(answer="answer: x", *, task="t", outcome=1.0, scores=(0.2, 0.9), failed=0, steps=1, update=0, process=None):
    actions = [f"search: {i}" for i in range(steps)] + [answer]
    t = Trajectory(task, tuple(Step(a, "o") for a in actions), outcome, {"update": update, "seed": 1})
    own = list(scores)[: steps + 1] if scores else None
    own = own and own + [own[-1]] * (steps + 1 - len(own))
    rewards = step_rewards(actions, RewardConfig(process_weight=1.0), scores=own, outcome=outcome)
    if process is not None:
        rewards = step_rewards(
            actions, RewardConfig(process_weight=process), scores=[0.0] * steps + [1.0], outcome=outcome
        )
    return Played(t, rewards, own, failed, False, 10 * steps, 30 * steps)


def batch(n=8, **options):
    return [played(f"answer: {i}", task=f"task {i}", **options) for i in range(n)]


def line(batch, update=0, **more):
    return {"update": update, "kl": 0.1} | describe(batch) | more


def names(history, batch, kls=(), config=QUIET):
    return [alarm.name for alarm in find_alarms(history, batch, kls, config)]


def test_the_series():
    mixed = [played(outcome=1.0, scores=(0.5, 0.9)), played(outcome=0.0, scores=(0.5, 0.1), failed=1)]
    got = describe(mixed)
    assert got["success"] == 0.5 and got["steps"] == 2 and got["tool_success"] == 0.75
    assert got["score_success"] == pytest.approx(0.7) and got["score_failure"] == pytest.approx(0.3)
    parts = [v for k, v in got.items() if k.startswith(("reward_", "penalty_", "check_"))]
    assert got["reward"] == pytest.approx(sum(parts))
    assert describe([played(outcome=1.0, scores=None)])["score_failure"] is None
    twice = Trajectory("t", (Step("Look  up"), Step("look up")), 0.0)
    again = Played(twice, mixed[0].rewards, None, 0, False, 1, 2)
    assert describe([again])["repeated_steps"] == 0.5


def test_a_healthy_run_raises_none():
    fine = batch(scores=(0.3, 0.8))
    history = [line(fine, i, success=0.2 + i / 20, reward_process=i / 10) for i in range(8)]
    assert names(history, fine, [0.1] * 8) == []


def test_tools():
    bad = [*batch(6), played("late", failed=2, task="failing")]
    (alarm,) = find_alarms([line(bad, tool_success=0.79)], bad, [], QUIET)
    assert alarm.name == "tool-success" and alarm.episodes[0] == 6
    assert "79% of the actions were carried out, expected at least 80%" in alarm.reason


@pytest.mark.parametrize(("kl", "fires"), [(9.9, False), (10.1, True), (-0.5, False), (-1.5, True)])
def test_kl(kl, fires):
    some = batch()
    found = find_alarms([line(some, kl=kl)], some, [0, 0, 0, 9 * kl, 0, 0, 0, 0], QUIET)
    assert [a.name for a in found] == ["kl"] * fires
    assert not fires or found[0].episodes[0] == 3


def test_length():
    short, long = batch(), batch(steps=6)
    history = [line(short, i) for i in range(3)]
    assert names([*history, line(short, 3)], short) == []
    (alarm,) = find_alarms([*history, line(long, 3)], long, [], QUIET)
    assert alarm.name == "length" and "7.0 steps, 2.0 in the first updates" in alarm.reason
    assert names([*([line(long, i) for i in range(3)]), line(short, 3)], short) == ["length"]
    assert names([*history[:2], line(long, 2)], long) == [], "too early to tell"


def test_one_answer():
    same = [played("answer: Paris", task=f"t{i}", outcome=0.0) for i in range(6)] + batch(4)
    (alarm,) = find_alarms([line(same)], same, [], QUIET)
    assert (
        alarm.name == "one-answer"
        and "6 of 10 episodes, of 6 tasks" in alarm.reason
        and alarm.episodes == [0, 1, 2, 3, 4]
    )
    right = [played("answer: Paris", task=f"t{i}", outcome=1.0) for i in range(10)]
    assert names([line(right)], right) == [], "it is right"
    alike = [played("answer: Paris", task="t", outcome=0.0) for _ in range(10)]
    assert names([line(alike)], alike) == [], "one task has one answer"


def test_process_up_while_success_down():
    hacked = [*batch(4, outcome=1.0, process=0.1), *batch(4, outcome=0.0, process=3.0)]
    down = [0.5, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3]
    rising = [line(hacked, i, success=s, reward_process=i / 5) for i, s in enumerate(down)]
    (alarm,) = find_alarms(rising, hacked, [], QUIET)
    assert alarm.name == "process-up-success-down" and "success went from 0.63 to 0.40" in alarm.reason
    assert set(alarm.episodes[:4]) == {4, 5, 6, 7}, "failures that were paid most"
    falling = [line(hacked, i, success=s, reward_process=-i / 5) for i, s in enumerate(down)]
    assert names(falling, hacked) == []
    assert names(rising[:5], hacked) == [], "too early to tell"


def test_scores_that_tell_nothing_apart():
    flat = batch(scores=(0.5, 0.5))
    assert names([line(flat)], flat) == ["flat-scores"]
    assert names([line(batch(scores=None))], batch(scores=None)) == []


def test_what_is_not_finite_is_named():
    some = batch()
    assert "value_loss" in find_alarms([line(some, value_loss=math.nan)], some, [], QUIET)[0].reason


def test_files(tmp_path, capsys):
    monitor = Monitor(tmp_path, MonitorConfig(boards=("none",), audit_every=2, audit=4))
    bad = [*batch(6), *batch(6, outcome=0.0, failed=2)]
    for update in range(4):
        alarms = monitor.add({"update": update, "kl": math.nan} | describe(bad), bad)
        assert alarms
    monitor.close()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in lines] == [0, 1, 2, 3] and lines[0]["kl"] is None
    alarms = [json.loads(text) for text in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    shown = {t.id: t.meta["alarm"] for t in read_jsonl(tmp_path / "alarm_trajectories.jsonl", Trajectory)}
    assert len(alarms) >= 4 and all(set(row["trajectories"]) <= shown.keys() for row in alarms)
    assert capsys.readouterr().err.count("alarm tool-success") == 1, "said once, written every time"
    assert len(read_jsonl(tmp_path / "audit.jsonl", Trajectory)) == 8


def test_what_comes_after_the_checkpoint_is_made_again(tmp_path):
    first = Monitor(tmp_path, MonitorConfig(boards=("none",), audit_every=1, audit=2))
    for update in range(3):
        own = batch(2, failed=2, update=update)
        first.add(line(own, update), own)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"upda')
    again = Monitor(tmp_path, MonitorConfig(boards=("none",)), first=2)
    assert [row["update"] for row in again.history] == [0, 1]
    for name in ("metrics.jsonl", "alarms.jsonl"):
        assert [json.loads(t)["update"] for t in (tmp_path / name).read_text().splitlines()][-1] == 1
    assert {t.meta["update"] for t in read_jsonl(tmp_path / "audit.jsonl", Trajectory)} == {0, 1}


def test_the_audit_holds_both_kinds():
    some = [*batch(2, outcome=1.0), *batch(9, outcome=0.0)]
    assert [t.outcome for t in audit(some, 6)] == [1, 1, 0, 0, 0, 0]
    assert [t.outcome for t in audit(batch(9), 4)] == [1] * 4
    assert all(len(t.meta["scores"]) == len(t.steps) for t in audit(some, 6))


def test_boards(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="unknown board 'paper'; known: tensorboard"):
        Monitor(tmp_path, MonitorConfig(boards=("paper",)))
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UsageError, match="trackio is not installed; pip install trackio"):
        Monitor(tmp_path, MonitorConfig(boards=("trackio",)))
    got = []
    fake = SimpleNamespace(
        init=lambda **k: got.append(k),
        log=lambda values, step: got.append((step, values)),
        finish=lambda: got.append("end"),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monitor = Monitor(tmp_path, MonitorConfig(boards=("wandb",)))
    some = batch(scores=None)
    monitor.add(line(some), some)
    monitor.close()
    assert got[0]["name"] == tmp_path.name and got[-1] == "end"
    assert got[1][0] == 0 and got[1][1]["success"] == 1.0 and "score_success" not in got[1][1]
