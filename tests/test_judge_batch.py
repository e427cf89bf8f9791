"""The Batch API against a scripted endpoint: submit, poll, resume in another process, partial and expired batches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labeling.judge import run
from labeling.judge.money import read_ledger
from prm import StepLabel, read_jsonl
from prm.errors import UsageError
from tests.judge_server import Endpoint, completion, config, episodes, verdicts

PRICES = "[m]\ninput = 1000.0\noutput = 2000.0\nbatch = 0.5\n"


class Stop(Exception):
    """The process dies here."""


class Batches:
    """What an endpoint does with files and batches; `fate(number of the batch, its lines)` gives its end.

    A fate is (status, output lines, error lines); None leaves the batch in progress. `break_at` names what fails next.
    """

    def __init__(self, fate: Callable[[int, list[Any]], Any] | None = None) -> None:
        self.fate = fate or (lambda number, lines: ("completed", [answer(line) for line in lines], []))
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.lost: list[str] = []  # requests that are carried out and whose reply is lost

    def __call__(self, method: str, path: str, raw: bytes) -> Any:
        path = path.removeprefix("/v1").split("?")[0]
        if method == "POST" and path == "/files":
            content = re.search(rb'filename="[^"]+"\r\n.*?\r\n\r\n(.*?)\r\n--', raw, re.S)
            assert content
            name = f"file-{len(self.files)}"
            self.files[name] = content[1]
            reply = {"id": name, "object": "file", "bytes": 1, "created_at": 0, "filename": "x", "purpose": "batch"}
        elif method == "POST" and path == "/batches":
            asked = json.loads(raw)
            name = f"batch_{len(self.batches)}"
            reply = self.batches[name] = {
                "id": name, "object": "batch", "endpoint": asked["endpoint"], "input_file_id": asked["input_file_id"],
                "completion_window": "24h", "status": "validating", "created_at": 0, "metadata": asked["metadata"],
            }  # fmt: skip
        elif path == "/batches":
            reply = {"object": "list", "data": list(self.batches.values()), "has_more": False}
        elif path.startswith("/batches/"):
            reply = self.look(path.split("/")[2])
        elif path.endswith("/content"):
            return 200, {"content-type": "application/octet-stream"}, self.files[path.split("/")[2]]
        else:
            return 404, {}, {"error": {"message": "no such thing"}}
        if f"{method} {path}" in self.lost:
            self.lost.remove(f"{method} {path}")
            return 500, {}, {"error": {"message": "the reply is lost"}}
        return 200, {}, reply

    def look(self, name: str) -> dict[str, Any]:
        batch = self.batches[name]
        lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
        fate = self.fate(int(name.split("_")[1]), lines) if batch["status"] in ("validating", "in_progress") else None
        if fate:
            batch["status"], output, errors, *more = fate
            for field, rows in (("output_file_id", output), ("error_file_id", errors)):
                if rows:
                    batch[field] = f"file-{len(self.files)}"
                    self.files[batch[field]] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            if more:
                batch["errors"] = {"object": "list", "data": [{"code": more[0], "message": "no"}]}
        return batch


def answer(line: Any, body: Any = None, code: int = 200) -> dict[str, Any]:
    body = body or completion(verdicts(line["body"]))
    return {"custom_id": line["custom_id"], "response": {"status_code": code, "body": body}, "error": None}


def expired(line: Any) -> dict[str, Any]:
    return {"custom_id": line["custom_id"], "response": None, "error": {"code": "batch_expired", "message": "late"}}


def judged(batches: Batches, tmp_path: Path, n: int = 6, **options: Any) -> Any:
    with Endpoint(routes=batches) as endpoint:
        found = run(episodes(n), endpoint.client(), config(tmp_path, batch=True, batch_poll=0.001, **options))
    assert endpoint.bodies == []
    return found


def asked(batches: Batches) -> list[str]:
    """The tasks that were sent, in all batches."""
    texts = [
        json.loads(line)["body"]["messages"][-1]["content"]
        for batch in batches.batches.values()
        for line in batches.files[batch["input_file_id"]].splitlines()
    ]
    return [re.findall(r'"Task \d+"', text)[0] for text in texts]


def test_a_batch_gives_the_labels_at_its_own_price(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    batches = Batches(lambda n, lines: ("completed", [answer(line) for line in lines][::-1], []))
    found = judged(batches, tmp_path, prices=str(tmp_path / "prices.toml"))
    assert found.summary().startswith("judged 6 of 6") and len(batches.batches) == 1
    assert found.usd == pytest.approx(6 * (100 * 1000 + 20 * 2000) / 1e6 / 2) and found.in_flight == 0
    assert [x.trajectory_id for x in found.labels[::4]] == [t.id for t in episodes(6)]
    assert read_jsonl(tmp_path / "labels.jsonl", StepLabel) == found.labels


def test_what_expired_or_failed_goes_into_another_batch(tmp_path: Path) -> None:
    def fate(number: int, lines: list[Any]) -> Any:
        if number == 0:
            done = [answer(line) for line in lines[:2]]
            return "expired", [*done, answer(lines[2], completion("no JSON"))], [expired(line) for line in lines[3:5]]
        if number == 1:
            bad = answer(lines[0], {"error": {"message": "down"}}, 500)
            return "completed", [answer(line) for line in lines[1:]], [bad]
        return "completed", [answer(line) for line in lines], []

    batches = Batches(fate)
    found = judged(batches, tmp_path)
    assert found.summary().startswith("judged 6 of 6") and found.in_flight == 0
    sent = [len(lines.splitlines()) for lines in batches.files.values() if b'"method"' in lines]
    assert sent == [6, 4, 1]
    ends = [row for row in read_ledger(str(tmp_path / "labels.jsonl.ledger.jsonl")) if row["event"] == "end"]
    assert {row["status"]: row["tokens"] for row in ends if row["status"] != "error"} == {
        "ok": 120, "unparsable": 120, "expired": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "code", "status", "sent"),
    [
        (completion("x", "content_filter"), 200, "filtered", 1),
        (completion(None, refusal="no"), 200, "refused", 1),
        (completion(None, "length"), 200, "truncated", 3),
        (completion("what?"), 200, "unparsable", 2),
        ({"error": {"message": "too much", "code": "context_length_exceeded"}}, 400, "too long", 1),
        ({"error": {"message": "slow", "code": "rate_limit_exceeded"}}, 429, "rate limit", 3),
    ],
)
def test_failures_in_a_batch_are_statuses(tmp_path: Path, reply: Any, code: int, status: str, sent: int) -> None:
    def fate(number: int, lines: list[Any]) -> Any:
        bad = [answer(line, reply, code) for line in lines if '"Task 1"' in json.dumps(line["body"]).replace("\\", "")]
        return "completed", [answer(line) for line in lines if '"Task 1"' not in str(line["body"])], bad

    batches = Batches(fate)
    found = judged(batches, tmp_path, 3, retries=2)
    assert list(found.reasons.values()) == [status] and len(found.labels) == 8 and len(batches.batches) == sent
    again = judged(batches, tmp_path, 3, retries=2)
    assert again.old == (status != "rate limit")


def test_an_expired_batch_is_not_asked_for_ever(tmp_path: Path) -> None:
    batches = Batches(lambda n, lines: ("expired", [], [expired(line) for line in lines]))
    found = judged(batches, tmp_path, 2, retries=2)
    assert set(found.reasons.values()) == {"expired"} and len(batches.batches) == 3 and found.tokens == 0


def test_another_process_goes_on_with_a_batch(tmp_path: Path) -> None:
    batches = Batches()
    with Endpoint(routes=lambda *a: (403, {}, {}) if "/batches/" in a[1] else batches(*a)) as endpoint:
        with pytest.raises(UsageError, match="no word of the batch"):
            run(episodes(4), endpoint.client(), config(tmp_path, batch=True, batch_poll=0.001))
        with pytest.raises(UsageError, match="go on with --batch"):  # or it would be paid for twice
            run(episodes(4), endpoint.client(), config(tmp_path))
    assert len(batches.batches) == 1
    later = Batches()
    later.files, later.batches = batches.files, batches.batches
    found = judged(later, tmp_path, 6)
    assert found.summary().startswith("judged 6 of 6") and found.in_flight == 0
    assert asked(later) == [f'"Task {i}"' for i in range(6)] and len(later.batches) == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_dies_while_it_submits_submits_once(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before the request is sent, or after the endpoint got it and before we know its name."""
    from openai.resources.batches import Batches as Api

    batches, create = Batches(), Api.create

    def dying(self: Any, **given: Any) -> Any:
        if when == "after":
            create(self, **given)
        raise Stop

    monkeypatch.setattr(Api, "create", dying)
    with pytest.raises(Stop):
        judged(batches, tmp_path)
    monkeypatch.setattr(Api, "create", create)
    found = judged(batches, tmp_path)
    assert found.summary().startswith("judged 6 of 6") and found.in_flight == 0
    assert len(batches.batches) == 1 and len(asked(batches)) == 6


