"""The event store, who gets what next, and events to labels and back."""

import os
import sqlite3
import stat
import threading
from dataclasses import replace

import pytest

from labeling.annotate.assign import LEASE_SECONDS, make_plan, next_item, read_queue
from labeling.annotate.exchange import event_of, import_events, labels
from labeling.annotate.run import import_labels
from labeling.annotate.store import Event, StorageError, Store, now
from prm import DataError, Step, StepLabel, Trajectory, UsageError


def rating(k, value, who="ana", item="t", how="manual", key=None):
    return Event(key or f"{who}-{item}-{k}-{value}", who, item, k, "rating", {"rating": value, "how": how}, time=now())


def item(name, steps=3):
    return Trajectory(name, tuple(Step(str(k)) for k in range(steps)))


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "l.db")
    yield made
    made.close()


def test_a_resend_is_no_second_label_and_the_state_outlives_a_restart(store):
    events = [rating(0, "good"), rating(1, "bad")]
    assert store.append(events).result() == ["", ""]
    assert store.append([*events, rating(1, "good", key="x")]).result() == ["", "", ""]
    store.close()
    again = Store(store.path)
    assert [e.id for e in again.events()] == ["ana-t-0-good", "ana-t-1-bad", "x"]
    assert {k: e.value["rating"] for k, e in again.sheet("ana", "t").ratings().items()} == {0: "good", 1: "good"}
    assert again.project == store.project
    again.close()


def test_an_id_used_for_something_else_is_refused_and_is_each_persons_own(store):
    store.append([rating(0, "good", key="same")]).result()
    (reason,) = store.append([rating(0, "bad", key="same")]).result()
    assert "another event" in reason
    assert store.append([rating(0, "bad", who="bo", key="same")]).result() == [""]


