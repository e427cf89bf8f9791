"""The server against offline scoring, and under load: 32 clients, mixed sizes, clients that hang up, a reload.

throughput  tokens a second over HTTP with 32 clients that ask all the time, over offline `PRM.score` on the same data
latency     p99 / p50 of one request size, at about a third of what the server can do
load        seconds of mixed load; the value is the number of faults: a 5xx that is not the bounded 503, an answer that
            differs from the sequential one, or memory that has not come back to within 15 %

Each runs against a server in a process of its own.  Usage: python bench/serve_load.py [NAME ...] [--quick]
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from score_support import made, mixed, tokens

from prm import PRM, Trajectory

TARGETS = {"throughput": (0.85, "higher"), "latency": (5.0, "lower"), "load": (0.0, "lower")}
CLIENTS = 32


class Server:
    """`prm serve` in a process of its own, with options from the command line."""

    def __init__(self, folder: str, *options: str) -> None:
        argv = [sys.executable, "-m", "prm.cli", "serve", folder, "--port", "0", *options]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://([\d.]+):(\d+)", line)
        assert found, line
        self.host, self.port = found[1], int(found[2])

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def memory(self) -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def body(trajectories: list[Trajectory]) -> bytes:
    rows = [{k: v for k, v in t.to_dict().items() if k in ("task", "steps")} for t in trajectories]
    return json.dumps({"trajectories": rows, "long": "windows"}).encode()


def scores(data: bytes) -> list[list[float]]:
    return [r["scores"] for r in json.loads(data)["results"]]


def in_parallel(calls: list[Any], clients: int) -> float:
    """Seconds until the clients have made all calls."""
    waiting, lock = list(reversed(calls)), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                call = waiting.pop()
            call()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return time.perf_counter() - start


def throughput(folder: str, quick: bool) -> float:
    prm, data = PRM.load(folder), mixed(60 if quick else 384)
    requests = [data[i : i + 3] for i in range(0, len(data), 3)]
    server = Server(folder)
    bodies = [body(own) for own in requests]
    best = {"server": float("inf"), "offline": float("inf")}
    for turn in range(2 if quick else 3):
        spent = in_parallel([lambda b=b: server.ask("POST", "/score", b) for b in bodies], CLIENTS)
        start = time.perf_counter()
        prm.score(data, batch_tokens=8192)
        if turn:
            best["offline"] = min(best["offline"], time.perf_counter() - start)
            best["server"] = min(best["server"], spent)
    server.stop()
    return best["offline"] / best["server"]


def latency(folder: str, quick: bool) -> float:
    prm, data = PRM.load(folder), mixed(40)
    data = [t for t in data if 250 <= tokens(prm, [t]) <= 500]
    start = time.perf_counter()
    prm.score(data)
    each = (time.perf_counter() - start) / len(data)
    server, times, draw = Server(folder), [], random.Random(0)
    server.ask("POST", "/score", body(data[:1]))

    def ask(t: Trajectory) -> None:
        begin = time.perf_counter()
        server.ask("POST", "/score", body([t]))
        times.append(time.perf_counter() - begin)

    threads = []
    for _ in range(80 if quick else 400):
        threads.append(threading.Thread(target=ask, args=(draw.choice(data),)))
        threads[-1].start()
        # Poisson arrivals at a third of the offline rate.
        time.sleep(draw.expovariate(0.33 / each))
    for t in threads:
        t.join()
    server.stop()
    times.sort()
    print(f"p50 {times[len(times) // 2]:.3f} s, p99 {times[int(len(times) * 0.99)]:.3f} s", file=sys.stderr)
    return times[int(len(times) * 0.99)] / times[len(times) // 2]


def load(folder: str, quick: bool) -> float:
    prm, data = PRM.load(folder), mixed(120)
    expected = {t.id: own for t, own in zip(data, prm.score(data), strict=True)}
    server, seen, faults = Server(folder, "--queue-tokens", "40000"), Counter(), []
    for _ in range(4):
        server.ask("POST", "/score", body(data[:30]))
    in_parallel([lambda: server.ask("POST", "/score", body(data[:8])) for _ in range(CLIENTS)], CLIENTS)
    before, end = server.memory(), time.monotonic() + (12 if quick else 60)

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            own = draw.sample(data, draw.choice((1, 1, 2, 4, 16)))
            if draw.random() < 0.1:
                hang_up(server, body(own), draw.random() * 0.05)
                seen["hung up"] += 1
                continue
            status, answer = server.ask("POST", "/score", body(own))
            seen[status] += 1
            if status == 503:
                time.sleep(draw.random() * 0.2)
            elif status != 200:
                faults.append(f"status {status}")
            else:
                pairs = zip(own, scores(answer), strict=True)
                if any(abs(a - b) > 1e-4 for t, got in pairs for a, b in zip(expected[t.id], got, strict=True)):
                    faults.append("another answer")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
    for t in threads:
        t.start()
    time.sleep((end - time.monotonic()) / 2)
    status, _ = server.ask("POST", "/reload")
    seen[f"reload {status}"] += 1
    for t in threads:
        t.join()
    time.sleep(2)
    after = server.memory()
    if after > 1.15 * before:
        faults.append(f"memory {before:.0f} -> {after:.0f} MB")
    if seen["reload 200"] != 1:
        faults.append("no reload")
    server.stop()
    print(f"{dict(seen)}, memory {before:.0f} -> {after:.0f} MB, faults {Counter(faults)}", file=sys.stderr)
    return float(len(faults))


def hang_up(server: Server, data: bytes, after: float) -> None:
    with socket.create_connection((server.host, server.port)) as one:
        head = (
            f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        one.sendall(head.encode() + data[: len(data) if after < 0.04 else len(data) // 2])
        time.sleep(after)


def main() -> None:
    quick = "--quick" in sys.argv
    names = [a for a in sys.argv[1:] if a in TARGETS] or list(TARGETS)
    with tempfile.TemporaryDirectory() as folder:
        made(width=256 if quick else 384, layers=4).save(folder)
        for name in names:
            value = globals()[name](folder, quick)
            target, better = TARGETS[name]
            line = {"name": f"serve_{name}", "value": round(value, 3), "target": target, "better": better}
            print(json.dumps(line | {"unit": "faults" if name == "load" else "ratio"}), flush=True)


if __name__ == "__main__":
    main()
