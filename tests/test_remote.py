"""A PRM behind a real server: drop-in for the PRM itself, patient where the server is busy, plain where it is wrong."""

import contextlib
import dataclasses
import http.server
import json
import socket
import threading
import time
from types import MappingProxyType

import pytest
import uvicorn

from prm import PRM, DataError, ModelError, Step, StepLabel, Trajectory, UsageError, append_jsonl, read_jsonl
from prm.cli import main
from prm.remote import RemotePRM, load_prm
from prm.serve.app import app
from prm.serve.config import ServeConfig
from tests.test_serve import TEXTS, Slow, make, near


@contextlib.contextmanager
def running(application):
    """A server in a thread; its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(application, log_level="error"))
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def prm():
    return make(max_tokens=256)


@pytest.fixture(scope="module")
def url(prm):
    with running(app(prm, ServeConfig(max_body_bytes=20_000, max_trajectories=7))) as found:
        yield found


def test_it_is_a_drop_in(prm, url):
    remote = RemotePRM.load(url)
    texts = [Trajectory(f"task {i}", TEXTS[1].steps[: i % 6]) for i in range(40)]
    texts += [Trajectory("long", tuple(Step(f"step {i}", "word " * 20) for i in range(30)))]
    assert len(prm.render(texts[-1])) > 1
    for own, expected in zip(remote.score(texts), prm.score(texts), strict=True):
        assert near(own, expected)
    assert [(t.id, len(s)) for t, s in remote.stream(texts)] == [(t.id, len(t.steps)) for t in texts]
    assert remote.fingerprint() == prm.fingerprint() and remote.name == prm.name
    assert remote.settings.threshold == prm.settings.threshold and remote.settings.max_tokens == 256
    labels, expected_labels = remote.label(TEXTS), prm.label(TEXTS)
    assert [(x.trajectory_id, x.step, x.source, x.meta) for x in labels] == [
        (x.trajectory_id, x.step, x.source, x.meta) for x in expected_labels
    ]
    assert remote.session().score(TEXTS[:1])[0] == pytest.approx(prm.score(TEXTS[:1])[0], abs=1e-5)
    assert remote.score([]) == []


def test_load_prm_takes_both(prm, url, tmp_path):
    prm.save(tmp_path / "prm")
    texts = TEXTS[:2]
    for a, b in zip(load_prm(tmp_path / "prm").score(texts), load_prm(url).score(texts), strict=True):
        assert near(a, b)
    with pytest.raises(UsageError, match="has its own dtype, kind"):
        load_prm(url, dtype="bfloat16", kind="trl", base=None)


def test_what_cannot_be_read_is_an_error_with_the_servers_reason(url):
    remote = RemotePRM.load(url, retries=0)
    with pytest.raises(DataError, match="the limit is 256"):
        remote.score([Trajectory("t", (Step("word " * 300),))])
    with pytest.raises(DataError, match="413: the body is larger than 20000 bytes"):
        remote.score([Trajectory("x" * 30_000, (Step("a"),))])


def test_prm_score_at_a_server(prm, url, tmp_path, capsys):
    append_jsonl(tmp_path / "t.jsonl", [*TEXTS, Trajectory("bad", (Step("word " * 300),))])
    out = tmp_path / "labels.jsonl"
    assert main(["score", url, str(tmp_path / "t.jsonl"), "--out", str(out), "--skip-bad"]) == 0
    said = capsys.readouterr()
    assert "10 steps scored" in said.out and "1 trajectories left out" in said.err
    labels = read_jsonl(out, StepLabel)
    assert [x.score for x in labels] == pytest.approx([s for own in prm.score(TEXTS) for s in own], abs=1e-5)
    assert main(["score", url, str(tmp_path / "t.jsonl"), "--out", str(out), "--skip-bad"]) == 0
    assert len(read_jsonl(out)) == 10
    assert main(["score", url, str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "o.jsonl")]) == 2
    assert "the limit is 256" in capsys.readouterr().err
    assert main(["score", url, str(tmp_path / "t.jsonl"), "--out", str(out), "--dtype", "bfloat16"]) == 2


def test_the_key_is_sent(prm, monkeypatch, url):
    monkeypatch.setenv("PRM_API_KEY", "s3cret")
    with running(app(prm, ServeConfig())) as guarded:
        assert near(RemotePRM.load(guarded).score(TEXTS[:1])[0], prm.score(TEXTS[:1])[0])
        with pytest.raises(ModelError, match="401: the API key is missing or wrong"):
            RemotePRM.load(guarded, api_key="other").score(TEXTS[:1])


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers /score from a list of (status, headers, body); None hangs up."""

    script: list = []  # noqa: RUF012
    asked: list = []  # noqa: RUF012

    def reply(self, status, body, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {"Content-Length": str(len(data)), **dict(headers)}.items():
            self.send_header(k, v)
        self.end_headers()
        self.wfile.write(data)

    more = MappingProxyType({})

    def do_GET(self):
        self.reply(200, {"model": "m", "version": "v", "threshold": 0.5, "max_tokens": None, "max_trajectories": 9,
                         "max_body_bytes": 9999, **self.more})  # fmt: skip

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(time.monotonic())
        step = self.script.pop(0)
        if step is not None:
            self.reply(*step)

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    Scripted.script, Scripted.asked = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


GOOD = (200, {"version": "w", "results": [{"scores": [0.5, 0.25]}]})


def test_a_busy_server_is_asked_again_when_it_says(scripted):
    Scripted.script = [(503, {"detail": "full"}, {"Retry-After": "0.3"}), None, (429, b"slow down"), GOOD]
    remote = RemotePRM.load(scripted)
    assert remote.score(TEXTS[:1]) == [[0.5, 0.25]]
    assert len(Scripted.asked) == 4 and Scripted.asked[1] - Scripted.asked[0] >= 0.3
    assert remote.fingerprint() == "w"


def test_patience_ends(scripted):
    Scripted.script = [(503, {"detail": "full"}, {"Retry-After": "0"})] * 3
    with pytest.raises(ModelError, match="given up after 3 tries: 503: full"):
        RemotePRM.load(scripted, retries=2).score(TEXTS[:1])
    assert len(Scripted.asked) == 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, b"{"), "not JSON"),
        ((200, {"version": "w", "results": []}), "expected 1 results"),
        ((200, [1]), "expected 1 results"),
        ((200, {"version": "w", "results": [{"scores": [0.5]}]}), "1 scores for 2 steps"),
        ((200, {"version": "w", "results": [{"scores": [5, -3]}]}), r"expected scores in \[0, 1\], got 5"),
        ((200, b'{"version": "w", "results": [{"scores": [1e999, 0]}]}'), r"in \[0, 1\], got inf"),
        ((200, {"version": "w", "results": [{"scores": None}]}), "expected scores and a version"),
        ((200, {"version": "w", "results": [None]}), "expected scores and a version"),
        ((200, {"results": [{"scores": [0.5, 0.5]}]}), "expected scores and a version"),
        ((500, b"oops"), "500: oops"),
        ((404, {"detail": "Not Found"}), "404: Not Found"),
    ],
)
def test_nonsense_is_no_score(scripted, answer, says):
    Scripted.script = [answer]
    with pytest.raises(ModelError, match=says):
        RemotePRM.load(scripted).score(TEXTS[:1])
    assert len(Scripted.asked) == 1


