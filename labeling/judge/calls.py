"""One call to the endpoint, and the one policy of retries. What fails has a status; it is never a label.

truncated     the output cap came first             refused      the model declined
filtered      the provider's filter                 unparsable   no verdicts can be read
wrong steps   other steps than asked for            timeout      no reply in time
rate limit    refused too often                     error        the endpoint failed
too long      more than the model reads             quota        nothing left to spend: the run stops
budget        the next call might exceed the budget: the run stops
"""

from __future__ import annotations

import email.utils
import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from labeling.judge.connections import Connections
from labeling.judge.money import Budget, Ledger, Price, Usage
from labeling.judge.prompt import schema
from labeling.judge.reply import ReplyError, Verdict, parse_reply
from prm.errors import DataError, UsageError
from prm.records import dump_json, parse_json

if TYPE_CHECKING:
    from openai import OpenAI

FORMATS = ("schema", "json", "text")
SWITCH = 0.0002  # seconds a thread keeps the interpreter while others wait for it
LONGEST_WAIT = 600.0  # seconds; where an endpoint asks for more, the run stops
FEWER = {"unparsable": 1, "wrong steps": 1, "truncated": 2}  # retries of what a model is likely to do again
PAID = ("truncated", "filtered", "refused", "unparsable", "wrong steps", "too long")  # not asked again by later runs


_QUOTA_CODE = re.compile(r"insufficient|quota|billing|credit|balance")
_QUOTA_TEXT = re.compile(r"exceeded your current quota|insufficient (quota|balance|credit|funds)|out of credits", re.I)


@dataclass(frozen=True)
class Job:
    """One call to make.

    Args:
        key: names trajectory, steps and vote; the same in every run.
        messages: the chat.
        steps: the numbers of the steps to judge.
        quotes: the text that is judged.
        cap: the most tokens of the reply.
        seed: of the endpoint's sampling, where there are several votes.
    """

    key: str
    messages: Sequence[Mapping[str, str]]
    steps: Sequence[int]
    quotes: str
    cap: int
    seed: int | None = None


@dataclass(frozen=True)
class Result:
    """What came of a job: `status` "ok" and verdicts, or another status and why."""

    status: str
    verdicts: Sequence[Verdict] = ()
    detail: str = ""


@dataclass
class Limit:
    """How many calls may be in flight: one until the endpoint has answered, then `most`; halved when it is too much.

    Additive increase, multiplicative decrease; one halving for all calls that were in flight together. While an
    endpoint asks to wait (Retry-After), no call begins.
    """

    most: int
    now: float = 1.0
    flying: int = 0
    opened: bool = False
    not_before: float = 0.0
    halved: float = -math.inf
    change: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, stop: threading.Event) -> bool:
        with self.change:
            while not stop.is_set():
                wait = self.not_before - time.monotonic()
                if wait <= 0 and self.flying < max(1, int(self.now)):
                    self.flying += 1
                    return True
                self.change.wait(min(wait, 0.2) if wait > 0 else 0.2)
            return False

    def leave(self) -> None:
        with self.change:
            self.flying -= 1
            self.change.notify()

    def answered(self) -> None:
        with self.change:
            if not self.opened:
                self.opened, self.now = True, float(self.most)
                self.change.notify_all()
            else:
                self.now = min(float(self.most), self.now + 1 / self.now)

    def too_much(self, began: float, wait: float | None) -> None:
        with self.change:
            if began >= self.halved:
                self.now, self.halved = max(1.0, self.now / 2), time.monotonic()
            if wait:
                self.not_before = max(self.not_before, time.monotonic() + wait)


