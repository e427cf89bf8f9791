"""What judging costs: prices, budgets, the ledger; going on after a crash; the command."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from labeling.judge import judge, run
from labeling.judge.money import Ledger, Usage, load_price, read_ledger, spent
from prm import StepLabel, append_jsonl, read_jsonl
from prm.cli import main
from prm.errors import UsageError
from tests.judge_server import Endpoint, completion, config, episodes, failing, good, judge_file, verdicts

PRICES = "[m]\ninput = 1000.0\ncached = 100.0\noutput = 2000.0\n"


def priced(tmp_path: Path) -> str:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return str(path)


def test_the_ledger_has_every_call_and_adds_up(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 60},
             "completion_tokens_details": {"reasoning_tokens": 5}}  # fmt: skip

    def script(body: Any, number: int) -> Any:
        return failing(500)(body, number) if number % 3 == 0 else (200, {}, completion(verdicts(body), usage=usage))

    with Endpoint(script) as endpoint:
        judged = run(episodes(5), endpoint.client(), config(tmp_path, prices=priced(tmp_path), concurrency=1))
    rows = list(read_ledger(str(tmp_path / "labels.jsonl.ledger.jsonl")))
    ends = [row for row in rows if row["event"] == "end"]
    assert len(ends) == len(endpoint.bodies) == sum(row["event"] == "start" for row in rows)
    fine = [row for row in ends if row["status"] == "ok"]
    assert len(fine) == 5 and {(r["input"], r["cached"], r["output"], r["reasoning"]) for r in fine} == {
        (100, 60, 20, 5)
    }
    assert fine[0]["usd"] == pytest.approx((40 * 1000 + 60 * 100 + 20 * 2000) / 1e6)
    assert judged.usd == pytest.approx(sum(row["usd"] for row in ends)) == pytest.approx(spent(rows)[0])
    assert all(row["usage"] == "not told: as reserved" for row in ends if row["status"] == "error")


@pytest.mark.parametrize("kind", ["usd", "tokens"])
def test_a_budget_is_never_exceeded(tmp_path: Path, kind: str) -> None:
    """Replies cost the most they can; some calls fail and are retried; many are in flight."""

    def script(body: Any, number: int) -> Any:
        if number % 4 == 1:
            return failing(500)(body, number)
        used = {"prompt_tokens": len(json.dumps(body, ensure_ascii=False)), "completion_tokens": body["max_tokens"]}
        return 200, {}, completion(verdicts(body), usage=used)

    bound = {"budget": 90.0, "prices": priced(tmp_path)} if kind == "usd" else {"budget_tokens": 60_000}
    with Endpoint(script, delay=0.005) as endpoint:
        judged = run(episodes(60), endpoint.client(), config(tmp_path, concurrency=16, **bound))
        before = judged.usd if kind == "usd" else judged.tokens
        again = run(episodes(60), endpoint.client(), config(tmp_path, concurrency=16, **bound))
    after = again.usd if kind == "usd" else again.tokens
    assert 0 < len(judged.labels) < 240 and "budget" in judged.reasons.values()
    assert before <= after <= (90.0 if kind == "usd" else 60_000)
    assert after > 0.8 * (90.0 if kind == "usd" else 60_000)


def test_an_endpoint_that_ignores_the_cap_does_not_break_the_budget(tmp_path: Path) -> None:
    """It is seen at the first call, which is alone."""

    def script(body: Any, number: int) -> Any:
        used = {"prompt_tokens": 10, "completion_tokens": 20_000}
        return 200, {}, completion(verdicts(body), usage=used)

    with Endpoint(script, delay=0.01) as endpoint:
        judged = run(episodes(60), endpoint.client(), config(tmp_path, budget_tokens=200_000))
    assert 100_000 < judged.tokens <= 200_000 and "budget" in judged.reasons.values()


def test_what_was_in_flight_at_a_crash_counts_against_the_budget(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "labels.jsonl.ledger.jsonl"))
    ledger.write({"event": "start", "id": 1, "call": "x", "time": 0.0, "reserved_usd": None, "reserved_tokens": 9_000})
    ledger.close()
    with Endpoint() as endpoint:
        judged = run(episodes(1), endpoint.client(), config(tmp_path, budget_tokens=10_000))
        assert endpoint.bodies == [] and list(judged.reasons.values()) == ["budget"] and judged.in_flight == 1
        judged = run(episodes(1), endpoint.client(), config(tmp_path, budget_tokens=20_000))
    assert len(judged.labels) == 4 and judged.tokens == 9_120


def test_a_budget_in_dollars_needs_a_price(tmp_path: Path) -> None:
    with Endpoint() as endpoint, pytest.raises(UsageError, match="has none for 'm'"):
        run(episodes(1), endpoint.client(), config(budget=1.0))
    assert endpoint.bodies == []


def test_prices_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for text in (
        "[m]\ninput = -1\noutput = 1",
        "[m]\ninput = 1",
        "[m]\ninput = true\noutput = 1",
        "m = 3",
        "[m",
        "[m]\nin = 1",
    ):
        path.write_text(text)
        with pytest.raises(UsageError):
            load_price("m", str(path))
    path.write_text('["m-*"]\ninput = 1\noutput = 2\n["m-large*"]\ninput = 3\noutput = 4')
    price = load_price("m-large-2", str(path))
    assert price is not None and price.of(Usage(10**6, 10**6)) == 7
    assert load_price("other", str(path)) is None


def test_a_dry_run_asks_nothing_and_names_the_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_jsonl(tmp_path / "t.jsonl", episodes(10))
    with Endpoint() as endpoint:
        arguments = ["judge", str(tmp_path / "t.jsonl"), "--model", "m", "--base-url", endpoint.url, "--dry-run"]
        assert main([*arguments, "--prices", priced(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert endpoint.bodies == [] and "10 calls for 10 trajectories, 40 steps" in said and "about $" in said
    assert list(tmp_path.glob("*.ledger.jsonl")) == []


def test_what_was_judged_is_not_asked_again(tmp_path: Path) -> None:
    with Endpoint() as endpoint:
        first = run(episodes(6), endpoint.client(), config(tmp_path))
        (tmp_path / "labels.jsonl").unlink()  # the ledger holds what was paid for
        second = run(episodes(8), endpoint.client(), config(tmp_path))
    assert len(endpoint.bodies) == 8 and [x.score for x in second.labels[:24]] == [x.score for x in first.labels]
    assert len(read_jsonl(tmp_path / "labels.jsonl", StepLabel)) == 32


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    held = Ledger(str(tmp_path / "labels.jsonl.ledger.jsonl"))
    with Endpoint() as endpoint, pytest.raises(UsageError, match="another run"):
        run(episodes(1), endpoint.client(), config(tmp_path))
    held.close()


def test_killed_ten_times_nothing_is_lost_or_paid_twice(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "t.jsonl", episodes(200, 3))
    out = tmp_path / "labels.jsonl"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.judge_server", "openai"])
    draw = random.Random(0)
    with Endpoint(delay=0.02) as endpoint:
        arguments = (str(tmp_path / "t.jsonl"), str(out), endpoint.url)
        for _ in range(10):
            process = context.Process(target=judge_file, args=arguments)
            target = len(endpoint.bodies) + draw.randrange(6, 18)
            process.start()
            while len(endpoint.bodies) < target and process.is_alive():
                time.sleep(0.002)
            assert process.is_alive()
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
        command = [sys.executable, "-m", "prm.cli", "judge", arguments[0], "--model", "m", "--out", str(out)]
        done = subprocess.run(
            [*command, "--base-url", endpoint.url, "--concurrency", "4"], capture_output=True, text=True
        )
    assert done.returncode == 0 and "judged 200 of 200" in done.stdout, done.stderr
    labels = read_jsonl(out, StepLabel)
    assert len({(x.trajectory_id, x.step) for x in labels}) == len(labels) == 600
    rows = list(read_ledger(f"{out}.ledger.jsonl"))
    ended = {row["id"] for row in rows if row["event"] == "end"}
    paid = Counter(row["call"] for row in rows if row["event"] == "end" and row["status"] == "ok")
    in_flight = [row for row in rows if row["event"] == "start" and row["id"] not in ended]
    assert len(paid) == 200 and set(paid.values()) == {1}  # nothing whose answer arrived was asked again
    assert len(endpoint.bodies) <= 200 + len(in_flight) and len(in_flight) <= 40
    assert f"{len(in_flight)} calls were in flight" in done.stdout


def test_the_command_says_how_much_was_judged_and_fails_where_nothing_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    append_jsonl(tmp_path / "t.jsonl", episodes(3))
    out = str(tmp_path / "l.jsonl")
    arguments = ["judge", str(tmp_path / "t.jsonl"), "--model", "m", "--out", out, "--backoff", "0"]
    assert main(arguments) == 2 and "OPENAI_API_KEY" in capsys.readouterr().err
    with Endpoint(lambda b, n: (200, {}, completion("no"))) as endpoint:
        assert main([*arguments, "--base-url", endpoint.url]) == 1
        assert "judged 0 of 3: 3 unparsable" in capsys.readouterr().out
        assert not (tmp_path / "l.jsonl").exists()
        endpoint.script = good
        asked = len(endpoint.bodies)
        assert main([*arguments, "--base-url", endpoint.url]) == 1 and len(endpoint.bodies) == asked
        assert "3 calls failed in an earlier run and were not paid for again" in capsys.readouterr().out
        assert main([*arguments, "--base-url", endpoint.url, "--retry-failed"]) == 0
    assert "judged 3 of 3" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "l.jsonl"), str(tmp_path / "l.jsonl"), "--out", str(tmp_path / "e")]) == 0
    assert main(["judge", str(tmp_path / "none.jsonl"), "--model", "m", "--out", "x"]) == 2


def test_failures_are_warned_about_in_python() -> None:
    with Endpoint(lambda b, n: (200, {}, completion("no"))) as endpoint, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert judge(episodes(2), endpoint.client(), config()) == []
    assert any("judged 0 of 2: 2 unparsable" in str(w.message) for w in said)
