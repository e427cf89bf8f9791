"""The labelling server: pages, a small JSON interface, and the rules about who may do what.

Pages that show what an agent wrote run under a policy that allows this server's own script files and nothing else, and
build everything from text nodes. The agreement page holds figures only: a Gradio app with the policy that Gradio needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from labeling.annotate import review
from labeling.annotate.assign import Plan, make_plan, next_item
from labeling.annotate.auth import SESSION_SECONDS, Sessions, Throttle, User
from labeling.annotate.exchange import event_of, labels
from labeling.annotate.overview import Overview
from labeling.annotate.store import PROVENANCES, Event, StorageError, Store, now
from prm.errors import DataError, PrmError
from prm.records import StepLabel, Trajectory, dump_json, parse_json

ERROR_TYPES = (
    "wrong tool",
    "wrong arguments",
    "misread the observation",
    "claim without support",
    "faulty reasoning",
    "repeats itself",
    "off the task",
)
MAX_BODY = 4 << 20  # bytes
MAX_EVENTS = 1000
STRICT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
GRADIO = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; form-action 'none'; base-uri 'self'; "
    "frame-ancestors 'none'"
)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


@dataclass(frozen=True)
class Site:
    """What the routes share."""

    store: Store
    plan: Plan
    steps: Mapping[str, int]
    sessions: Sessions | None  # None: one local person, nobody signs in
    local: User
    cookie: str
    settings: Mapping[str, Any]


class Refused(PrmError):
    """A request that is answered with an error status."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = dict(headers or {})


