"""Labels from people as events in SQLite: append-only, durable before they are acknowledged, state derived from them.

One process writes. All events go through one thread that commits what is waiting in one transaction (group commit), in
WAL mode with `synchronous=FULL`. An event has an id made by its client, so a resend is no second label.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prm.errors import DataError, PrmError, UsageError

APPLICATION = 0x50524D4C  # "PRML", SQLite's mark of whose file this is
RATINGS = {"bad": 0.0, "neutral": 0.5, "good": 1.0}
PROVENANCES = ("manual", "accepted", "bulk", "first_error_fill", "import")
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS event(
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  event_id TEXT NOT NULL, annotator TEXT NOT NULL, trajectory_id TEXT NOT NULL, step INTEGER,
  op TEXT NOT NULL, value TEXT NOT NULL, context TEXT NOT NULL, client_time TEXT NOT NULL, time TEXT NOT NULL,
  UNIQUE(annotator, event_id));
CREATE INDEX IF NOT EXISTS event_item ON event(annotator, trajectory_id, seq);
CREATE TRIGGER IF NOT EXISTS event_no_update BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS event_no_delete BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""
COLUMNS = "event_id, annotator, trajectory_id, step, op, value, context, client_time, time"


class StorageError(PrmError, RuntimeError):
    """The database cannot take an event now (a full disk, a failing one); nothing of it was kept."""


@dataclass(frozen=True)
class Event:
    """One thing that one person did to one step, or to a whole trajectory (`step` None).

    Args:
        id: made by the client, unique for the annotator.
        op: "rating", "confidence", "errors", "comment", "flag", "decision" on a step; "open", "submit", "skip" on a
            trajectory.
        value: what the field is now; None clears it.
        context: `group` (the events of one key press), `kind` ("do", "undo", "redo"), `of` (the group undone), and
            what the server adds: `assist` ("shown", "blind", "none") and `prelabel` ({"score", "source"}).
        client_time, time: ISO 8601 in UTC, of the browser and of the server.
    """

    id: str
    annotator: str
    trajectory_id: str
    step: int | None
    op: str
    value: Any
    context: dict[str, Any] = field(default_factory=dict)
    client_time: str = ""
    time: str = ""

    def row(self) -> tuple[Any, ...]:
        """As the table holds it."""
        texts = (_dump(self.value), _dump(self.context))
        return (self.id, self.annotator, self.trajectory_id, self.step, self.op, *texts, self.client_time, self.time)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the audit trail."""
        return dict(vars(self))


@dataclass
class Sheet:
    """What one person has said about one trajectory: the latest event of each field of each step."""

    latest: dict[tuple[int | None, str], Event] = field(default_factory=dict)
    opened: float = 0.0  # when it was last touched, seconds since the epoch: what a lease runs from

    def get(self, step: int | None, op: str) -> Any:
        """The value of a field, None where it was never set or was cleared."""
        event = self.latest.get((step, op))
        return event.value if event else None

    @property
    def status(self) -> str:
        """ "submitted", "skipped" or "open"."""
        return "submitted" if self.get(None, "submit") else "skipped" if self.get(None, "skip") else "open"

    def ratings(self) -> dict[int, Event]:
        """The rating event of each labelled step."""
        copied = list(self.latest.items())  # the writer's thread may add to it meanwhile
        found = {k: e for (k, op), e in copied if op == "rating" and e.value and k is not None}
        return dict(sorted(found.items()))