class Caller:
    """Makes calls for jobs, from many threads at once.

    Args:
        client: an `openai.OpenAI`; its own retries are switched off.
        model: the name that the endpoint knows.
        ledger, budget, price: where calls are written down, and what they may cost. A call whose reply does not say
            what it used, and one that may have been billed without a reply, costs what was reserved for it.
        concurrency: the most calls in flight.
        retries: further calls for a job whose first one failed.
        timeout: seconds a call may take.
        backoff: seconds before the first retry; doubled each time, with up to half of it more or less.
        form: "auto" (found out), "schema", "json" or "text".
        temperature: None for the endpoint's own.
        logprobs: ask for verdicts with log-probabilities.
    """

    def __init__(
        self, client: OpenAI, model: str, ledger: Ledger, budget: Budget, price: Price | None, *, concurrency: int = 64,
        retries: int = 4, timeout: float = 120.0, backoff: float = 1.0, form: str = "auto",
        temperature: float | None = 0.0, logprobs: bool = False,
    ) -> None:  # fmt: skip
        self.client = client.with_options(max_retries=0, timeout=timeout)
        self.model, self.ledger, self.budget, self.price = model, ledger, budget, price
        self.retries, self.backoff, self.temperature, self.logprobs = retries, backoff, temperature, logprobs
        self.limit = Limit(concurrency)
        self.stop = threading.Event()
        self.stopped: Result | None = None
        self.fatal: UsageError | None = None
        self.excess = 1.0
        self.form = "schema" if form == "auto" else form
        self._may_change = form == "auto"
        self._cap_name = "max_tokens"
        self._dropped: set[str] = set()
        self._ids = itertools.count(1 + max((int(row.get("id") or 0) for row in ledger.rows), default=0))
        self._lock = threading.Lock()
        self.connections = Connections(self.client)

    # --- what is sent ---

    def body(self, job: Job, cap: int, form: str | None = None) -> dict[str, Any]:
        """The request of a job."""
        body: dict[str, Any] = {"model": self.model, "messages": list(job.messages), self._cap_name: cap}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if job.seed is not None:
            body["seed"] = job.seed
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": 10}
        form = form or self.form
        if form == "schema":
            shape = {"name": "verdicts", "strict": True, "schema": schema(verdicts=self.logprobs)}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        elif form == "json":
            body["response_format"] = {"type": "json_object"}
        return {key: value for key, value in body.items() if key not in self._dropped}

    def bound(self, job: Job, cap: int, *, batch: bool = False) -> tuple[float, int]:
        """(dollars, tokens): the most that a call can cost. A token is at least one byte of what is sent.

        An endpoint that does not keep to the cap is reckoned with as soon as it was seen.
        """
        sent = len(dump_json(self.body(job, cap, "schema"))) + 16 * len(job.messages)
        sent, cap = math.ceil(sent * self.excess), math.ceil(cap * self.excess)
        dollars = (
            [self.price.of(Usage(sent, cap, cached), batch=batch) for cached in (0, sent)] if self.price else [0.0]
        )
        return max(dollars), sent + cap

    def number(self) -> int:
        """The next call's number in the ledger."""
        return next(self._ids)

    def start_line(self, number: int, job: Job, usd: float, tokens: int) -> dict[str, Any]:
        """The ledger's line before a call."""
        return {
            "event": "start", "id": number, "call": job.key, "time": time.time(),
            "reserved_usd": usd if self.price else None, "reserved_tokens": tokens,
        }  # fmt: skip

    # --- one job ---

    def ask(self, job: Job) -> Result:
        """Call until there are verdicts, no retry is left, or the run stops. What failed for good is in the ledger."""
        result = self._ask(job)
        if result.status in PAID and result is not self.stopped:
            self.give_up(job, result)
        return result

    def give_up(self, job: Job, result: Result) -> None:
        """Write down that a job was paid for and gave nothing, so that later runs do not pay for it again."""
        row = {"event": "failed", "call": job.key, "status": result.status, "detail": result.detail[:300]}
        self.ledger.write(row, durable=False)

    def _ask(self, job: Job) -> Result:
        cap, tries, told, result = job.cap, 0, 0, Result("error", detail="not asked")
        random = Random(job.key)
        while not self.stop.is_set():
            result, wait, again = self._once(job, cap)
            if again == "reshaped":  # the endpoint told us what it cannot do; that is no failure of the job
                continue
            if again == "no":
                return result
            if result.status == "rate limit":  # no failure of the job's own
                told += 1
                if told > 4 * self.retries:
                    return result
            else:
                tries += 1
                if tries > min(self.retries, FEWER.get(result.status, self.retries)):
                    return result
            cap, job = (cap * 2 if result.status == "truncated" else cap), told_again(job, result)
            pause = min(30.0, self.backoff * 2 ** (tries + told - 1)) * (0.5 + random.random())
            if wait is not None:
                pause = wait
            elif result.status in FEWER:
                pause = 0.0
            self.stop.wait(pause)
        return self.stopped or result

    def _once(self, job: Job, cap: int) -> tuple[Result, float | None, str]:
        """(result, seconds to wait if told, "no" | "retry" | "reshaped")."""
        if not self.limit.enter(self.stop):
            return self.stopped or Result("error", detail="the run was stopped"), None, "no"
        try:
            usd, tokens = self.bound(job, cap)
            if not self.budget.reserve(usd, tokens, self.stop):
                if not self.stop.is_set():
                    self.halt(Result("budget", detail=f"the next call might cost {_money(usd, tokens, self.price)}"))
                return self.stopped or Result("budget"), None, "no"
            number = self.number()
            self.ledger.write(self.start_line(number, job, usd, tokens))
            began, form = time.monotonic(), self.form
            result, usage, wait, again = self._send(job, cap, form, began)
            paid, cost = Usage(tokens - cap, cap), usd
            if usage is not None:
                paid, cost = usage, self.price.of(usage) if self.price else 0.0
            if (ratio := max(paid.total / tokens, cost / usd if usd else 0.0)) > 1:
                self.excess = max(self.excess, ratio * self.excess)
            self.budget.settle(usd, tokens, cost, paid.total)
            line = end_line(number, job, result, paid, usage is not None, cost if self.price else None)
            self.ledger.write(line, durable=False)
            if result.status in ("ok", *PAID):
                self.limit.answered()
            return result, wait, again
        finally:
            self.limit.leave()

    def _send(self, job: Job, cap: int, form: str, began: float) -> tuple[Result, Usage | None, float | None, str]:
        import openai

        nothing = Usage()
        try:
            # as chat.completions.create, without its walk through typed parameters and reply
            text = self.connections.get().post("/chat/completions", cast_to=str, body=self.body(job, cap, form))
        except openai.APITimeoutError:
            return Result("timeout", detail="no reply in time"), None, None, "retry"
        except openai.APIStatusError as error:
            return self.refused(error, job, form, began)
        except openai.APIConnectionError as error:
            unsent = type(error.__cause__).__name__ == "ConnectError"  # nothing was asked, so nothing is billed
            detail = f"no connection: {error.__cause__ or error}"
            return Result("error", detail=detail), nothing if unsent else None, None, "retry"
        except openai.OpenAIError as error:
            self._break(UsageError(f"the client cannot ask: {error}"))
            return Result("error", detail=str(error)), nothing, None, "no"
        try:
            reply = parse_json(text)
        except DataError as error:
            return Result("error", detail=f"the endpoint sent no JSON: {error}"), None, None, "retry"
        usage = Usage.of(reply.get("usage")) if isinstance(reply, dict) else None
        result = read_completion(reply, job, logprobs=self.logprobs)
        if result.status == "no log-probs":
            self._break(UsageError("the endpoint gives no log-probabilities: judge without --logprobs"))
            return Result("error", detail=result.detail), usage, None, "no"
        again = "retry" if result.status in ("truncated", "unparsable", "wrong steps", "error") else "no"
        return result, usage, None, again

    def refused(self, error: Any, job: Job, form: str, began: float) -> tuple[Result, Usage | None, float | None, str]:
        """An HTTP error status: quota, rate limit, something that this endpoint cannot do, or a failure."""
        status, free = error.status_code, Usage()
        body = error.body if isinstance(error.body, Mapping) else {}
        code, said = f"{body.get('code')} {body.get('type')}", " ".join(str(error.message).split())[:300]
        if status == 402 or _QUOTA_CODE.search(code) or _QUOTA_TEXT.search(said):
            return self.halt(Result("quota", detail=said)), free, None, "no"
        wait = retry_after(error.response)
        if wait is not None and wait > LONGEST_WAIT:
            return self.halt(Result("rate limit", detail=f"asked to wait {wait:.0f} s: {said}")), free, None, "no"
        if status in (429, 529) or (status == 503 and wait is not None):
            self.limit.too_much(began, wait)
            return Result("rate limit", detail=said), free, wait, "retry"
        if status in (408, 409) or status >= 500:
            what = "timeout" if status in (408, 504) else "error"
            return Result(what, detail=f"{status}: {said}"), None, wait, "retry"
        if "content_filter" in code or "content_filter" in said or "content management policy" in said:
            return Result("filtered", detail=said), free, None, "no"
        if "context_length" in code or "context length" in said or "maximum context" in said or status == 413:
            return Result("too long", detail=said), free, None, "no"
        if status in (400, 404, 415, 422, 501) and self._reshape(said, str(body.get("param") or ""), form):
            return Result("error", detail=said), free, None, "reshaped"
        if status in (401, 403, 404):
            self._break(UsageError(f"the endpoint refuses: {status}: {said}"))
        return Result("error", detail=f"{status}: {said}"), free, None, "no"

    def _reshape(self, said: str, param: str, form: str) -> bool:
        """Whether something of the request was given up that this endpoint complains of, for all calls from now on."""
        about = f"{param} {said}".casefold()
        with self._lock:
            if "max_completion_tokens" in about and self._cap_name == "max_tokens":
                self._cap_name = "max_completion_tokens"
                return True
            for name in ("temperature", "seed"):
                if name in about and name not in self._dropped:
                    self._dropped.add(name)
                    return True
            if self.logprobs and "logprobs" in about:
                self._break(UsageError("the endpoint gives no log-probabilities: judge without --logprobs"))
                return False
            words = ("response_format", "json_schema", "json_object", "schema", "guided", "grammar", "structured")
            if self._may_change and form != "text" and any(word in about for word in words):
                if self.form == form:
                    self.form = FORMATS[FORMATS.index(form) + 1]
                return True
        return False

    def halt(self, result: Result) -> Result:
        with self._lock:
            self.stopped = self.stopped or result
        self.stop.set()
        return result

    def _break(self, error: UsageError) -> None:
        self.fatal = self.fatal or error
        self.stop.set()


