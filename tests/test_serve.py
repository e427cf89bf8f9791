"""The server: the scores of the model alone whoever else asks, limits with a reason, other trainers' protocols."""

import asyncio
import json
import random
import threading
import time

import hypothesis.strategies as st
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings

from prm import PRM, ModelError, Step, Trajectory
from prm.batching import aggregate
from prm.serve.app import app
from prm.serve.batcher import Batcher, Busy
from prm.serve.config import ServeConfig
from prm.serve.metrics import Metrics
from prm.serve.texts import chat_of
from tests.tiny import model, tokenizer

TEXTS = [
    Trajectory("What is 2 + 2?", (Step("search: the sum", "none"), Step("answer: 4"))),
    Trajectory("capital of France", tuple(Step(f"search: {w}", "Paris is the capital. " * 3) for w in "abcde")),
    Trajectory("река", (Step("они <step> идут"), Step("", "x"), Step("answer: \n\n"))),
    Trajectory("nothing", ()),
]


def row(t):
    return {"task": t.task, "steps": [{"action": s.action, "observation": s.observation} for s in t.steps]}


def rows(texts):
    return {"trajectories": [row(t) for t in texts]}


def make(**options):
    prm = PRM.create(model(), tokenizer=tokenizer(), **options)
    with torch.no_grad():
        prm.head.weight.mul_(20)
    prm.name = "tiny"
    return prm


@pytest.fixture(scope="module")
def prm():
    return make(max_tokens=256)


@pytest.fixture(scope="module")
def client(prm):
    with TestClient(app(prm, ServeConfig(max_body_bytes=100_000, max_trajectories=40))) as found:
        yield found


def near(left, right, tolerance=1e-5):
    return len(left) == len(right) and all(abs(a - b) < tolerance for a, b in zip(left, right, strict=True))


