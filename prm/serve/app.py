"""The server's routes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer

from prm.batching import StepScorer, aggregate
from prm.errors import DataError, PrmError
from prm.records import Trajectory
from prm.render import Rendered, encode
from prm.serve import shapes
from prm.serve.batcher import Batcher, Busy
from prm.serve.config import ServeConfig
from prm.serve.guard import Guard
from prm.serve.metrics import Metrics
from prm.serve.texts import chat_of, text_trajectories

GONE = 499  # nginx's status for a client that went away; nobody reads it


class Gone(Exception):
    """The client has closed the connection."""


class Late(Exception):
    """The request's time is up."""


class Serving:
    """The model that is served now, and what its requests share."""

    def __init__(self, model: StepScorer, config: ServeConfig, load: Callable[[], StepScorer] | None) -> None:
        self.model, self.config, self.load = model, config, load
        self.version = model.fingerprint()
        self.metrics = Metrics()
        self.batcher = Batcher(config.batch_tokens, config.queue_tokens, self.metrics)
        self.in_flight = 0
        # One thread: a tokenizer is not safe to use from several.
        self.tokenizing = ThreadPoolExecutor(1, "prm-tokenizing")
        self.loading = asyncio.Lock()
        self._tell()

    def _tell(self) -> None:
        self.metrics.set("prm_model_info", 1, model=self.model.name, version=self.version)

    async def render(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a function of the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, call, *args)

    async def answer(self, request: Request, work: Awaitable[Any]) -> Any:
        """Wait for the work as long as the client is there and the time is not up.

        Raises:
            Busy: too many requests are being answered.
        """
        task = asyncio.ensure_future(work)
        if self.in_flight >= self.config.max_requests:
            task.cancel()
            raise Busy(self.batcher.seconds())
        self.in_flight += 1
        self.metrics.set("prm_requests_in_flight", self.in_flight)
        try:
            end = time.monotonic() + self.config.timeout
            while not task.done():
                await asyncio.wait({task}, timeout=min(0.25, max(end - time.monotonic(), 0.001)))
                if task.done():
                    break
                if await request.is_disconnected():
                    raise Gone
                if time.monotonic() >= end:
                    raise Late
            return task.result()
        finally:
            task.cancel()
            self.in_flight -= 1
            self.metrics.set("prm_requests_in_flight", self.in_flight)

    async def reload(self) -> bool:
        """Load the model again and put it in the place of the old one; requests that run keep the old one.

        Raises:
            PrmError: it cannot be loaded; the old one stays.
        """
        if self.load is None:
            raise DataError("the model is only in memory, there is nothing to load it from")
        async with self.loading:
            try:
                model = await asyncio.to_thread(self.load)
            except Exception:
                self.metrics.add("prm_reloads_total", result="failed")
                raise
            version = model.fingerprint()
            changed = version != self.version
            self.model, self.version = model, version
            self._tell()
            self.metrics.add("prm_reloads_total", result="done")
            for seconds in (0, 2, 30):
                # Requests that run hold the old model until they are answered.
                asyncio.get_running_loop().call_later(seconds, _release)
            return changed


def app(model: StepScorer, config: ServeConfig, *, load: Callable[[], StepScorer] | None = None) -> FastAPI:
    """The server as an ASGI application.

    Args:
        model: what scores first.
        config: limits, and how texts become steps.
        load: loads the model anew, for `/reload`.
    """
    serving = Serving(model, config, load)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.batcher.start()
        try:
            yield
        finally:
            await asyncio.to_thread(serving.batcher.stop)

    key = config.key()
    own = FastAPI(
        title="prm serve",
        description="A process reward model: a score for every step of a trajectory.",
        version="1",
        lifespan=lifespan,
        dependencies=[Depends(HTTPBearer(auto_error=False))] if key is not None else [],
        redirect_slashes=False,
    )
    own.state.serving = serving
    own.add_middleware(Guard, api_key=key, config=config, metrics=serving.metrics)
    _refusals(own, serving)
    _routes(own, serving)
    return own


def _refusals(own: FastAPI, serving: Serving) -> None:
    @own.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # What came is not sent back: it may be large, and need not be text.
        first, more = error.errors()[0], len(error.errors()) - 1
        where = ".".join(map(str, first["loc"]))
        detail = f"{where}: {first['msg']}" + (f" (and {more} more)" if more else "")
        return _problem(422, detail)

    @own.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        return _problem(503, str(error), {"Retry-After": f"{error.seconds:.0f}"})

    @own.exception_handler(Late)
    async def late(_: Request, error: Late) -> Response:
        serving.metrics.add("prm_cancelled_total", reason="timeout")
        seconds = serving.batcher.seconds()
        detail = f"not done within {serving.config.timeout:g} s"
        return _problem(503, detail, {"Retry-After": f"{seconds:.0f}"})

    @own.exception_handler(Gone)
    async def gone(_: Request, error: Gone) -> Response:
        serving.metrics.add("prm_cancelled_total", reason="disconnect")
        return Response(status_code=GONE)

    @own.exception_handler(PrmError)
    async def refused(_: Request, error: PrmError) -> Response:
        return _problem(409, str(error))