def told_again(job: Job, result: Result) -> Job:
    """The job for a retry: a model that replied in a wrong way is told so, as it would else do the same again."""
    if result.status not in ("unparsable", "wrong steps"):
        return job
    *before, last = job.messages
    note = f"\n\nAn earlier reply could not be used: {result.detail}."
    return replace(job, messages=[*before, {**last, "content": last["content"] + note}])


def read_completion(reply: Any, job: Job, *, logprobs: bool = False) -> Result:
    """A chat completion as a result. Why it ended is read before what it says."""
    try:
        choice = reply["choices"][0]
        finish, message = choice.get("finish_reason"), choice.get("message") or {}
        content, refusal = message.get("content"), message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return Result("error", detail="the reply holds no choice")
    if finish == "length":
        return Result("truncated", detail="the reply ended at the output cap")
    if finish == "content_filter":
        return Result("filtered", detail="the reply was filtered")
    if refusal:
        return Result("refused", detail=str(refusal)[:200])
    if not isinstance(content, str) or not content.strip():
        return Result("unparsable", detail="the reply is empty")
    tokens = None
    if logprobs:
        given = choice.get("logprobs")
        tokens = given.get("content") if isinstance(given, Mapping) else None
        if not isinstance(tokens, list) or not tokens:
            return Result("no log-probs", detail="the reply holds no log-probabilities")
    try:
        verdicts = parse_reply(content, job.steps, quotes=job.quotes, logprobs=tokens, verdicts=logprobs)
    except ReplyError as error:
        return Result(error.status, detail=str(error))
    return Result("ok", verdicts)