def sized(prm, tokens):
    """A trajectory of eight steps of exactly so many tokens."""
    for n in range(2000):
        t = Trajectory(
            "task", (*(Step(f"step {i}", "word " * (n // 24)) for i in range(7)), Step("x" + " y" * (n % 24)))
        )
        if sum(len(p.ids) for p in prm.render(t)) == tokens and len(prm.render(t)) == 1:
            return t
    raise AssertionError(tokens)


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model(prm, client):
    answer = client.post("/score", json=rows(TEXTS)).json()
    assert answer["model"] == "tiny" and answer["version"] == prm.fingerprint() and answer["threshold"] == 0.5
    for result, own, t in zip(answer["results"], prm.score(TEXTS), TEXTS, strict=True):
        assert near(result["scores"], own) and result["id"] == t.id
        assert not result["truncated"] and result["error"] is None
    assert client.post("/score", json={"trajectories": []}).json()["results"] == []


def test_no_answer_depends_on_who_else_asks(prm, client):
    draw = random.Random(0)
    texts = [Trajectory(f"task {i % 3}", TEXTS[1].steps[: 1 + i % 4] * (1 + i % 3)) for i in range(60)]
    alone = {t.id: prm.score([t])[0] for t in texts}
    asked = [draw.sample(texts, 1 + i % 4) for i in range(20)]
    threads, out = in_threads(
        [lambda own=own: client.post("/score", json=rows(own) | {"long": "windows"}) for own in asked]
    )
    for t in threads:
        t.join(30)
    for own, answer in zip(asked, out, strict=True):
        assert answer.status_code == 200
        assert all(near(r["scores"], alone[t.id]) for t, r in zip(own, answer.json()["results"], strict=True))


def test_siblings_are_read_once(prm, client):
    before = client.get("/metrics").text
    siblings = [Trajectory("one", (*TEXTS[1].steps, Step(f"answer {i}"))) for i in range(8)]
    client.post("/score", json=rows(siblings))
    after = client.get("/metrics").text

    def value(text, name):
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))

    asked, read = (value(after, n) - value(before, n) for n in ("prm_asked_tokens_total", "prm_read_tokens_total"))
    parts = [p.ids for t in siblings for p in prm.render(t)]
    assert asked == sum(map(len, parts))
    assert read == len({tuple(p[:n]) for p in parts for n in range(1, len(p) + 1)}) < asked / 3


def test_longer_than_the_limit_is_named_and_the_others_are_served(prm, client):
    whole, over = sized(prm, 256), Trajectory("task", tuple(Step(f"step {i}", "word " * 40) for i in range(8)))
    crossing = prm.render(over)[1].first
    assert near(client.post("/score", json=rows([whole])).json()["results"][0]["scores"], prm.score([whole])[0])
    answer = client.post("/score", json=rows([TEXTS[0], over, *TEXTS[1:3]]))
    assert answer.status_code == 409
    body = answer.json()
    assert f"step {crossing} of 8" in body["detail"] and "limit of 256 tokens" in body["detail"]
    assert [r["error"] is None for r in body["results"]] == [True, False, True, True]
    for i, t in ((0, TEXTS[0]), (2, TEXTS[1]), (3, TEXTS[2])):
        assert near(body["results"][i]["scores"], prm.score([t])[0])
    cut = client.post("/score", json=rows([over, TEXTS[0]]) | {"long": "truncate"}).json()["results"]
    assert cut[0]["truncated"] and cut[0]["scores"][crossing:] == [None] * (8 - crossing)
    assert near(cut[0]["scores"][:crossing], prm.score([over])[0][:crossing])
    assert not cut[1]["truncated"]
    windows = client.post("/score", json=rows([over]) | {"long": "windows"}).json()["results"]
    assert near(windows[0]["scores"], prm.score([over])[0]) and not windows[0]["truncated"]
    alone = Trajectory("word " * 300, (Step("a"),))
    for long in ("error", "windows"):
        answer = client.post("/score", json=rows([alone]) | {"long": long})
        assert answer.status_code == 409 and "the limit is 256" in answer.json()["detail"]
    nothing = client.post("/score", json=rows([alone]) | {"long": "truncate"}).json()["results"][0]
    assert nothing["scores"] == [None] and nothing["truncated"]
    assert client.get("/healthz").json()["max_tokens"] == 256


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 422, "body"),
        (b"{", 422, "JSON"),
        (b"[" * 50_000, 4, ""),
        (b'{"trajectories": NaN}', 422, "trajectories"),
        (b'{"trajectories": [{"task": 1, "steps": []}]}', 422, "trajectories.0.task"),
        (b'{"trajectories": [{"task": "t", "steps": [{"observation": "o"}]}]}', 422, "steps.0.action"),
        (b'{"trajectories": [{"task": "t", "steps": [], "surprise": 1}]}', 422, "surprise"),
        (b'{"trajectories": [{"task": "t", "steps": [], "id": "0000000000000000"}]}', 409, "the text was changed"),
        (b'{"trajectories": [{"task": "t", "steps": []}], "long": "cut"}', 422, "long"),
        (b"\xff\xfe", 4, ""),
        (json.dumps({"trajectories": [{"task": "t", "steps": []}] * 41}).encode(), 409, "41 trajectories"),
        (json.dumps({"trajectories": [{"task": "x" * 100_000, "steps": []}]}).encode(), 413, "100000 bytes"),
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused_with_a_reason(client, body, status, says):
    answer = client.post("/score", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status or answer.status_code // 100 == status, answer.text
    assert says in answer.json()["detail"]
    assert len(answer.content) < 1000
    assert client.get("/healthz").status_code == 200


def test_text_that_utf8_cannot_hold_is_scored_as_offline(prm, client):
    body = b'{"trajectories": [{"task": "\\ud800", "steps": [{"action": "a \\udfff"}]}]}'
    answer = client.post("/score", content=body, headers={"content-type": "application/json"})
    expected = prm.score([Trajectory("\ud800", (Step("a \udfff"),))])
    assert near(answer.json()["results"][0]["scores"], expected[0])


def test_a_body_in_pieces_is_measured_too(client):
    def pieces():
        for _ in range(20):
            yield b" " * 10_000

    assert client.post("/score", content=pieces()).status_code == 413
    assert client.post("/score", content=b"{}", headers={"content-length": "x"}).status_code in (400, 422)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["trajectories", "task", "steps", "action", "meta", "tools", "query", "input",
                                       "prompts", "messages", "role", "content", "long"]), inner, max_size=4),
    max_leaves=12,
), st.sampled_from(["/score", "/get_reward", "/pooling"]))  # fmt: skip
def test_no_json_makes_the_server_fail(client, value, route):
    answer = client.post(route, content=json.dumps(value), headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["detail"]


def test_tools_that_no_template_can_render_are_refused():
    with TestClient(app(make(layout="chat"), ServeConfig())) as client:
        for tools in (5, ["x"], [{"a": "x"}], {"a": 1}):
            given_row = row(TEXTS[0]) | {"meta": {"tools": tools}}
            answer = client.post("/score", json={"trajectories": [given_row, row(TEXTS[1])]})
            assert answer.status_code in (200, 409), answer.text


def test_the_key_is_asked_for(prm, monkeypatch):
    monkeypatch.setenv("PRM_API_KEY", "s3cret")
    with TestClient(app(prm, ServeConfig())) as client:
        for given_key in (None, "Bearer wrong", "Bearer s3cret2", "s3cret", "Bearer "):
            headers = {"Authorization": given_key} if given_key else {}
            answer = client.post("/score", json=rows(TEXTS), headers=headers)
            assert answer.status_code == 401 and "key" in answer.json()["detail"]
            assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/healthz").status_code == 200
        right = {"Authorization": "Bearer s3cret"}
        assert client.post("/score", json=rows(TEXTS), headers=right).status_code == 200
        assert "HTTPBearer" in json.dumps(client.get("/openapi.json", headers=right).json())


# --- queue ------------------------------------------------------------------------------------------------------------


class Slow:
    """A model whose passes wait for an event."""

    def __init__(self, inner):
        self.inner, self.go, self.passes = inner, threading.Event(), []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def raw(self, parts, **options):
        self.passes.append(len(parts))
        assert self.go.wait(20)
        return self.inner.raw(parts, **options)


def in_threads(calls):
    out = [None] * len(calls)
    threads = [
        threading.Thread(target=lambda i=i, c=c: out.__setitem__(i, c()), daemon=True) for i, c in enumerate(calls)
    ]
    for t in threads:
        t.start()
    return threads, out


def test_a_full_queue_says_when_to_come_back(prm):
    slow = Slow(prm)
    with TestClient(app(slow, ServeConfig(batch_tokens=64, queue_tokens=200))) as client:
        threads, out = in_threads([lambda: client.post("/score", json=rows([TEXTS[1]])) for _ in range(6)])
        while sum(a is not None for a in out) < 2:
            time.sleep(0.01)
        slow.go.set()
        for t in threads:
            t.join(20)
        assert {a.status_code for a in out} == {200, 503}
        for a in out:
            if a.status_code == 503:
                assert int(a.headers["Retry-After"]) >= 1 and "queue is full" in a.json()["detail"]
        assert client.post("/score", json=rows(TEXTS)).status_code == 200
        assert client.app.state.serving.batcher._waiting == 0 and client.app.state.serving.in_flight == 0


def test_requests_over_the_bound_and_over_time(prm):
    slow = Slow(prm)
    with TestClient(app(slow, ServeConfig(max_requests=1, timeout=0.4))) as client:
        threads, out = in_threads([lambda: client.post("/score", json=rows([TEXTS[0]])) for _ in range(2)])
        for t in threads:
            t.join(20)
        assert [a.status_code for a in out] == [503, 503]
        assert sorted("not done within" in a.json()["detail"] for a in out) == [False, True]
        assert all("Retry-After" in a.headers for a in out)
        slow.go.set()
        assert client.post("/score", json=rows([TEXTS[0]])).status_code == 200


def test_what_waits_is_read_together(prm):
    """While a pass runs, requests come; the next pass takes them all."""
    slow = Slow(prm)
    with TestClient(app(slow, ServeConfig())) as client:
        first, _ = in_threads([lambda: client.post("/score", json=rows(TEXTS[:1]))])
        while not slow.passes:
            time.sleep(0.01)
        more, _ = in_threads([lambda: client.post("/score", json=rows(TEXTS[1:3])) for _ in range(5)])
        while len(client.app.state.serving.batcher._jobs) < 5:
            time.sleep(0.01)
        slow.go.set()
        for t in first + more:
            t.join(20)
        assert slow.passes == [1, 10]


def run(batcher, coroutine):
    async def main():
        batcher.start()
        try:
            return await coroutine
        finally:
            await asyncio.to_thread(batcher.stop)

    return asyncio.run(main())


def test_what_nobody_waits_for_is_not_read(prm):
    slow, batcher = Slow(prm), Batcher(64, 1 << 20, Metrics())
    parts = [prm.render(t)[0] for t in TEXTS[:3]]

    async def scene():
        first = asyncio.ensure_future(batcher.logits(slow, parts[:1]))
        while not slow.passes:
            await asyncio.sleep(0.01)
        gone = asyncio.ensure_future(batcher.logits(slow, parts * 50))
        last = asyncio.ensure_future(batcher.logits(slow, parts[1:2]))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0.05)
        slow.go.set()
        return await first, await last

    first, last = run(batcher, scene())
    assert sum(slow.passes) == 2 and batcher._waiting == 0
    assert near(first[0].tolist(), prm.raw(parts[:1])[0].tolist()) and near(
        last[0].tolist(), prm.raw(parts[1:2])[0].tolist()
    )