def test_a_submission_whose_reply_is_lost_is_found_and_not_repeated(tmp_path: Path) -> None:
    batches = Batches()
    batches.lost = ["POST /batches"]
    assert judged(batches, tmp_path).summary().startswith("judged 6 of 6") and len(batches.batches) == 1
    assert batches.lost == []


def test_a_budget_holds_for_batches(tmp_path: Path) -> None:
    def costly(number: int, lines: list[Any]) -> Any:
        used = [
            {"prompt_tokens": len(json.dumps(x["body"])), "completion_tokens": x["body"]["max_tokens"]} for x in lines
        ]
        return (
            "completed",
            [answer(line, completion(verdicts(line["body"]), usage=u)) for line, u in zip(lines, used, strict=True)],
            [],
        )

    batches = Batches(costly)
    found = judged(batches, tmp_path, 40, budget_tokens=40_000)
    assert 20_000 < found.tokens <= 40_000 and "budget" in found.reasons.values() and found.labels
    cheap = Batches()  # what is not used up is used for the next
    found = judged(cheap, tmp_path / "b", 40, budget_tokens=40_000)
    assert found.summary().startswith("judged 40 of 40") and len(cheap.batches) > 1


def test_a_batch_that_is_too_much_at_once_is_cut(tmp_path: Path) -> None:
    def fate(number: int, lines: list[Any]) -> Any:
        if len(lines) > 2:
            return "failed", [], [], "token_limit_exceeded"
        return "completed", [answer(line) for line in lines], []

    batches = Batches(fate)
    found = judged(batches, tmp_path, 8)
    assert found.summary().startswith("judged 8 of 8") and len(batches.batches) == 2 + 4


@pytest.mark.parametrize(
    "routes",
    [
        lambda *a: (404, {}, {"error": {"message": "no batches here"}}),
        Batches(lambda n, lines: ("failed", [], [], "invalid_json_line")),
    ],
)
def test_an_endpoint_that_refuses_batches(tmp_path: Path, routes: Any) -> None:
    with Endpoint(routes=routes) as endpoint, pytest.raises(UsageError, match="batch"):
        run(episodes(2), endpoint.client(), config(tmp_path, batch=True, batch_poll=0.001))


def test_quota_at_submission_stops_the_run(tmp_path: Path) -> None:
    error = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    with Endpoint(routes=lambda *a: (429, {}, error)) as endpoint:
        found = run(episodes(2), endpoint.client(), config(tmp_path, batch=True, batch_poll=0.001))
    assert set(found.reasons.values()) == {"quota"} and found.tokens == 0 and found.in_flight == 0
