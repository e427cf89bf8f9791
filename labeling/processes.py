"""Objects that live in processes of their own, so that one that hangs or crashes can be killed and costs one call."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from prm.errors import UsageError

MAKING = 60.0  # seconds that starting a process and making the object may take at least


class RemoteError(RuntimeError):
    """The object raised, its process died, or it did not answer in time. The message says which."""


class Remote:
    """An object in another process; started when first needed, and again after it was killed.

    Args:
        make: makes the object; found by its name in the other process, so a class or function of a module, or a partial
            of one.
        timeout: seconds that a call may take.

    Raises:
        UsageError: `make` has no name that another process could import.
    """

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        try:
            self._make = pickle.dumps(make)
            if b"__main__" in self._make:
                raise pickle.PicklingError("it belongs to the script that runs")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{make!r:.80} cannot run in a process of its own: {error}; name a class or function of a module"
            ) from None
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the object's method returns; the value of an attribute; None where it has neither."""
        if self._connection is None:
            self._ask(self._start(), "")
        return self._ask(self._connection, method, *args, **kwargs)

    @property
    def running(self) -> bool:
        return self._connection is not None

    def renew(self) -> None:
        """Make the object anew."""
        self._ask(self._connection or self._start(), "")

    def _ask(self, connection: Connection | None, method: str, *args: Any, **kwargs: Any) -> Any:
        assert connection is not None
        try:
            connection.send((method, args, kwargs))
            allowed = self.timeout if method else max(self.timeout, MAKING)
            if not connection.poll(allowed):
                raise RemoteError(f"no answer to {method or 'its making'} within {allowed:g} s; killed")
            ok, result = connection.recv()
        except (EOFError, OSError):
            self.close()
            raise RemoteError(f"its process died in {method or 'its making'}") from None
        except RemoteError:
            self.close()
            raise
        if not ok:
            raise RemoteError(result)
        return result

    def close(self) -> None:
        """Kill the process."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from labeling.processes import _serve; _serve({theirs.fileno()})"
            paths = os.pathsep.join([p or os.getcwd() for p in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints is no product of ours
                env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is the parent's to handle; when it ends, so do we
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(self._make)
        return self._connection


class ProcessEnv:
    """An environment (`prm.env.Env`) in a process of its own, made anew at each reset."""

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        self._remote = Remote(make, timeout)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        kwargs: dict[str, Any] = {"seed": seed}
        if options is not None:
            kwargs["options"] = options
        self._remote.renew()
        return self._remote.call("reset", **kwargs)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self._call("step", action)

    def tools(self) -> list[dict[str, Any]]:
        return self._call("tools") or []

    @property
    def continues_text(self) -> bool:
        return bool(self._call("continues_text"))

    def begin_continuation(self) -> None:
        # A process that dies here is missed at the next step.
        with contextlib.suppress(RemoteError):
            self._call("begin_continuation")

    def _call(self, method: str, *args: Any) -> Any:
        if not self._remote.running:
            raise RemoteError(f"the process is gone, {method} needs a reset first")
        return self._remote.call(method, *args)

    def close(self) -> None:
        self._remote.close()


def _serve(handle: int) -> None:
    """The other process: make the object, answer calls until the connection closes."""
    connection = Connection(handle)
    make: Any = None
    made: Any = None
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        first = connection.recv_bytes()
        while True:
            method, args, kwargs = connection.recv()
            try:
                if not method:
                    make = make or pickle.loads(first)
                    made, result = make(), None
                else:
                    found = getattr(made, method, None)
                    result = found(*args, **kwargs) if callable(found) else found
                reply = pickle.dumps((True, result))
            except Exception as error:
                reply = pickle.dumps((False, f"{type(error).__name__}: {error}"))
            connection.send_bytes(reply)