def end_line(number: int, job: Job, result: Result, paid: Usage, known: bool, usd: float | None) -> dict[str, Any]:
    """The ledger's line after a call; it holds the verdicts, so that nothing that was paid for is lost."""
    row: dict[str, Any] = {
        "event": "end", "id": number, "call": job.key, "time": time.time(), "status": result.status, "usd": usd,
        "tokens": paid.total, "input": paid.input, "cached": paid.cached, "output": paid.output,
        "reasoning": paid.reasoning,
    }  # fmt: skip
    if not known:
        row["usage"] = "not told: as reserved"
    if result.status == "ok":
        row["verdicts"] = [[v.step, v.score, v.error, v.reason] for v in result.verdicts]
    else:
        row["detail"] = result.detail[:300]
    return row


def retry_after(response: Any) -> float | None:
    """Seconds that a response asks to wait: `retry-after-ms`, or `Retry-After` as seconds or as a date."""
    headers = response.headers
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * scale
            if 0 <= seconds < math.inf:
                return seconds
        except (KeyError, ValueError):
            continue
    try:
        return max(0.0, email.utils.parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time())
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def run_jobs(caller: Caller, jobs: Sequence[Job], done: Callable[[int, Result], None]) -> None:
    """Ask for all jobs, as many at a time as the limit allows; `done(index, result)` is called in this thread.

    When the run stops, jobs that were not begun are not reported. An interrupt waits for the calls in flight.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH))  # at the default of 5 ms, who comes back with a reply queues for it
    try:
        _run_jobs(caller, jobs, done)
    finally:
        sys.setswitchinterval(interval)


def _run_jobs(caller: Caller, jobs: Sequence[Job], done: Callable[[int, Result], None]) -> None:
    import queue

    waiting, results = iter(enumerate(jobs)), queue.SimpleQueue[Any]()
    lock = threading.Lock()

    def work() -> None:
        try:
            while not caller.stop.is_set():
                with lock:
                    index, job = next(waiting, (-1, None))
                if job is None:
                    break
                results.put((index, caller.ask(job)))
        except BaseException as error:
            caller.stop.set()
            results.put(error)
        finally:
            caller.connections.close()
            results.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(caller.limit.most, len(jobs)))]
    for thread in threads:
        thread.start()
    left, interrupted = len(threads), None
    while left:
        try:
            got = results.get()
        except KeyboardInterrupt as error:
            if interrupted:
                raise
            interrupted = error
            caller.stop.set()
            continue
        if got is None:
            left -= 1
        elif isinstance(got, BaseException):
            raise got
        else:
            done(*got)
    if interrupted:
        raise interrupted
    if caller.fatal:
        raise caller.fatal


def _money(usd: float, tokens: int, price: Price | None) -> str:
    return f"up to ${usd:.6f}" if price else f"up to {tokens} tokens"