def make_app(
    trajectories: Iterable[Trajectory],
    *,
    db: str,
    prelabels: Iterable[StepLabel] = (),
    gold: Iterable[StepLabel] = (),
    queue: Sequence[tuple[str, int | None, float]] | None = None,
    users: Mapping[str, User] | str | None = None,
    annotator: str = "local",
    error_types: Sequence[str] = ERROR_TYPES,
    guide: str | None = None,
    overlap: float = 0.0,
    per_item: int = 2,
    blind: float = 0.1,
    gold_every: int = 10,
) -> FastAPI:
    """The ASGI application; `app.state.store` is its `Store`, closed when the application ends.

    Args:
        trajectories: what is labelled.
        db: the SQLite file; made if missing. One server at a time.
        prelabels: a model's labels, shown as such; the last one of a step counts.
        gold: known labels; everybody gets these trajectories now and then, without pre-labels.
        queue: rows of `assign.read_queue`.
        users: who may sign in (`auth.read_users`, or its path). None: one local person without a login, who must reach
            the server by a loopback name.
        annotator: the local person's name.
        error_types: at most 9, the keys Shift+1 to Shift+9.
        guide: the text of the guideline pane; None takes the one that ships.
        overlap, per_item: the share of trajectories that several people get, and how many.
        blind: the share of trajectories whose pre-labels are withheld.
        gold_every: every so many trajectories is a gold one.

    Raises:
        DataError, UsageError: the database cannot be used.
    """
    if isinstance(users, str):
        from labeling.annotate.auth import read_users

        users = read_users(users)
    store = Store(db)
    try:
        plan = make_plan(
            trajectories,
            store.project,
            prelabels=prelabels,
            gold=gold,
            queue=queue,
            overlap=overlap,
            per_item=per_item,
            blind=blind,
            gold_every=gold_every,
        )
        sessions = Sessions(store.secret(), users) if users is not None else None
    except BaseException:
        store.close()
        raise
    text = guide if guide is not None else (resources.files(__package__) / "static" / "guide.txt").read_text("utf-8")
    settings = {"project": store.project, "error_types": list(error_types)[:9], "guide": text}
    local = User(annotator, "", "reviewer")
    steps = {t.id: len(t.steps) for t in plan.trajectories.values()}
    site = Site(store, plan, steps, sessions, local, f"prm_{store.project[:8]}", settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await overview.stop()
        store.close()

    app = FastAPI(title="prm annotate", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.store = store
    app.state.plan = plan
    _pages(app, site)
    _labelling(app, site)
    _reviewing(app, site)
    overview = Overview(store, plan, lambda request: _may(site, request, "reviewer"))
    app.mount("/agreement", overview)
    app.add_exception_handler(PrmError, _answer_error)
    app.add_middleware(Guard, local=sessions is None)
    return app


class Guard:
    """Headers on every answer. Refuses forged requests and, where nobody signs in, names not of this machine."""

    def __init__(self, app: ASGIApp, local: bool) -> None:
        self.app = app
        self.local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        gradio = path.startswith("/agreement")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out["content-security-policy"] = GRADIO if gradio else STRICT
                out["x-content-type-options"] = "nosniff"
                out["referrer-policy"] = "no-referrer"
                out["x-frame-options"] = "DENY"
                out["cross-origin-opener-policy"] = "same-origin"
                out["cross-origin-resource-policy"] = "same-origin"
                if not gradio:
                    out["cache-control"] = "no-store" if path.startswith("/api/") else "no-cache"
            await send(message)

        origin, host = headers.get("origin"), headers.get("host", "")
        refusal = None
        if self.local and not _is_local(host):
            refusal = Response("without --users this server answers on a loopback name only\n", 403)
        elif scope["method"] not in ("GET", "HEAD"):
            foreign = origin is not None and origin.partition("://")[2] != host
            if foreign or (not gradio and "x-prm" not in headers):
                refusal = _json({"error": "the header X-PRM is missing, or the request is another site's"}, 403)
        await (refusal or self.app)(scope, receive, with_headers)


def _is_local(host: str) -> bool:
    """A loopback address, or a name without a dot, which nobody on the internet can own."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return "." not in name or name.endswith(".localhost")


def _who(site: Site, request: Request) -> User:
    if site.sessions is None:
        return site.local
    user = site.sessions.user(request.cookies.get(site.cookie))
    if user is None:
        raise Refused(401, "sign in first")
    return user


def _may(site: Site, request: Request, role: str) -> bool:
    try:
        return _who(site, request).role == role
    except Refused:
        return False


def _reviewer(site: Site, request: Request) -> User:
    user = _who(site, request)
    if user.role != "reviewer":
        raise Refused(403, "this is for reviewers")
    return user


def _same(name: Any, user: User) -> None:
    if name != user.name:
        raise Refused(409, f"this page is of {str(name)[:64]!r}, signed in is now {user.name!r}")


def _pages(app: FastAPI, site: Site) -> None:
    folder = resources.files(__package__) / "static"
    files = {f.name: f.read_bytes() for f in folder.iterdir() if Path(f.name).suffix in TYPES}

    def serve(name: str) -> Response:
        return Response(files[name], media_type=TYPES[Path(name).suffix])

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files or name.endswith(".html"):
            raise Refused(404, "no such file")
        return serve(name)

    def page(request: Request, name: str, role: str | None = None) -> Response:
        try:
            user = _who(site, request)
        except Refused:
            return RedirectResponse("/login", 303)
        if role and user.role != role:
            return RedirectResponse("/", 303)
        return serve(name)

    @app.get("/")
    def label_page(request: Request) -> Response:
        return page(request, "label.html")

    @app.get("/adjudicate")
    def adjudicate_page(request: Request) -> Response:
        return page(request, "adjudicate.html", "reviewer")

    @app.get("/login")
    def login_page() -> Response:
        return serve("login.html") if site.sessions else RedirectResponse("/", 303)

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/manifest.json")
    def manifest() -> Response:
        return _json({})  # the agreement page asks for one

    throttle = Throttle()

    @app.post("/api/login")
    async def login(request: Request) -> Response:
        body = await _body(request)
        name, password = body.get("name"), body.get("password")
        if site.sessions is None or not isinstance(name, str) or not isinstance(password, str):
            raise Refused(400, "expected a name and a password")
        keys = (f"name:{name[:64]}", f"from:{request.client.host if request.client else ''}")
        if left := throttle.wait(*keys):
            seconds = int(left) + 1
            raise Refused(429, f"too many wrong guesses; try again in {seconds} s", {"retry-after": str(seconds)})
        value = await asyncio.to_thread(site.sessions.sign_in, name, password[:1000])
        if value is None:
            raise Refused(401, "name or password is wrong")
        throttle.passed(*keys)
        answer = _json({"name": name})
        secure = request.url.scheme == "https"
        answer.set_cookie(site.cookie, value, SESSION_SECONDS, httponly=True, samesite="lax", secure=secure)
        return answer

    @app.post("/api/logout")
    def logout() -> Response:
        answer = _json({})
        answer.delete_cookie(site.cookie)
        return answer


def _labelling(app: FastAPI, site: Site) -> None:
    store, plan = site.store, site.plan

    @app.get("/api/me")
    def me(request: Request) -> Response:
        user = _who(site, request)
        about = {"name": user.name, "role": user.role, "local": site.sessions is None}
        return _json({**about, **site.settings, "progress": review.progress(store, plan, user.name)})

    @app.post("/api/events")
    async def events(request: Request) -> Response:
        user = _who(site, request)
        body = await _body(request)
        rows = body.get("events")
        if not isinstance(rows, list) or len(rows) > MAX_EVENTS:
            raise Refused(400, f"events must be a list of at most {MAX_EVENTS}")
        _same(body.get("annotator"), user)
        good, refused = [], {}
        for row in rows:
            try:
                event = event_of(row, user.name, site.steps)
            except DataError as error:
                refused[str(row.get("id", "") if isinstance(row, dict) else "")[:200]] = str(error)
                continue
            if event.op == "decision" and user.role != "reviewer":
                refused[event.id] = "decisions are for reviewers"
            else:
                good.append(_completed(plan, event))
        reasons = await asyncio.wrap_future(store.append(good))
        refused |= {event.id: reason for event, reason in zip(good, reasons, strict=True) if reason}
        kept = [event.id for event, reason in zip(good, reasons, strict=True) if not reason]
        return _json({"kept": kept, "refused": refused})

    @app.post("/api/next")
    async def next_one(request: Request) -> Response:
        user = _who(site, request)
        body = await _body(request)
        _same(body.get("annotator", user.name), user)  # a page that was opened as somebody else
        wanted, leave = body.get("id"), body.get("leave")
        seconds = time.time()
        if isinstance(wanted, str) and wanted in plan.trajectories:
            store.touch(user.name, wanted, seconds)
            choice: str | None = wanted
        else:
            choice = next_item(store, plan, user.name, seconds, leave if isinstance(leave, str) else "")
        if choice is None:
            return _json({"item": None, "progress": review.progress(store, plan, user.name)})
        opened = Event(f"open-{now()}-{time.monotonic_ns()}", user.name, choice, None, "open", True, time=now())
        store.append([opened])  # not waited for: a full disk is said where a label is lost, not where one is read
        item = await asyncio.to_thread(_item, site, user.name, choice)
        return _json({"item": item, "progress": review.progress(store, plan, user.name)})

    @app.post("/api/lease/{trajectory_id}")
    def lease(request: Request, trajectory_id: str) -> Response:
        user = _who(site, request)
        if (user.name, trajectory_id) not in store.sheets:
            raise Refused(404, "you have not opened this one")
        store.touch(user.name, trajectory_id, time.time())
        return _json({})

    @app.get("/api/items")
    def items(request: Request) -> Response:
        user = _who(site, request)
        own = sorted(store.own(user.name), key=lambda pair: pair[1].opened)
        return _json(
            [
                {"id": t, "task": plan.trajectories[t].task[:120], "status": s.status, "labels": len(s.ratings())}
                for t, s in own
                if t in plan.trajectories
            ]
        )

    @app.get("/api/export")
    def export(request: Request) -> Response:
        user = _who(site, request)
        wanted = request.query_params.get("annotator")
        if user.role != "reviewer":
            if wanted not in (None, user.name):
                raise Refused(403, "you may export your own labels only")
            wanted = user.name
        only = [p for p in request.query_params.get("provenance", "").split(",") if p]
        if unknown := set(only) - {*PROVENANCES, "adjudicated"}:
            raise Refused(400, f"unknown provenance {', '.join(sorted(unknown))}")
        lines = (dump_json(label.to_dict()) + b"\n" for label in labels(store, wanted, only))
        return _download(lines, "labels.jsonl")


def _reviewing(app: FastAPI, site: Site) -> None:
    store, plan = site.store, site.plan

    @app.get("/api/disagreements")
    def disagreements(request: Request) -> Response:
        _reviewer(site, request)
        return _json(review.disagreements(store, plan))

    @app.get("/api/trajectory/{trajectory_id}")
    def trajectory(request: Request, trajectory_id: str) -> Response:
        _reviewer(site, request)
        if trajectory_id not in plan.trajectories:
            raise Refused(404, "no such trajectory")
        return _json(_text(plan.trajectories[trajectory_id]))

    @app.get("/api/report")
    def report(request: Request) -> Response:
        _reviewer(site, request)
        only = [p for p in request.query_params.get("provenance", "").split(",") if p]
        return _json(review.report(store, plan, only or PROVENANCES))

    @app.get("/api/audit")
    def audit(request: Request) -> Response:
        _reviewer(site, request)
        return _download((dump_json(event.to_dict()) + b"\n" for event in store.events()), "audit.jsonl")


def _completed(plan: Plan, event: Event) -> Event:
    """An event with the server's time and, on a rating, what the person saw of the model's opinion."""
    context = dict(event.context)
    if event.op == "rating":
        context["assist"] = plan.assist(event.trajectory_id)
        said = plan.prelabels.get((event.trajectory_id, event.step or 0))
        if said:
            context["prelabel"] = {"score": said.score, "source": said.source}
    return replace(event, context=context, time=now())


def _item(site: Site, name: str, trajectory_id: str) -> dict[str, Any]:
    """What the browser gets to label. It does not tell a blind or a gold item from one without pre-labels."""
    plan, found = site.plan, site.plan.trajectories[trajectory_id]
    shown = plan.assist(trajectory_id) == "shown"
    said = [plan.prelabels.get((trajectory_id, k)) if shown else None for k in range(len(found.steps))]
    history = [
        {"id": e.id, "step": e.step, "op": e.op, "value": e.value}
        | {k: e.context[k] for k in ("group", "kind", "of") if k in e.context}
        for e in site.store.events(name, trajectory_id)
        if e.op not in ("open", "decision")
    ]
    return {
        **_text(found),
        "prelabels": [{"score": p.score, "source": p.source} if p else None for p in said],
        "asked": [] if trajectory_id in plan.blind else sorted(plan.asked.get(trajectory_id, ())),
        "history": history,
    }


def _text(trajectory: Trajectory) -> dict[str, Any]:
    steps = [{"action": s.action, "observation": s.observation} for s in trajectory.steps]
    return {"id": trajectory.id, "task": trajectory.task, "steps": steps}


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Refused(413, f"more than {MAX_BODY >> 20} MB at once")
    try:
        value = parse_json(bytes(body)) if body else {}
    except DataError as error:
        raise Refused(400, str(error)) from None
    if not isinstance(value, dict):
        raise Refused(400, "expected a JSON object")
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(dump_json(value), status, media_type="application/json")


def _download(lines: Iterator[bytes], name: str) -> Response:
    disposition = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(lines, media_type="application/x-ndjson", headers=disposition)


def _answer_error(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, Refused) else 507 if isinstance(error, StorageError) else 400
    answer = _json({"error": str(error)}, status)
    if isinstance(error, Refused):
        answer.headers.update(error.headers)
    return answer
