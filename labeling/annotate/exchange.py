"""Events and `StepLabel` records: what a browser may send, what goes out to a file, and what comes in from one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from labeling.annotate.store import PROVENANCES, RATINGS, Event, Store
from prm.errors import DataError
from prm.records import StepLabel, dump_json

CONFIDENCES = ("low", "medium", "high")
NAME = re.compile(r"[\w.@+-]{1,64}")
DECIDED = "gold:adjudicated"
MAX_COMMENT = 20_000  # characters


def _one_of(value: Any, known: Collection[str]) -> bool:
    return isinstance(value, str) and value in known


def _rating(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"rating", "how"}:
        return False
    return _one_of(value["rating"], RATINGS) and _one_of(value["how"], PROVENANCES)


def _decision(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) - {"rating", "comment"}:
        return False
    return _one_of(value.get("rating"), RATINGS) and _comment(value.get("comment", ""))


def _texts(value: Any, longest: int = 60) -> bool:
    return isinstance(value, list) and len(value) <= 20 and all(isinstance(v, str) and len(v) <= longest for v in value)


def _comment(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_COMMENT


STEP_OPS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rating": (_rating, f"{{rating: {'|'.join(RATINGS)}, how: {'|'.join(PROVENANCES)}}}"),
    "confidence": (lambda v: _one_of(v, CONFIDENCES), "low, medium or high"),
    "errors": (_texts, "a list of error types"),
    "comment": (_comment, f"a text of at most {MAX_COMMENT} characters"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "decision": (_decision, f"{{rating: {'|'.join(RATINGS)}, comment: a text}}"),
}
ITEM_OPS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "submit": (lambda v: isinstance(v, bool), "true or false"),
    "skip": (lambda v: isinstance(v, bool) or _comment(v), "true, false or a reason"),
}


def event_of(row: Any, annotator: str, steps: Mapping[str, int]) -> Event:
    """The event that a browser sent.

    Args:
        row: `{"id", "trajectory_id", "step", "op", "value", "group", "kind", "of", "time"}`.
        annotator: who is signed in.
        steps: the number of steps of each trajectory on show. A label for another trajectory is kept as well: it may
            be late, from before a restart with another file.

    Raises:
        DataError: what is wrong with it.
    """
    if not isinstance(row, Mapping):
        raise DataError("an event must be an object")
    texts = {k: row.get(k, "") for k in ("id", "trajectory_id", "group", "kind", "of", "time")}
    for name, value in texts.items():
        if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
            raise DataError(f"{name} must be a text of at most 200 characters")
    if not texts["id"] or not texts["trajectory_id"]:
        raise DataError("id and trajectory_id must not be empty")
    step, op, value = row.get("step"), row.get("op"), row.get("value")
    ops = ITEM_OPS if step is None else STEP_OPS
    if not isinstance(op, str) or op not in ops:
        raise DataError(f"op must be one of {', '.join(ops)} where step is {step!r}, got {op!r}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**31):
        raise DataError("step must be an integer >= 0")
    known = steps.get(texts["trajectory_id"])
    if known is not None and step is not None and step >= known:
        raise DataError(f"step {step} is not there: the trajectory has {known}")
    test, expected = ops[op]
    if value is not None and not test(value):
        raise DataError(f"{op} must be {expected}, or null")
    context = {k: texts[k] for k in ("group", "kind", "of") if texts[k]}
    return Event(texts["id"], annotator, texts["trajectory_id"], step, op, value, context, texts["time"])


def labels(
    store: Store, annotator: str | None = None, provenance: Collection[str] = (), *, decisions: bool = True
) -> Iterator[StepLabel]:
    """The labels as records, in the order of people and trajectories; a step without a rating gives none.

    `source` is "human:NAME"; `note` the comment; `meta` has `provenance`, `status` of the item, `blind` (was the
    model's opinion withheld), and where there are any `confidence`, `error_types`, `flag`, `prelabel` (what was shown).
    A decision on a disagreement has the source "gold:adjudicated", and `meta["by"]` says whose it is.

    Args:
        annotator: only this person's.
        provenance: only labels that came about so; empty takes all.
        decisions: the adjudicated ones too (they have no provenance but "adjudicated").
    """
    for (name, trajectory_id), sheet in list(store.sheets.items()):
        if annotator is not None and name != annotator:
            continue
        for step, event in sheet.ratings().items():
            value, how = event.value, event.value["how"]
            if provenance and how not in provenance:
                continue
            meta: dict[str, Any] = {"provenance": how, "status": sheet.status}
            meta["blind"] = event.context.get("assist") == "blind"
            if "prelabel" in event.context and not meta["blind"]:
                meta["prelabel"] = event.context["prelabel"]
            for key, op in (("confidence", "confidence"), ("error_types", "errors"), ("flag", "flag")):
                if given := sheet.get(step, op):
                    meta[key] = given
            meta |= event.context.get("imported") or {}
            score = value.get("score", RATINGS[value["rating"]])
            note = sheet.get(step, "comment") or ""
            time = event.client_time if event.context.get("imported") is not None else event.time
            yield StepLabel(trajectory_id, step, score, f"human:{name}", 1.0, note, time, meta)
    if decisions and annotator is None and (not provenance or "adjudicated" in provenance):
        for (trajectory_id, step), event in list(store.decisions.items()):
            if event.value:
                meta = {"provenance": "adjudicated", "by": event.annotator}
                score = event.value.get("score", RATINGS[event.value["rating"]])
                note = str(event.value.get("comment") or "")
                yield StepLabel(trajectory_id, step, score, DECIDED, 1.0, note, event.time, meta)


def import_events(records: Iterable[StepLabel]) -> Iterator[Event]:
    """Earlier labels of people as events; the ids are made from the content, so a second import adds nothing.

    A score other than 0, 0.5 or 1 is kept beside the nearest rating. An unknown provenance becomes "import".

    Raises:
        DataError: a record is neither a person's ("human:NAME") nor a decision ("gold:adjudicated").
    """
    own = ("provenance", "status", "blind", "prelabel", "confidence", "error_types", "flag", "by")
    for i, record in enumerate(records, 1):
        kind, _, name = record.source.partition(":")
        decided = record.source == DECIDED
        if not decided and (kind != "human" or not NAME.fullmatch(name)):
            raise DataError(
                f"label {i}: the source must be human:NAME or {DECIDED} to be imported, got {record.source!r}; "
                "labels of a model go to --prelabels"
            )
        digest = hashlib.sha256(dump_json(record.to_dict())).hexdigest()[:24]
        meta, step = record.meta, record.step
        rating = min(RATINGS, key=lambda r: abs(RATINGS[r] - record.score))
        value: dict[str, Any] = {"rating": rating}
        if record.score != RATINGS[rating]:
            value["score"] = record.score
        if decided:
            name = str(meta.get("by") or "import")
            value |= {"comment": record.note} if record.note else {}
            yield Event(f"import-{digest}", name, record.trajectory_id, step, "decision", value, {}, record.time)
            continue
        how = meta.get("provenance")
        value["how"] = how if how in PROVENANCES else "import"
        context: dict[str, Any] = {"imported": {k: v for k, v in meta.items() if k not in own}}
        context["assist"] = "blind" if meta.get("blind") else "shown" if "prelabel" in meta else "none"
        if "prelabel" in meta:
            context["prelabel"] = meta["prelabel"]
        more = {"confidence": meta.get("confidence"), "errors": meta.get("error_types"), "flag": meta.get("flag")}
        given = {"rating": value} | {k: v for k, v in more.items() if v} | {"comment": record.note}
        for op, content in given.items():
            if content and not STEP_OPS[op][0]({"rating": rating, "how": value["how"]} if op == "rating" else content):
                raise DataError(f"label {i}: {op} must be {STEP_OPS[op][1]}, got {str(content)[:60]!r}")
            if content:
                yield Event(
                    f"import-{digest}-{op}", name, record.trajectory_id, step, op, content, context, record.time
                )