def test_events_cannot_be_changed_or_removed(store):
    store.append([rating(0, "good")]).result()
    with sqlite3.connect(store.path) as db:
        for sql in ("UPDATE event SET value = '0'", "DELETE FROM event"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(sql)


def test_many_threads_write_through_one(store):
    def work(who):
        for k in range(200):
            assert store.append([rating(k, "good", who=who)]).result() == [""]

    threads = [threading.Thread(target=work, args=(f"p{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(1 for _ in store.events()) == 1600
    assert all(len(store.sheet(f"p{n}", "t").ratings()) == 200 for n in range(8))


def test_a_full_disk_raises_and_keeps_what_was_there(store):
    store.append([rating(0, "good")]).result()
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    commit = store._commit
    store._commit = lambda db, lists: (db.execute(f"PRAGMA max_page_count = {pages}"), commit(db, lists))[1]
    big = Event("big", "ana", "t", 1, "comment", "x" * 500_000, time=now())
    with pytest.raises(StorageError, match="full"):
        store.append([rating(2, "bad"), big]).result()
    assert list(store.sheet("ana", "t").ratings()) == [0], "nothing of a failed call is kept"
    store._commit = commit
    store._db.execute("PRAGMA wal_checkpoint")
    assert store._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_one_writer_at_a_time_and_readers_beside_it(store):
    with pytest.raises(UsageError, match="another prm annotate"):
        Store(store.path)
    store.append([rating(0, "good")]).result()
    reader = Store(store.path, write=False)
    assert len(list(labels(reader))) == 1
    with pytest.raises(StorageError):
        reader.append([rating(1, "good")])
    reader.close()


def test_the_secret_is_its_owners_alone_and_stays(store):
    mode = stat.S_IMODE(os.stat(f"{store.path}.key").st_mode)
    assert mode == 0o600
    secret = store.secret()
    store.close()
    again = Store(store.path)
    assert again.secret() == secret and len(secret) == 32
    again.close()


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be read" * 20, None, "sqlite", "dir"])
def test_a_file_that_is_no_label_database_is_named(tmp_path, content):
    path = tmp_path / "x.db"
    if content == "sqlite":
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE other(x)")
    elif content == "dir":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"x\.db"):
        Store(path, write=content is not None)
    assert sorted(tmp_path.iterdir()) == before, "nothing is written beside it"


# --- who gets what ----------------------------------------------------------------------------------------------------


def test_two_people_never_get_the_same_item_until_a_lease_ends(store):
    plan = make_plan([item(str(k)) for k in range(3)], store.project)
    got = [next_item(store, plan, who, 1000.0) for who in ("ana", "bo", "cy")]
    assert len(set(got)) == 3
    assert next_item(store, plan, "dee", 1000.0) is None
    assert next_item(store, plan, "ana", 1000.0) == got[0], "one's own comes back"
    store.touch("bo", got[1], 1000.0 + LEASE_SECONDS)  # a heartbeat
    later = 1001.0 + LEASE_SECONDS
    store.touch("cy", got[2], later)
    assert next_item(store, plan, "dee", later) == got[0]


def test_a_late_label_is_kept_and_a_submitted_item_is_not_given_again(store):
    plan = make_plan([item("a"), item("b")], store.project)
    first = next_item(store, plan, "ana", 0.0)
    assert next_item(store, plan, "bo", LEASE_SECONDS + 1) == first
    late = Event("s", "ana", first, None, "submit", True, time=now())
    assert store.append([rating(0, "bad", item=first), late]).result() == ["", ""]
    assert len(list(labels(store, "ana"))) == 1
    assert next_item(store, plan, "ana", 1e12) != first


def test_overlap_gives_a_share_to_several(store):
    items = [item(str(k)) for k in range(400)]
    plan = make_plan(items, store.project, overlap=0.25, per_item=3)
    assert 60 <= len(plan.people) <= 140 and set(plan.people.values()) == {3}
    assert plan == make_plan(items, store.project, overlap=0.25, per_item=3)
    shared = next(iter(plan.people))
    lone = replace(plan, order=[shared])
    assert [next_item(store, lone, who, 0.0) for who in ("ana", "bo", "cy", "dee")] == [shared] * 3 + [None]


def test_the_queue_orders_by_priority_and_else_the_uncertain_come_first(store):
    a, b, c = item("a"), item("b"), item("c")
    queued = make_plan([a, b, c], "p", queue=[(b.id, 1, 0.5), (c.id, None, 2.0), (b.id, 2, 0.7), ("gone", 0, 9.0)])
    assert list(queued.order) == [c.id, b.id, a.id]
    assert queued.asked == {b.id: {1, 2}, "gone": {0}}
    said = [StepLabel(a.id, 0, 0.99, "prm:x"), StepLabel(b.id, 0, 0.9, "prm:x"), StepLabel(b.id, 1, 0.55, "prm:x")]
    assert list(make_plan([a, b, c], "p", prelabels=said).order) == [b.id, a.id, c.id]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"trajectory_id": 3}', "trajectory_id"),
        ('{"trajectory_id": "a", "step": -1}', "step must be"),
        ('{"trajectory_id": "a", "priority": "high"}', "priority must be"),
        ("", "no row"),
    ],
)
def test_a_bad_queue_names_its_line(tmp_path, line, reason):
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=reason):
        read_queue(str(path))


def test_gold_items_come_to_everybody_without_prelabels(store):
    items = [item(str(k)) for k in range(40)]
    gold = [StepLabel(items[k].id, 0, 1.0, "gold:x") for k in (3, 4, 5)]
    said = [StepLabel(t.id, 0, 0.9, "prm:x") for t in items]
    plan = make_plan(items, store.project, gold=gold, prelabels=said, blind=0, gold_every=5)
    assert plan.blind == plan.gold_items == {t.id for t in items[3:6]}
    for who in ("ana", "bo"):
        given = []
        for n in range(18):
            given.append(next_item(store, plan, who, 0.0, given[-1] if given else ""))
            store.append([Event(f"{who}{n}", who, given[-1], None, "submit", True)]).result()
        assert plan.gold_items <= set(given[:15]) and len(set(given)) == 18


def test_the_blind_slice_has_its_share_and_stays_the_same():
    items = [item(str(k)) for k in range(500)]
    said = [StepLabel(t.id, 0, 0.9, "prm:x") for t in items]
    plan = make_plan(items, "p", prelabels=said)
    assert 25 <= len(plan.blind) <= 75
    assert plan.blind == make_plan(items, "p", prelabels=said).blind != make_plan(items, "q", prelabels=said).blind


# --- events and labels ------------------------------------------------------------------------------------------------


