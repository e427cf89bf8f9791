"""The labelling pages in a real Chromium."""

import contextlib
import json
import os
import shutil
import time

import pytest

from labeling.annotate import app
from labeling.annotate.auth import User, hash_password
from labeling.annotate.exchange import labels
from labeling.annotate.reader import show_app
from labeling.annotate.run import import_labels
from labeling.annotate.show import find
from labeling.annotate.store import Store
from prm import Step, StepLabel, Trajectory, append_jsonl, read_jsonl
from tests.annotate_support import (
    CHROMIUM,
    DRIVER,
    HOSTILE,
    Process,
    chromium,
    first_error_at_7,
    hostile,
    post,
    serving,
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


class Page:
    """A labelling page, worked by keys that are counted."""

    def __init__(self, driver, url):
        self.driver, self.url, self.pressed = driver, url, 0
        driver.get("about:blank")
        driver.get(url)
        self.wait("return document.querySelector('.step, .done')")
        driver.get_log("performance")

    def js(self, code, *args):
        return self.driver.execute_script(code, *args)

    def wait(self, code, *args, seconds=10):
        until = time.monotonic() + seconds
        while not (found := self.js(code, *args)):
            assert time.monotonic() < until, code
            time.sleep(0.01)
        return found

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver, duration=0).send_keys(key).perform()
            self.pressed += 1

    def submit(self):
        """n, and wait for the next item."""
        before = self.js("return location.hash")
        self.press("n")
        self.wait("return location.hash !== arguments[0]", before)

    def saved(self):
        self.wait("return document.getElementById('saved').dataset.state === 'saved'")

    def ratings(self):
        return self.js("return [...document.querySelectorAll('.step')].map((row) => row.dataset.rating)")


@contextlib.contextmanager
def page(browser, tmp_path, trajectories, **options):
    made = app(trajectories, db=str(tmp_path / "labels.db"), **options)
    with serving(made) as url:
        yield Page(browser, url), made.state.store


def kept(store, annotator=None):
    return {(label.trajectory_id, label.step): label for label in labels(store, annotator)}


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


def sign_in(driver, url, name, password):
    driver.get(url)
    driver.find_element("id", "name").send_keys(name)
    driver.find_element("id", "password").send_keys(password + "\n")
    until = time.monotonic() + 10
    while driver.execute_script("return location.pathname") == "/login":
        assert time.monotonic() < until, driver.find_element("id", "message").text
        time.sleep(0.01)


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


# --- what is shown ----------------------------------------------------------------------------------------------------

ACTION = "return document.querySelectorAll('.step')[arguments[0]].querySelector('.text').textContent"


def requests_of(driver):
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            yield message["params"]["request"]["url"]


def open_all(p):
    p.js("document.querySelectorAll('button.fold').forEach((button) => button.click())")


def texts_of(p, selector):
    """The text contents, as JSON on the way: a lone surrogate cannot go otherwise."""
    code = "return [...document.querySelectorAll(arguments[0])].map((box) => JSON.stringify(box.textContent))"
    return [json.loads(text) for text in p.js(code, selector)]


def test_hostile_text_is_shown_exactly_and_does_nothing(browser, tmp_path):
    item = hostile()
    file = tmp_path / "trajectories.jsonl"
    append_jsonl(file, item)
    before = file.read_bytes()
    with page(browser, tmp_path, read_jsonl(file), guide=HOSTILE[2], error_types=HOSTILE[2:5]) as (p, _):
        open_all(p)
        assert p.js("return document.querySelector('.task .text').textContent") == item.task
        for k, step in enumerate(item.steps):
            assert texts_of(p, f".step[data-step='{k}'] .text") == [step.action, step.observation], k
        p.press(*"rj" * 16)
        assert p.js(ACTION, 1) == item.steps[1].action, "the raw view"
        p.press("g", "3", "x", "h")
        p.saved()
        assert p.js("return document.title") == "Label · prm annotate"
        assert p.js("return document.querySelectorAll('img, iframe, form, svg, base, script:not([src])').length") == 0
        assert all(url.startswith((p.url, "data:,")) for url in requests_of(browser))
        names = p.js("return [...document.querySelectorAll('.hidden-character')].map((box) => box.dataset.name)")
        assert {"RLO", "PDF", "ESC", "NUL", "BEL", "DEL", "CR", "ZWSP", "BOM", "LRI", "U+D800", "U+E0041"} <= set(names)
        widths = p.js("return [...document.querySelectorAll('.hidden-character')].map((box) => box.offsetWidth)")
        assert min(widths) > 5, "a character that cannot be seen has a box that can"
    assert file.read_bytes() == before


def test_a_megabyte_in_one_step_is_folded_and_opens_whole(browser, tmp_path):
    big = "line <b>\n" * 60_000 + "y" * 500_000
    item = Trajectory("big", (Step(big, big), Step("small")))
    with page(browser, tmp_path, [item]) as (p, store):
        assert p.js("return document.querySelector('.step .text').textContent.length") <= 3000
        assert "1,040,000" in p.js("return document.querySelector('button.fold').textContent")
        p.press("o")
        assert p.js(ACTION, 0) == big
        p.press("3")
        p.saved()
        assert len(kept(store)) == 1


def test_json_is_laid_out_without_adding_a_character(browser, tmp_path):
    first = '{"b": [1,2 , {"c":{}}],"a":"x, {y}" ,"a":null}'
    texts = [first, "[]", '{"x":"\\u0000"}  ', "[[[]], {}]", '{"torn": ', "7"]
    with page(browser, tmp_path, [Trajectory("json", tuple(Step(t) for t in texts))]) as (p, _):
        assert [p.js(ACTION, k) for k in range(len(texts))] == texts
        lines = texts_of(p, ".step[data-step='0'] .json-line")
        shown = [line.strip() for line in lines]
        assert shown == ["{", '"b": [', "1,", "2 ,", "{", '"c":{}', "}", "],", '"a":"x, {y}" ,', '"a":null', "}"]


