"""A scripted OpenAI-compatible endpoint on a real socket, for tests and benches, and how both use it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from labeling.judge import JudgeConfig, run
from prm.records import Step, Trajectory, read_jsonl

Answer = tuple[int, dict[str, str], Any]  # status, headers, body (bytes as they are, else JSON)


def asked_steps(body: dict[str, Any]) -> range:
    """The steps that a request asks to judge."""
    first, last = re.findall(r"FIRST is (\d+), LAST is (\d+)", body["messages"][-1]["content"])[-1]
    return range(int(first), int(last) + 1)


def verdicts(body: dict[str, Any], score: float = 0.9) -> str:
    """A reply that gives each asked step the same score."""
    return json.dumps(
        {"steps": [{"step": i, "score": score, "error": None, "reason": "ok"} for i in asked_steps(body)]}
    )


def completion(content: str | None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """A chat completion; `usage`, `refusal` and `logprobs` may be given."""
    usage = more.pop("usage", {"prompt_tokens": 100, "completion_tokens": 20})
    message = {"role": "assistant", "content": content, "refusal": more.pop("refusal", None)}
    choice = {"index": 0, "message": message, "finish_reason": finish, **more}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def good(body: dict[str, Any], number: int) -> Answer:
    return 200, {}, completion(verdicts(body))


class Endpoint:
    """Answers `POST /v1/chat/completions` by `script(body, number)`, other paths by `routes(method, path, body)`.

    Keeps the request bodies, their headers (lower case, and the path), and the most requests in flight at once.
    """

    def __init__(self, script: Callable[[dict[str, Any], int], Answer] = good, delay: float = 0.0,
                 routes: Callable[[str, str, bytes], Answer] | None = None) -> None:  # fmt: skip
        self.script, self.delay, self.routes = script, delay, routes
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.flying = self.most = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                self.answer(self.rfile.read(int(self.headers["content-length"])))

            def answer(self, raw: bytes) -> None:
                if outer.routes is not None and not self.path.endswith("/chat/completions"):
                    status, headers, reply = outer.routes(self.command, self.path, raw)
                else:
                    body = json.loads(raw)
                    with outer.lock:
                        outer.bodies.append(body)
                        outer.heads.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                        number = len(outer.bodies) - 1
                        outer.flying += 1
                        outer.most = max(outer.most, outer.flying)
                    try:
                        time.sleep(outer.delay)
                        status, headers, reply = outer.script(body, number)
                    finally:
                        with outer.lock:
                            outer.flying -= 1
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                try:
                    self.send_response(status)
                    for name, value in {"content-type": "application/json", **headers}.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Endpoint:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(api_key="none", base_url=self.url)


def episodes(n: int, steps: int = 4) -> list[Trajectory]:
    """Different trajectories of the same length."""
    return [
        Trajectory(f"Task {i}", tuple(Step(f"search: thing {i} {t}", f"Found {t}.") for t in range(steps)))
        for i in range(n)
    ]


def config(tmp_path: Path | None = None, **options: Any) -> JudgeConfig:
    """Retries at once; labels into `tmp_path`."""
    out = {} if tmp_path is None else {"out": str(tmp_path / "labels.jsonl")}
    return JudgeConfig(**{"backoff": 0.001, "model": "m", **out, **options})


def failing(status: int, code: str = "", message: str = "no", **headers: str) -> Any:
    """A script that answers with an HTTP error."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda body, number: (status, headers, {"error": {"message": message, "code": code}})


def one(script: Any, **options: Any) -> tuple[Any, Endpoint]:
    """The outcome for one trajectory of four steps."""
    with Endpoint(script) as endpoint:
        return run(episodes(1), endpoint.client(), config(**options)), endpoint


def judge_file(trajectories: str, out: str, url: str) -> None:
    """The work of a process that gets killed."""
    from openai import OpenAI

    run(read_jsonl(trajectories, Trajectory), OpenAI(api_key="none", base_url=url),
        JudgeConfig("m", out=out, concurrency=4, backoff=0.01))  # fmt: skip
