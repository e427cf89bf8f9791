"""Labels of trajectories from a judge: what to ask, what is there, what it costs, and in which order it lands."""

from __future__ import annotations

import hashlib
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labeling.judge.batch import open_batches, run_batches
from labeling.judge.bias import Bias, bias_jobs, measure, write
from labeling.judge.calls import FORMATS, Caller, Job, Result, run_jobs
from labeling.judge.money import Budget, Ledger, Price, Usage, load_price
from labeling.judge.prompt import Rubric, Window, load_rubric, messages, own_text, prefix, too_long, windows
from labeling.judge.reply import Verdict
from prm.config import option, progress
from prm.errors import DataError, UsageError
from prm.records import StepLabel, Trajectory, append_jsonl, dump_json, read_jsonl

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True)
class JudgeConfig:
    model: str = option(..., "the judge, by the name that the endpoint knows")
    out: str | None = option(None, "append labels here; what is judged there is not paid for again")
    base_url: str | None = option(None, "the endpoint's address (default: OPENAI_BASE_URL, or OpenAI's)")
    rubric: str = option("general", "general, tools, search, code, web, math, or a file of your own")
    reference: str | None = option(None, "show the judge this field of each trajectory's meta as the right answer")
    form: str = option("auto", "how the reply's form is asked for (auto: found out)", choices=("auto", *FORMATS))
    votes: int = option(1, "calls a trajectory; from 2 on, score = share of them that call the step good")
    logprobs: bool = option(False, "score = probability of the verdict's token, where the endpoint gives it")
    temperature: float | None = option(None, "sampling temperature (default: 0, with several votes 1)")
    window: int = option(48_000, "the most characters of steps in one call; longer trajectories take several")
    overlap: int = option(2, "steps before a window that are shown with it, as context")
    max_output_tokens: int | None = option(None, "the reply's cap (default: 200, and 100 a step)")
    budget: float | None = option(None, "never spend more dollars than this, earlier runs on OUT included")
    budget_tokens: int | None = option(None, "the same, in tokens")
    prices: str | None = option(None, "a price file (default: prices.toml of this package)")
    dry_run: bool = option(False, "print calls, tokens and dollars, and ask nothing")
    concurrency: int = option(64, "the most calls in flight; fewer when the endpoint asks for it")
    retries: int = option(4, "further calls where one failed")
    retry_failed: bool = option(False, "ask again what earlier runs paid for without a label (refused, truncated, ...)")
    backoff: float = option(1.0, "seconds before the first retry, doubled each time")
    timeout: float = option(120.0, "seconds that a call may take")
    batch: bool = option(False, "use the Batch API: cheaper, within a day")
    batch_poll: float = option(30.0, "seconds between two looks at a batch")
    check_bias: bool = option(False, "measure what reordering, padding and another answer do to the scores")
    bias_sample: int = option(20, "trajectories that the bias check uses")


@dataclass(frozen=True)
class Unit:
    """A window of a trajectory, and the jobs (one a vote) that judge it."""

    trajectory: Trajectory
    window: Window
    jobs: tuple[Job, ...]

    @property
    def steps(self) -> range:
        return range(self.window.first, self.window.last + 1)


@dataclass
class Judged:
    """What a run gave.

    Args:
        labels: of all given trajectories, in their order, those from before included.
        reasons: trajectory id -> the status of its first window without labels.
        n: how many trajectories there are.
        usd, tokens: spent in all, by earlier runs on the same file, too; usd is None without a price.
        in_flight: calls of which it is not known whether they were paid; they are counted as paid.
        old: calls that an earlier run paid for without getting a label, and that were not asked again.
        details: why calls failed, in the order in which they did.
    """

    labels: list[StepLabel] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    n: int = 0
    usd: float | None = None
    tokens: int = 0
    in_flight: int = 0
    old: int = 0
    details: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """`judged n of m` and why the others were not."""
        counts = Counter(self.reasons.values())
        why = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        text = f"judged {self.n - len(self.reasons)} of {self.n}" + (f": {why}" if why else "")
        text += f"; {self.tokens} tokens" + (f", ${self.usd:.4f}" if self.usd is not None else "")
        if self.in_flight:
            text += f" ({self.in_flight} calls were in flight when a run died; counted as paid)"
        if self.old:
            text += f"; {self.old} calls failed in an earlier run and were not paid for again (--retry-failed does)"
        if self.details:
            text += f"; the last reason: {self.details[-1]}"
        return text


