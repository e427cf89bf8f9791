"""How close judging comes to the endpoint's own pace: a local server with 200 ms latency, 64 calls allowed in flight.

The ideal is that 64 calls are always in flight: latency * trajectories / 64. The server is a process of its own and
answers 429 to what is above its limit. Ledger, labels and budget are written as in any run.

    python bench/judge_throughput.py [--quick]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from openai import OpenAI

from labeling.judge import JudgeConfig, run
from tests.judge_server import episodes, failing, good

QUICK = "--quick" in sys.argv
seen = {"requests": 0, "now": 0, "most": 0}
replies: list[bytes] = []  # all trajectories have as many steps, so one reply does; the server is to cost little
N, STEPS, LATENCY, FLYING = 1000, 8, 0.2, 64
REPEATS = 2 if QUICK else 5


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The requests of one connection; a count of those under way is kept in `seen`."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.I)
            body = await reader.readexactly(int(length[1]) if length else 0)
            seen["requests"] += 1
            seen["now"] += 1
            seen["most"] = max(seen["most"], seen["now"])
            enough = seen["now"] > FLYING
            await asyncio.sleep(LATENCY)
            seen["now"] -= 1
            if enough or not replies:
                status, _, reply = (failing(429) if enough else good)(json.loads(body), 0)
                content = json.dumps(reply).encode()
                kind = "content-type: application/json"
                head = f"HTTP/1.1 {status} X\r\n{kind}\r\ncontent-length: {len(content)}\r\n\r\n"
                if not enough:
                    replies.append(head.encode() + content)
                writer.write(head.encode() + content)
            else:
                writer.write(replies[0])


def serve(pipe: Any) -> None:
    """Answer until told to end; then say how many requests there were, and the most at once."""

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
        pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        pipe.send((seen["requests"], seen["most"]))
        os._exit(0)

    asyncio.run(work())


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
