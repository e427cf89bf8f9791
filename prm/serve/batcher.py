"""Continuous batching: one thread runs the model, and each pass takes what waits at that moment, of all requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from prm.batching import StepScorer
from prm.render import Rendered
from prm.serve.metrics import Metrics


class Busy(Exception):
    """The queue is full; `seconds` is about when it will not be."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the queue is full, try again in {seconds:.0f} s")
        self.seconds = seconds


@dataclass(eq=False)
class _Job:
    model: StepScorer
    parts: Sequence[Rendered]
    future: asyncio.Future[list[Tensor]]
    loop: asyncio.AbstractEventLoop
    out: dict[int, Tensor] = field(default_factory=dict)
    next: int = 0
    dropped: bool = False


class Batcher:
    """Requests in, logits out.

    A pass takes parts of the waiting requests in turn, a quarter of a pass at most from each before the next one has
    its turn, so that a small request does not wait for a large one, and siblings in a request still share their prefix.
    A request belongs to the model that it was rendered for, also when another one has taken its place meanwhile.

    Args:
        batch_tokens: the most tokens in a pass.
        queue_tokens: the most tokens that may wait. A single request may be larger when nothing waits.
    """

    def __init__(self, batch_tokens: int, queue_tokens: int, metrics: Metrics) -> None:
        self.batch_tokens, self.queue_tokens, self.metrics = batch_tokens, queue_tokens, metrics
        self._jobs: deque[_Job] = deque()
        self._waiting = 0
        self._rate = 0.0  # tokens a second, a running mean
        self._stop = False
        self._changed = threading.Condition()
        self._users = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; an application may be started more than once, also while it runs."""
        self._users += 1
        if self._thread is None:
            self._stop = False
            self._thread = threading.Thread(target=self._run, name="prm-scoring", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Finish the pass that runs, with the last user; requests that still wait are cancelled."""
        self._users -= 1
        if self._users or self._thread is None:
            return
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join()
        self._thread = None

    async def logits(self, model: StepScorer, parts: Sequence[Rendered]) -> list[Tensor]:
        """The logits of each part, as `StepScorer.raw`. Cancelling drops what has not been read.

        Raises:
            Busy: too much waits already.
        """
        if not parts:
            return []
        loop = asyncio.get_running_loop()
        job = _Job(model, parts, loop.create_future(), loop)
        size = sum(len(p.ids) for p in parts)
        with self._changed:
            if self._waiting and self._waiting + size > self.queue_tokens:
                raise Busy(self.seconds())
            self._jobs.append(job)
            self._add(size)
            self._changed.notify()
        try:
            return await job.future
        finally:
            with self._changed:
                job.dropped = True

    def seconds(self) -> float:
        """About how long what waits now will take."""
        return min(max(1.0, self._waiting / self._rate if self._rate else 1.0), 60.0)

    def _add(self, tokens: int) -> None:
        self._waiting += tokens
        self.metrics.set("prm_queue_tokens", self._waiting)

    def _take(self) -> list[tuple[_Job, int]]:
        """The parts of the next pass, all for one model."""
        taken: list[tuple[_Job, int]] = []
        tokens = 0
        model: StepScorer | None = None
        passed: deque[_Job] = deque()
        while self._jobs and tokens < self.batch_tokens:
            job = self._jobs.popleft()
            if job.dropped:
                self._add(-sum(len(p.ids) for p in job.parts[job.next :]))
                continue
            if model is not None and job.model is not model:
                passed.append(job)
                continue
            model, own = job.model, 0
            while job.next < len(job.parts) and (not own or own < self.batch_tokens // 4):
                size = len(job.parts[job.next].ids)
                if taken and tokens + size > self.batch_tokens:
                    break
                taken.append((job, job.next))
                job.next, own, tokens = job.next + 1, own + size, tokens + size
            if job.next < len(job.parts):
                if not own:
                    passed.append(job)
                    break
                self._jobs.append(job)
        self._jobs.extendleft(reversed(passed))
        self._add(-tokens)
        return taken

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stop:
                    self._changed.wait()
                if self._stop:
                    while self._jobs:
                        job = self._jobs.popleft()
                        job.loop.call_soon_threadsafe(job.future.cancel)
                    self._waiting = 0
                    return
                taken = self._take()
            if taken:
                self._pass(taken)
                # Nothing of a request, or of a model that was replaced, is held while nothing is asked.
                del taken

    def _pass(self, taken: list[tuple[_Job, int]]) -> None:
        model, parts = taken[0][0].model, [job.parts[i] for job, i in taken]
        start = time.perf_counter()
        tokens = sum(len(p.ids) for p in parts)
        reader = model._reader() if model.shares else None
        try:
            found = model.raw(parts, batch_tokens=self.batch_tokens, reader=reader)
        except Exception as error:
            # What a pass raises belongs to its requests; the thread and the other requests live on.
            for job in {id(job): job for job, _ in taken}.values():
                job.dropped = True
                _deliver(job, error)
            return
        seconds = time.perf_counter() - start
        self._rate = tokens / seconds if not self._rate else 0.9 * self._rate + 0.1 * tokens / seconds
        self.metrics.add("prm_read_tokens_total", reader.read_tokens if reader else tokens)
        self.metrics.add("prm_asked_tokens_total", tokens)
        self.metrics.add("prm_steps_total", sum(len(p.ends) for p in parts))
        self.metrics.observe("prm_batch_tokens", tokens)
        for (job, i), own in zip(taken, found, strict=True):
            job.out[i] = own
            if len(job.out) == len(job.parts):
                _deliver(job, None)


def _deliver(job: _Job, error: Exception | None) -> None:
    def deliver() -> None:
        if job.future.done():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result([job.out[i] for i in range(len(job.parts))])

    job.loop.call_soon_threadsafe(deliver)
