"""The routes: who may do what, what is refused, and that acknowledged labels survive a kill."""

import http.client
import json
import subprocess
import sys
import threading

import pytest
from fastapi.testclient import TestClient

from labeling.annotate import app
from labeling.annotate.auth import User, hash_password
from labeling.annotate.exchange import labels
from labeling.annotate.run import import_labels
from labeling.annotate.store import Store
from prm import StepLabel, append_jsonl, read_jsonl
from prm.cli import main
from tests.annotate_support import Process, first_error_at_7, hostile, post, twelve

USERS = {
    "ana": User("ana", hash_password("a")),
    "bo": User("bo", hash_password("b")),
    "rita": User("rita", hash_password("r"), "reviewer"),
}
HEADER = {"x-prm": "1"}


def event(item, k, value="good", key=None, **more):
    made = {"id": key or f"{item.id}-{k}-{value}", "trajectory_id": item.id, "step": k, "op": "rating"}
    return made | {"value": {"rating": value, "how": "manual"}} | more


def say(client, name, *events):
    return client.post("/api/events", json={"annotator": name, "events": list(events)}, headers=HEADER)


def signed_in(made, name):
    client = TestClient(made)
    answer = client.post("/api/login", json={"name": name, "password": name[0]}, headers=HEADER)
    assert answer.status_code == 200, answer.text
    return client


@pytest.fixture
def made(tmp_path):
    items = [twelve(str(k)) for k in range(4)]
    return app(items, db=str(tmp_path / "l.db"), users=USERS, overlap=1, prelabels=first_error_at_7(items[0]), blind=0)


def test_two_people_and_a_bare_client_never_share_anything(made):
    ana, bo, nobody = signed_in(made, "ana"), signed_in(made, "bo"), TestClient(made)
    assert ana.cookies != bo.cookies
    one = ana.post("/api/next", json={}, headers=HEADER).json()["item"]
    say(ana, "ana", event(made.state.plan.trajectories[one["id"]], 2, "bad"))
    seen = bo.post("/api/next", json={"id": one["id"]}, headers=HEADER).json()["item"]
    assert seen["history"] == []
    undo = event(made.state.plan.trajectories[one["id"]], 2) | {"value": None, "kind": "undo"}
    say(bo, "bo", undo)
    assert [(label.source, label.score) for label in labels(made.state.store)] == [("human:ana", 0.0)]
    assert len(ana.post("/api/next", json={}, headers=HEADER).json()["item"]["history"]) == 1
    for path in ("/api/me", "/api/items", "/api/export", "/api/report", "/api/audit", "/api/disagreements"):
        assert nobody.get(path).status_code == 401
    for path in ("/api/next", "/api/events", "/api/lease/x"):
        assert nobody.post(path, json={}, headers=HEADER).status_code == 401
    assert nobody.get("/", follow_redirects=False).headers["location"] == "/login"


def test_labels_cannot_be_given_in_anothers_name(made):
    ana, item = signed_in(made, "ana"), next(iter(made.state.plan.trajectories.values()))
    assert say(ana, "bo", event(item, 0)).status_code == 409
    assert ana.post("/api/next", json={"annotator": "bo"}, headers=HEADER).status_code == 409
    answer = say(ana, "ana", event(item, 0) | {"annotator": "bo"}, event(item, 1, op="decision"))
    assert answer.json()["refused"] != {} and len(answer.json()["kept"]) == 1
    assert [label.source for label in labels(made.state.store)] == ["human:ana"]


def test_an_annotator_exports_own_labels_and_a_reviewer_all(made):
    ana, bo, rita = (signed_in(made, name) for name in ("ana", "bo", "rita"))
    item = next(iter(made.state.plan.trajectories.values()))
    say(ana, "ana", event(item, 0), event(item, 1, "bad"))
    say(bo, "bo", event(item, 0, "bad"))
    rows = [json.loads(line) for line in ana.get("/api/export").text.splitlines()]
    assert {row["source"] for row in rows} == {"human:ana"} and len(rows) == 2
    assert ana.get("/api/export", params={"annotator": "bo"}).status_code == 403
    assert ana.get("/api/export", params={"annotator": ""}).status_code == 403
    for path in ("/api/audit", "/api/report", "/api/disagreements", f"/api/trajectory/{item.id}"):
        assert ana.get(path).status_code == 403
        assert rita.get(path).status_code == 200
    assert ana.get("/adjudicate", follow_redirects=False).status_code == 303
    assert ana.get("/agreement/", follow_redirects=False).status_code == 303
    assert ana.get("/agreement/config").status_code == 403
    assert ana.post("/agreement/gradio_api/queue/join", json={}).status_code == 403
    assert len(rita.get("/api/export").text.splitlines()) == 3
    assert len(rita.get("/api/export", params={"annotator": "bo"}).text.splitlines()) == 1
    assert rita.get("/api/export", params={"provenance": "bulk"}).text == ""
    assert rita.get("/api/export", params={"provenance": "x"}).status_code == 400
    audit = [json.loads(line) for line in rita.get("/api/audit").text.splitlines()]
    assert [row["annotator"] for row in audit] == ["ana", "ana", "bo"]


