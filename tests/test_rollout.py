"""Many episodes side by side: no shared state, seeds that count, failing policies, an endpoint over real sockets."""

import dataclasses
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prm import PRM, read_jsonl
from prm.cli import main
from prm.env import Action, History
from prm.errors import DataError, EnvError, ModelError, UsageError
from rl.policies import EndpointPolicy, PolicyConfig, load_policy
from rl.rollout import rollout
from tests import tiny


class Diary:
    """Write your own id, wait, read it back."""

    def reset(self, *, seed=None, options=None):
        self.notes, self.seed, self.count = {}, seed, 0
        return f"task {seed} {random.Random(seed).random():.6f}", {}

    def step(self, action):
        self.count += 1
        verb, _, value = action.partition(" ")
        if verb == "write":
            self.notes["id"] = value
            return "ok", 0.0, False, False, {}
        if verb == "wait":
            return "waited", 0.0, False, False, {}
        read = self.notes.get("id", "nothing")
        return read, 1.0, True, False, {"success": read == str(self.seed)}


class Writer:
    """Writes the id in its task, waits a number of turns that differs, reads."""

    def act(self, histories):
        out = []
        for h in histories:
            seed, turn = h.task.split()[1], len(h.actions)
            waits = int(seed) * 7 % 5
            out.append(Action(f"write {seed}" if turn == 0 else "wait" if turn <= waits else "read"))
        return out


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_every_episode_reads_its_own_note(batch):
    played = rollout(Writer(), Diary, range(16), batch=batch)
    assert [t.outcome for t in played] == [1.0] * 16
    assert [t.meta["seed"] for t in played] == list(range(16))
    assert played == rollout(Writer(), Diary, range(16), batch=16)


def test_one_object_plays_one_episode_at_a_time():
    assert [t.outcome for t in rollout(Writer(), Diary(), range(5))] == [1.0] * 5


class Draws:
    """Acts by its seed; remembers the seeds it saw."""

    def __init__(self):
        self.seeds = []

    def act(self, histories):
        self.seeds += [h.seed for h in histories]
        return [Action("read") for _ in histories]


def test_repeated_seeds_are_the_same_task_with_other_draws():
    policy = Draws()
    played = rollout(policy, Diary, [3, 3, 4], salt=1)
    assert played[0].task == played[1].task != played[2].task
    assert len(set(policy.seeds)) == 3
    again = Draws()
    rollout(again, Diary, [3, 3, 4], salt=2)
    assert not set(policy.seeds) & set(again.seeds)


def test_the_global_generator_is_left_alone():
    state = random.getstate()
    rollout(Writer(), Diary, range(4))
    assert random.getstate() == state


class Endless(Diary):
    def step(self, action):
        return "more", 0.5, False, False, {}


def test_an_endless_episode_is_cut_with_an_unknown_outcome():
    (t,) = rollout(Writer(), Endless, [0], max_steps=4)
    assert len(t.steps) == 4 and t.outcome is None and t.meta["truncated"] and not t.meta["terminated"]


class Short:
    def act(self, histories):
        return [Action("read")] * (len(histories) - 1)


def test_a_policy_that_answers_too_little_is_named():
    with pytest.raises(EnvError, match="gave 1 actions for 2 histories"):
        rollout(Short(), Diary, range(2))


class Sometimes:
    def act(self, histories):
        return [Action("read", finish="error" if h.task.startswith("task 1 ") else "stop") for h in histories]


def test_a_failing_call_costs_its_episode_only():
    assert [t.meta["seed"] for t in rollout(Sometimes(), Diary, range(3))] == [0, 2]
    with pytest.raises(UsageError, match="failed in all 1 episodes"):
        rollout(Sometimes(), Diary, [1])


