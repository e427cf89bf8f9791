"""Rollouts at a server that loads each update's adapter: a stand-in for vLLM on a tiny model."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest
import torch
from peft import PeftModel

from prm.errors import UsageError
from rl.policies import PolicyConfig, TransformersPolicy
from rl.ppo import PPOConfig, train
from rl.served import ServedPolicy
from tests import tiny
from tests.test_ppo import Chatty, scorer


class Server(ThreadingHTTPServer):
    """Samples from the adapter that was loaded last, token by token."""

    def __init__(self, base, drop=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.base, self.drop, self.loaded, self.calls, self.lock = base, drop, {}, [], threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.calls.append((self.path, body.get("lora_name") or body.get("model")))
            if self.path == "/v1/load_lora_adapter":
                policy = TransformersPolicy.load(server.base, PolicyConfig("x"))
                server.loaded[body["lora_name"]] = PeftModel.from_pretrained(policy.model, body["lora_path"]).eval()
                out = b"Success"
            elif self.path == "/v1/unload_lora_adapter":
                del server.loaded[body["lora_name"]]
                out = b"Success"
            else:
                out = json.dumps({"choices": [self.sample(body)]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(out)

    @torch.no_grad()
    def sample(self, body):
        model, ids, logprobs, random = self.server.loaded[body["model"]], list(body["prompt"]), [], Random(body["seed"])
        finish = "length"
        for _ in range(body["max_tokens"]):
            row = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1] / body["temperature"], -1)
            at = min(int((row.exp().cumsum(0) < random.random()).sum()), len(row) - 1)
            ids.append(at)
            logprobs.append(row[at].item())
            if at in body["stop_token_ids"]:
                finish = "stop"
                break
        choice = {"token_ids": ids[len(body["prompt"]) :], "logprobs": {"token_logprobs": logprobs}}
        return {k: v for k, v in choice.items() if k not in self.server.drop} | {"finish_reason": finish}

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(tmp_path):
    base = tiny.checkpoint(tmp_path / "base", init=0.05)
    servers = []

    def start(**options):
        server = Server(base, **options)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        local = TransformersPolicy.load(base, PolicyConfig(base, layout="plain", max_action_tokens=4))
        return server, ServedPolicy(local, f"http://127.0.0.1:{server.server_port}", tmp_path / "served")

    yield start
    for server in servers:
        server.shutdown()


def config(out, **more):
    return PPOConfig(out=str(out), updates=2, episodes=4, minibatch=4, lr=1e-2, critic_warmup=0, eval_episodes=2,
                     boards=("none",), **more)  # fmt: skip


def test_each_update_samples_from_the_weights_of_that_update(serve, tmp_path):
    server, policy = serve()
    result = train(policy, Chatty, scorer, config(tmp_path / "run", lora_rank=4))
    assert all(line["ratio_error"] < 1e-4 for line in result.metrics)
    assert policy.gap < 1e-4, "server and trainer agree on the weights"
    loads = [name for path, name in server.calls if path == "/v1/load_lora_adapter"]
    assert loads == ["update-0", "update-1", "update-2"] and list(server.loaded) == ["update-2"]
    asked = [name for path, name in server.calls if path == "/v1/completions"]
    assert asked == sorted(asked) and set(asked) == set(loads)
    assert [p.name for p in (tmp_path / "served").iterdir()] == ["update-2"]


def test_a_server_without_token_ids_is_refused(serve, tmp_path):
    _, policy = serve(drop=("token_ids",))
    with pytest.raises(UsageError, match="gives no token_ids"):
        train(policy, Chatty, scorer, config(tmp_path / "run", lora_rank=4))


def test_whole_weights_and_a_server_that_is_away_are_refused(serve, tmp_path):
    _, policy = serve()
    with pytest.raises(UsageError, match="train with --lora-rank"):
        train(policy, Chatty, scorer, config(tmp_path / "run"))
    away = ServedPolicy(policy, "http://127.0.0.1:9", tmp_path / "served")
    with pytest.raises(UsageError, match="9/v1/load_lora_adapter"):
        train(away, Chatty, scorer, config(tmp_path / "other", lora_rank=4))
