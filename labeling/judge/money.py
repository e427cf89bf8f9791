"""What calls cost: prices, a budget that is never exceeded, and a ledger that survives a crash."""

from __future__ import annotations

import fcntl
import math
import os
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from prm.errors import DataError, UsageError
from prm.records import dump_json, parse_json


@dataclass(frozen=True)
class Price:
    """Dollars for a million tokens: `input`, input read from the provider's cache, `output`; the Batch API's factor."""

    input: float
    output: float
    cached: float
    batch: float = 1.0

    def of(self, tokens: Usage, *, batch: bool = False) -> float:
        """Dollars for these tokens. Reasoning tokens are among the output's, as providers bill them."""
        fresh = tokens.input - tokens.cached
        dollars = (fresh * self.input + tokens.cached * self.cached + tokens.output * self.output) / 1e6
        return dollars * (self.batch if batch else 1.0)


@dataclass(frozen=True)
class Usage:
    """Tokens of a call; `cached` is part of `input`, `reasoning` of `output`."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0

    @property
    def total(self) -> int:
        return self.input + self.output

    @staticmethod
    def of(usage: Any) -> Usage | None:
        """The `usage` of a chat completion; None where it is not there or makes no sense."""
        if not isinstance(usage, Mapping):
            return None
        inner = {name: usage.get(f"{name}_tokens_details") for name in ("prompt", "completion")}
        values = [
            usage.get("prompt_tokens"),
            usage.get("completion_tokens", 0),
            (inner["prompt"].get("cached_tokens") if isinstance(inner["prompt"], Mapping) else 0) or 0,
            (inner["completion"].get("reasoning_tokens") if isinstance(inner["completion"], Mapping) else 0) or 0,
        ]
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 10**12 for v in values):
            return None
        read, written, cached, reasoning = values
        return Usage(read, written, min(cached, read), min(reasoning, written))


def load_price(model: str, path: str | None) -> Price | None:
    """The price of a model, of the file or else of those that come along; None where there is none.

    The file's tables are named by model; a name that ends in `*` stands for all that begin like it, the longest first.

    Raises:
        UsageError: the file cannot be read, or a price is no number >= 0.
    """
    try:
        if path is None:
            text = (resources.files("labeling.judge") / "prices.toml").read_text(encoding="utf-8")
        else:
            text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--prices {path}: cannot be read: {error}") from None
    stars = sorted((n for n in table if n.endswith("*") and model.startswith(n[:-1])), key=len, reverse=True)
    name = next((n for n in (model, *stars) if n in table), None)
    if name is None:
        return None
    row, where = table[name], f"{path or 'prices.toml'}: {name}"
    if not isinstance(row, dict) or set(row) - {"input", "output", "cached", "batch"}:
        raise UsageError(f"{where}: expected input, output, cached and batch, got {row!r:.80}")
    row = {"cached": row.get("input"), "batch": 1.0, **row}
    for key in ("input", "output", "cached", "batch"):
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UsageError(f"{where}: {key} must be a number >= 0, got {value!r}")
    return Price(**{key: float(value) for key, value in row.items()})


class Budget:
    """Bounds on what is spent: dollars, tokens or neither. A call reserves the most it can cost before it is made.

    Args:
        usd, tokens: the bounds, None for none.
        spent_usd, spent_tokens: what earlier runs spent.
    """

    def __init__(self, usd: float | None, tokens: int | None, spent_usd: float = 0.0, spent_tokens: int = 0) -> None:
        self.usd, self.tokens = usd, tokens
        self.spent_usd, self.spent_tokens = spent_usd, spent_tokens
        self._reserved_usd, self._reserved_tokens, self._calls = 0.0, 0, 0
        self._change = threading.Condition()

    def reserve(self, usd: float, tokens: int, stop: threading.Event | None = None, *, wait: bool = True) -> bool:
        """Set aside for one call; waits while calls in flight may yet free enough. False where it does not fit."""
        with self._change:
            while not self._fits(usd, tokens):
                if not wait or self._calls == 0 or (stop is not None and stop.is_set()):
                    return False
                self._change.wait(0.5)
            self._reserved_usd += usd
            self._reserved_tokens += tokens
            self._calls += 1
            return True

    def adopt(self, usd: float, tokens: int) -> None:
        """A call that an earlier process left in flight, and that was counted as spent, is ours to settle."""
        with self._change:
            self.spent_usd -= usd
            self.spent_tokens -= tokens
            self._reserved_usd += usd
            self._reserved_tokens += tokens
            self._calls += 1

    def settle(self, reserved_usd: float, reserved_tokens: int, usd: float, tokens: int) -> None:
        """Put what a call did cost in the place of what was reserved for it."""
        with self._change:
            self._reserved_usd -= reserved_usd
            self._reserved_tokens -= reserved_tokens
            self._calls -= 1
            self.spent_usd += usd
            self.spent_tokens += tokens
            self._change.notify_all()

    def _fits(self, usd: float, tokens: int) -> bool:
        dollars = self.spent_usd + self._reserved_usd + usd
        count = self.spent_tokens + self._reserved_tokens + tokens
        return (self.usd is None or dollars <= self.usd) and (self.tokens is None or count <= self.tokens)


class Ledger:
    """One line before a call and one after it, each on disk before anything depends on it.

    The first is on disk before the call is made, the second with the next first one, or before labels are written. A
    call without its second line was in flight when the process died: it may have been paid, and counts as such.

    Args:
        path: the file; None keeps the lines in memory.

    Raises:
        UsageError: another process writes this ledger.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._written = self._synced = 0
        self._handle = -1
        if path is None:
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UsageError(f"{path}: another run is writing to it") from None
        self.rows = list(read_ledger(path))
        _end_line(self._handle)

    def write(self, row: dict[str, Any], *, durable: bool = True) -> None:
        """Append a line; with `durable` it and those before it are on disk when this returns."""
        with self._lock:
            self.rows.append(row)
            if self._handle < 0:
                return
            rest = memoryview(dump_json(row) + b"\n")
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            self._written += 1
            mine = self._written
        if durable:
            self.sync(mine)

    def sync(self, line: int | None = None) -> None:
        """Wait until that line (default: all) is on disk; the file system groups calls at the same time."""
        reached = self._written
        if self._handle >= 0 and self._synced < (reached if line is None else line):
            os.fdatasync(self._handle)
            self._synced = max(self._synced, reached)

    def spent(self) -> tuple[float, int, int]:
        """(dollars, tokens, calls without an end) of all lines; those calls count with what was reserved for them."""
        return spent(self.rows)

    def close(self) -> None:
        if self._handle >= 0:
            self.sync()
            os.close(self._handle)
            self._handle = -1


