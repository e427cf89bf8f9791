"""What the pages show, in a real Chromium: exact texts, nothing that runs, the review pages, accessibility."""

import json
import os
import time

import pytest

from labeling.annotate import app
from labeling.annotate.auth import User, hash_password
from labeling.annotate.reader import show_app
from labeling.annotate.run import import_labels
from labeling.annotate.show import find
from prm import Step, StepLabel, Trajectory, append_jsonl, read_jsonl
from tests.annotate_support import (
    CHROMIUM,
    DRIVER,
    HOSTILE,
    Page,
    chromium,
    first_error_at_7,
    hostile,
    kept,
    page,
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