def judge(trajectories: Sequence[Trajectory], client: OpenAI, config: JudgeConfig) -> list[StepLabel]:
    """Let a strong model score every step, one call a trajectory; labels only of what it said.

    Args:
        trajectories: whose steps to judge.
        client: an `openai.OpenAI` for any OpenAI-compatible endpoint. Its retries are switched off.
        config: see its fields. With `out` the labels are appended there in order, and a ledger beside it
            (`OUT.ledger.jsonl`) holds every call; the same call goes on where it was interrupted.

    Returns:
        The labels of these trajectories, in order. A trajectory that could not be judged has none; a warning says how
        many, and why.

    Raises:
        UsageError: options that do not go together, no price for a budget in dollars, or an endpoint that refuses.
        DataError: `out` holds labels of another rubric.
    """
    judged = run(trajectories, client, config)
    if judged.reasons:
        warnings.warn(judged.summary(), stacklevel=2)
    return judged.labels


def run(trajectories: Sequence[Trajectory], client: OpenAI, config: JudgeConfig) -> Judged:
    """`judge`, with the whole account of the run."""
    rubric, price = check(config)
    trajectories = list({t.id: t for t in trajectories}.values())
    source = f"judge:{config.model}"
    labels, there = _there(config, trajectories, rubric, source)
    ledger = Ledger(f"{config.out}.ledger.jsonl" if config.out else None)
    try:
        if not config.batch and any(batch.calls for batch in open_batches(ledger.rows).values()):
            raise UsageError(f"{config.out}: a batch of it is under way: go on with --batch")
        setup = _setup(config, rubric)
        units, reasons = _units(trajectories, config, rubric, setup, there)
        spent_usd, spent_tokens, _ = ledger.spent()
        budget = Budget(config.budget, config.budget_tokens, spent_usd, spent_tokens)
        caller = _caller(client, config, ledger, budget, price)
        results = _settled(ledger.rows, config.retry_failed)
        old = sum(job.key in results and results[job.key].status != "ok" for unit in units for job in unit.jobs)
        judged = Judged(n=len(trajectories), reasons=reasons, old=old)
        landing = _Landing(units, results, labels, config, rubric, source, judged, ledger)
        jobs = [job for unit in units for job in unit.jobs if job.key not in results]
        bar = progress(len(units), "judge", "window")

        def done(index: int, result: Result) -> None:
            results[jobs[index].key] = result
            if result.status != "ok":
                judged.details.append(f"{result.status}: {result.detail}")
            if time.monotonic() > landing.due:
                bar.update(landing.land())
            bar.set_postfix_str(f"${budget.spent_usd:.3f}" if price else f"{budget.spent_tokens} tokens")

        try:
            landing.land()
            if config.batch:
                run_batches(caller, jobs, done, poll=config.batch_poll)
            else:
                run_jobs(caller, jobs, done)
        finally:
            bar.close()
            stopped = caller.stopped.status if caller.stopped else "not asked"
            landing.land(rest=stopped)
            usd, judged.tokens, judged.in_flight = ledger.spent()
            judged.usd = usd if price else None
        if caller.stopped:
            judged.details.append(f"{caller.stopped.status}: {caller.stopped.detail}")
        judged.labels = [label for t in trajectories for label in sorted(labels.get(t.id, ()), key=lambda x: x.step)]
        return judged
    finally:
        ledger.close()


