"""The bias check against judges whose biases are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from labeling.judge.bias import BEFORE, answer_of, other_answer, padded
from labeling.judge.run import bias
from prm import Step, Trajectory, append_jsonl
from prm.cli import main
from prm.errors import UsageError
from tests.judge_server import Endpoint, asked_steps, completion, config, failing, good


def sums(n: int) -> list[Trajectory]:
    return [Trajectory(f"{i}+1?", (Step("think"), Step("add", "ok"), Step(f"answer: {i + 1}"))) for i in range(n)]


def biased(body: Any, number: int) -> Any:
    """0.5 a step; 0.2 more for padding, 0.1 more for the step shown first, 0.4 less for a wrong sum."""
    text = body["messages"][-1]["content"]
    first = int(re.findall(r"^Step (\d+)", text, re.M)[0])
    task, said = int(re.findall(r'"(\d+)\+1', text)[0]), int(re.findall(r"answer: (\d+)", text)[0])
    rows = []
    for i in asked_steps(body):
        score = 0.5 + 0.2 * (BEFORE.strip() in text) + 0.1 * (i == first) - 0.4 * (i == 2 and said != task + 1)
        rows.append({"step": i, "score": score, "error": None, "reason": ""})
    return 200, {}, completion(json.dumps({"steps": rows}))


def test_known_biases_are_measured(tmp_path: Path) -> None:
    with Endpoint(biased) as endpoint:
        found = bias(sums(8), endpoint.client(), config(tmp_path, bias_sample=5))
        asked = len(endpoint.bodies)
        again = bias(sums(8), endpoint.client(), config(tmp_path, bias_sample=5))
    shifts = {(s.change, s.of): s for s in found.shifts}
    assert asked == 25 == len(endpoint.bodies) and again.shifts == found.shifts  # the ledger has them
    assert {s.n for s in found.shifts} == {15, 5, 10}
    assert shifts["again", "all steps"].absolute == 0
    assert shifts["padded", "all steps"].mean == pytest.approx(0.2)
    assert shifts["reordered", "all steps"].mean == pytest.approx(0)
    assert shifts["reordered", "all steps"].absolute == pytest.approx(0.2 / 3)
    assert shifts["answer", "last step"].mean == pytest.approx(-0.4) and shifts["answer", "last step"].flips == 1
    assert shifts["answer", "steps before"].absolute == 0
    assert json.loads((tmp_path / "labels.jsonl.bias.json").read_text())["left_out"] == {}
    assert not (tmp_path / "labels.jsonl").exists()  # no labels of changed text


def test_what_cannot_be_measured_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trajectories = [
        Trajectory("a", (Step("Hm"),)), Trajectory("b", ()), Trajectory("c", (Step("x" * 900), Step("so 3"))), *sums(1),
    ]  # fmt: skip

    def script(body: Any, number: int) -> Any:
        return failing(400, "content_filter")(body, number) if '"1?"' in str(body) else good(body, number)

    with Endpoint(script) as endpoint:
        found = bias(trajectories, endpoint.client(), config(window=800))
        assert dict(found.left_out) == {
            "trajectories without steps": 1, "trajectories longer than one window": 1,
            "trajectories of one step, not reordered": 1,
            "trajectories without a final answer that could be changed": 1,
        }  # fmt: skip
        endpoint.script = failing(400, "content_filter")
        append_jsonl(tmp_path / "t.jsonl", sums(2))
        arguments = ["judge", str(tmp_path / "t.jsonl"), "--model", "m", "--base-url", endpoint.url, "--check-bias"]
        assert main([*arguments, "--out", str(tmp_path / "l.jsonl")]) == 1
        assert "left out: 10 calls: filtered" in capsys.readouterr().out
        endpoint.script, endpoint.bodies = good, []
        assert main([*arguments, "--dry-run"]) == 0 and endpoint.bodies == []
        assert "10 calls for 2 trajectories, 30 steps" in capsys.readouterr().out
        assert main([*arguments, "--out", str(tmp_path / "m.jsonl")]) == 0
    assert "padded" in capsys.readouterr().out


def test_the_check_keeps_to_the_budget() -> None:
    with Endpoint() as endpoint:
        found = bias(sums(10), endpoint.client(), config(budget_tokens=6_000))
        assert 0 < len(endpoint.bodies) < 50 and found.left_out["calls: budget"] == 50 - len(endpoint.bodies)
        for options in ({"votes": 3}, {"batch": True}, {"reference": "answer"}):
            with pytest.raises(UsageError, match="single calls"):
                bias(sums(1), endpoint.client(), config(**options))


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("answer: Paris", "Paris"),
        ("Thought: done\nfinish[Gare du Nord]", "Gare du Nord"),
        ("The final answer is: the \\alpha of B.", "the \\alpha of B"),
        ("search: Paris", None),
    ],
)
def test_answers_in_words_become_those_of_others(action: str, answer: str | None) -> None:
    said = answer_of(action)
    assert (said and said[0]) == answer
    changed = other_answer(Trajectory("t", (Step("a 1"), Step(action))), Random(0), ["Rome", answer or "x"])
    assert changed is None if answer is None else changed and changed.steps[1].action == action.replace(answer, "Rome")


def test_numbers_become_others_and_nothing_else_changes() -> None:
    for action in ("so 2+2 = 4.", "\\boxed{4}", "it is 1,234.50 dollars", "7"):
        trajectory = Trajectory("t", (Step("a 1", "b"), Step(action, "c")))
        changed = other_answer(trajectory, Random(3), [])
        assert changed is not None and changed.id != trajectory.id and changed.steps[0] == trajectory.steps[0]
        assert changed.steps[1].action != action and changed.steps[1].observation == "c"
        assert re.sub(r"\d", "", changed.steps[1].action).replace(".", "") == re.sub(r"\d", "", action).replace(".", "")
    assert [s.observation for s in padded(trajectory).steps] == ["b", "c"]
