"""What the annotation tests and benchmarks share: trajectories, a server process or thread, a headless Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from labeling.annotate import app
from labeling.annotate.exchange import labels
from prm.records import Step, StepLabel, Trajectory, append_jsonl

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOSTILE = [
    'if a<b and c>d: return "<b>x</b>"',
    "<think>check 2<3</think> then <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"${1+1}\"}}\n</tool_call>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "[click](javascript:alert(1)) ![i](http://evil.example/i.png)",
    "$\\frac{a}{b}$ costs $5 ${document.title='pwned'} {{constructor.constructor('return 1')()}}",
    "\\\\begin{cases} C:\\new __init__ *a* # b",
    "x" * 30_000,
    "safe \u202egnp.exe\u202c and \u2066hidden\u2069 \u200bzero\ufeff",
    "\x1b[31mred\x1b[0m bell\x07 nul\x00 del\x7f cr\r\nnext",
    "</script><script>document.title='pwned'</script></textarea></pre><!--",
    "List<String> xs = new ArrayList<>(); <unknown-tag attr>kept</unknown-tag>",
    '<form action="http://evil.example/"><input name=q><button>go</button></form>',
    '<iframe srcdoc="<script>parent.document.title=1</script>"></iframe><svg onload="document.title=1"><style>*{',
    '<details ontoggle="document.title=1" open><base href="http://evil.example/"><meta http-equiv=refresh content=0>',
    "\u0645\u0631\u062d\u0628\u0627 emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 \U000e0041 tag, lone \ud800 end",
    '{"tool": "search", "args": {"q": "a\\u0000b", "n": 1e400, "n": [1, {}, []]}}',
]


def twelve(name: str = "", steps: int = 12) -> Trajectory:
    """A trajectory of so many steps: thought, tool call, observation; an answer at the end."""
    made = [
        Step(
            f"<think>Step {k + 1}: look at row {k}.</think>\n"
            f'<tool_call>\n{{"name": "lookup", "arguments": {{"row": {k}, "table": "orders"}}}}\n</tool_call>',
            f"row {k} | alice{k} | {k * 17 % 23} items | shipped\nrow {k + 1} | bob{k} | back-ordered",
        )
        for k in range(steps - 1)
    ]
    return Trajectory(f"Refund order 8812 and tell the customer. {name}".strip(), (*made, Step("Final Answer: done.")))


def hostile() -> Trajectory:
    steps = tuple(Step(text, text[::-1] if i % 2 else text) for i, text in enumerate(HOSTILE))
    return Trajectory(HOSTILE[2] + "${alert(1)} {{x}}", steps)


def first_error_at_7(trajectory: Trajectory, source: str = "prm:model") -> list[StepLabel]:
    """Pre-labels of a model that is sure up to step 6, finds step 7 bad, and is unsure or negative after it."""
    scores = [0.97, 0.95, 0.99, 0.93, 0.9, 0.96, 0.12, 0.2, 0.4, 0.3, 0.1, 0.2]
    return [StepLabel(trajectory.id, k, s, source) for k, s in enumerate(scores)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(app: object, port: int | None = None) -> Iterator[str]:
    """Run an application in a thread; gives its address."""
    import uvicorn

    port = port or free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


class Process:
    """`prm annotate` as a process of its own, that can be killed and started again on the same port."""

    def __init__(self, folder: Path, trajectories: list[Trajectory], *flags: str) -> None:
        self.folder, self.flags, self.port = folder, flags, free_port()
        self.file, self.db = folder / "trajectories.jsonl", folder / "labels.db"
        append_jsonl(self.file, trajectories)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "prm.cli", "annotate", str(self.file), "--db", str(self.db)]
        log = open(self.folder / "server.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen([*command, "--port", str(self.port), *self.flags], stdout=log, stderr=log)
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/static/style.css", timeout=1):
                return
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()


def post(url: str, body: object, timeout: float = 5) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"x-prm": "1", "content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[object]:
    """A headless Chromium with a new profile, driven by selenium."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        for flag in (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={profile}", "--window-size=1400,900", *flags),
        ):
            options.add_argument(flag)
        os.environ.setdefault("SE_AVOID_STATS", "true")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        driver.set_page_load_timeout(30)
        driver.set_script_timeout(30)
        try:
            yield driver
        finally:
            driver.quit()


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


def sign_in(driver, url, name, password):
    driver.get(url)
    driver.find_element("id", "name").send_keys(name)
    driver.find_element("id", "password").send_keys(password + "\n")
    until = time.monotonic() + 10
    while driver.execute_script("return location.pathname") == "/login":
        assert time.monotonic() < until, driver.find_element("id", "message").text
        time.sleep(0.01)