def test_a_blind_item_and_a_gold_item_cannot_be_told_from_one_without_prelabels(tmp_path):
    items = [twelve(str(k)) for k in range(2)]
    gold = [StepLabel(items[0].id, 0, 1.0, "gold:x")]
    made = app(items, db=str(tmp_path / "l.db"), prelabels=first_error_at_7(items[1]), gold=gold, blind=1)
    client = TestClient(made)
    for item in items:
        answer = client.post("/api/next", json={"id": item.id}, headers=HEADER).json()["item"]
        assert answer["prelabels"] == [None] * 12
        assert set(answer) == {"id", "task", "steps", "prelabels", "asked", "history"}
    say(client, "local", event(items[1], 0, "bad"))
    answer = client.post("/api/next", json={"id": items[1].id}, headers=HEADER)
    assert "0.97" not in answer.text, "nor after it was labelled"
    assert "prelabel" not in client.get("/api/export").text
    assert client.get("/api/report").json()["model"][0]["assist"] == "blind"


def test_headers_on_every_answer(made):
    client = TestClient(made)
    for path in ("/", "/login", "/static/view.js", "/api/me", "/nothing"):
        answer = client.get(path, follow_redirects=False)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    cookie = client.post("/api/login", json={"name": "ana", "password": "a"}, headers=HEADER).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie


def test_forged_requests_are_refused(made):
    ana = signed_in(made, "ana")
    body = {"annotator": "ana", "events": []}
    assert ana.post("/api/events", json=body).status_code == 403
    assert ana.post("/api/logout").status_code == 403
    foreign = HEADER | {"origin": "http://evil.example"}
    assert ana.post("/api/events", json=body, headers=foreign).status_code == 403
    own = HEADER | {"origin": "http://testserver"}
    assert ana.post("/api/events", json=body, headers=own).status_code == 200


def test_without_users_only_a_loopback_name_is_answered(tmp_path):
    client = TestClient(app([twelve()], db=str(tmp_path / "l.db")))
    own = ("localhost:7860", "127.0.0.1", "[::1]:80")
    foreign = ("evil.example", "evil.example:7860", "10.0.0.5", "127.0.0.1.evil.example")
    codes = [client.get("/api/me", headers={"host": host}).status_code for host in own + foreign]
    assert codes == [200] * 3 + [403] * 4


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/label.html",
        "/static/guide.txt",
        "/l.db",
        "/static/",
        "/..%2f..%2fetc/passwd",
        "/file=/etc/passwd",
        "/gradio_api/file=/etc/passwd",
        "/agreement/file=/etc/passwd",
        "/agreement/gradio_api/file=/etc/passwd",
        "/agreement/gradio_api/upload",
        "/agreement/gradio_api/proxy=http://evil.example/",
        "/openapi.json",
        "/docs",
        "/api/trajectory/..%2f..%2fetc%2fpasswd",
    ],
)
def test_no_other_path_is_served(tmp_path, path):
    answer = TestClient(app([twelve()], db=str(tmp_path / "l.db"))).get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text and "import" not in answer.text


def test_malformed_bodies(made):
    ana = signed_in(made, "ana")
    for body in (b"{", b"[]", b'{"events": 3}', b'{"annotator": "ana", "events": {}}', b'{"annotator": NaN}', b"\xff"):
        assert ana.post("/api/events", content=body, headers=HEADER).status_code in (400, 409)
    many = {"annotator": "ana", "events": [3, None, {}, {"id": "a"}]}
    answer = ana.post("/api/events", json=many, headers=HEADER).json()
    assert answer["kept"] == [] and "a" in answer["refused"]
    assert ana.post("/api/events", content=b"x" * (5 << 20), headers=HEADER).status_code == 413
    assert ana.post("/api/next", json={"id": ["x"], "leave": 3}, headers=HEADER).status_code == 200
    assert ana.post("/api/lease/nothing", json={}, headers=HEADER).status_code == 404