def test_a_small_request_does_not_wait_for_a_large_one(prm):
    batcher, order = Batcher(256, 1 << 20, Metrics()), []
    parts = [prm.render(t)[0] for t in TEXTS[:3]]
    slow = Slow(prm)

    async def ask(name, own):
        await batcher.logits(slow, own)
        order.append(name)

    async def scene():
        tasks = [asyncio.ensure_future(ask("large", parts * 100))]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.ensure_future(ask("small", parts[:1])))
        await asyncio.sleep(0.05)
        slow.go.set()
        await asyncio.gather(*tasks)

    run(batcher, scene())
    assert order == ["small", "large"]


def test_a_pass_that_fails_fails_its_requests_alone(prm):
    broken, batcher = make(), Batcher(1024, 1 << 20, Metrics())
    with torch.no_grad():
        broken.head.weight[0, 0] = float("nan")
    part = prm.render(TEXTS[0])

    async def scene():
        with pytest.raises(ModelError, match="not finite"):
            await batcher.logits(broken, part)
        return await batcher.logits(prm, part)

    assert near(run(batcher, scene())[0].tolist(), prm.raw(part)[0].tolist())


def test_a_queue_without_room(prm):
    batcher = Batcher(64, 10, Metrics())
    part = prm.render(TEXTS[0])

    async def scene():
        slow = Slow(prm)
        first = asyncio.ensure_future(batcher.logits(slow, part))
        while not slow.passes:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(batcher.logits(slow, part))
        await asyncio.sleep(0.02)
        with pytest.raises(Busy):
            await batcher.logits(slow, part)
        slow.go.set()
        await asyncio.gather(first, second)

    run(batcher, scene())