def _routes(own: FastAPI, serving: Serving) -> None:
    config = serving.config
    problems: dict[int | str, dict[str, Any]] = {
        status: {"model": shapes.Problem, "description": why}
        for status, why in (
            (400, "not HTTP that can be read"),
            (401, "the API key is missing or wrong"),
            (408, "the body did not come"),
            (409, "well-formed, but nothing that this model can read as it is: too long, an id of another text, ..."),
            (413, "larger than the server reads"),
            (422, "not of the shape that is expected"),
            (503, "too much waits; Retry-After says how long"),
        )
    }

    @own.get("/healthz", response_model=shapes.Health)
    async def healthz() -> Any:
        """The server lives. Needs no key."""
        own_model = serving.model
        return {
            "status": "ok",
            "model": own_model.name,
            "version": serving.version,
            "threshold": own_model.settings.threshold,
            "max_tokens": own_model.settings.max_tokens,
            "max_trajectories": config.max_trajectories,
            "max_body_bytes": config.max_body_bytes,
        }

    @own.get("/metrics", response_class=PlainTextResponse, responses={401: problems[401]})
    async def metrics() -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(serving.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @own.post(
        "/score",
        response_model=shapes.ScoreResponse,
        responses=problems | {409: problems[409] | {"model": shapes.ScoreProblem}},
    )
    async def score(body: shapes.ScoreRequest, request: Request) -> Any:
        """A score for every step of every trajectory."""
        _at_most(config.max_trajectories, len(body.trajectories), "trajectories")
        prm, version = serving.model, serving.version

        async def work() -> tuple[list[Any], list[Any]]:
            read = await serving.render(_render, prm, body)
            logits = await serving.batcher.logits(prm, [part for own, _ in read for part in own])
            return read, logits

        read, logits = await serving.answer(request, work())
        flat, results = iter(logits), []
        for own_parts, result in read:
            parts = [next(flat) for _ in own_parts]
            if result["error"] is None:
                scores: list[float | None] = prm.settings.calibration(torch.cat(parts)).tolist() if parts else []
                result["scores"] = scores + [None] * (result.pop("steps") - len(scores))
            results.append(result)
        failed = [(i, r["error"]) for i, r in enumerate(results) if r["error"] is not None]
        answer: dict[str, Any] = {"model": prm.name, "version": version, "results": results}
        if failed:
            detail = f"{len(failed)} of {len(results)} cannot be scored; number {failed[0][0]}: {failed[0][1]}"
            return JSONResponse({"detail": detail, **answer}, 409)
        return answer | {"threshold": prm.settings.threshold}

    @own.post("/get_reward", response_model=shapes.RewardResponse, responses=problems)
    async def get_reward(body: shapes.RewardRequest, request: Request) -> Any:
        """OpenRLHF's remote reward: one scalar a sample, made of its step scores."""
        prm = serving.model

        async def work() -> tuple[list[list[Rendered]], Any]:
            trajectories = text_trajectories(body.query, body.prompts, prm.tokenizer, config.split)
            _at_most(config.max_trajectories, len(trajectories), "queries")
            parts = await serving.render(lambda: [prm.render(t) for t in trajectories])
            return parts, await serving.batcher.logits(prm, [part for own in parts for part in own])

        rendered, logits = await serving.answer(request, work())
        flat = iter(logits)
        scores = []
        for own_parts in rendered:
            read = [next(flat) for _ in own_parts]
            scores.append(prm.settings.calibration(torch.cat(read)).tolist() if read else [])
        rewards = [aggregate(own, config.aggregate) for own in scores]
        return {"rewards": rewards, "scores": rewards}

    @own.post("/pooling", response_model=shapes.PoolingResponse, responses=problems)
    async def pooling(body: shapes.PoolingInput | shapes.PoolingChat, request: Request) -> Any:
        """vLLM's pooling shape: `[score]` of every token of a text or of token ids, of every step of a chat."""
        prm = serving.model

        async def work() -> tuple[list[list[Rendered]], Any]:
            rendered = await serving.render(_pooled, prm, body)
            _at_most(config.max_trajectories, len(rendered), "inputs")
            return rendered, await serving.batcher.logits(prm, [part for own in rendered for part in own])

        rendered, logits = await serving.answer(request, work())
        flat, data = iter(logits), []
        for i, own_parts in enumerate(rendered):
            raw = torch.cat([next(flat) for _ in own_parts]) if own_parts else torch.empty(0)
            values = raw if body.use_activation is False else prm.settings.calibration(raw)
            data.append({"index": i, "data": values[:, None].tolist()})
        tokens = sum(len(part.ids) for own_parts in rendered for part in own_parts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        name = {"id": f"pool-{uuid.uuid4().hex}", "created": int(time.time()), "model": prm.name}
        return {**name, "data": data, "usage": usage}

    @own.post(
        "/reload",
        response_model=shapes.Reloaded,
        responses={
            401: problems[401],
            403: {"model": shapes.Problem, "description": "from elsewhere only with an API key"},
            409: {"model": shapes.Problem, "description": "it cannot be loaded; the old one goes on"},
        },
    )
    async def reload(request: Request) -> Any:
        """Load the model again from where it came. Requests that run are answered by the old one."""
        here = request.client is not None and request.client.host in ("127.0.0.1", "::1", "testclient")
        if config.key() is None and not here:
            return _problem(403, "without an API key the model is reloaded from this machine only")
        try:
            changed = await serving.reload()
        except (PrmError, OSError) as error:
            return _problem(409, f"the model cannot be loaded, the old one goes on: {error}")
        return {"model": serving.model.name, "version": serving.version, "changed": changed}


def _render(prm: StepScorer, body: shapes.ScoreRequest) -> list[tuple[list[Rendered], dict[str, Any]]]:
    """The parts of each trajectory with what its answer will hold, or why it cannot be read."""
    out: list[tuple[list[Rendered], dict[str, Any]]] = []
    for given in body.trajectories:
        row = given.model_dump(exclude_none=True)
        result: dict[str, Any] = {"id": None, "scores": None, "truncated": False, "error": None}
        parts: list[Rendered] = []
        try:
            trajectory = Trajectory.from_dict(row)
            result |= {"id": trajectory.id, "steps": len(trajectory.steps)}
            parts = _parts(prm, trajectory, body.long)
            result["truncated"] = sum(len(p.ends) for p in parts) < len(trajectory.steps)
        except (PrmError, ValueError, TypeError) as error:
            # Tools are arbitrary JSON that a chat template reads.
            result["error"] = str(error)
            result.pop("steps", None)
        out.append(([p for p in parts if p.ends], result))
    return out


def _parts(prm: StepScorer, trajectory: Trajectory, long: str) -> list[Rendered]:
    if long == "truncate":
        parts = prm.render(trajectory, skip_long=True)
        kept: list[Rendered] = []
        for part in parts:
            # Windows after the first are context cut off; and after a step that was left out nothing counts.
            if part.first != sum(len(p.ends) for p in kept) or (kept and prm.windowed):
                break
            kept.append(part)
        return kept
    parts = prm.render(trajectory)
    if long == "error" and prm.windowed and len(parts) > 1:
        raise DataError(
            f"trajectory {trajectory.id}: step {parts[1].first} of {len(trajectory.steps)} (counted from 0) ends "
            f"beyond the limit of {prm.settings.max_tokens} tokens; long=truncate scores those before, windows all"
        )
    return parts


def _pooled(prm: StepScorer, body: shapes.PoolingInput | shapes.PoolingChat) -> list[list[Rendered]]:
    if isinstance(body, shapes.PoolingChat):
        rows = [m.model_dump(exclude_none=True) for m in body.messages]
        return [prm.render(chat_of(rows))]
    given: Any = body.input
    inputs: Sequence[Any] = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
    out, rows_there = [], prm.backbone.get_input_embeddings().weight.shape[0]
    for i, one in enumerate(inputs):
        ids = encode(prm.tokenizer, one) if isinstance(one, str) else list(one)
        if bad := [t for t in ids if not 0 <= t < rows_there]:
            raise DataError(f"input {i}: token id {bad[0]} is not in [0, {rows_there})")
        if prm.settings.max_tokens is not None and len(ids) > prm.settings.max_tokens:
            raise DataError(f"input {i}: {len(ids)} tokens, the limit is {prm.settings.max_tokens}")
        out.append([Rendered(ids, list(range(len(ids))), [])] if ids else [])
    return out


def _release() -> None:
    """Give memory that nobody holds back to the system; C libraries that cannot are left alone."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _at_most(limit: int, count: int, what: str) -> None:
    if count > limit:
        raise DataError(f"{count} {what} in a request, the limit is {limit}")


def _problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    clean = detail.encode("utf-8", "replace").decode("utf-8")
    return JSONResponse({"detail": clean}, status, headers)
