"""Peak memory of PPO with policy, reference, critic and PRM as adapters on one base, against four separate models.

Each mode runs in a process of its own: the models, two optimisers, scoring of the episodes, and one update on the same
tokens. The peak is that of the resident set, less what the process holds before a model is loaded.

    python bench/ppo_memory.py [--quick] [--model PATH]

--quick takes a random model of 60 million parameters; PATH is a checkpoint such as Qwen2.5-Coder-0.5B, in bfloat16.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

QUICK = "--quick" in sys.argv


def peak() -> float:
    """GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def small_model(folder: str) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rl.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(["some words of a task"] * 4, 1000)
    config = Qwen2Config(
        vocab_size=1000, hidden_size=640, intermediate_size=2560, num_hidden_layers=10, num_attention_heads=10,
        num_key_value_heads=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(mode: str, base: str, adapter: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from prm.model import PRM
    from prm.records import Step, Trajectory
    from rl.ppo import PPOConfig, Sample, learn
    from rl.roles import Roles, adapter_prm

    torch.set_num_threads(1)
    dtype = torch.float32 if QUICK else torch.bfloat16
    PRM.score  # noqa: B018 (its imports are part of what is there before)
    before = peak()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if mode == "one":
        roles = Roles(model, lora_rank=16)
        prm = adapter_prm(adapter, roles)
    else:
        roles = Roles(model)
        prm = PRM.create(base, dtype="float32" if QUICK else "bfloat16")
    prm.score([Trajectory("some words of a task", (Step("some words", "of a task"),) * 4)])
    draw, own = random.Random(0), []
    for _ in range(2):
        ids = [draw.randrange(3, 900) for _ in range(128)]
        own.append(Sample(ids, list(range(64, 128)), torch.full((64,), -5.0), torch.rand(64)))
    optimisers: dict[str, torch.optim.Optimizer] = {
        role: torch.optim.AdamW(roles.parameters(role).values(), lr=1e-5) for role in ("policy", "critic")
    }
    learn(own, roles, optimisers, PPOConfig(out="", epochs=1, minibatch=2, critic_warmup=0), 0.01, 5)
    print(json.dumps(peak() - before))


def main() -> None:
    from prm.model import PRM

    with tempfile.TemporaryDirectory() as folder:
        given = sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else ""
        base = given or small_model(str(Path(folder, "base")))
        adapter = str(Path(folder, "prm"))
        PRM.create(base, lora_rank=16, dtype="float32" if QUICK else "bfloat16").save(adapter)
        used = {}
        for mode in ("one", "four"):
            command = [sys.executable, __file__, "--measure", mode, base, adapter, *(["--quick"] if QUICK else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            used[mode] = json.loads(done.stdout.splitlines()[-1])
    print(f"one base, four adapters: {used['one']:.2f} GiB; four models: {used['four']:.2f} GiB")
    ratio = used["one"] / used["four"]
    result = {"name": "ppo_memory", "value": round(ratio, 3), "target": 0.45, "better": "lower"}
    print(json.dumps({**result, "unit": "peak memory of one base over that of four models"}))


if __name__ == "__main__":
    if "--measure" in sys.argv:
        at = sys.argv.index("--measure")
        measure(*sys.argv[at + 1 : at + 4])
    else:
        main()