# --- reload -----------------------------------------------------------------------------------------------------------


def test_a_reload_drops_no_request_and_the_version_names_the_model(prm):
    other, slow = make(seed=5), Slow(prm)
    own = app(slow, ServeConfig(), load=lambda: other)
    with TestClient(own) as client:
        threads, out = in_threads([lambda: client.post("/score", json=rows(TEXTS)) for _ in range(4)])
        while not slow.passes:
            time.sleep(0.01)
        assert client.post("/reload").json() == {"model": "tiny", "version": other.fingerprint(), "changed": True}
        after, new = in_threads([lambda: client.post("/score", json=rows(TEXTS))])
        time.sleep(0.05)
        slow.go.set()
        for t in threads + after:
            t.join(20)
        for answers, expected in ((out, prm), (new, other)):
            for answer in answers:
                assert answer.status_code == 200 and answer.json()["version"] == expected.fingerprint()
                for r, scores in zip(answer.json()["results"], expected.score(TEXTS), strict=True):
                    assert near(r["scores"], scores)
        assert 'prm_reloads_total{result="done"} 1' in client.get("/metrics").text


def test_a_reload_that_fails_leaves_the_old_model(prm):
    def fail():
        raise ModelError("gone")

    with TestClient(app(prm, ServeConfig(), load=fail)) as client:
        answer = client.post("/reload")
        assert answer.status_code == 409 and "gone" in answer.json()["detail"]
        assert client.post("/score", json=rows(TEXTS)).json()["version"] == prm.fingerprint()


# --- other trainers' protocols ----------------------------------------------------------------------------------------


def test_openrlhf_gets_one_scalar_a_sample(prm, client):
    prompt, steps = "What is 2 + 2?", ("First we add.\n\n", "answer: 4")
    query = [prompt + "".join(steps) + "<|im_end|><|endoftext|>", prompt, prompt + "just one"]
    body = {"query": query, "prompts": [prompt] * 3, "labels": ["4", None, {"a": 1}]}
    answer = client.post("/get_reward", json=body).json()
    expected = prm.score([Trajectory(prompt, tuple(map(Step, steps))), Trajectory(prompt, (Step("just one"),))])
    assert near(answer["rewards"], [min(expected[0]), 0.0, expected[1][0]])
    assert answer["scores"] == answer["rewards"]
    assert client.post("/get_reward", json={"query": [], "prompts": [], "labels": []}).json()["rewards"] == []
    assert client.post("/get_reward", json={"query": []}).json()["rewards"] == []
    assert len(client.post("/get_reward", json={"query": "a single one"}).json()["rewards"]) == 1
    short = client.post("/get_reward", json={"query": ["a", "b"], "prompts": ["a"]})
    assert short.status_code == 409 and "2 queries, but 1 prompts" in short.json()["detail"]
    other = client.post("/get_reward", json={"query": ["a"], "prompts": ["b"]})
    assert other.status_code == 409 and "does not begin with its prompt" in other.json()["detail"]