def test_guesses_are_throttled_and_the_right_password_waits_too(made):
    client = TestClient(made)
    wrong = {"name": "ana", "password": "x"}
    codes = [client.post("/api/login", json=wrong, headers=HEADER).status_code for _ in range(7)]
    assert codes == [401] * 5 + [429] * 2
    answer = client.post("/api/login", json={"name": "ana", "password": "a"}, headers=HEADER)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1


def test_signing_in_survives_a_restart_and_ends_with_signing_out(tmp_path):
    made = app([twelve()], db=str(tmp_path / "l.db"), users=USERS)
    cookies = signed_in(made, "ana").cookies
    made.state.store.close()
    again = TestClient(app([twelve()], db=str(tmp_path / "l.db"), users=USERS), cookies=cookies)
    assert again.get("/api/me").json()["name"] == "ana"
    again.post("/api/logout", headers=HEADER)
    assert again.get("/api/me").status_code == 401


def test_an_item_is_sent_exactly_as_it_is(tmp_path):
    item = hostile()
    client = TestClient(app([item], db=str(tmp_path / "l.db")))
    sent = client.post("/api/next", json={}, headers=HEADER).json()["item"]
    assert sent["task"] == item.task
    assert [(s["action"], s["observation"]) for s in sent["steps"]] == [(s.action, s.observation) for s in item.steps]


def test_the_adjudicators_decision_is_a_label_of_its_own(made):
    rita, store, item = signed_in(made, "rita"), made.state.store, next(iter(made.state.plan.trajectories.values()))
    import_labels(store, [StepLabel(item.id, 0, s, f"human:{n}") for n, s in (("ana", 1), ("bo", 0))])
    (row,) = rita.get("/api/disagreements").json()
    assert "ana" not in json.dumps(row)
    answer = say(rita, "rita", event(item, 0, op="decision") | {"value": {"rating": "bad", "comment": "see step 1"}})
    assert answer.json()["refused"] == {}
    (decision,) = [label for label in labels(store) if label.source == "gold:adjudicated"]
    assert (decision.score, decision.note, decision.meta["by"]) == (0.0, "see step 1", "rita")
    assert len(list(labels(store))) == 3


def test_kill_in_the_middle_loses_nothing_and_doubles_nothing(tmp_path):
    """8 clients give labels, each sent until it is acknowledged, while the server is killed three times."""
    items = [twelve(str(k), 40) for k in range(8)]
    server = Process(tmp_path, items)
    server.start()
    acknowledged = [0] * 8

    def work(n):
        for k in range(40):
            body = {"annotator": "local", "events": [event(items[n], k, "bad" if k % 3 else "good")]}
            while True:
                try:
                    if post(server.url + "/api/events", body)["kept"]:
                        break
                except (OSError, http.client.HTTPException, ValueError):
                    threading.Event().wait(0.02)
            acknowledged[n] += 1
            threading.Event().wait(0.02)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for kill in range(1, 4):
        while sum(acknowledged) < 80 * kill:
            threading.Event().wait(0.005)
        server.kill()
        server.start()
    for thread in threads:
        thread.join(60)
    server.kill()
    assert acknowledged == [40] * 8
    store = Store(server.db, write=False)
    given = [e for e in store.events() if e.op == "rating"]
    assert len(given) == len({(e.trajectory_id, e.step) for e in given}) == 320
    assert len(list(labels(store))) == 320
    store.close()


# --- the command line -------------------------------------------------------------------------------------------------