class Store:
    """The database, and the state derived from it.

    Args:
        path: the SQLite file; made when `write` and missing.
        write: take the one writer's lock. Without it only what is there is read.

    Raises:
        DataError: the file is missing, no SQLite database, or another program's.
        UsageError: another process writes to it.
    """

    def __init__(self, path: str | os.PathLike[str], *, write: bool = True) -> None:
        self.path = Path(path)
        self.sheets: dict[tuple[str, str], Sheet] = {}
        self.people: dict[str, set[str]] = {}  # trajectory -> annotators with a sheet
        self._own: dict[str, set[str]] = {}  # the reverse
        self.decisions: dict[tuple[str, int], Event] = {}
        self._key_file: int | None = None
        self._waiting: queue.SimpleQueue[tuple[list[Event], Future[list[str]]] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._reading = threading.Lock()
        if not write and not self.path.is_file():
            raise DataError(f"{path}: no such file")
        if self.path.is_dir():
            raise DataError(f"{path}: is a directory, expected an SQLite file")
        try:
            with contextlib.closing(self._connect()) as db:
                _check(db, self.path)  # before anything is written beside a file that is not ours
            if write:
                self._lock()
            self._db = self._connect()
            if write:
                _prepare(self._db)
            self.project = str(self._db.execute("SELECT value FROM meta WHERE key = 'project'").fetchone()[0])
            for event in self.events():
                self._apply(event)
        except sqlite3.DatabaseError as error:
            self.close()
            raise DataError(f"{path}: cannot be used as a label database: {error}") from None
        except BaseException:
            self.close()
            raise
        if write:
            self._writer = threading.Thread(target=self._write, name="labels", daemon=True)
            self._writer.start()

    def append(self, events: Sequence[Event]) -> Future[list[str]]:
        """Keep events durably. The future gives, for each, "" or why it was not kept.

        The future raises StorageError when the database fails; nothing of these events is kept then.
        """
        future: Future[list[str]] = Future()
        if self._writer is None:
            raise StorageError(f"{self.path}: is not open for writing")
        self._waiting.put((list(events), future))
        return future

    def events(self, annotator: str | None = None, trajectory_id: str | None = None) -> Iterator[Event]:
        """The events in the order they came, of everyone or of one person on one trajectory."""
        where, values = "", ()
        if annotator is not None:
            where, values = "WHERE annotator = ? AND trajectory_id = ?", (annotator, trajectory_id)  # type: ignore[assignment]
        last = 0
        while True:
            limit = f"{where} {'AND' if where else 'WHERE'} seq > ? ORDER BY seq LIMIT 1000"
            with self._reading:
                rows = self._db.execute(f"SELECT seq, {COLUMNS} FROM event {limit}", (*values, last)).fetchall()
            for seq, key, who, item, step, op, value, context, client_time, time in rows:
                yield Event(key, who, item, step, op, json.loads(value), json.loads(context), client_time, time)
                last = seq
            if len(rows) < 1000:
                return

    def secret(self) -> bytes:
        """32 bytes that only this project knows, from a file beside the database that its owner alone can read."""
        return bytes.fromhex(Path(f"{self.path}.key").read_text().strip())

    def sheet(self, annotator: str, trajectory_id: str) -> Sheet:
        """One person's sheet; an empty one that is not kept where there is none."""
        return self.sheets.get((annotator, trajectory_id)) or Sheet()

    def own(self, annotator: str) -> list[tuple[str, Sheet]]:
        """A person's trajectories and sheets."""
        return [(t, self.sheets[annotator, t]) for t in sorted(self._own.get(annotator, set()).copy())]

    def touch(self, annotator: str, trajectory_id: str, now: float) -> None:
        """Start or lengthen a person's lease on a trajectory; in memory, rebuilt from the events after a restart."""
        sheet = self.sheets.setdefault((annotator, trajectory_id), Sheet())
        sheet.opened = max(sheet.opened, now)
        self.people.setdefault(trajectory_id, set()).add(annotator)
        self._own.setdefault(annotator, set()).add(trajectory_id)

    def close(self) -> None:
        """Write what is waiting, and let another process have the database."""
        if self._writer:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None
        if hasattr(self, "_db"):
            self._db.close()
        if self._key_file is not None:
            os.close(self._key_file)
            self._key_file = None

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous = FULL")
        return db

    def _lock(self) -> None:
        """The key file is the lock too: locking the database file itself would collide with SQLite's own locks."""
        self._key_file = os.open(f"{self.path}.key", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._key_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{self.path}: another prm annotate is using it") from None
        if os.fstat(self._key_file).st_size != 65:
            os.ftruncate(self._key_file, 0)
            os.pwrite(self._key_file, secrets.token_bytes(32).hex().encode() + b"\n", 0)
            os.fsync(self._key_file)

    def _write(self) -> None:
        db = self._connect()
        while (item := self._waiting.get()) is not None:
            batch = [item]
            while not self._waiting.empty() and len(batch) < 64:
                more = self._waiting.get()
                if more is None:
                    self._waiting.put(None)
                    break
                batch.append(more)
            try:
                results = self._commit(db, [events for events, _ in batch])
            except Exception as error:  # this thread must outlive whatever happens to one batch
                for _, future in batch:
                    future.set_exception(StorageError(f"{self.path}: {error}"))
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    future.set_result(result)
        db.close()

    def _commit(self, db: sqlite3.Connection, lists: list[list[Event]]) -> list[list[str]]:
        results, new = [], []
        db.execute("BEGIN IMMEDIATE")
        try:
            for events in lists:
                reasons = []
                for event in events:
                    sql = f"INSERT INTO event({COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT DO NOTHING"
                    if db.execute(sql, event.row()).rowcount:
                        new.append(event)
                        reasons.append("")
                    else:
                        reasons.append(_resent(db, event))
                results.append(reasons)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        for event in new:
            self._apply(event)
        return results

    def _apply(self, event: Event) -> None:
        if event.op == "decision":
            if event.step is not None:
                self.decisions[(event.trajectory_id, event.step)] = event
            return
        seen = 0.0 if event.context.get("imported") else _seconds(event.time)
        self.touch(event.annotator, event.trajectory_id, seen)
        self.sheets[(event.annotator, event.trajectory_id)].latest[(event.step, event.op)] = event


def now() -> str:
    """The time, ISO 8601 in UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _seconds(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return 0.0


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)  # ASCII, so that any text a browser can send is kept


def _resent(db: sqlite3.Connection, event: Event) -> str:
    """ "" where the event with this id is the same one, sent again; else why not."""
    sql = "SELECT trajectory_id, step, op, value FROM event WHERE annotator = ? AND event_id = ?"
    kept = db.execute(sql, (event.annotator, event.id)).fetchone()
    same = kept == (event.trajectory_id, event.step, event.op, _dump(event.value))
    return "" if same else f"the id {event.id!r} was used for another event"


def _check(db: sqlite3.Connection, path: Path) -> None:
    mark = db.execute("PRAGMA application_id").fetchone()[0]
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if mark != APPLICATION and (mark or tables):
        raise DataError(f"{path}: is the database of another program, expected one made by prm annotate")


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.executescript(SCHEMA)
    db.execute("INSERT INTO meta VALUES ('project', ?) ON CONFLICT DO NOTHING", (secrets.token_hex(8),))
