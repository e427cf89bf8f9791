"""kill -9 of the labelling server amid 8 clients x 200 labels, 20 times: is every acknowledged label there?

Each client sends a label, again and again with the same id, until it is acknowledged, and then the next. The value is
the number of labels that were acknowledged and are missing, or are there twice: 0 is the only good one. `--quick`: 4
kills.
"""

import argparse
import http.client
import json
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.annotate_support import Process, post, twelve

CLIENTS, LABELS = 8, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    kills = 4 if parser.parse_args().quick else 20
    items = [twelve(str(n), LABELS) for n in range(CLIENTS)]
    acknowledged: list[list[int]] = [[] for _ in items]
    resent = [0] * CLIENTS
    with tempfile.TemporaryDirectory() as folder:
        server = Process(Path(folder), items)
        server.start()

        def work(n: int) -> None:
            for k in range(LABELS):
                value = {"rating": ("bad", "neutral", "good")[k % 3], "how": "manual"}
                event = {"id": f"{n}-{k}", "trajectory_id": items[n].id, "step": k, "op": "rating", "value": value}
                while True:
                    try:
                        if post(server.url + "/api/events", {"annotator": "local", "events": [event]}, 2)["kept"]:
                            break
                    except (OSError, http.client.HTTPException, ValueError):
                        resent[n] += 1
                        time.sleep(0.02)
                acknowledged[n].append(k)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        total = CLIENTS * LABELS
        for kill in range(kills):
            while sum(map(len, acknowledged)) < total * (kill + 1) / (kills + 2):
                time.sleep(0.001)
            server.kill()
            server.start()
        for thread in threads:
            thread.join()
        server.kill()
        with sqlite3.connect(server.db) as db:
            query = "SELECT trajectory_id, step, count(*) FROM event WHERE op = 'rating' GROUP BY 1, 2"
            there = {(t, k): count for t, k, count in db.execute(query)}
            whole = db.execute("PRAGMA integrity_check").fetchone()[0]
    missing = sum((items[n].id, k) not in there for n in range(CLIENTS) for k in acknowledged[n])
    twice = sum(count > 1 for count in there.values())
    print(f"{kills} kills, {sum(map(len, acknowledged))} acknowledged, {len(there)} rows, {sum(resent)} sends failed, "
          f"missing {missing}, twice {twice}, integrity {whole}")
    bad = missing + twice + (whole != "ok")
    print(json.dumps({"name": "annotate_kill_lost", "value": bad, "target": 0, "better": "lower", "unit": "labels"}))


if __name__ == "__main__":
    main()
