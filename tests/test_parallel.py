"""Two processes give the numbers of one."""

import json
import multiprocessing
import os
import socket

import peft  # noqa: F401 (once, before the processes part)
import pytest
import torch
from accelerate import PartialState

from prm.parallel import ALONE, Ranks
from rl.ppo import PPOConfig, train
from tests.test_ppo import WORDS, Chatty, scorer, tiny, tiny_tokenizer

STEADY = ("reward", "success", "kl", "kl_k3", "policy_loss", "value_loss", "entropy", "clip_share", "ratio_error")


def options(out, **more):
    return PPOConfig(out=str(out), updates=2, episodes=8, minibatch=4, lr=1e-3, micro_tokens=60, eval_episodes=6,
                     boards=("none",), critic_warmup=1, save_every=1, **more)  # fmt: skip


def work(rank, size, port, out, more):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": str(size)}  # fmt: skip
    torch.set_num_threads(1)
    PartialState._reset_state()
    ranks = Ranks.started()
    assert (ranks.rank, ranks.size) == (rank, size)
    train(tiny(tiny_tokenizer([WORDS] * 4, 290)), Chatty, scorer, options(out, **more), ranks=ranks)


@pytest.mark.parametrize("more", [{"lora_rank": 4}, {"advantages": "rloo", "group": 4}])
def test_two_processes_give_the_numbers_of_one(tmp_path, more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=work, args=(r, 2, port, tmp_path / "two", more)) for r in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    one = train(tiny(tiny_tokenizer([WORDS] * 4, 290)), Chatty, scorer, options(tmp_path / "one", **more))
    lines = [json.loads(text) for text in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for got, want in zip(lines, one.metrics, strict=True):
        assert {k: got[k] for k in STEADY} == pytest.approx({k: want[k] for k in STEADY}, abs=1e-5)
    assert json.loads((tmp_path / "two" / "result.json").read_text())["success"] == one.success
    states = [torch.load(tmp_path / name / "checkpoint.pt")["weights"]["policy"] for name in ("one", "two")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.allclose(states[0][k], states[1][k], atol=1e-4) for k in states[0])


def test_alone_nothing_is_exchanged():
    assert ALONE.first and ALONE.mine([1, 2, 3]) == [1, 2, 3]
    assert ALONE.gather([(1, "b"), (0, "a")]) == ["a", "b"] and ALONE.add([1.0]) == [1.0]
    done = []
    ALONE.together(lambda: done.append(1))
    with pytest.raises(ValueError, match="no"):
        ALONE.together(lambda: int("no"))
    assert done == [1]
    assert Ranks(1, 2).mine(list(range(5))) == [1, 3]
