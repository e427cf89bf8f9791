"""Many continuations side by side: restore a prefix's state, let the policy act to the end, look at the outcome.

How many continuations are made, and from where, is decided by strategies: generators that yield requests and are sent
what came of them. `drive` runs any number of strategies over one `Runner`, so that every call of the policy carries as
many histories as there are episodes in flight. What was once run is kept in a journal, where there is one, and a
strategy that is started again asks for the same continuations and gets them from there.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from labeling.processes import ProcessEnv, RemoteError
from prm.env import Action, Env, EnvFactory, Episode, Policy, act, replay
from prm.errors import DataError, EnvError, ReplayError, UsageError
from prm.records import Step, Trajectory, append_jsonl, content_id, dump_json, iter_jsonl

RESTORE = -1  # the draw of a request that only asks whether the episode is over after its prefix


@dataclass(frozen=True)
class Request:
    """One continuation wanted: number `draw` from the state after the first `steps` steps of `trajectory`.

    Requests of a lower `order` go first; those of one order in the order in which they came.
    """

    trajectory: Trajectory
    steps: int
    draw: int
    order: int = 0

    @cached_property
    def key(self) -> str:
        """What tells it from others: environment seed and options, task, prefix, and draw. Equal prefixes share it."""
        meta = self.trajectory.meta
        prefix = content_id(self.trajectory.task, self.trajectory.steps[: self.steps])
        text = dump_json([meta.get("seed"), meta.get("options"), prefix])
        return f"{hashlib.sha256(text).hexdigest()[:16]}:{self.draw}"


@dataclass(frozen=True)
class Continuation:
    """What came of a request.

    Args:
        status: "ended" (the outcome counts), "truncated" (cut by a limit of the policy or of this run), "error" (the
            environment or the policy failed), "unanswered" (nothing new was answered), "open" (a restored state whose
            episode goes on).
        outcome: success in [0, 1] where it ended.
        steps: the steps after the prefix.
        tokens: sampled by the policy, where it says so.
        reason: of an error.
        verdict: what the environment said of the end, in `info["verdict"]` ("no answer", ...).
    """

    status: str
    outcome: float | None = None
    steps: tuple[Step, ...] = ()
    tokens: int = 0
    reason: str = ""
    verdict: str = ""

    @property
    def valid(self) -> bool:
        return self.outcome is not None


@dataclass(frozen=True)
class Limits:
    """What bounds a run.

    Args:
        batch: episodes in flight.
        max_steps: steps of a continuation.
        continuations, tokens: the budget for all of it.
        workers: environments are processes, so many at most, each killed when it does not answer for `timeout` seconds.
    """

    batch: int = 256
    max_steps: int = 50
    continuations: int | None = None
    tokens: int | None = None
    workers: int = 0
    timeout: float = 60.0


class Runner:
    """Episodes in flight.

    Args:
        policy: acts on all of them in one call.
        make: a fresh environment for each continuation.
        seed: of the policy's draws; each request has its own, derived from this and its key.
    """

    def __init__(self, policy: Policy, make: EnvFactory, limits: Limits, seed: int = 0) -> None:
        self.policy, self.make, self.limits, self.seed = policy, make, limits, seed
        self.launched = self.tokens = 0
        self._queue: list[tuple[int, int, Request]] = []
        self._count = 0
        self._running: list[_Running] = []
        self._restored: tuple[str, Episode] | None = None
        self._idle: list[ProcessEnv] = []
        self._room = min(limits.batch, limits.workers or limits.batch)
        self._threads = ThreadPoolExecutor(limits.workers) if limits.workers else None

    @property
    def hungry(self) -> bool:
        """Whether there is less in the queue than fits beside what runs."""
        return len(self._queue) + len(self._running) < 2 * self._room

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        limits = self.limits
        return (limits.continuations is not None and self.launched >= limits.continuations) or (
            limits.tokens is not None and self.tokens >= limits.tokens
        )

    def submit(self, request: Request) -> None:
        heapq.heappush(self._queue, (request.order, self._count, request))
        self._count += 1

    def advance(self) -> list[tuple[Request, Continuation | None]]:
        """Start what there is room for, let every running episode take one step; what ended, None for what the budget
        does not cover."""
        out: list[tuple[Request, Continuation | None]] = []
        starting: list[Request] = []
        while self._queue and len(self._running) + len(starting) < self._room:
            request = heapq.heappop(self._queue)[2]
            if request.draw == RESTORE:
                starting.append(request)
            elif self.spent:
                out.append((request, None))
            else:
                self.launched += 1
                starting.append(request)
        for request, started in zip(starting, self._each(self._start, starting), strict=True):
            if isinstance(started, Continuation):
                out.append((request, started))
            else:
                self._running.append(started)
        if not self._running:
            return out
        still = []
        acted = zip(self._running, self._act(), strict=True)
        for one, ended in zip(self._running, self._each(self._step, acted), strict=True):
            if ended is None:
                still.append(one)
            else:
                self._release(one.episode.env)
                out.append((one.request, ended))
        self._running = still
        return out

    def close(self) -> None:
        """End the environments' processes."""
        for one in self._running:
            self._release(one.episode.env)
        for env in self._idle:
            env.close()
        if self._threads is not None:
            self._threads.shutdown()

    def _each(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """One after the other; side by side where the environments are processes."""
        return list(map(call, items) if self._threads is None else self._threads.map(call, items))

    def _env(self) -> Env:
        if not self.limits.workers:
            return self.make()
        try:
            return self._idle.pop()
        except IndexError:
            return ProcessEnv(self.make, self.limits.timeout)

    def _release(self, env: Env) -> None:
        if isinstance(env, ProcessEnv):
            self._idle.append(env)

    def _start(self, request: Request) -> _Running | Continuation:
        """Restore the state. A replay that differs is the trajectory's fault, not the continuation's, and is raised."""
        prefix = request.key.partition(":")[0]
        if self._restored is not None and self._restored[0] == prefix:
            episode = _copied(self._restored[1])
        else:
            env = self._env()
            try:
                episode = replay(env, request.trajectory, request.steps)
                if not episode.done and request.draw != RESTORE:
                    _check_text(env, self.policy)
            except ReplayError:
                raise
            except (EnvError, RemoteError) as error:
                self._release(env)
                return Continuation("error", reason=str(error))
            if callable(getattr(env, "copy", None)):
                self._restored = prefix, _copied(episode)
        if episode.done or request.draw == RESTORE:
            self._release(episode.env)
            return _ended(episode, (), 0) if episode.done else Continuation("open")
        if callable(begin := getattr(episode.env, "begin_continuation", None)):
            begin()
        draw = hashlib.sha256(f"{self.seed}:{request.key}".encode()).digest()[:6]
        episode.history = replace(episode.history, seed=int.from_bytes(draw, "big"))
        return _Running(request, episode)

    def _act(self) -> list[Action]:
        histories = [one.episode.history for one in self._running]
        before = getattr(self.policy, "sampled_tokens", None)
        actions = act(self.policy, histories)
        counted = [0 if action.token_ids is None else len(action.token_ids) for action in actions]
        if before is not None and not any(counted):
            # A policy that only counts in total: shared out evenly.
            total = int(self.policy.sampled_tokens - before)  # type: ignore[attr-defined]
            counted = [total * (i + 1) // len(actions) - total * i // len(actions) for i in range(len(actions))]
        for one, tokens in zip(self._running, counted, strict=True):
            one.tokens += tokens
        self.tokens += sum(counted)
        return actions

    def _step(self, acted: tuple[_Running, Action]) -> Continuation | None:
        """Apply an action; None while the episode goes on."""
        one, action = acted
        history = one.episode.history
        if action.finish == "error":
            return Continuation("error", None, _own(one), one.tokens, "the policy failed")
        if action.finish == "length":
            steps = (*_own(one), Step(action.text))
            return Continuation("truncated", None, steps, one.tokens, "the policy's limit on an action")
        try:
            one.episode.step(action)
        except EnvError as error:
            return Continuation("error", None, _own(one), one.tokens, str(error))
        if one.episode.done:
            return _ended(one.episode, _own(one), one.tokens)
        if len(history.actions) + 1 - one.request.steps >= self.limits.max_steps:
            return Continuation("truncated", None, _own(one), one.tokens, f"{self.limits.max_steps} steps")
        return None


@dataclass
class _Running:
    request: Request
    episode: Episode
    tokens: int = 0


def _check_text(env: Env, policy: Policy) -> None:
    """Where actions continue one text, a policy that opens a new turn for each would continue another one."""
    if getattr(env, "continues_text", False):
        layout = getattr(policy, "kind", None) or getattr(getattr(policy, "config", None), "layout", "text")
        if layout != "text":
            name = type(policy).__name__
            raise UsageError(f"{name} acts in turns (layout {layout}) and cannot continue a text: use the layout text")


def _own(one: _Running) -> tuple[Step, ...]:
    return one.episode.history.steps[one.request.steps :]


def _ended(episode: Episode, steps: tuple[Step, ...], tokens: int) -> Continuation:
    """An episode that is over. One that a time limit ended, and that names no success, has no known outcome."""
    info = episode.infos[-1]
    verdict = str(info.get("verdict", ""))
    if verdict == "unanswered":
        return Continuation("unanswered", None, steps, tokens, "nothing was answered anew", verdict)
    if episode.truncated and not episode.terminated and info.get("success") is None:
        return Continuation("truncated", None, steps, tokens, "the environment's limit", verdict)
    return Continuation("ended", episode.outcome, steps, tokens, "", verdict)


def _copied(episode: Episode) -> Episode:
    """A second episode in the same state, by the environment's own `copy`."""
    twin = copy.copy(episode)
    twin.env = episode.env.copy()  # type: ignore[attr-defined]
    twin.rewards, twin.infos = list(episode.rewards), [dict(info) for info in episode.infos]
    return twin


# --- strategies -------------------------------------------------------------------------------------------------------

# Yields the requests it wants next, is sent what came of each (None: the budget was used up), returns its product.
Strategy = Generator[list[Request], list[Continuation | None], Any]


class Journal:
    """Continuations that were run, by key; with a path also in a file, which a later run reads.

    Args:
        mark: what the run depends on (policy, seed, ...); rows with another mark are left alone and not used.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, mark: str = "") -> None:
        self.path, self.mark = path, mark
        self.known: dict[str, Continuation] = {}
        if path is not None and os.path.exists(path):
            rows: Iterable[Any] = iter_jsonl(path, _Row, skip_bad=True)  # type: ignore[type-var]
            # What failed may work now.
            self.known = {r.key: r.continuation for r in rows if r.mark == mark and r.continuation.status != "error"}

    def add(self, done: Iterable[tuple[str, Continuation]]) -> None:
        rows = [_Row(self.mark, key, continuation) for key, continuation in done]
        self.known |= {row.key: row.continuation for row in rows}
        if self.path is not None:
            append_jsonl(self.path, rows)  # type: ignore[arg-type]

    def close(self) -> None:
        """Remove the file: everything it was kept for is done."""
        if self.path is not None and os.path.exists(self.path):
            os.remove(self.path)


@dataclass(frozen=True)
class _Row:
    mark: str
    key: str
    continuation: Continuation

    def to_dict(self) -> dict[str, Any]:
        return {"mark": self.mark, "key": self.key, **asdict(self.continuation)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> _Row:
        try:
            rest = {k: v for k, v in row.items() if k not in ("mark", "key")}
            steps = tuple(Step(**step) for step in rest.pop("steps"))
            return cls(row["mark"], row["key"], Continuation(**rest, steps=steps))
        except (KeyError, TypeError) as error:
            raise DataError(f"not a continuation: {error}") from None


@dataclass
class _Job:
    name: Any
    strategy: Strategy
    requests: list[Request] = field(default_factory=list)
    results: dict[str, Continuation | None] = field(default_factory=dict)
    missing: int = 0
    started: bool = False


def drive(
    strategies: Iterable[tuple[Any, Strategy]], runner: Runner, journal: Journal, *, at_once: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Run strategies side by side; (name, product) of each as it ends.

    Args:
        strategies: (name, strategy); taken up one after the other as there is room.
        journal: asked before anything is run; filled with what is.
        at_once: take up all strategies at the start, so that the requests' order holds among all of them.
    """
    waiting: dict[str, list[_Job]] = {}
    rest = iter(strategies)
    more, jobs = True, 0
    runner.launched += len(journal.known)
    runner.tokens += sum(c.tokens for c in journal.known.values())

    def turn(job: _Job) -> tuple[Any, Any] | None:
        """Send a job what it waits for, until it waits again (None) or ends."""
        while True:
            results = [job.results[r.key] for r in job.requests]
            try:
                job.requests = job.strategy.send(results if job.started else None)  # type: ignore[arg-type]
            except StopIteration as stop:
                return job.name, stop.value
            job.results, job.missing, job.started = {}, 0, True
            for request in job.requests:
                key = request.key
                if key in journal.known:
                    job.results[key] = journal.known[key]
                elif key not in job.results:
                    job.results[key] = None
                    job.missing += 1
                    if key not in waiting:
                        waiting[key] = []
                        runner.submit(request)
                    waiting[key].append(job)
            if job.missing:
                return None

    while True:
        while more and (at_once or runner.hungry):
            if (following := next(rest, None)) is None:
                more = False
                break
            jobs += 1
            if (ended := turn(_Job(*following))) is not None:
                jobs -= 1
                yield ended
        if not jobs:
            return
        done = runner.advance()
        journal.add((r.key, c) for r, c in done if c is not None and r.draw != RESTORE)
        for request, continuation in done:
            for job in waiting.pop(request.key):
                job.results[request.key] = continuation
                job.missing -= 1
                if not job.missing and (ended := turn(job)) is not None:
                    jobs -= 1
                    yield ended