@pytest.fixture
def endpoint():
    """(address, requests seen, replies to give)"""
    seen, replies = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            status, reply = replies.pop(0) if replies else (200, {"content": "read"})
            if isinstance(reply, tuple):
                data, kind = reply
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                return
            choice = {"index": 0, "finish_reason": reply.pop("finish_reason", "stop")}
            if self.path.endswith("/chat/completions"):
                choice["message"] = {"role": "assistant", "content": None, **reply}
            else:
                choice["text"] = reply.get("content", "")
            usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
            answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps({**answer, "usage": usage} if status == 200 else {"error": {"message": "no"}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen, replies
    server.shutdown()
    server.server_close()


def test_an_endpoint_plays_a_chat_with_tools(endpoint):
    url, seen, replies = endpoint
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "Nile"}'}}
    replies.append((200, {"tool_calls": [call], "finish_reason": "tool_calls"}))
    policy = EndpointPolicy("m", PolicyConfig("openai:m", base_url=url, system="be brief"))
    tools = ({"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}},)
    start = History("find it", tools=tools, seed=1)
    action = policy.act([start])[0]
    assert action.text == '<tool_call>\n{"name": "search", "arguments": {"query": "Nile"}}\n</tool_call>'
    policy.act([start.then(action, "It is long.")])
    roles = [m["role"] for m in seen[1][1]["messages"]]
    assert roles[:3] == ["system", "user", "assistant"] and "It is long." in json.dumps(seen[1][1]["messages"])
    assert seen[0][1]["tools"] and seen[0][1]["seed"] != seen[1][1]["seed"]


def test_draws_of_one_state_have_their_own_calls_and_seeds(endpoint):
    url, seen, _ = endpoint
    policy = EndpointPolicy("m", PolicyConfig("openai:m", base_url=url))
    assert len(policy.act([History("go", seed=s) for s in range(8)])) == 8
    assert len({body["seed"] for _, body in seen}) == 8 and all("n" not in body for _, body in seen)


@pytest.mark.parametrize("prefix", ["Let x = 4.\n\n", "Then 2x = 8. ", "    indented code\n", "\t\r\n"])
def test_a_prefix_is_continued_byte_for_byte(endpoint, prefix):
    url, seen, _ = endpoint
    policy = EndpointPolicy("m", PolicyConfig("openai:m", base_url=url, layout="text"))
    policy.act([History("Solve.\n", (Action(prefix),), ("",))])
    path, body = seen[0]
    assert path == "/v1/completions" and body["prompt"] == "Solve.\n" + prefix
    assert "stop" not in body
    policy.act([History("Solve.\n", (Action(prefix), Action("b")), ("seen. ", "")), ])
    assert seen[1][1]["prompt"] == "Solve.\n" + prefix + "seen. b"


@pytest.mark.parametrize(
    ("reply", "finish_reason", "text", "finish"),
    [
        ("3 + 4 = 7\n7 * 5", "length", "3 + 4 = 7\n", "stop"),
        ("#### 35\n\nQuestion: x\n", "stop", "#### 35\n", "stop"),
        ("so 5; then\n", "stop", "so 5; ", "stop"),
        ("\n", "stop", "\n", "stop"),
        ("no end in", "length", "no end in", "length"),
        ("no end", "stop", "no end", "stop"),
        ("", "stop", "", "stop"),
        ("filtered\nand more", "content_filter", "filtered\nand more", "error"),
    ],
)
def test_a_step_at_an_endpoint_ends_after_its_stop_text(endpoint, reply, finish_reason, text, finish):
    url, seen, replies = endpoint
    replies.append((200, {"content": reply, "finish_reason": finish_reason}))
    policy = EndpointPolicy("m", PolicyConfig("openai:m", base_url=url, layout="text", stop=("\n", "; ")))
    (action,) = policy.act([History("Solve.\n")])
    assert (action.text, action.finish) == (text, finish)
    assert "stop" not in seen[0][1], "an endpoint would drop it, and so would the step"
    with pytest.raises(UsageError, match="needs --layout text"):
        EndpointPolicy("m", PolicyConfig("openai:m", base_url=url, stop=("\n",)))


def test_how_a_call_ended_is_kept(endpoint):
    url, _, replies = endpoint
    replies += [(200, {"content": "cut", "finish_reason": "length"}), (400, {})]
    policy = EndpointPolicy("m", PolicyConfig("openai:m", base_url=url, concurrency=1))
    assert [a.finish for a in policy.act([History("a"), History("b"), History("c")])] == ["length", "error", "stop"]
    assert "BadRequestError" in policy.errors[0]


def play(out, *more):
    argv = ["rollout", "--env", "rl.envs.multihop:MultiHop", "--policy", "rl.envs.multihop:exact", "--out", str(out)]
    return main([*argv, "--n", "3", *more])


def test_a_torn_last_line_is_played_again(tmp_path, capsys):
    out = tmp_path / "t.jsonl"
    assert play(out) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert play(out) == 0 and out.read_bytes() == whole
    assert "removed a torn last line" in capsys.readouterr().err


def test_episodes_of_another_policy_or_environment_are_not_taken_as_done(tmp_path, capsys):
    out = tmp_path / "t.jsonl"
    assert play(out) == 0
    before = out.read_bytes()
    assert play(out, "--policy", "rl.envs.multihop:sloppy") == 2
    assert play(out, "--env-args", '{"hops": [4]}') == 2
    for line in capsys.readouterr().err.strip().splitlines():
        assert "holds an episode of seed 0 with" in line and "give another --out or --seed" in line
    assert out.read_bytes() == before
    assert play(out, "--policy", "rl.envs.multihop:sloppy", "--seed", "100") == 0, "other seeds are other episodes"
    assert len(read_jsonl(out)) == 6 and "3 episodes, 0 of them from before" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [["--top-p", "0"], ["--temperature", "-1"], ["--temperature", "inf"], ["--batch", "0"],
     ["--max-action-tokens", "0"], ["--concurrency", "0"], ["--max-steps", "0"], ["--n", "-4"]],
)  # fmt: skip
def test_options_that_would_sample_nothing_or_nonsense_are_refused(tmp_path, capsys, more):
    assert play(tmp_path / "t.jsonl", *more) == 2
    err = capsys.readouterr().err.strip()
    assert more[0].strip("-").replace("-", "_") in err.replace("-", "_") and len(err.splitlines()) == 1


def test_a_checkpoint_without_a_language_head_is_no_policy(tmp_path):
    PRM.create(tiny.checkpoint(tmp_path / "base")).save(tmp_path / "prm")
    with pytest.raises(ModelError, match="no language model: the checkpoint lacks"):
        load_policy(PolicyConfig(str(tmp_path / "prm")))
    assert load_policy(PolicyConfig(str(tmp_path / "base"))).name.endswith("base")


@pytest.mark.parametrize("found", [None, ["text"], "text", [None]])
def test_a_policy_that_gives_no_actions_is_named(found):
    class Odd:
        def act(self, histories):
            return found

    with pytest.raises(EnvError, match=r"Odd\.act"):
        rollout(Odd(), Diary, [1])


class Broken:
    def act(self, histories):
        raise OSError("no network")


@pytest.mark.parametrize("command", [["rollout", "--n", "1"], ["mc", "{}"]])
def test_a_policy_that_raises_is_one_line(tmp_path, capsys, command):
    there = tmp_path / "t.jsonl"
    assert play(there) == 0
    name, *more = [part.format(there) for part in command]
    env = ["--env", "rl.envs.multihop:MultiHop", "--policy", "tests.test_rollout:Broken"]
    assert main([name, *more, *env, "--out", str(tmp_path / "o.jsonl")]) == 2
    err = capsys.readouterr().err.strip()
    assert "policy Broken.act: raised OSError: no network" in err and len(err.splitlines()) == 1


def test_an_adapter_of_another_task_is_no_policy(tmp_path):
    PRM.create(tiny.checkpoint(tmp_path / "base"), lora_rank=2).save(tmp_path / "prm")
    with pytest.raises(ModelError, match="no language model: an adapter for TOKEN_CLS"):
        load_policy(PolicyConfig(str(tmp_path / "prm")))


def test_an_empty_prompt_is_named(tmp_path):
    policy = load_policy(PolicyConfig(tiny.checkpoint(tmp_path / "base"), layout="text"))
    policy.layout()  # made with this tokenizer's own first token
    policy._layouts = {key: dataclasses.replace(made, head=()) for key, made in policy._layouts.items()}
    with pytest.raises(DataError, match="an empty prompt"):
        policy.act([History("")])


NO_REPLIES = (
    b"<html>", b"[]", b"null", b'"x"', b'{"choices": [{}]}', b'{"choices": [null]}', b'{"choices": []}',
    b'{"choices": [{"message": {"role": "assistant"}}], "usage": {}}',
)  # fmt: skip


@pytest.mark.parametrize("body", NO_REPLIES)
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_reply_that_is_none_costs_its_episode_alone(endpoint, body, kind):
    url, _, replies = endpoint
    replies.append((200, (body, kind)))
    policy = EndpointPolicy("m", PolicyConfig("openai:m", base_url=url, concurrency=1))
    odd, good = policy.act([History("a"), History("b")])
    assert good.text == "read" and (odd.finish == "error" or odd.text == "")
    assert len(policy.errors) == (odd.finish == "error")