def bias(trajectories: Sequence[Trajectory], client: OpenAI, config: JudgeConfig) -> Bias:
    """What reordering, padding and another final answer do to the judge's scores; see `labeling.judge.bias`.

    Calls are in the same ledger and under the same budget as those of `judge`; with `out`, `OUT.bias.json` is written.

    Raises:
        UsageError: as `judge`; also with several votes, references, or the Batch API.
    """
    rubric, price = check(config)
    if config.votes > 1 or config.batch or config.reference:
        raise UsageError("--check-bias makes single calls: leave out --votes, --batch and --reference")
    ledger = Ledger(f"{config.out}.ledger.jsonl" if config.out else None)
    try:
        left_out: Counter[str] = Counter()
        jobs = bias_jobs(trajectories, config, rubric, _setup(config, rubric), left_out)
        spent_usd, spent_tokens, _ = ledger.spent()
        budget = Budget(config.budget, config.budget_tokens, spent_usd, spent_tokens)
        caller = _caller(client, config, ledger, budget, price)
        found = measure(caller, jobs, _settled(ledger.rows, config.retry_failed), left_out)
    finally:
        ledger.close()
    if config.out:
        write(found, f"{config.out}.bias.json")
    return found


def dry_run(trajectories: Sequence[Trajectory], config: JudgeConfig) -> str:
    """What a run would cost, as text: calls, tokens and dollars, about and at most. Nothing is asked."""
    rubric, price = check(config)
    trajectories = list({t.id: t for t in trajectories}.values())
    _, there = _there(config, trajectories, rubric, f"judge:{config.model}")
    units, reasons = _units(trajectories, config, rubric, _setup(config, rubric), there)
    done: set[str] = set()
    spent = (0.0, 0, 0)
    if config.out and os.path.exists(f"{config.out}.ledger.jsonl"):
        ledger = Ledger(f"{config.out}.ledger.jsonl")
        done = set(_settled(ledger.rows, config.retry_failed))
        spent = ledger.spent()
        ledger.close()
    caller = Caller(_Nobody(), config.model, Ledger(None), Budget(None, None), price, logprobs=config.logprobs)  # type: ignore[arg-type]
    about, most_usd, most_tokens = Usage(), 0.0, 0
    jobs = [job for unit in units for job in unit.jobs if job.key not in done]
    steps = sum(len(unit.steps) for unit in units)
    if config.check_bias:
        made = bias_jobs(trajectories, config, rubric, _setup(config, rubric), Counter())
        jobs = [job for job in made.values() if job.key not in done]
        steps = sum(len(job.steps) for job in jobs)
    for job in jobs:
        read = sum(len(m["content"]) for m in job.messages) // 4
        about = Usage(about.input + read, about.output + 50 * len(job.steps) + 20)
        usd, tokens = caller.bound(job, job.cap, batch=config.batch)
        most_usd, most_tokens = most_usd + usd, most_tokens + tokens
    lines = [
        f"{len(jobs)} calls for {len(trajectories)} trajectories, {steps} steps",
        f"about {about.input} tokens read and {about.output} written (at most {most_tokens} without retries)",
    ]
    if price:
        cost = price.of(about, batch=config.batch)
        lines.append(f"about ${cost:.4f}, at most ${most_usd:.4f} without retries; spent so far: ${spent[0]:.4f}")
    else:
        lines.append(f"no price for {config.model}: dollars unknown (--prices FILE)")
    for status, count in Counter(reasons.values()).items():
        lines.append(f"{count} trajectories cannot be asked about: {status}")
    return "\n".join(lines)


