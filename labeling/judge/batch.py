"""The Batch API: many calls as one file, at a lower price, within a day.

The intent to submit is on disk before anything is sent, and the batch carries its name as metadata: a process that
dies at any point finds its batch again, and nothing is submitted twice. Ledger lines beside those of the calls:

    {"event": "batch", "batch": NAME, "calls": {custom id: [ledger id, job, cap]}}     before it is submitted
    {"event": "batch submitted", "batch": NAME, "batch_id": the endpoint's}
    {"event": "batch done", "batch": NAME, "status": STATUS}                           its results were read
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from labeling.judge.calls import FEWER, PAID, Caller, Job, Result, end_line, read_completion, told_again
from labeling.judge.money import Usage
from prm.errors import DataError, UsageError
from prm.records import dump_json, parse_json

MOST_CALLS, MOST_BYTES = 10_000, 90_000_000  # of one batch
FINAL = ("completed", "failed", "expired", "cancelled")
PASSING = (408, 409, 425, 429)  # HTTP statuses to wait out, as those from 500 on
MARK = "prm_judge"
PATIENCE = 20  # looks at a batch that may fail, one after another


@dataclass
class Call:
    """A call in a batch: its ledger line, what is reserved for it, and the job where this run wants it."""

    number: int
    key: str
    cap: int
    usd: float
    tokens: int
    job: Job | None = None


@dataclass
class Open:
    """A batch that is under way: the endpoint's id ("" where it is not known whether it was submitted), its calls."""

    name: str
    calls: dict[str, Call]
    id: str = ""


@dataclass
class _Round:
    """What is still to be asked: (job, cap, tries so far).

    At most `most` calls go into one batch; with `alone`, one batch at a time: the endpoint said that it was too much.
    """

    jobs: list[tuple[Job, int, int]]
    most: int = MOST_CALLS
    alone: bool = False
    tries: dict[str, int] = field(default_factory=dict)


def open_batches(rows: Sequence[Mapping[str, Any]]) -> dict[str, Open]:
    """The batches of a ledger whose results were not read yet, by name."""
    starts = {row["id"]: row for row in rows if row["event"] == "start"}
    ended = {row["id"] for row in rows if row["event"] == "end"}
    found: dict[str, Open] = {}
    for row in rows:
        if row["event"] == "batch":
            calls = {
                custom: Call(number, key, cap, starts[number].get("reserved_usd") or 0.0,
                             starts[number].get("reserved_tokens") or 0)
                for custom, (number, key, cap) in row["calls"].items()
                if number in starts and number not in ended
            }  # fmt: skip
            found[row["batch"]] = Open(row["batch"], calls)
        elif row["event"] == "batch submitted":
            found[row["batch"]].id = row["batch_id"]
        elif row["event"] == "batch done":
            found.pop(row["batch"], None)
    return found


def run_batches(caller: Caller, jobs: Sequence[Job], done: Callable[[int, Result], None], *, poll: float) -> None:
    """Ask for all jobs by batches; `done(index, result)` as they come. Goes on with batches of an earlier process.

    Calls that expired, failed or were cut are asked again in a further batch, as often as single calls would be.

    Raises:
        UsageError: the endpoint refuses batches, or does not answer any more; what is under way is found again.
    """
    index = {job.key: i for i, job in enumerate(jobs)}
    under_way = open_batches(caller.ledger.rows)
    for batch in under_way.values():
        for call in batch.calls.values():
            call.job = jobs[index[call.key]] if call.key in index else None
            caller.budget.adopt(call.usd, call.tokens)
    taken = {call.key for batch in under_way.values() for call in batch.calls.values()}
    left = _Round([(job, job.cap, 0) for job in jobs if job.key not in taken])
    for lost in [b for b in under_way.values() if not b.id]:
        if not _find(caller, lost, poll):
            _close(caller, lost, "not sent")
            left.jobs += [(c.job, c.cap, 0) for c in lost.calls.values() if c.job]
            del under_way[lost.name]
    while under_way or (left.jobs and not caller.stop.is_set()):
        while left.jobs and not caller.stop.is_set() and not (left.alone and under_way):
            filled = _fill(caller, left, bool(under_way))
            if filled is None or not _submit(caller, filled, poll):
                break
            under_way[filled.name] = filled
        for batch in list(under_way.values()):
            info = _patiently(poll, caller.client.batches.retrieve, batch.id)
            if info.status in FINAL:
                _collect(caller, batch, info, left, index, done, poll)
                del under_way[batch.name]
        if under_way:
            time.sleep(poll)
    if caller.fatal:
        raise caller.fatal


