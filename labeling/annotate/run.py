"""`prm annotate`: serve the labelling page, or without a browser export, import, hash a password."""

from __future__ import annotations

import contextlib
import getpass
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from labeling.annotate.auth import hash_password, read_users
from labeling.annotate.exchange import NAME, import_events, labels
from labeling.annotate.store import PROVENANCES, Store, now
from prm.config import option, save
from prm.errors import DataError, UsageError
from prm.records import StepLabel, Trajectory, dump_json, read_jsonl

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AnnotateConfig:
    """Options of `prm annotate`."""

    db: str | None = option(None, "the SQLite file that keeps the labels (required, but for --hash-password)")
    annotator: str = option("local", "your name, where nobody signs in")
    users: str | None = option(None, "who may sign in: a TOML file of names, password hashes and roles")
    prelabels: tuple[str, ...] = option((), "label files of a model, shown as such")
    gold: tuple[str, ...] = option((), "label files with known answers; everybody gets these trajectories")
    queue: str | None = option(None, "what to label first, as prm select writes it; else the uncertain pre-labels")
    overlap: float = option(0.0, "share of trajectories that several people get")
    per_item: int = option(2, "how many people get each of those")
    blind: float = option(0.1, "share of trajectories whose pre-labels are withheld")
    gold_every: int = option(10, "every so many trajectories a person gets a gold one")
    error_types: tuple[str, ...] = option((), "the error types to choose from, at most 9; else seven common ones")
    guide: str | None = option(None, "a text file for the guideline pane; else a short one")
    host: str = option("127.0.0.1", "the address to listen on; another than loopback needs --users")
    port: int = option(7860, "the port; 0 takes a free one")
    export: str | None = option(None, "write the labels to this file and end; - is stdout")
    provenance: tuple[str, ...] = option((), "export only labels that came about so: " + ", ".join(PROVENANCES))
    audit: str | None = option(None, "write every event to this file and end; - is stdout")
    import_labels: tuple[str, ...] = option((), "take in earlier labels of people; ends, where no TRAJ is given")
    hash_password: bool = option(False, "read a password and print its hash for the users file")
    skip_bad: bool = option(False, "count bad rows of the input files and go on")


def annotate(trajectories: str | None, config: AnnotateConfig) -> int:
    """Do what the options say; the exit status. Serves until interrupted.

    Raises:
        DataError, UsageError: a file or an option is not what it should be.
    """
    if config.hash_password:
        typed = getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
        print(hash_password(typed))
        return 0
    if config.db is None:
        raise UsageError("--db is required")
    _check(config)
    if config.export or config.audit:
        store = Store(config.db, write=False)
        if config.export:
            wanted = labels(store, None, config.provenance)
            _write(config.export, (label.to_dict() for label in wanted), "labels")
        if config.audit:
            _write(config.audit, (event.to_dict() for event in store.events()), "events")
        store.close()
        return 0
    records = read_labels(config.import_labels, config)
    if trajectories is None and not config.import_labels:
        raise UsageError("give a file of trajectories, or one of --export, --audit, --import-labels")
    if records:
        store = Store(config.db)
        try:
            taken, passed = import_labels(store, records)
        finally:
            store.close()
        print(f"{config.db}: {taken} labels imported, {passed} passed over (the person has rated that step already)")
    if trajectories is None:
        return 0
    return _serve(trajectories, config)


def import_labels(store: Store, records: Sequence[StepLabel]) -> tuple[int, int]:
    """Take in earlier labels; a step that its person has rated already stays as it is. Returns (taken, passed over).

    Raises:
        DataError: a label is not of a person, or the database refused it.
    """
    events, taken, passed = [], 0, 0
    for event in import_events(records):
        there = store.sheet(event.annotator, event.trajectory_id).ratings()
        if event.op == "decision":
            known = store.decisions.get((event.trajectory_id, event.step or 0)) is not None
        else:
            known = event.step in there
        counts = event.op in ("rating", "decision")
        passed += known and counts
        taken += counts and not known
        if not known:
            events.append(replace(event, time=now()))
    rest = iter(events)
    while chunk := list(islice(rest, 1000)):
        store.append(chunk).result()
    return taken, passed