def test_show_colours_by_score_and_is_as_exact(browser, tmp_path):
    item, other = hostile(), twelve("A")
    append_jsonl(tmp_path / "t.jsonl", [item, other])
    append_jsonl(tmp_path / "l.jsonl", [*first_error_at_7(other), StepLabel(item.id, 0, 0.5, "human:<b>x")])
    with serving(show_app(find(str(tmp_path / "t.jsonl"), [str(tmp_path / "l.jsonl")]))) as url:
        p = Page(browser, url)
        open_all(p)
        assert texts_of(p, ".step .text.action") == [step.action for step in item.steps]
        assert p.js("return document.title") == "prm show"
        p.press("n")
        p.wait("return document.querySelectorAll('.step').length === 12")
        assert p.js("return document.querySelectorAll('.step')[6].classList.contains('score-1')")
        assert all(seen.startswith((url, "data:,")) for seen in requests_of(browser))
    with serving(show_app(find(str(tmp_path / "l.jsonl")))) as url:
        browser.get(url)
        p.wait("return document.querySelectorAll('tbody tr').length === 13")


# --- review and accessibility -----------------------------------------------------------------------------------------


def reviewed(tmp_path, **options):
    """An application where three people have rated the same two trajectories, not always alike."""
    items = [twelve("A"), twelve("B")]
    made = app(items, db=str(tmp_path / "labels.db"), prelabels=first_error_at_7(items[0]), **options)
    for name, votes in (("ana", "333333111111"), ("bo", "333331111111"), ("cy", "333333121311")):
        meta = {"error_types": ["wrong tool"]}
        rows = [
            StepLabel(t.id, k, (int(v) - 1) / 2, f"human:{name}", note=f"because {k}", meta=meta)
            for t in items
            for k, v in enumerate(votes)
        ]
        import_labels(made.state.store, rows)
    return made


def axe(driver):
    import importlib.resources

    source = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text("utf-8")
    driver.execute_script(source)
    return json.loads(
        driver.execute_async_script(
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}).then((found) => arguments[0]("
            "JSON.stringify(found.violations.map((v) => [v.id, v.nodes.map((n) => n.html.slice(0, 99)).slice(0, 3)]))))"
        )
    )


@pytest.fixture(scope="module", params=["light", "dark"])
def themed(request, browser):
    features = [{"name": "prefers-color-scheme", "value": request.param}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    yield browser
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_adjudication_shows_only_disagreements_without_names(browser, tmp_path):
    made = reviewed(tmp_path)
    with serving(made) as url:
        browser.get(url + "/adjudicate")
        p = Page.__new__(Page)
        p.driver, p.url, p.pressed = browser, url, 0
        p.wait("return document.querySelectorAll('.case').length === 6")
        text = p.js("return document.documentElement.textContent")
        assert not any(name in text for name in ("ana", "bo ", "cy "))
        assert "because 5" in text
        p.press("3", "1", "u", "2")
        p.saved()
        decided = {k: v for k, v in kept(made.state.store).items() if v.source == "gold:adjudicated"}
        assert [(k[1], v.score, v.meta["by"]) for k, v in decided.items()] == [(5, 1.0, "local"), (7, 0.5, "local")]
        browser.refresh()
        p.wait("return document.getElementById('count')?.textContent === '2 of 6 decided'")


def test_no_accessibility_violation(themed, tmp_path):
    made = reviewed(tmp_path, blind=0)
    with serving(made) as url:
        p = Page(themed, url)
        p.press("3", "1", "2", "x", "f", "w")
        assert axe(themed) == []
        p.press("?")
        assert axe(themed) == []
        p.press("\ue00c", "h")
        assert axe(themed) == []
        themed.get(url + "/adjudicate")
        p.wait("return document.querySelector('.case')")
        assert axe(themed) == []
    users = {"ana": User("ana", hash_password("x"))}
    with serving(app([hostile()], db=str(tmp_path / "other.db"), users=users)) as url:
        themed.get(url + "/login")
        p.wait("return document.getElementById('form')")
        assert axe(themed) == []
        sign_in(themed, url, "ana", "x")
        Page(themed, url)
        assert axe(themed) == []
    append_jsonl(tmp_path / "t.jsonl", [twelve("A")])
    append_jsonl(tmp_path / "l.jsonl", first_error_at_7(twelve("A")))
    for found in (find(str(tmp_path / "t.jsonl"), [str(tmp_path / "l.jsonl")]), find(str(tmp_path / "l.jsonl"))):
        with serving(show_app(found)) as url:
            themed.get(url)
            p.wait("return document.querySelector('.step, tbody tr')")
            assert axe(themed) == []


def test_the_agreement_page(themed, tmp_path):
    made = reviewed(tmp_path)
    with serving(made) as url:
        themed.get_log("performance")
        themed.get(url + "/agreement/")
        p = Page.__new__(Page)
        p.driver, p.url, p.pressed = themed, url, 0
        p.wait("return document.querySelectorAll('.prm-figures table').length >= 3", seconds=30)
        text = p.js("return document.querySelector('.prm-figures').innerText")
        assert "Krippendorff's alpha (ordinal, everyone): 0." in text and "ana" in text
        time.sleep(0.5)
        assert axe(themed) == []
        assert all(seen.startswith((url, "data:", "blob:")) for seen in requests_of(themed))


def test_axe_and_browser_are_there():
    pytest.importorskip("axe_core_python")
    assert shutil.which("chromium")