def test_what_goes_out_comes_in_again(store, tmp_path):
    store.append(
        [
            rating(0, "good", how="bulk"),
            rating(1, "neutral"),
            rating(2, "bad", who="bo", how="accepted"),
            Event("c", "ana", "t", 1, "comment", "why\n<b>"),
            Event("f", "ana", "t", 1, "flag", True),
            Event("e", "ana", "t", 1, "errors", ["wrong tool", "x"]),
            Event("q", "ana", "t", 1, "confidence", "low"),
            Event("d", "rita", "t", 2, "decision", {"rating": "good", "comment": "no"}, time=now()),
            Event("n", "ana", "t", 5, "comment", "on an unrated step"),
            Event("z", "ana", "t", 0, "rating", None),
            rating(0, "bad", how="first_error_fill", key="again"),
        ]
    ).result()
    out = list(labels(store))
    assert [(r.source, r.step, r.score, r.meta["provenance"]) for r in out] == [
        ("human:ana", 0, 0.0, "first_error_fill"),
        ("human:ana", 1, 0.5, "manual"),
        ("human:bo", 2, 0.0, "accepted"),
        ("gold:adjudicated", 2, 1.0, "adjudicated"),
    ]
    assert out[1].note == "why\n<b>"
    assert out[1].meta["error_types"] == ["wrong tool", "x"] and out[1].meta["confidence"] == "low"
    assert [r.step for r in labels(store, "ana", ["manual"])] == [1]
    other = Store(tmp_path / "other.db")
    assert import_labels(other, out) == (4, 0)
    assert import_labels(other, out) == (0, 4)
    assert [replace(r, time="") for r in labels(other)] == [replace(r, time="") for r in out]
    assert [r.time for r in labels(other, decisions=False)] == [r.time for r in out[:3]]
    other.close()


def test_an_import_never_changes_what_a_person_has_said_since(store):
    store.append([rating(0, "good")]).result()
    rows = [StepLabel("t", 0, 0.0, "human:ana"), StepLabel("t", 1, 0.9, "human:ana", meta={"batch": 3})]
    assert import_labels(store, rows) == (1, 1)
    out = list(labels(store))
    assert [(r.score, r.meta["provenance"]) for r in out] == [(1.0, "manual"), (0.9, "import")]
    assert out[1].meta["batch"] == 3


def test_a_models_labels_are_not_imported_as_a_persons():
    with pytest.raises(DataError, match="--prelabels"):
        list(import_events([StepLabel("t", 0, 1.0, "judge:m")]))


GOOD = {"id": "1", "trajectory_id": "t", "step": 0, "op": "rating", "value": {"rating": "good", "how": "manual"}}


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": 3},
        {"id": "x" * 300},
        {"trajectory_id": "\ud800"},
        {"step": -1},
        {"step": True},
        {"step": 3},
        {"step": "0"},
        {"step": None},
        {"op": "drop"},
        {"op": ["rating"]},
        {"value": "good"},
        {"value": {"rating": "great", "how": "manual"}},
        {"value": {"rating": "good"}},
        {"value": {"rating": "good", "how": "magic"}},
        {"op": "confidence", "value": 3},
        {"op": "errors", "value": "x"},
        {"op": "errors", "value": ["x" * 61]},
        {"op": "comment", "value": "x" * 20_001},
        {"op": "flag", "value": 1},
        {"op": "submit", "step": None, "value": "yes"},
        {"kind": "\x1b[2J"},
    ],
)
def test_a_malformed_event_is_refused(change):
    assert event_of(GOOD, "ana", {"t": 3}).annotator == "ana"
    with pytest.raises(DataError):
        event_of(GOOD | change, "ana", {"t": 3})


def test_a_label_for_a_trajectory_that_is_not_on_show_is_kept():
    assert event_of(GOOD | {"trajectory_id": "before the restart", "step": 70}, "ana", {"t": 3}).step == 70


def test_unhashable_values_are_refused_too():
    for value in ({"rating": [], "how": "manual"}, {"rating": "good", "how": {}}):
        with pytest.raises(DataError):
            event_of(GOOD | {"value": value}, "ana", {})
    with pytest.raises(DataError):
        event_of(GOOD | {"op": "confidence", "value": []}, "ana", {})