def test_nothing_there():
    with pytest.raises(ModelError, match="given up after 1 tries: ConnectionRefusedError"):
        RemotePRM.load("http://127.0.0.1:9", retries=0)
    for wrong in ("ftp://x", "http://", "localhost", "http://h:abc", "http://h:99999", "http://[::1"):
        with pytest.raises(UsageError, match="expected an address"):
            RemotePRM(wrong)


ABSURD = ({"max_trajectories": 0}, {"max_body_bytes": -5}, {"max_tokens": 0}, {"threshold": 7}, {"threshold": -1})


@pytest.mark.parametrize("more", ABSURD)
def test_a_server_with_absurd_limits_is_none_of_ours(scripted, monkeypatch, more):
    assert RemotePRM(scripted).settings.threshold == 0.5
    monkeypatch.setattr(Scripted, "more", more)
    with pytest.raises(ModelError, match="not as `prm serve` does"):
        RemotePRM(scripted)


def test_a_key_that_no_header_can_carry_is_refused(monkeypatch):
    monkeypatch.setenv("PRM_API_KEY", "schlüssel")
    with pytest.raises(UsageError, match="must be printable ASCII"):
        RemotePRM("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="PRM_API_KEY must be printable ASCII"):
        ServeConfig().key()
    with pytest.raises(UsageError, match="port must be at most 65535"):
        ServeConfig(port=99999)


def test_a_client_that_goes_away_is_dropped(prm):
    slow = Slow(prm)
    own = app(slow, ServeConfig(batch_tokens=64))
    with running(own) as url:
        body = json.dumps({"trajectories": [{"task": t.task, "steps": [{"action": s.action} for s in t.steps]}
                                            for t in TEXTS[:3]]}).encode()  # fmt: skip
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as one:
            head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            one.sendall(f"{head}\r\n\r\n".encode() + body)
            while not slow.passes:
                time.sleep(0.01)
        serving = own.state.serving
        end = time.monotonic() + 10
        while serving.in_flight and time.monotonic() < end:
            time.sleep(0.01)
        assert serving.in_flight == 0
        assert serving.metrics.value("prm_cancelled_total", reason="disconnect") == 1
        slow.go.set()
        assert near(RemotePRM.load(url).score(TEXTS[:1])[0], prm.score(TEXTS[:1])[0])
    assert len(slow.passes) <= 3


def test_a_reload_in_the_middle(tmp_path):
    first, second = make(), make(seed=3)
    own = app(first, ServeConfig(), load=lambda: second)
    with running(own) as url:
        remote, seen, wrong = RemotePRM.load(url), set(), []
        expected = {p.fingerprint(): p.score(TEXTS) for p in (first, second)}

        def ask():
            own_remote = RemotePRM.load(url)
            for _ in range(15):
                scores = own_remote.score(TEXTS)
                seen.add(own_remote.fingerprint())
                right = expected[own_remote.fingerprint()]
                wrong.extend(1 for a, b in zip(scores, right, strict=True) if not near(a, b))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for t in threads:
            t.start()
        time.sleep(0.1)
        assert remote._call("POST", "/reload", b"")["changed"]
        for t in threads:
            t.join(30)
        assert not wrong and second.fingerprint() in seen


def test_serving_from_the_command_line(tmp_path):
    import signal
    import subprocess
    import sys

    make().save(tmp_path / "prm")
    argv = [sys.executable, "-m", "prm.cli", "serve", str(tmp_path / "prm"), "--port", "0", "--max-tokens", "128"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("prm on http://127.0.0.1:"), (line, process.stderr.read() if not line else "")
        remote = RemotePRM.load(line.split()[-1])
        assert remote.settings.max_tokens == 128
        here = PRM.load(tmp_path / "prm")
        here.settings = dataclasses.replace(here.settings, max_tokens=128)
        assert near(remote.score(TEXTS[:2])[1], here.score(TEXTS[:2])[1])
        make(seed=9).save(tmp_path / "prm")
        version = remote.fingerprint()
        process.send_signal(signal.SIGHUP)
        assert "reloaded" in process.stderr.readline()
        remote.score(TEXTS[:1])
        assert remote.fingerprint() != version
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
