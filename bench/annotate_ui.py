"""How fast the labelling page is, in a headless Chromium against a server process of its own.

    draw_40, draw_400   from asking the server for the next item to its steps painted, median
    key_to_paint        from a rating key to the changed step painted, median
    key_to_ack          from a rating key to the server having it on disk (fsync) and the page knowing, p50

Keys are dispatched in the page; painted means the first task after the next frame. `--quick` takes fewer samples.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.annotate_support import Process, chromium, twelve

PAGE = """
window.bench = {
  painted: () => new Promise((done) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => done(performance.now());
    channel.port2.postMessage(0);
  })),
  key: (code, key) => document.body.dispatchEvent(new KeyboardEvent('keydown', {code, key, bubbles: true})),
  saved: () => new Promise((done) => {
    const saved = document.getElementById('saved');
    const watch = new MutationObserver(() => {
      if (saved.dataset.state === 'saved') { watch.disconnect(); done(performance.now()); }
    });
    watch.observe(saved, {attributes: true});
  }),
  drawn: () => new Promise((done) => {
    const watch = new MutationObserver(() => { watch.disconnect(); bench.painted().then(done); });
    watch.observe(document.getElementById('main'), {childList: true});
  }),
  idle: () => new Promise((done) => setTimeout(done, 20 + Math.random() * 30)),
};
"""
RATE = """
const done = arguments[arguments.length - 1];
(async () => {
  const out = [];
  for (let i = 0; i < arguments[0]; i++) {
    await bench.idle();
    const start = performance.now(), saved = bench.saved(), digit = 1 + i % 3;
    bench.key('Digit' + digit, String(digit));
    const painted = await bench.painted();
    out.push([painted - start, await saved - start]);
  }
  done(out);
})();
"""
NEXT = """
const done = arguments[arguments.length - 1];
(async () => {
  performance.clearResourceTimings();
  const drawn = bench.drawn();
  bench.key('Digit3', '3');
  bench.key('KeyN', 'n');
  const end = await drawn;
  const asked = performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/api/next')).pop();
  done([end - asked.startTime, end - asked.responseEnd, document.querySelectorAll('.step').length]);
})();
"""


def open_page(driver, url: str) -> None:
    driver.get(url)
    while not driver.execute_script("return document.querySelector('.step')"):
        pass
    driver.execute_script(PAGE)


def draws(driver, steps: int, times: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        server = Process(Path(folder), [twelve(str(n), steps) for n in range(times + 3)])
        server.start()
        try:
            open_page(driver, server.url)
            found = [driver.execute_async_script(NEXT) for _ in range(times + 1)][1:]
        finally:
            server.kill()
    assert {row[2] for row in found} == {steps}
    return [row[0] for row in found]


def rates(driver, steps: int, times: int) -> tuple[list[float], list[float]]:
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Process(Path(folder), [twelve(str(n), steps) for n in range(times + 1)])
        server.start()
        try:
            open_page(driver, server.url)
            for _ in range(times):
                found += driver.execute_async_script(RATE, steps - 1)[3:]
                driver.execute_async_script(NEXT)
        finally:
            server.kill()
    return [row[0] for row in found], [row[1] for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with chromium() as driver:
        lines = [
            ("annotate_draw_40_ms", draws(driver, 40, 8 if quick else 30), 80),
            ("annotate_draw_400_ms", draws(driver, 400, 5 if quick else 15), 300),
        ]
        paint, ack = rates(driver, 40, 2 if quick else 8)
        lines += [("annotate_key_to_paint_ms", paint, 20), ("annotate_key_to_ack_ms", ack, 20)]
    for name, values, _ in lines:
        print(f"{name}: min {min(values):.1f}, p95 {sorted(values)[int(len(values) * 0.95)]:.1f}, n {len(values)}")
    for name, values, target in lines:
        value = round(statistics.median(values), 2)
        print(json.dumps({"name": name, "value": value, "target": target, "better": "lower", "unit": "ms"}))


if __name__ == "__main__":
    main()
