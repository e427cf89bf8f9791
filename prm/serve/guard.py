"""What stands before every route: the key, the size of a body, and how long it may take to come."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from typing import Any

from prm.serve.config import ServeConfig
from prm.serve.metrics import Metrics

OPEN = ("/healthz",)


class Guard:
    """ASGI middleware: 401 without the key, 413 for a body over the limit, 408 for one that does not come.

    The body is read whole before a route sees it, never more than the limit of it. Every answer is counted.
    """

    def __init__(self, app: Any, *, api_key: str | None, config: ServeConfig, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics
        self.max_body_bytes, self.timeout = config.max_body_bytes, config.timeout
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), "none"

        async def counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._guarded(scope, receive, counted)
        finally:
            # A path that is no route is not a label: anybody can make those up.
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.add("prm_requests_total", route=route, status=status)
            self.metrics.observe("prm_request_seconds", time.perf_counter() - start, route=route)

    async def _guarded(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {k.lower(): v for k, v in scope["headers"]}
        if self._key is not None and scope["path"] not in OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):
                await _answer(send, 401, "the API key is missing or wrong", (b"www-authenticate", b"Bearer"))
                return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            await _answer(send, 400, "content-length is no number")
            return
        too_large = f"the body is larger than {self.max_body_bytes} bytes"
        if int(length[:18]) > self.max_body_bytes or len(length) > 18:
            await _answer(send, 413, too_large)
            return
        body = bytearray()
        try:
            async with asyncio.timeout(self.timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.max_body_bytes:
                        await _answer(send, 413, too_large)
                        return
        except TimeoutError:
            await _answer(send, 408, f"the body did not come within {self.timeout:g} s")
            return
        given_body = False

        async def replay() -> Any:
            nonlocal given_body
            if given_body:
                return await receive()
            given_body = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, replay, send)


async def _answer(send: Any, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"detail": detail}).encode()
    # What is left of the body is not read, so the connection cannot be used again.
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})
