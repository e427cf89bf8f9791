"""Clients for threads that call at the same time.

A pool that all threads share looks through all its connections at each call, which costs more than the rest of a call.
So each thread has a client with a connection of its own, whose requests are built from its first one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prm.records import dump_json

if TYPE_CHECKING:
    from openai import OpenAI


class Connections:
    """A client like `client` for each thread; `client` itself where the caller chose how to connect, or it is no plain
    `openai.OpenAI` (Azure), or has not the parts that a client of its own is made from.
    """

    def __init__(self, client: OpenAI) -> None:
        self.client = client
        self._own = threading.local()
        self._lock = threading.Lock()
        self._tls: Any = None

    def get(self) -> OpenAI:
        """The client for this thread."""
        if (client := getattr(self._own, "client", None)) is None:
            client = self._own.client = self._made()
        return client

    def close(self) -> None:
        """Close this thread's own connection, if there is one; `get` makes another."""
        client, self._own.client = getattr(self._own, "client", None), None
        if client is not None and client is not self.client:
            client.close()

    def _made(self) -> OpenAI:
        try:
            import httpx2
            from openai import DefaultHttpxClient, OpenAI
            from openai._base_client import SyncHttpxClientWrapper  # what a client has that was given none
        except ImportError:  # another version of openai
            return self.client
        given = self.client._client if type(self.client) is OpenAI else None
        if type(given) is not SyncHttpxClientWrapper or not isinstance(given, httpx2.Client):
            return self.client
        with self._lock:
            self._tls = self._tls or httpx2.create_ssl_context()
        own = DefaultHttpxClient(verify=self._tls, base_url=self.client.base_url, timeout=self.client.timeout)
        client = self.client.with_options(http_client=own)
        client._build_request = _built_once(client)  # type: ignore[method-assign]
        return client


def _built_once(client: OpenAI) -> Callable[..., Any]:
    """A `_build_request` for requests that differ in nothing but their JSON: URL and headers are made once a key."""
    import httpx2

    whole, made = client._build_request, dict[str, tuple[Any, list[tuple[str, str]]]]()

    def build(options: Any, **more: Any) -> Any:
        if client.api_key not in made:
            first = whole(options, **more)
            headers = [(k, v) for k, v in first.headers.multi_items() if k.lower() != "content-length"]
            made.clear()
            made[client.api_key] = (first, headers)
            return first
        first, headers = made[client.api_key]
        content = dump_json(options.json_data)
        return httpx2.Request("POST", first.url, headers=headers, content=content, extensions=first.extensions)

    return build
