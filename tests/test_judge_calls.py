"""The judge against a scripted endpoint: statuses, retries, what the endpoint can do, order, votes."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from labeling.judge import judge, run
from prm import StepLabel, read_jsonl
from prm.errors import UsageError
from tests.judge_server import Endpoint, completion, config, episodes, failing, good, one, verdicts


def test_every_step_has_the_score_that_the_reply_gives_it() -> None:
    scores = [0.25, 1, 0, 0.5]

    def script(body: Any, number: int) -> Any:
        rows = [
            {"step": i, "score": s, "error": "x" if s == 0 else None, "reason": f"r{i}"} for i, s in enumerate(scores)
        ]
        return 200, {}, completion(json.dumps({"steps": rows[::-1]}))  # matched by number, not by place

    judged, endpoint = one(script)
    assert [(x.step, x.score, x.note) for x in judged.labels] == [(i, s, f"r{i}") for i, s in enumerate(scores)]
    assert judged.labels[2].meta["error"] == "x" and judged.labels[0].source == "judge:m"
    assert judged.labels[0].meta["rubric"] == "general" and len(judged.labels[0].meta["rubric_sha256"]) == 64
    assert len(endpoint.bodies) == 1 and judged.reasons == {}


@pytest.mark.parametrize(
    ("reply", "status", "calls"),
    [
        (completion(None, "length", usage={"prompt_tokens": 9, "completion_tokens": 200}), "truncated", 3),
        (completion('{"steps": [{"step": 0, "score": 1}, {"step": 1, "score": 0}', "length"), "truncated", 3),
        (completion("x", "content_filter"), "filtered", 1),
        (completion(None, refusal="I will not"), "refused", 1),
        (completion("I can't help with that."), "refused", 2),
        (completion(""), "unparsable", 2),
        (completion(None), "unparsable", 2),
        (completion("All good!"), "unparsable", 2),
        ({"choices": []}, "error", 5),
        (b"<html>bad gateway</html>", "error", 5),
        (b'{"choices": [{"message": {"content": NaN}}]}', "error", 5),
    ],
)
def test_what_fails_has_a_status_and_no_label(reply: Any, status: str, calls: int) -> None:
    judged, endpoint = one(lambda body, number: (200, {}, reply))
    assert judged.labels == [] and list(judged.reasons.values()) == [status]
    assert judged.summary().startswith(f"judged 0 of 1: 1 {status}")
    assert len(endpoint.bodies) == (1 if status == "refused" else calls)
    caps = [body["max_tokens"] for body in endpoint.bodies]
    assert status != "truncated" or len(set(caps)) == len(caps)  # never the same cap again


@pytest.mark.parametrize(
    ("script", "status", "calls"),
    [
        (failing(500), "error", 5),
        (failing(429), "rate limit", 5),
        (failing(400, "content_filter"), "filtered", 1),
        (failing(400, "context_length_exceeded"), "too long", 1),
        (failing(429, "insufficient_quota"), "quota", 1),
        (failing(402), "quota", 1),
        (failing(429, message="You exceeded your current quota, please check your plan"), "quota", 1),
        (failing(429, retry_after="86400"), "rate limit", 1),
        (failing(418), "error", 1),
    ],
)
def test_http_failures(script: Any, status: str, calls: int) -> None:
    judged, endpoint = one(script, retries=1 if status == "rate limit" else 4)
    assert judged.labels == [] and list(judged.reasons.values()) == [status]
    assert len(endpoint.bodies) == calls


def test_a_slow_reply_is_a_timeout_and_counts_as_paid() -> None:
    with Endpoint(delay=0.6) as endpoint:
        judged = run(episodes(1), endpoint.client(), config(timeout=0.1, retries=1))
    assert list(judged.reasons.values()) == ["timeout"] and judged.tokens > 2 * 600


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_endpoint_that_refuses_us_ends_the_run_with_an_error(status: int) -> None:
    with (
        Endpoint(failing(status, message="no such model")) as endpoint,
        pytest.raises(UsageError, match="no such model"),
    ):
        run(episodes(5), endpoint.client(), config())
    assert len(endpoint.bodies) == 1


def test_quota_stops_the_run_and_keeps_what_there_is(tmp_path: Path) -> None:
    def script(body: Any, number: int) -> Any:
        return good(body, number) if number < 3 else failing(429, "insufficient_quota")(body, number)

    with Endpoint(script) as endpoint:
        judged = run(episodes(50), endpoint.client(), config(tmp_path, concurrency=1))
    assert len(endpoint.bodies) == 4 and len(judged.labels) == 12
    assert judged.summary().startswith("judged 3 of 50: 47 quota")


def test_one_bad_item_among_ten_costs_one() -> None:
    def script(body: Any, number: int) -> Any:
        if '"Task 5"' in body["messages"][-1]["content"]:
            return 200, {}, completion('{"steps":[{"step":0,"score":1},{"step":1,"score":0}', "length")
        return good(body, number)

    with Endpoint(script) as endpoint:
        judged = run(episodes(10), endpoint.client(), config())
    assert len(judged.labels) == 36 and list(judged.reasons.values()) == ["truncated"]


def test_a_server_that_is_not_there_costs_nothing() -> None:
    with Endpoint() as endpoint:
        client = endpoint.client()
    judged = run(episodes(2), client, config(retries=1))
    assert list(judged.reasons.values()) == ["error", "error"] and judged.tokens == 0
    assert "no connection" in judged.summary()


def test_one_wait_is_for_all_calls() -> None:
    """Nothing is sent while the endpoint asks to wait, by no thread."""
    times: list[float] = []
    told = threading.Event()

    def script(body: Any, number: int) -> Any:
        times.append(time.monotonic())
        if number == 5:
            told.set()
            return failing(429, retry_after="1")(body, number)
        return good(body, number)

    with Endpoint(script, delay=0.01) as endpoint:
        judged = run(episodes(24), endpoint.client(), config(concurrency=4))
    assert judged.reasons == {} and len(endpoint.bodies) == 25
    assert max(b - a for a, b in itertools.pairwise(times)) > 0.9


def test_retry_after_is_waited_for() -> None:
    def script(body: Any, number: int) -> Any:
        return good(body, number) if number else failing(429, retry_after_ms="400")(body, number)

    started = time.monotonic()
    judged, endpoint = one(script)
    assert len(judged.labels) == 4 and len(endpoint.bodies) == 2 and time.monotonic() - started > 0.35


@pytest.mark.parametrize("able", ["schema", "json", "text"])
def test_what_form_the_endpoint_takes_is_found_out(able: str) -> None:
    def script(body: Any, number: int) -> Any:
        form = {"json_schema": "schema", "json_object": "json", None: "text"}[
            body.get("response_format", {}).get("type")
        ]
        order = ["schema", "json", "text"]
        if order.index(form) < order.index(able):
            return failing(400, message=f"response_format {form} is not supported")(body, number)
        return good(body, number)

    with Endpoint(script) as endpoint:
        judged = run(episodes(20), endpoint.client(), config())
    assert len(judged.labels) == 80 and judged.reasons == {}
    assert len(endpoint.bodies) == 20 + ["schema", "json", "text"].index(able)  # one call finds out for all


def test_parameters_that_a_model_does_not_take_are_given_up() -> None:
    def script(body: Any, number: int) -> Any:
        if "max_tokens" in body:
            return failing(400, message="'max_tokens' is not supported: use 'max_completion_tokens'")(body, number)
        if "temperature" in body:
            return failing(400, message="'temperature' does not support 0")(body, number)
        return good(body, number)

    judged, endpoint = one(script)
    assert len(judged.labels) == 4 and endpoint.bodies[-1]["max_completion_tokens"] == 600


def test_concurrency_gives_way_to_rate_limits() -> None:
    def script(body: Any, number: int) -> Any:
        return failing(429)(body, number) if endpoint.flying > 4 else good(body, number)

    with Endpoint(script, delay=0.01) as endpoint:
        judged = run(episodes(120), endpoint.client(), config(concurrency=32))
    assert len(judged.labels) == 480 and judged.reasons == {}
    assert len(endpoint.bodies) < 120 * 2.5


def test_labels_land_in_the_order_of_the_trajectories(tmp_path: Path) -> None:
    def script(body: Any, number: int) -> Any:
        time.sleep(random.Random(number).random() * 0.02)
        return good(body, number)

    trajectories = episodes(40)
    with Endpoint(script) as endpoint:
        judged = run(trajectories, endpoint.client(), config(tmp_path))
    written = read_jsonl(tmp_path / "labels.jsonl", StepLabel)
    assert [(x.trajectory_id, x.step) for x in written] == [(t.id, i) for t in trajectories for i in range(4)]
    assert written == judged.labels and endpoint.most > 4


def test_votes_are_shares_and_weights() -> None:
    def script(body: Any, number: int) -> Any:
        return 200, {}, completion(verdicts(body, [0.9, 0.2, 0.5, 0.8][body["seed"]]))

    with Endpoint(script) as endpoint:
        labels = judge(episodes(2), endpoint.client(), config(votes=4))
    assert {(x.score, x.weight) for x in labels} == {(0.625, 4.0)} and labels[0].meta["votes"] == [0.9, 0.2, 0.5, 0.8]


def test_log_probabilities_of_the_verdict(tmp_path: Path) -> None:
    chosen = {"good": {"good": 0.6, "bad": 0.2, "x": 0.2}, ' "bad': {' "bad': 0.9, ' "good': 0.1}}
    pieces = ['{"steps":', '[{"step": 0, "verdict": "', "good", '", "reason": "a"}', ', {"step": 1, "verdict":',
              ' "bad', '", "reason": "b"}]}']  # fmt: skip

    def script(body: Any, number: int) -> Any:
        tokens = []
        for piece in pieces:
            chances = chosen.get(piece, {piece: 1.0})
            top = [{"token": t, "logprob": math.log(p)} for t, p in chances.items()]
            tokens.append({"token": piece, "logprob": top[0]["logprob"], "top_logprobs": top})
        return 200, {}, completion("".join(t["token"] for t in tokens), logprobs={"content": tokens})

    with Endpoint(script) as endpoint:
        labels = judge(episodes(1, 2), endpoint.client(), config(logprobs=True))
    assert [x.score for x in labels] == pytest.approx([0.75, 0.1])
    with (
        Endpoint(lambda b, n: (200, {}, completion('{"steps": [{"step": 0, "verdict": "good"}]}'))) as endpoint,
        pytest.raises(UsageError, match="no log-probabilities"),
    ):
        judge(episodes(1, 1), endpoint.client(), config(logprobs=True))


def test_votes_that_fail_do_not_count() -> None:
    def script(body: Any, number: int) -> Any:
        return good(body, number) if body["seed"] < 2 else (200, {}, completion("no", "content_filter"))

    with Endpoint(script) as endpoint:
        labels = judge(episodes(1), endpoint.client(), config(votes=3))
    assert {(x.score, x.weight) for x in labels} == {(1.0, 2.0)}
    assert {body["temperature"] for body in endpoint.bodies} == {1.0}


def test_an_asynchronous_client_serves_as_well() -> None:
    from openai import AsyncOpenAI

    with Endpoint() as endpoint:
        client = AsyncOpenAI(api_key="none", base_url=endpoint.url, default_headers={"x-team": "a"})
        assert len(judge(episodes(2), client, config())) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", [False, True])
def test_every_call_of_every_thread_is_sent_as_the_client_was_set_up(chosen: bool) -> None:
    import httpx2
    from openai import OpenAI

    sent: list[str] = []
    with Endpoint(delay=0.02) as endpoint:
        more: dict[str, Any] = {}
        if chosen:
            more["http_client"] = httpx2.Client(event_hooks={"request": [lambda r: sent.append(str(r.url))]})
        client = OpenAI(
            api_key="key", base_url=endpoint.url, organization="org", default_headers={"X-Team": "ours"},
            default_query={"api-version": "1"}, **more,
        )  # fmt: skip
        judged = run(episodes(12), client, config(concurrency=4))
    assert not judged.reasons and len(endpoint.heads) == 12
    for head, body in zip(endpoint.heads, endpoint.bodies, strict=True):
        assert head["authorization"] == "Bearer key" and head["x-team"] == "ours"
        assert head["openai-organization"] == "org" and head["content-type"] == "application/json"
        assert head["path"].endswith("/v1/chat/completions?api-version=1") and body["model"] == "m"
    assert len({json.dumps(body["messages"]) for body in endpoint.bodies}) == 12
    assert len(sent) == (12 if chosen else 0)  # a client that the caller chose is the one that is used


def test_a_key_that_changes_is_the_one_that_is_sent() -> None:
    from openai import OpenAI

    keys = (f"key-{n}" for n in itertools.count())
    with Endpoint() as endpoint:
        client = OpenAI(api_key=lambda: next(keys), base_url=endpoint.url)
        judged = run(episodes(6), client, config(concurrency=1))
    sent = [head["authorization"] for head in endpoint.heads]
    assert not judged.reasons and len(sent) == len(set(sent)) == 6
    assert all(key.startswith("Bearer key-") for key in sent)
