"""A PRM behind HTTP (`prm serve`), used as if it were here."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prm.batching import chunks, labels_of
from prm.errors import DataError, ModelError, UsageError
from prm.records import StepLabel, Trajectory, dump_json, parse_json

RETRIED = (429, 502, 503, 504)
KEY_VARIABLE = "PRM_API_KEY"


def load_prm(path: str | os.PathLike[str], **options: Any) -> Any:
    """A PRM from wherever it is: an address (http://...), a folder, or a hub id.

    Args:
        path: what the command line calls MODEL.
        options: those of `PRM.load`; an address takes none, as its server has chosen.
    """
    if is_url(path):
        given = {k for k, v in options.items() if v not in (None, False, "auto")}
        if given:
            raise UsageError(f"{path}: is a server, which has its own {', '.join(sorted(given))}")
        return RemotePRM.load(str(path))
    from prm.model import PRM

    return PRM.load(path, **options)


def is_url(path: str | os.PathLike[str]) -> bool:
    return str(path).startswith(("http://", "https://"))


@dataclass(frozen=True)
class RemoteSettings:
    """What `PRM.settings` has that a caller may want."""

    threshold: float
    max_tokens: int | None


class RemotePRM:
    """Scores by a server. Drop-in for `PRM` where it scores: `score`, `label`, `stream`, `session`, `fingerprint`.

    A busy server (429, 503) is asked again after the time that it names, and so is one that cannot be reached, with
    growing pauses, until `retries` are used up.

    Attributes:
        name: the model's name at the server.
        settings: its threshold, and the most tokens it reads at once.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0, retries: int = 8) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise UsageError(f"{url!r}: expected an address such as http://localhost:8000: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r}: expected an address such as http://localhost:8000")
        if timeout <= 0 or retries < 0:
            raise UsageError(f"timeout must be > 0 and retries >= 0, got {timeout} and {retries}")
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self._parts, self._path = parts, parts.path.rstrip("/")
        self._key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE)
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise UsageError(f"the API key ({KEY_VARIABLE}) must be printable ASCII, as it travels in a header")
        health = self._call("GET", "/healthz")
        try:
            self.name, self._version = str(health["model"]), str(health["version"])
            self.settings = RemoteSettings(float(health["threshold"]), health["max_tokens"])
            self._limits = {k: int(health[k]) for k in ("max_trajectories", "max_body_bytes")}
            most = self.settings.max_tokens
            if not 0 <= self.settings.threshold <= 1 or min(1 if most is None else most, *self._limits.values()) < 1:
                raise ValueError("a threshold outside [0, 1], or a limit below 1")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ModelError(f"{url}: answers, but not as `prm serve` does") from None

    @classmethod
    def load(cls, url: str, **options: Any) -> RemotePRM:
        """Connect; see the class. Raises ModelError: nothing that scores is there."""
        return cls(url, **options)

    def score(self, trajectories: Sequence[Trajectory], *, batch_tokens: int | None = None) -> list[list[float]]:
        """As `PRM.score`; `batch_tokens` is the server's own.

        Raises:
            DataError: a trajectory that the server cannot read, with its reason.
            ModelError: the server is away, refuses the key, or is busy for longer than the retries last.
        """
        out: list[list[float]] = []
        for body, count in self._bodies(trajectories):
            answer = self._call("POST", "/score", body)
            results = answer.get("results") if isinstance(answer, dict) else None
            if not isinstance(results, list) or len(results) != count:
                raise ModelError(f"{self.url}/score: expected {count} results, got {str(answer)[:80]}")
            try:
                found = [[float(s) for s in result["scores"]] for result in results]
                self._version = str(answer["version"])
            except (KeyError, TypeError, ValueError):
                raise ModelError(f"{self.url}/score: expected scores and a version, got {str(answer)[:80]}") from None
            if wrong := [s for one in found for s in one if not 0 <= s <= 1]:
                raise ModelError(f"{self.url}/score: expected scores in [0, 1], got {wrong[0]}")
            out += found
        for trajectory, own in zip(trajectories, out, strict=True):
            if len(own) != len(trajectory.steps):
                raise ModelError(f"{self.url}/score: {len(own)} scores for {len(trajectory.steps)} steps")
        return out

    def label(self, trajectories: Sequence[Trajectory], *, batch_tokens: int | None = None) -> list[StepLabel]:
        """As `PRM.label`: the meta holds the version that the server gave with the scores."""
        return labels_of(self, trajectories, self.score(trajectories))

    def stream(self, trajectories: Iterable[Trajectory]) -> Iterator[tuple[Trajectory, list[float]]]:
        """As `PRM.stream`."""
        for chunk in chunks(trajectories):
            yield from zip(chunk, self.score(chunk), strict=True)

    def session(self, *, keep_tokens: int = 0) -> RemotePRM:
        """Itself: what to keep is the server's business."""
        return self

    def fingerprint(self) -> str:
        """The version of the model as of the last answer."""
        return self._version

    def _bodies(self, trajectories: Sequence[Trajectory]) -> Iterator[tuple[bytes, int]]:
        """Requests that keep to the server's limits. A trajectory that is too large alone is sent, and refused."""
        rows: list[bytes] = []
        size = 0
        # Many small requests are batched by the server, and a failed one costs less.
        most, most_bytes = min(64, self._limits["max_trajectories"]), self._limits["max_body_bytes"] - 64
        for trajectory in trajectories:
            row = trajectory.to_dict()
            meta = {k: v for k, v in row["meta"].items() if k == "tools"}
            line = dump_json({"task": row["task"], "steps": row["steps"], "meta": meta})
            if rows and (len(rows) == most or size + len(line) > most_bytes):
                yield _body(rows), len(rows)
                rows, size = [], 0
            rows.append(line)
            size += len(line) + 1
        if rows:
            yield _body(rows), len(rows)

    def _call(self, method: str, route: str, body: bytes | None = None) -> Any:
        reason = ""
        for attempt in range(self.retries + 1):
            try:
                status, headers, data = self._once(method, self._path + route, body)
            except (OSError, http.client.HTTPException) as error:
                reason, wait = f"{type(error).__name__}: {error}", None
            else:
                if status == 200:
                    return _parsed(self.url + route, data)
                reason = _reason(status, data)
                if status in (400, 409, 413, 422) and body is not None:
                    raise DataError(f"{self.url}{route}: {reason}")
                if status not in RETRIED:
                    raise ModelError(f"{self.url}{route}: {reason}")
                wait = _seconds(headers.get("Retry-After"))
            if attempt < self.retries:
                pause = min(0.1 * 2**attempt, 10.0) if wait is None else wait
                # Clients that were turned away together must not come back together.
                time.sleep(pause * random.uniform(1.0, 1.25))
        raise ModelError(f"{self.url}{route}: given up after {self.retries + 1} tries: {reason}")

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, Any, bytes]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()


def _body(rows: list[bytes]) -> bytes:
    return b'{"long": "windows", "trajectories": [' + b",".join(rows) + b"]}"


def _parsed(where: str, data: bytes) -> Any:
    try:
        return parse_json(data)
    except DataError as error:
        raise ModelError(f"{where}: the answer is {error}") from None


def _reason(status: int, data: bytes) -> str:
    try:
        detail = json.loads(data)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = data[:80].decode("utf-8", "replace")
    return f"{status}: {detail}"


def _seconds(value: str | None) -> float | None:
    try:
        return min(max(float(value), 0.0), 60.0) if value is not None else None
    except ValueError:
        return None
