"""What a reviewer looks at: progress, agreement, gold scores, and the steps that people disagree on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

from labeling.annotate.agreement import Ratings, alpha, compare, error_type_agreement
from labeling.annotate.assign import Plan
from labeling.annotate.store import PROVENANCES, RATINGS, Store


def ratings(store: Store, provenance: Collection[str] = PROVENANCES, assist: str = "") -> dict[str, dict[str, Any]]:
    """person -> trajectory -> step -> 0, 0.5 or 1, of labels that came about so, given with this assistance."""
    found: dict[str, dict[str, Any]] = {}
    for (name, trajectory_id), sheet in list(store.sheets.items()):
        for step, event in sheet.ratings().items():
            if event.value["how"] in provenance and (not assist or event.context.get("assist") == assist):
                value = RATINGS[event.value["rating"]]
                found.setdefault(name, {}).setdefault(trajectory_id, {})[step] = value
    return found


def progress(store: Store, plan: Plan, annotator: str) -> dict[str, Any]:
    """How far one person is: trajectories `submitted`, `skipped` and begun (`open`), steps rated (`labels`)."""
    count = {"submitted": 0, "skipped": 0, "open": 0}
    labels = 0
    for t, sheet in store.own(annotator):
        labels += len(sheet.ratings())
        if t in plan.trajectories:
            count[sheet.status] += 1
    return {**count, "labels": labels, "total": len(plan.trajectories)}


def report(store: Store, plan: Plan, provenance: Collection[str] = PROVENANCES) -> dict[str, Any]:
    """All figures of the agreement page.

    Returns:
        `progress` a person, `pairs` of people, `alpha`, `error_types`, `gold` (each person against the known answers),
        `model` (each person against the pre-labels, apart for items where they were shown and where they were withheld)
        and `disagreements` (steps).
    """
    lengths = {t: len(trajectory.steps) for t, trajectory in plan.trajectories.items()}
    raters = ratings(store, provenance)
    marks: dict[str, dict[tuple[str, int], frozenset[str]]] = {}
    for (name, t), sheet in list(store.sheets.items()):
        for (step, op), event in list(sheet.latest.items()):
            if op == "errors" and event.value and step is not None:
                marks.setdefault(name, {})[(t, step)] = frozenset(event.value)
    pairs = []
    for a, b in combinations(sorted(raters), 2):
        row = compare(raters[a], raters[b], lengths)
        if row["steps"]:
            pairs.append({"a": a, "b": b, **row})
    known = _nested(plan.gold)
    gold = [{"person": name, **compare(known, raters[name], lengths)} for name in sorted(raters)] if known else []
    model = []
    for assist in ("shown", "blind"):
        for name, own in sorted(ratings(store, provenance, assist).items()):
            said = {t: {k: s for k, s in _said(store, name, t).items() if k in steps} for t, steps in own.items()}
            if any(said.values()):
                model.append({"person": name, "assist": assist, **compare(said, own, lengths)})
    return {
        "progress": [{"person": n, **progress(store, plan, n)} for n in sorted({n for n, _ in list(store.sheets)})],
        "pairs": pairs,
        "alpha": alpha(raters),
        "error_types": error_type_agreement(marks, raters),
        "gold": [row for row in gold if row["steps"]],
        "model": model,
        "disagreements": len(disagreements(store, plan)),
    }


def disagreements(store: Store, plan: Plan) -> list[dict[str, Any]]:
    """The steps that two or more people rated differently, in the order of the file; votes without names.

    The votes stand in an order drawn anew for each step, so that no column is one person.
    """
    votes: dict[tuple[str, int], list[tuple[str, dict[str, Any]]]] = {}
    for (name, t), sheet in list(store.sheets.items()):
        for step, event in sheet.ratings().items():
            vote = {"rating": event.value["rating"]}
            for op in ("confidence", "errors", "comment"):
                if given := sheet.get(step, op):
                    vote[op] = given
            shuffled = hashlib.sha256(f"{store.project}\0{t}\0{step}\0{name}".encode()).hexdigest()
            votes.setdefault((t, step), []).append((shuffled, vote))
    place = {t: i for i, t in enumerate(plan.trajectories)}
    found = []
    for (t, step), cast in sorted(votes.items(), key=lambda item: (place.get(item[0][0], len(place)), item[0])):
        if t in place and len({vote["rating"] for _, vote in cast}) > 1:
            decision = store.decisions.get((t, step))
            row: dict[str, Any] = {"trajectory_id": t, "step": step, "votes": [v for _, v in sorted(cast, key=_first)]}
            row["decision"] = decision.value if decision else None
            found.append(row)
    return found


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _said(store: Store, name: str, trajectory_id: str) -> dict[int, float]:
    """What the model had said where this person rated, as 0, 0.5 or 1."""
    said = {}
    for step, event in store.sheet(name, trajectory_id).ratings().items():
        if "prelabel" in event.context:
            said[step] = RATINGS[rating_of(event.context["prelabel"]["score"])]
    return said


def rating_of(score: float) -> str:
    """The rating nearest to a score: bad below 1/3, good above 2/3, neutral between."""
    return "bad" if score < 1 / 3 else "good" if score > 2 / 3 else "neutral"


def _nested(flat: Mapping[tuple[str, int], float]) -> Ratings:
    nested: dict[str, dict[int, float]] = {}
    for (t, k), value in flat.items():
        nested.setdefault(t, {})[k] = RATINGS[rating_of(value)]
    return nested