def _fill(caller: Caller, left: _Round, waiting: bool) -> Open | None:
    """A batch of the next jobs, as far as the budget goes, its intent on disk. None where none fits just now."""
    name = uuid.uuid4().hex[:16]
    calls: dict[str, Call] = {}
    size = 0
    while left.jobs and len(calls) < left.most:
        job, cap, tries = left.jobs[0]
        usd, tokens = caller.bound(job, cap, batch=True)
        size += len(dump_json(caller.body(job, cap))) + 200
        if calls and size > MOST_BYTES:
            break
        if not caller.budget.reserve(usd, tokens, wait=False):
            if not calls and not waiting:
                what = f"${usd:.6f}" if caller.price else f"{tokens} tokens"
                caller.halt(Result("budget", detail=f"the next call might cost {what}"))
            break
        left.jobs.pop(0)
        left.tries[job.key] = tries
        number = caller.number()
        calls[f"call-{number}"] = Call(number, job.key, cap, usd, tokens, job)
        caller.ledger.write(caller.start_line(number, job, usd, tokens), durable=False)
    if not calls:
        return None
    listed = {custom: [call.number, call.key, call.cap] for custom, call in calls.items()}
    caller.ledger.write({"event": "batch", "batch": name, "calls": listed, "time": time.time()})
    return Open(name, calls)


def _submit(caller: Caller, batch: Open, poll: float) -> bool:
    """Send a batch once. Where it is not known whether it arrived, it is looked for before it is sent again.

    False where there is no money left for it.
    """
    import openai

    lines = [
        {"custom_id": custom, "method": "POST", "url": "/v1/chat/completions", "body": caller.body(call.job, call.cap)}
        for custom, call in batch.calls.items()
        if call.job
    ]
    content = b"".join(dump_json(line) + b"\n" for line in lines)
    for _ in range(PATIENCE):
        try:
            file = caller.client.files.create(file=(f"{batch.name}.jsonl", content), purpose="batch")
            batch.id = caller.client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
                metadata={MARK: batch.name},
            ).id  # fmt: skip
        except openai.APIStatusError as error:
            caller.refused(error, Job(batch.name, (), (), "", 1), "text", time.monotonic())  # is it a quota?
            if caller.stop.is_set() or (error.status_code < 500 and error.status_code not in PASSING):
                _close(caller, batch, "not sent")
                if caller.stopped:
                    return False
                raise UsageError(f"the endpoint takes no batch: {error.status_code}: {error.message}") from None
        except openai.APIConnectionError:
            pass
        if batch.id:
            _submitted(caller, batch)
            return True
        if _find(caller, batch, poll):
            return True
    raise UsageError("the endpoint does not take the batch; the same command goes on from here")


def _find(caller: Caller, batch: Open, poll: float) -> bool:
    """Look for a batch by its metadata, twice: a list may be a little behind."""
    for look in range(2):
        if look:
            time.sleep(poll)
        for info in _patiently(poll, lambda: list(caller.client.batches.list(limit=100))):
            if (getattr(info, "metadata", None) or {}).get(MARK) == batch.name:
                batch.id = info.id
                _submitted(caller, batch)
                return True
    return False


def _submitted(caller: Caller, batch: Open) -> None:
    row = {"event": "batch submitted", "batch": batch.name, "batch_id": batch.id, "time": time.time()}
    caller.ledger.write(row)