def test_scalars_of_step_scores():
    scores = [0.5, 0.2, 0.8]
    assert [round(aggregate(scores, how), 6) for how in ("min", "last", "mean", "product")] == [0.2, 0.8, 0.5, 0.08]
    assert aggregate([], "product") == aggregate([], "min") == 0.0


@pytest.mark.parametrize("depth", [150, 500, 800, 950, 3000])
def test_deep_nesting_is_refused_with_a_reason(client, depth):
    deep = "[" * depth + "]" * depth
    for route, text in (
        ("/score", '{"trajectories": [{"task": "t", "steps": [{"action": "a"}], "meta": {"x": DEEP}}]}'),
        ("/pooling", '{"messages": [{"role": "user", "content": DEEP}, {"role": "assistant", "content": "a"}]}'),
        ("/pooling", '{"messages": [{"role": "user", "x": DEEP}, {"role": "assistant", "content": "a"}]}'),
    ):
        answer = client.post(route, content=text.replace("DEEP", deep), headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 409, 413, 422) and answer.json()["detail"], answer.text


@pytest.mark.parametrize("tools", [5, True, "x", ["x"], {"a": 1}])
def test_tools_of_another_shape_are_refused(client, tools):
    row = {"task": "t", "steps": [{"action": "a"}], "meta": {"tools": tools}}
    (result,) = client.post("/score", json={"trajectories": [row]}).json().get("results") or [None]
    assert result is None or "meta.tools must be a list of objects" in result["error"]


def test_vllms_pooling_shape(prm, client):
    part = prm.render(TEXTS[0])[0]
    answer = client.post("/pooling", json={"model": "any", "input": part.ids}).json()
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] == len(part.ids)
    data = answer["data"][0]
    assert data["object"] == "pooling" and len(data["data"]) == len(part.ids)
    assert near([data["data"][end][0] for end in part.ends], prm.score(TEXTS[:1])[0])
    raw = client.post("/pooling", json={"input": [part.ids], "use_activation": False}).json()["data"][0]["data"]
    assert near([raw[end][0] for end in part.ends], prm.raw([part])[0].tolist())
    text = client.post("/pooling", json={"input": ["some text", "more"]}).json()["data"]
    assert [len(d["data"]) for d in text] == [len(tokenizer()(t).input_ids) for t in ("some text", "more")]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
                {"role": "user", "content": "o"}, {"role": "assistant", "content": "b"}]  # fmt: skip
    chat = client.post("/pooling", json={"messages": messages}).json()["data"][0]["data"]
    assert near([x for [x] in chat], prm.score([Trajectory("q", (Step("a", "o"), Step("b")))])[0])
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning_content": "a long thought", "tool_calls": [
            {**call, "id": "x"}, {**call, "id": "y"}]},
        {"role": "tool", "tool_call_id": "y", "content": "second"},
        {"role": "tool", "tool_call_id": "x", "content": "first"},
        {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    chat = client.post("/pooling", json={"messages": messages}).json()["data"][0]["data"]
    assert near([x for [x] in chat], prm.score([chat_of(messages)])[0])
    assert "a long thought" in chat_of(messages).steps[0].action
    for wrong, says in (
        ({}, "Field required"),
        ({"input": [-1]}, "input"),
        ({"input": [10**9]}, "token id"),
        ({"input": [1] * 257}, "257 tokens, the limit is 256"),
        ({"input": [True]}, "input"),
        ({"messages": [{"role": "user", "content": "q"}]}, ""),
    ):
        refused = client.post("/pooling", json=wrong)
        assert refused.status_code in (409, 422) and says in refused.json()["detail"], refused.text


def test_metrics_are_prometheus_text(client):
    client.post("/score", json=rows(TEXTS))
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = set()
    for line in answer.text.splitlines():
        if line.startswith("# TYPE"):
            names.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            float(value)
            base = name.split("{")[0]
            assert base in names or base.rsplit("_", 1)[0] in names
    assert 'prm_requests_total{route="/score",status="200"}' in answer.text
    assert 'prm_request_seconds_bucket{route="/score",le="+Inf"}' in answer.text


def test_the_schema_names_every_answer(client):
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/score", "/get_reward", "/pooling", "/healthz", "/metrics", "/reload"}
    for route in ("/score", "/get_reward", "/pooling"):
        assert set(schema["paths"][route]["post"]["responses"]) == {
            "200",
            "400",
            "401",
            "408",
            "409",
            "413",
            "422",
            "503",
        }
