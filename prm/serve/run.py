"""`prm serve`: load the model, listen, reload on SIGHUP."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
import sys
from pathlib import Path

from prm.batching import StepScorer
from prm.errors import PrmError, UsageError
from prm.serve.config import ServeConfig


def serve(where: str, config: ServeConfig) -> int:
    """Serve a PRM until interrupted; the exit status."""
    import uvicorn

    from prm.model import PRM
    from prm.serve.app import app

    def load() -> StepScorer:
        made = PRM.load(where, kind=config.kind, prompt=config.prompt, base=config.base, dtype=config.dtype)
        limit = made.settings.max_tokens
        if config.max_tokens is not None:
            if limit is not None and config.max_tokens > limit:
                raise UsageError(f"max_tokens {config.max_tokens} is more than the {limit} that {where} reads")
            made.settings = dataclasses.replace(made.settings, max_tokens=config.max_tokens)
        # Tried on the model when it is first used: better now than while a request waits.
        made.shares  # noqa: B018
        return made

    own = app(load(), config, load=load)
    if config.key() is None and config.host not in ("127.0.0.1", "localhost", "::1"):
        print("prm serve: no PRM_API_KEY is set, anybody who reaches this address may use it", file=sys.stderr)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((config.host, config.port))
        except OSError as error:
            raise UsageError(f"{config.host}:{config.port}: {error.strerror or error}") from None
        # From here on a client may connect: it waits until the server runs.
        listening.listen(1024)
        host = f"[{config.host}]" if family == socket.AF_INET6 else config.host
        print(f"{Path(where).name or where} on http://{host}:{listening.getsockname()[1]}", flush=True)
        server = uvicorn.Server(uvicorn.Config(own, log_level="warning", access_log=False, timeout_keep_alive=30))
        asyncio.run(_run(server, listening, own))
    return 0


async def _run(server: object, listening: socket.socket, own: object) -> None:
    serving, waiting = own.state.serving, set()  # type: ignore[attr-defined]

    async def reload() -> None:
        try:
            changed = await serving.reload()
            print(f"reloaded: {serving.version}{'' if changed else ' (as before)'}", file=sys.stderr)
        except (PrmError, OSError) as error:
            print(f"prm serve: not reloaded, the old model goes on: {error}", file=sys.stderr)

    def hang_up() -> None:
        task = asyncio.ensure_future(reload())
        waiting.add(task)
        task.add_done_callback(waiting.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    await server.serve(sockets=[listening])  # type: ignore[attr-defined]