def _collect(
    caller: Caller, batch: Open, info: Any, left: _Round, index: Mapping[str, int], done: Callable[[int, Result], None],
    poll: float,
) -> None:  # fmt: skip
    """Read what a batch gave, write it down, and put what is to be asked again into `left`."""
    given: dict[str, Any] = {}
    for file_id in (getattr(info, "output_file_id", None), getattr(info, "error_file_id", None)):
        if file_id:
            for line in _patiently(poll, caller.client.files.content, file_id).read().splitlines():
                try:
                    row = parse_json(line)
                except DataError:
                    continue  # its call counts as one without a result
                if isinstance(row, dict):
                    given.setdefault(str(row.get("custom_id")), row)
    errors = [f"{e.code}: {e.message}" for e in (getattr(getattr(info, "errors", None), "data", None) or [])]
    too_much = info.status == "failed" and any("token_limit" in e or "limit" in e.split(":")[0] for e in errors)
    if too_much and left.most > 1:
        left.most, left.alone = max(1, min(left.most, len(batch.calls)) // 2), True
    elif info.status == "failed" and not given:
        caller.fatal = caller.fatal or UsageError(f"the endpoint refuses the batch: {'; '.join(errors[:3]) or '?'}")
        caller.stop.set()
    for custom, call in batch.calls.items():
        job = call.job or Job(call.key, (), (), "", call.cap)
        result, usage, again = _read(caller, given.get(custom), job, info.status)
        known = usage is not None
        paid, cost = Usage(call.tokens - call.cap, call.cap), call.usd
        if usage is not None:
            paid, cost = usage, caller.price.of(usage, batch=True) if caller.price else 0.0
        caller.budget.settle(call.usd, call.tokens, cost, paid.total)
        line = end_line(call.number, job, result, paid, known, cost if caller.price else None)
        caller.ledger.write(line, durable=False)
        if call.job is None:
            continue
        tries = left.tries.get(call.key, 0) + (again == "retry" and not too_much)
        if again != "no" and not caller.stop.is_set() and tries <= FEWER.get(result.status, caller.retries):
            job = told_again(call.job, result)
            left.jobs.append((job, call.cap * 2 if result.status == "truncated" else call.cap, tries))
            continue
        if result.status in PAID:
            caller.give_up(call.job, result)
        done(index[call.key], result)
    caller.ledger.write({"event": "batch done", "batch": batch.name, "status": info.status})


def _read(caller: Caller, row: Any, job: Job, status: str) -> tuple[Result, Usage | None, str]:
    """(result, usage or None where it is not told, "no" | "retry" | "reshaped") of a line, or of no line."""
    if row is None:  # a batch that was not completed did not get to it, and does not bill it
        fate = status if status != "completed" else "error"
        return Result(fate, detail=f"the batch is {status} and has no line for it"), Usage(), "retry"
    response = row.get("response")
    if not isinstance(response, Mapping):
        error = row.get("error") if isinstance(row.get("error"), Mapping) else {}
        fate = "expired" if "expired" in str(error.get("code")) else "error"
        return Result(fate, detail=str(error.get("message") or "no response")[:300]), Usage(), "retry"
    code, body = response.get("status_code"), response.get("body")
    if code == 200:
        usage = Usage.of(body.get("usage")) if isinstance(body, Mapping) else None
        result = read_completion(body, job, logprobs=caller.logprobs)
        return result, usage, "retry" if result.status in (*FEWER, "error") else "no"
    inner = body.get("error", body) if isinstance(body, Mapping) else {}
    inner = inner if isinstance(inner, Mapping) else {"message": str(inner)}
    failure = SimpleNamespace(
        status_code=code if isinstance(code, int) else 500, body=inner, message=inner.get("message") or "",
        response=SimpleNamespace(headers={}),
    )  # fmt: skip
    result, usage, _, again = caller.refused(failure, job, caller.form, time.monotonic())
    return result, usage, again


def _close(caller: Caller, batch: Open, status: str) -> None:
    """A batch that was never submitted: its calls cost nothing."""
    for call in batch.calls.values():
        caller.budget.settle(call.usd, call.tokens, 0.0, 0)
        job = call.job or Job(call.key, (), (), "", call.cap)
        caller.ledger.write(end_line(call.number, job, Result(status), Usage(), True, 0.0), durable=False)
    caller.ledger.write({"event": "batch done", "batch": batch.name, "status": status})


def _patiently(poll: float, ask: Callable[..., Any], *given: Any) -> Any:
    """What the endpoint answers; passing failures are waited out."""
    import openai

    for left in reversed(range(PATIENCE)):
        try:
            return ask(*given)
        except openai.APIStatusError as error:
            if not left or (error.status_code < 500 and error.status_code not in PASSING):
                raise UsageError(f"no word of the batch: {error.status_code}: {error.message}") from None
        except openai.APIConnectionError as error:
            if not left:
                raise UsageError(f"the endpoint does not answer: {error}; the same command goes on from here") from None
        time.sleep(poll)
    raise AssertionError