def read_ledger(path: str) -> Iterator[dict[str, Any]]:
    """The lines of a ledger; one that a crash tore is passed over, and counted on stderr. Raises DataError."""
    torn = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except DataError:
                torn += 1
                continue
            if not isinstance(row, dict) or not isinstance(row.get("event"), str):
                raise DataError(f"{path}:{number}: not a line of a ledger: {line[:60]!r}")
            yield row
    if torn:
        print(f"{path}: {torn} torn lines passed over", file=sys.stderr)


def spent(rows: list[dict[str, Any]]) -> tuple[float, int, int]:
    """(dollars, tokens, calls that have no end line) of a ledger's lines."""
    dollars, tokens = 0.0, 0
    open_calls: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if row["event"] == "start":
            open_calls[row.get("id")] = row
        elif row["event"] == "end":
            open_calls.pop(row.get("id"), None)
            dollars += row.get("usd") or 0.0
            tokens += row.get("tokens") or 0
    for row in open_calls.values():
        dollars += row.get("reserved_usd") or 0.0
        tokens += row.get("reserved_tokens") or 0
    return dollars, tokens, len(open_calls)


def _end_line(handle: int) -> None:
    """A torn last line keeps its bytes and gets an end, so that the next line is whole."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        os.write(handle, b"\n")