def check(config: JudgeConfig) -> tuple[Rubric, Price | None]:
    """The rubric and the price that a config names. Raises UsageError where it makes no sense."""
    for name in ("votes", "concurrency", "window"):
        if getattr(config, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(config, name)}")
    for name in ("overlap", "retries", "backoff", "budget", "budget_tokens"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
    if not config.timeout > 0:
        raise UsageError(f"--timeout must be above 0, got {config.timeout}")
    if config.max_output_tokens is not None and config.max_output_tokens < 1:
        raise UsageError(f"--max-output-tokens must be at least 1, got {config.max_output_tokens}")
    if config.votes > 1 and config.temperature == 0:
        raise UsageError("votes at temperature 0 are one vote: raise --temperature or leave --votes at 1")
    if config.votes > 1 and config.logprobs:
        raise UsageError("--votes and --logprobs are two ways to a score: choose one")
    price = load_price(config.model, config.prices)
    if config.budget is not None and price is None:
        raise UsageError(f"--budget needs a price: {config.prices or 'prices.toml'} has none for {config.model!r}; "
                         "give --prices FILE, or --budget-tokens")  # fmt: skip
    return load_rubric(config.rubric), price


# --- what there is, and what there is to do ---------------------------------------------------------------------------


def _settled(rows: Sequence[Mapping[str, Any]], retry_failed: bool) -> dict[str, Result]:
    """What the calls of earlier runs gave, by job: verdicts, or that they were paid for and gave none."""
    found: dict[str, Result] = {}
    for row in rows:
        if row["event"] == "end" and row.get("status") == "ok":
            found[row["call"]] = Result("ok", [Verdict(*v) for v in row["verdicts"]])
        elif row["event"] == "failed" and not retry_failed:
            found.setdefault(row["call"], Result(row["status"], detail=row["detail"]))
    return found


def _there(
    config: JudgeConfig, trajectories: Sequence[Trajectory], rubric: Rubric, source: str
) -> tuple[dict[str, list[StepLabel]], dict[str, set[int]]]:
    """(this judge's labels, their steps) in `out`, by trajectory."""
    labels: dict[str, list[StepLabel]] = {}
    ids = {t.id for t in trajectories}
    if config.out and os.path.exists(config.out):
        for label in read_jsonl(config.out, StepLabel, skip_bad=True):
            if label.source == source and label.trajectory_id in ids:
                if label.meta.get("rubric_sha256") != rubric.sha256:
                    raise DataError(f"{config.out}: holds labels of {source} by another rubric; write elsewhere")
                labels.setdefault(label.trajectory_id, []).append(label)
    return labels, {i: {label.step for label in of} for i, of in labels.items()}


def _units(
    trajectories: Sequence[Trajectory], config: JudgeConfig, rubric: Rubric, setup: str, there: Mapping[str, set[int]]
) -> tuple[list[Unit], dict[str, str]]:
    """The windows without labels, in order; and the trajectories that cannot be asked about, with a status."""
    units, reasons = [], {}
    for trajectory in trajectories:
        reference = None
        if config.reference is not None:
            value = trajectory.meta.get(config.reference)
            if value is None:
                reasons[trajectory.id] = "no reference"
                continue
            reference = value if isinstance(value, str) else dump_json(value).decode()
        if not trajectory.steps:
            reasons[trajectory.id] = "no steps"
        for window in windows(trajectory, config.window, config.overlap):
            steps = range(window.first, window.last + 1)
            if there.get(trajectory.id, set()).issuperset(steps):
                continue
            if too_long(trajectory, window, config.window):
                reasons[trajectory.id] = "too long"
                continue
            chat = messages(trajectory, window, rubric, reference=reference, verdicts=config.logprobs)
            cap = config.max_output_tokens or 200 + 100 * len(steps)
            jobs = tuple(
                Job(f"{trajectory.id}/{window.first}-{window.last}/{vote}/{setup}", chat, steps, own_text(trajectory),
                    cap, seed=vote if config.votes > 1 else None)
                for vote in range(config.votes)
            )  # fmt: skip
            units.append(Unit(trajectory, window, jobs))
    return units, reasons


def _setup(config: JudgeConfig, rubric: Rubric) -> str:
    """A digest of all that decides what a judge says of a window."""
    told = prefix(rubric, verdicts=config.logprobs)
    parts = [config.model, rubric.sha256, told, config.reference, _temperature(config), config.overlap]
    return hashlib.sha256(dump_json(parts)).hexdigest()[:12]


def _temperature(config: JudgeConfig) -> float | None:
    if config.temperature is not None:
        return config.temperature
    return 1.0 if config.votes > 1 else 0.0


class _Landing:
    """Labels are written in the order of the trajectories, in groups, once all before them are settled."""

    def __init__(
        self, units: Sequence[Unit], results: Mapping[str, Result], labels: dict[str, list[StepLabel]],
        config: JudgeConfig, rubric: Rubric, source: str, judged: Judged, ledger: Ledger,
    ) -> None:  # fmt: skip
        self.units, self.results, self.labels, self.judged = units, results, labels, judged
        self.config, self.rubric, self.source, self.ledger = config, rubric, source, ledger
        self.next, self.due = 0, 0.0

    def land(self, rest: str | None = None) -> int:
        """Write what can be written; with `rest`, all of it, and what has no result gets that status."""
        before, fresh = self.next, []
        while self.next < len(self.units):
            unit = self.units[self.next]
            results = [self.results.get(job.key) for job in unit.jobs]
            if rest is None and None in results:
                break
            got = [r or Result(rest or "not asked") for r in results]
            made = self._labels(unit, [r.verdicts for r in got if r.status == "ok"])
            if not made:
                self.judged.reasons.setdefault(unit.trajectory.id, next(r.status for r in got))
            fresh += made
            self.next += 1
        for label in fresh:
            self.labels.setdefault(label.trajectory_id, []).append(label)
        if self.config.out and fresh:
            self.ledger.sync()
            append_jsonl(self.config.out, fresh)
        self.due = time.monotonic() + 0.5
        return self.next - before

    def _labels(self, unit: Unit, votes: Sequence[Sequence[Verdict]]) -> list[StepLabel]:
        if not votes:
            return []
        have = {label.step for label in self.labels.get(unit.trajectory.id, ())}
        meta = {"rubric": self.rubric.name, "rubric_version": self.rubric.version, "rubric_sha256": self.rubric.sha256}
        made, now = [], time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for said in zip(*votes, strict=True):
            if said[0].step in have:
                continue
            first = said[0]
            score, more = first.score, {}
            if self.config.votes > 1:
                score = sum((v.score > 0.5) + 0.5 * (v.score == 0.5) for v in said) / len(said)
                first = min(said, key=lambda v: abs(v.score - score))
                more = {"votes": [v.score for v in said]}
            made.append(
                StepLabel(
                    unit.trajectory.id, first.step, score, self.source, weight=float(len(said)), note=first.reason,
                    time=now,
                    meta={**meta, **({"error": first.error} if first.error else {}), **more},
                )
            )  # fmt: skip
        return made


def _caller(client: OpenAI, config: JudgeConfig, ledger: Ledger, budget: Budget, price: Price | None) -> Caller:
    return Caller(
        _synchronous(client), config.model, ledger, budget, price, concurrency=config.concurrency,
        retries=config.retries, timeout=config.timeout, backoff=config.backoff, form=config.form,
        temperature=_temperature(config), logprobs=config.logprobs,
    )  # fmt: skip


class _Nobody:
    """Stands for the client where nothing is asked."""

    def with_options(self, **_: Any) -> _Nobody:
        return self


def _synchronous(client: Any) -> Any:
    """The client, or an `OpenAI` like an `AsyncOpenAI`: calls are made from threads."""
    import openai

    if isinstance(client, openai.AsyncOpenAI):
        return openai.OpenAI(
            api_key=client.api_key, base_url=str(client.base_url), organization=client.organization,
            project=client.project, default_headers=client._custom_headers, default_query=client._custom_query,
        )  # fmt: skip
    return client


def command(path: str, trajectories: Sequence[Trajectory], config: JudgeConfig) -> int:
    """`prm judge`: the exit status; 1 where nothing was judged."""
    from prm.config import save

    if config.dry_run:
        print(dry_run(trajectories, config))
        return 0
    if not config.out:
        raise UsageError("--out is required: say where the labels go")
    check(config)
    from openai import OpenAI

    if not (key := os.environ.get("OPENAI_API_KEY")):
        if not (config.base_url or os.environ.get("OPENAI_BASE_URL")):
            raise UsageError("set OPENAI_API_KEY, or name an endpoint with --base-url")
        key = "none"
    client = OpenAI(api_key=key, base_url=config.base_url)
    if config.check_bias:
        found = bias(trajectories, client, config)
        print(found.text())
        return 0 if found.shifts else 1
    save(config.out, "judge", config, trajectories=path)
    judged = run(trajectories, client, config)
    print(f"{config.out}: {judged.summary()}", file=sys.stdout)
    return 0 if judged.labels else 1