def test_export_import_and_audit_without_a_browser(tmp_path, capsys):
    item = twelve()
    append_jsonl(tmp_path / "old.jsonl", [StepLabel(item.id, k, k % 2, "human:ana") for k in range(4)])
    db, out = str(tmp_path / "l.db"), str(tmp_path / "labels.jsonl")
    assert main(["annotate", "--db", db, "--import-labels", str(tmp_path / "old.jsonl")]) == 0
    assert main(["annotate", "--db", db, "--export", out, "--audit", str(tmp_path / "audit.jsonl")]) == 0
    assert [(r.step, r.score, r.source) for r in read_jsonl(out)] == [(k, k % 2, "human:ana") for k in range(4)]
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 4
    capsys.readouterr()
    assert main(["annotate", "--db", db, "--export", out]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_hash_from_stdin():
    command = [sys.executable, "-m", "prm.cli", "annotate", "--hash-password"]
    done = subprocess.run(command, input="secret\n", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("scrypt:")


BAD = {
    "missing file": ["none.jsonl", "--db", "l.db"],
    "empty file": ["empty.jsonl", "--db", "l.db"],
    "not JSON": ["bad.jsonl", "--db", "l.db"],
    "labels instead": ["labels.jsonl", "--db", "l.db"],
    "no db": ["t.jsonl"],
    "nothing to do": ["--db", "l.db"],
    "db is no database": ["t.jsonl", "--db", "bad.jsonl"],
    "db to export is missing": ["--db", "none.db", "--export", "out.jsonl"],
    "users malformed": ["t.jsonl", "--db", "l.db", "--users", "bad.jsonl"],
    "users missing": ["t.jsonl", "--db", "l.db", "--users", "none.toml"],
    "open without users": ["t.jsonl", "--db", "l.db", "--host", "0.0.0.0"],
    "share": ["t.jsonl", "--db", "l.db", "--blind", "2"],
    "prelabels are trajectories": ["t.jsonl", "--db", "l.db", "--prelabels", "t.jsonl"],
    "queue malformed": ["t.jsonl", "--db", "l.db", "--queue", "bad.jsonl"],
    "port": ["t.jsonl", "--db", "l.db", "--port", "70000"],
    "guide missing": ["t.jsonl", "--db", "l.db", "--guide", "none.txt"],
    "name": ["t.jsonl", "--db", "l.db", "--annotator", "a/b"],
    "import of a model": ["--db", "l.db", "--import-labels", "labels.jsonl"],
    "db folder missing": ["t.jsonl", "--db", "no/where/l.db"],
}


@pytest.mark.parametrize("argv", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_2(tmp_path, monkeypatch, capsys, argv):
    monkeypatch.chdir(tmp_path)
    append_jsonl("t.jsonl", twelve())
    append_jsonl("labels.jsonl", StepLabel("x", 0, 1.0, "judge:m"))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text("{ this is no JSON, no TOML and no database\n" * 40)
    assert main(["annotate", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("prm annotate: "), err


def test_a_taken_port_is_one_line_and_2(tmp_path, capsys):
    server = Process(tmp_path, [twelve()])
    server.start()
    try:
        other = str(tmp_path / "other.db")
        assert main(["annotate", str(server.file), "--db", other, "--port", str(server.port)]) == 2
        assert "choose another --port" in capsys.readouterr().err
        assert main(["annotate", str(server.file), "--db", str(server.db), "--port", "0"]) == 2
        assert "another prm annotate is using it" in capsys.readouterr().err
        assert main(["annotate", "--db", str(server.db), "--export", "-"]) == 0
    finally:
        server.kill()


def test_show_in_the_terminal(tmp_path, capsys):
    item, other = hostile(), twelve()
    append_jsonl(tmp_path / "t.jsonl", [item, other])
    append_jsonl(tmp_path / "l.jsonl", first_error_at_7(other))
    assert main(["show", str(tmp_path / "t.jsonl"), "--labels", str(tmp_path / "l.jsonl")]) == 0
    out = capsys.readouterr().out
    assert out.isprintable() or set(c for c in out if not c.isprintable()) == {"\n"}
    assert r"\x1b[31mred\x1b[0m bell\x07 nul\x00" in out and r"\u202egnp.exe" in out
    assert "<think>check 2<3</think>" in out and "prm:model 0.12" in out
    assert main(["show", str(tmp_path / "t.jsonl"), "--labels", str(tmp_path / "l.jsonl"), "--terminal"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[31m  7 █ prm:model 0.12\x1b[0m" in out and "\x1b[32m  1 █" in out
    assert main(["show", str(tmp_path / "l.jsonl")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 13


def test_show_a_training_run(tmp_path, capsys):
    from dataclasses import replace

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (run_dir / "report.html").write_text("x")
    assert main(["show", str(run_dir)]) == 2
    assert "report.html" in capsys.readouterr().err
    append_jsonl(run_dir / "audit.jsonl", replace(twelve(), meta={"scores": [0.1] * 12}))
    assert main(["show", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "report.html" in out and "prm:this run 0.10" in out
    for path in (tmp_path / "none", tmp_path):
        assert main(["show", str(path)]) == 2