def read_labels(files: Iterable[str], config: AnnotateConfig) -> list[StepLabel]:
    """The labels of several files, one after the other; a file without any is an error."""
    found: list[StepLabel] = []
    for name in files:
        own = read_jsonl(name, StepLabel, skip_bad=config.skip_bad)
        if not own:
            raise DataError(f"{name}: holds no label")
        found += own
    return found


def serve(app: Any, host: str, port: int, started: Callable[[str], Any] = lambda url: None) -> int:
    """Serve an application until interrupted, and say where. Raises UsageError where the port is taken."""
    import uvicorn

    from labeling.annotate.show import check_port

    check_port(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named: 40 ms an answer
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listening.getsockname()[1]}/"
    print(f"{url}   (Ctrl+C ends)", flush=True)
    started(url)
    options: dict[str, Any] = {"log_level": "warning", "server_header": False, "timeout_graceful_shutdown": 2}
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[listening])
    return 0


def _serve(trajectories: str, config: AnnotateConfig) -> int:
    from labeling.annotate.assign import read_queue
    from labeling.annotate.server import ERROR_TYPES, make_app

    assert config.db is not None
    items = read_jsonl(trajectories, Trajectory, skip_bad=config.skip_bad)
    if not items:
        raise DataError(f"{trajectories}: holds no trajectory")
    known = {t.id for t in items}
    if len(known) < len(items):
        print(f"{trajectories}: {len(items) - len(known)} trajectories are there twice, shown once", file=sys.stderr)
    prelabels, gold = read_labels(config.prelabels, config), read_labels(config.gold, config)
    queue = read_queue(config.queue) if config.queue else None
    named = {"--prelabels": [p.trajectory_id for p in prelabels], "--gold": [g.trajectory_id for g in gold]}
    named["--queue"] = [row[0] for row in queue or ()]
    for flag, ids in named.items():
        if astray := sum(name not in known for name in ids):
            print(f"{flag}: {astray} of {len(ids)} rows are for trajectories not in {trajectories}", file=sys.stderr)
    app = make_app(
        items,
        db=config.db,
        prelabels=prelabels,
        gold=gold,
        queue=queue,
        users=read_users(config.users) if config.users else None,
        annotator=config.annotator,
        error_types=config.error_types or ERROR_TYPES,
        guide=Path(config.guide).read_text(encoding="utf-8") if config.guide else None,
        overlap=config.overlap,
        per_item=config.per_item,
        blind=config.blind,
        gold_every=config.gold_every,
    )
    try:
        save(config.db, "annotate", config, trajectories=trajectories)
        return serve(app, config.host, config.port)
    finally:
        app.state.store.close()


def _check(config: AnnotateConfig) -> None:
    for name, share in (("overlap", config.overlap), ("blind", config.blind)):
        if not 0 <= share <= 1:
            raise UsageError(f"--{name} must lie in [0, 1], got {share:g}")
    for name, count in (("per-item", config.per_item), ("gold-every", config.gold_every)):
        if count < 1:
            raise UsageError(f"--{name} must be at least 1, got {count}")
    if len(config.error_types) > 9:
        raise UsageError(f"--error-types takes at most 9, got {len(config.error_types)}")
    if unknown := set(config.provenance) - {*PROVENANCES, "adjudicated"}:
        expected = ", ".join((*PROVENANCES, "adjudicated"))
        raise UsageError(f"--provenance {' '.join(sorted(unknown))}: expected some of {expected}")
    if not NAME.fullmatch(config.annotator):
        raise UsageError(f"--annotator {config.annotator!r}: a name is 1 to 64 letters, digits and . _ @ + -")
    if config.users is None and config.host not in LOOPBACK:
        raise UsageError(f"--host {config.host} lets others in: it needs --users")
    for target in (config.export, config.audit):
        if target and target != "-" and Path(target).exists():
            raise UsageError(f"{target} exists already; remove it or write elsewhere")


def _write(target: str, rows: Iterable[Any], what: str) -> None:
    count = 0
    if target == "-":
        for row in rows:
            sys.stdout.buffer.write(dump_json(row) + b"\n")
        sys.stdout.flush()
        return
    partial = Path(f"{target}.partial")
    with open(partial, "wb") as file:
        for row in rows:
            file.write(dump_json(row) + b"\n")
            count += 1
    partial.replace(target)
    print(f"{target}: {count} {what}")
