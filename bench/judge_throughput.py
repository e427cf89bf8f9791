"""How close judging comes to the endpoint's own pace: a local server with 200 ms latency, 64 calls allowed in flight.

The ideal is that 64 calls are always in flight: latency * trajectories / 64. The server is a process of its own and
answers 429 to what is above its limit. Ledger, labels and budget are written as in any run.

    python bench/judge_throughput.py [--quick]
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from openai import OpenAI

from labeling.judge import JudgeConfig, run
from tests.judge_server import Endpoint, episodes, failing, good

QUICK = "--quick" in sys.argv
N, STEPS, LATENCY, FLYING = 1000, 8, 0.2, 64
REPEATS = 2 if QUICK else 5


def serve(pipe: Any) -> None:
    """Answer until told to end; then say how many requests there were, and the most at once."""

    def script(body: Any, number: int) -> Any:
        return failing(429)(body, number) if endpoint.flying > FLYING else good(body, number)

    with Endpoint(script, delay=LATENCY) as endpoint:
        pipe.send(endpoint.url)
        pipe.recv()
        pipe.send((len(endpoint.bodies), endpoint.most))


def main() -> None:
    trajectories = episodes(N, STEPS)
    ratios = []
    for _ in range(REPEATS):
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        server.start()
        client = OpenAI(api_key="none", base_url=ours.recv())
        with tempfile.TemporaryDirectory() as folder:
            config = JudgeConfig("m", out=f"{folder}/labels.jsonl", budget_tokens=10**9, concurrency=FLYING)
            started = time.perf_counter()
            judged = run(trajectories, client, config)
            seconds = time.perf_counter() - started
        ours.send("end")
        requests, most = ours.recv()
        server.join()
        ratios.append(seconds / (LATENCY * N / FLYING))
        print(f"{judged.summary()}; {requests} requests, at most {most} at once; {seconds:.2f} s, {ratios[-1]:.3f}")
    print(json.dumps({"name": "judging 1,000 trajectories against the ideal time", "value": statistics.median(ratios),
                      "target": 1.3, "better": "lower", "unit": "ratio"}))  # fmt: skip


if __name__ == "__main__":
    main()
