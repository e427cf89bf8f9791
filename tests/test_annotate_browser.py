"""The labelling page in a real Chromium: keys, undo, what survives, and people apart."""

import contextlib
import os

import pytest

from labeling.annotate import app
from labeling.annotate.auth import User, hash_password
from labeling.annotate.store import Store
from prm import StepLabel
from tests.annotate_support import (
    CHROMIUM,
    DRIVER,
    Page,
    Process,
    chromium,
    first_error_at_7,
    kept,
    page,
    post,
    serving,
    sign_in,
    twelve,
)

MISSING = not (CHROMIUM and DRIVER)
if MISSING and os.environ.get("CI") == "true":
    pytest.fail("chromium and chromedriver must be installed where CI=true", pytrace=False)
pytestmark = pytest.mark.skipif(MISSING, reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


# --- keys -------------------------------------------------------------------------------------------------------------


def test_to_the_first_error_without_a_model_takes_eight_keys(browser, tmp_path):
    first, second = twelve("A"), twelve("B")
    with page(browser, tmp_path, [first, second]) as (p, store):
        p.press(*"jjjjjj", "x")
        p.submit()
        assert p.pressed <= 8
        found = kept(store)
        assert [found[first.id, k].score for k in range(7)] == [1.0] * 6 + [0.0]
        ways = [found[first.id, k].meta["provenance"] for k in range(7)]
        assert ways == ["first_error_fill"] * 6 + ["manual"]
        assert len(found) == 7, "what comes after the first error stays unlabelled"
        p.press("g", "7", "x")
        p.submit()
        assert p.pressed <= 8 + 4
        assert sum(label.score == 0 for label in kept(store).values()) == 2


def test_all_twelve_without_a_model_takes_fourteen_keys(browser, tmp_path):
    first = twelve("A")
    with page(browser, tmp_path, [first, twelve("B")]) as (p, store):
        p.press(*"333333", "1", *"21213")
        p.submit()
        assert p.pressed <= 14
        scores = [kept(store)[first.id, k].score for k in range(12)]
        assert scores == [1, 1, 1, 1, 1, 1, 0, 0.5, 0, 0.5, 0, 1]


def test_with_a_model_five_keys_to_the_first_error_and_eight_for_all(browser, tmp_path):
    items = [twelve("A"), twelve("B"), twelve("C")]
    said = [label for t in items for label in first_error_at_7(t)]
    with page(browser, tmp_path, items, prelabels=said, blind=0) as (p, store):
        first = p.js("return location.hash.slice(1)")
        p.press("a", "x")
        p.submit()
        assert p.pressed <= 5
        found = kept(store)
        assert [found[first, k].meta["provenance"] for k in range(7)] == ["bulk"] * 6 + ["manual"]
        assert found[first, 0].meta["prelabel"] == {"score": 0.97, "source": "prm:model"}
        p.pressed, second = 0, p.js("return location.hash.slice(1)")
        p.press("a", *" " * 5, "1")
        p.submit()
        assert p.pressed <= 8
        found = kept(store)
        ways = [found[second, k].meta["provenance"] for k in range(12)]
        assert ways == ["bulk"] * 6 + ["accepted"] * 5 + ["manual"]
        assert [found[second, k].score for k in range(12)] == [1] * 6 + [0, 0, 0.5, 0, 0, 0]


def test_a_bad_or_unsure_prelabel_is_never_accepted_in_a_run(browser, tmp_path):
    item = twelve("A")
    said = [StepLabel(item.id, k, s, "judge:m") for k, s in enumerate([0.9, 0.79, 0.9, 0.01])]
    with page(browser, tmp_path, [item], prelabels=said, blind=0) as (p, _):
        p.press("a")
        assert p.ratings()[:4] == ["good", "none", "none", "none"]
        p.press("a")
        assert p.ratings()[1] == "none"
        p.press("2", "a", "a")
        assert p.ratings()[:5] == ["good", "neutral", "good", "none", "none"]


def test_prelabels_are_withheld_on_the_blind_slice(browser, tmp_path):
    item = twelve("A")
    with page(browser, tmp_path, [item], prelabels=first_error_at_7(item), blind=1) as (p, store):
        assert not p.js("return document.querySelector('.prelabel')")
        p.press("a", " ", "3")
        p.saved()
        assert [label.meta["blind"] for label in kept(store).values()] == [True]


# --- what is set on a step, undone, redone ----------------------------------------------------------------------------


def test_an_unlabelled_step_stays_unlabelled_whatever_else_is_set(browser, tmp_path):
    item = twelve("A")
    with page(browser, tmp_path, [item]) as (p, store):
        p.press("w", "f", "c")
        p.press(*"odd 1x2")
        p.press("\ue00c")  # Escape
        p.js("document.querySelector('[data-error]').click()")
        p.press("j", "3")
        p.saved()
        assert list(kept(store)) == [(item.id, 1)]
        sheet = store.sheet("local", item.id)
        given = [sheet.get(0, op) for op in ("rating", "confidence", "flag", "comment", "errors")]
        assert given == [None, "medium", True, "odd 1x2", ["wrong tool"]]
        p.press("k", "k", "1")
        p.saved()
        label = kept(store)[item.id, 0]
        assert label.note == "odd 1x2"
        assert (label.meta["confidence"], label.meta["flag"]) == ("medium", True)
        assert label.meta["error_types"] == ["wrong tool"]


def test_undo_and_redo_have_no_limit_and_outlive_a_reload(browser, tmp_path):
    item = twelve("A")
    with page(browser, tmp_path, [item]) as (p, store):
        p.press(*"3333", "x", "j", "w", "f")
        whole = p.ratings()
        p.saved()
        p = Page(browser, p.driver.current_url)
        p.press(*"u" * 7)
        assert p.ratings() == ["none"] * 12
        p.press(*"u" * 3)
        p.press(*"y" * 7)
        assert p.ratings() == whole
        p.saved()
        sheet = store.sheet("local", item.id)
        assert (sheet.get(5, "confidence"), sheet.get(5, "flag")) == ("medium", True)
        p.press("u", "3")  # a new key press ends what could be redone
        p.press("y")
        p.saved()
        assert sheet.get(5, "flag") is None
        assert sum(1 for _ in store.events()) > 7 * 3, "undo adds events, it removes none"


def test_the_mouse_alone_is_enough(browser, tmp_path):
    first = twelve("A")
    with page(browser, tmp_path, [first, twelve("B")]) as (p, store):
        click = "document.querySelector(arguments[0]).click()"
        p.js(click, ".step[data-step='1'] [data-rating=good]")
        p.js(click, '.spot[data-go="4"]')
        p.js(click, ".panel [data-rating=neutral]")
        p.js(click, ".panel [data-confidence=high]")  # of step 6, where rating moved on to
        p.js(click, ".step[data-step='8'] .text")
        p.js(click, ".keys button")  # First error here
        p.js(click, ".step[data-step='1'] [data-rating=good]")  # again: cleared
        assert p.ratings()[:9] == ["good", "none", *["good"] * 2, "neutral", *["good"] * 3, "bad"]
        before = p.js("return location.hash")
        p.js(click, ".keys .primary")
        p.wait("return location.hash !== arguments[0]", before)
        assert store.sheet("local", first.id).status == "submitted"
        assert store.sheet("local", first.id).get(5, "confidence") == "high"


def test_help_guide_skip_items_and_going_back(browser, tmp_path):
    items = [twelve("A"), twelve("B")]
    with page(browser, tmp_path, items, guide="Be <b>kind</b>.") as (p, store):
        p.press("?")
        assert "first error" in p.js("return document.getElementById('dialog').textContent")
        p.press("\ue00c", "h")
        assert p.js("return document.querySelector('.guide .text').textContent") == "Be <b>kind</b>."
        before = p.js("return location.hash")
        p.press("s")
        p.wait("return location.hash !== arguments[0]", before)
        assert store.sheet("local", before[1:]).status == "skipped"
        p.press("p")
        p.wait("return location.hash === arguments[0]", before)
        p.press("u")
        p.saved()
        assert store.sheet("local", before[1:]).status == "open"
        p.press("3", "m")
        p.wait("return document.querySelectorAll('.items li').length === 2")
        p.press("\ue00c", "n")
        p.wait("return location.hash && location.hash !== arguments[0]", before)
        p.press("3")
        p.press("n")
        p.wait("return document.querySelector('.done')")


# --- nothing lost -----------------------------------------------------------------------------------------------------


def test_labels_given_while_the_server_is_away_arrive_once(browser, tmp_path):
    server = Process(tmp_path, [twelve("A")])
    server.start()
    p = Page(browser, server.url)
    p.press(*"333")
    p.saved()
    server.kill()
    p.press(*"21")
    p.wait("return document.querySelector('.alerts').textContent.includes('does not answer')")
    with contextlib.suppress(Exception):
        browser.refresh()  # the tab has nothing but what the browser kept
    server.start()
    try:
        p = Page(browser, server.url)
        p.saved()
        assert p.ratings()[:6] == ["good", "good", "good", "neutral", "bad", "none"]
        p.press("3")
        p.saved()
    finally:
        server.kill()
    store = Store(server.db, write=False)
    assert sum(event.op == "rating" for event in store.events()) == 6
    assert len(kept(store)) == 6
    store.close()


def test_two_tabs_of_one_person_lose_nothing_and_agree(browser, tmp_path):
    item = twelve("A", 40)
    with page(browser, tmp_path, [item]) as (p, store):
        one = browser.current_window_handle
        browser.switch_to.new_window("tab")
        two = browser.current_window_handle
        try:
            Page(browser, p.url)
            for tab, key in ((one, "3"), (two, "1"), (one, "3"), (two, "2")):
                browser.switch_to.window(tab)
                if tab == two:
                    p.press(*"jjjjjjjj")
                p.press(*key * 4)
            p.saved()
            shown = p.wait("return document.querySelectorAll('.step:not([data-rating=none])').length === 16")
            assert shown, "a tab shows what was said in the other"
            found = kept(store)
            assert len(found) == 16 and sum(1 for e in store.events() if e.op == "rating") == 16
        finally:
            browser.switch_to.window(two)
            browser.close()
            browser.switch_to.window(one)


def test_a_full_browser_storage_is_a_visible_error_and_no_label(browser, tmp_path):
    with page(browser, tmp_path, [twelve("A")]) as (p, _):
        p.js("""let size = 1 << 22, i = 0; while (size >= 1) {
            try { localStorage.setItem('fill' + i++, 'x'.repeat(size)); } catch { size >>= 1; } }""")
        p.press("3")
        assert "NOT kept" in p.js("return document.querySelector('.alerts').textContent")
        assert p.ratings()[0] == "none"
        p.js("localStorage.clear()")
        p.press("3")
        assert p.ratings()[0] == "good"
        assert "NOT kept" not in p.js("return document.querySelector('.alerts').textContent")


def test_a_full_disk_is_a_visible_error_and_earlier_labels_are_whole(browser, tmp_path):
    with page(browser, tmp_path, [twelve("A", 40)]) as (p, store):
        p.press("3")
        p.saved()
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        limited = store._commit
        store._commit = lambda db, lists: (db.execute(f"PRAGMA max_page_count = {pages}"), limited(db, lists))[1]
        p.press(*"3" * 30)
        p.wait("return document.querySelector('.alerts').textContent.includes('full')")
        store._commit = lambda db, lists: (db.execute("PRAGMA max_page_count = 1000000"), limited(db, lists))[1]
        p.saved()
        assert len(kept(store)) == 31
        assert store._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


# --- people -----------------------------------------------------------------------------------------------------------


def test_two_people_at_once_never_see_each_other(browser, tmp_path):
    """Two browsers and a bare client; the items overlap, so that both have the same ones before them."""
    users = {name: User(name, hash_password(name + "!")) for name in ("ana", "bo")}
    items = [twelve(str(i)) for i in range(3)]
    made = app(items, db=str(tmp_path / "labels.db"), users=users, overlap=1, per_item=2)
    store = made.state.store
    with serving(made) as url, chromium() as other:
        sign_in(browser, url, "ana", "ana!")
        ana = Page(browser, url)
        shared = ana.js("return location.hash")
        ana.press("j", "1", "3")
        ana.saved()
        with pytest.raises(Exception, match="401"):
            post(url + "/api/next", {})
        sign_in(other, url, "bo", "bo!")
        bo = Page(other, url + "/" + shared)
        assert bo.ratings() == ["none"] * 12
        assert "ana" not in bo.js("return document.documentElement.textContent")
        bo.press("u", "3")
        bo.saved()
        ana.press("u")
        ana.saved()
        ana, bo = Page(browser, url), Page(other, url)
        assert ana.js("return location.hash") == bo.js("return location.hash") == shared
        assert ana.ratings() == ["none", "bad", *["none"] * 10]
        assert bo.ratings() == ["good", *["none"] * 11]
        assert {(n, k) for n in users for (_, k) in kept(store, n)} == {("ana", 1), ("bo", 0)}
        cookies = {d.get_cookies()[0]["value"] for d in (browser, other)}
        assert len(cookies) == 2
        ana.submit()
        assert bo.js("return location.hash") == shared


def test_labels_that_wait_are_never_sent_as_another_person(browser, tmp_path):
    users = {name: User(name, hash_password(name + "!")) for name in ("ana", "bo")}
    made = app([twelve("A")], db=str(tmp_path / "labels.db"), users=users, overlap=1)
    with serving(made) as url:
        sign_in(browser, url, "ana", "ana!")
        p = Page(browser, url)
        browser.delete_all_cookies()
        p.press("3")
        p.wait("return document.querySelector('.alerts').textContent.includes('signed out')")
        sign_in(browser, url + "/login", "bo", "bo!")
        Page(browser, url).saved()
        assert kept(made.state.store) == {}
        browser.delete_all_cookies()
        sign_in(browser, url + "/login", "ana", "ana!")
        Page(browser, url).saved()
        assert [label.source for label in kept(made.state.store).values()] == ["human:ana"]
