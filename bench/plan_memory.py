"""`prm plan` against the memory that the same runs really take on the CPU: the largest relative error over the cases.

Each case is a process of its own: resident memory before the model is made, and its peak over two updates after that.
The 0.5 B model is one more case where it is on disk (a transformers checkpoint, its folder in QWEN).

Usage: python bench/plan_memory.py [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.plan import PlanConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

WIDTH, LAYERS, LENGTH, ROWS = 384, 8, 384, 4
CASES: dict[str, dict[str, object]] = {
    "distil all float32": {},
    "distil LoRA": {"lora_rank": 16},
    "distil all bfloat16 checkpointing pieces": {
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "batch_tokens": LENGTH * 2,
    },
    "ppo LoRA": {"stage": "ppo", "lora_rank": 16},
    "ppo all": {"stage": "ppo"},
}
QUICK = ("distil LoRA", "ppo LoRA")
REAL = {"lora_rank": 16, "dtype": "bfloat16", "gradient_checkpointing": True, "length": 512, "batch": 4}


def resident(key: str = "VmRSS") -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def child(case: dict[str, object]) -> None:
    """Train as planned; print the peak beside what was there before, in bytes."""
    import gc

    import torch

    from tests.tiny import checkpoint

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # What code and libraries take is there before.
        checkpoint(folder, kind="qwen2")
        update = started(case | {"base": folder, "length": 16, "batch_tokens": 32, "batch": 2})
        update()
        del update
    gc.collect()
    before = resident()
    update = started(case)
    update()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    update()
    print(resident("VmHWM") - before)


def started(case: dict[str, object]) -> Callable[[], None]:
    """A run as planned, made, and what does an update of it."""
    import torch

    from distill.plan import PlanConfig

    stage = str(case.get("stage", "distil"))
    config = PlanConfig(**{k: v for k, v in case.items() if k != "stage"})  # type: ignore[arg-type]
    ids = torch.randint(0, 300, (config.batch, config.length)).tolist()
    return distilling(config, ids) if stage == "distil" else learning(config, ids)


def distilling(config: PlanConfig, ids: list[list[int]]) -> Callable[[], None]:
    from distill.data import Row
    from distill.train import DistillConfig, Run
    from prm import PRM
    from prm.render import Rendered

    options = DistillConfig(
        base=config.base,
        out=tempfile.mkdtemp(),
        lora_rank=config.lora_rank,
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        batch=config.batch,
        batch_tokens=config.batch_tokens,
    )
    dtype = config.dtype if config.lora_rank is not None else "float32"
    prm = PRM.create(config.base, lora_rank=config.lora_rank, dtype=dtype)
    ends = list(range(0, config.length, 32))
    rows = [Row(Rendered(i, ends, [], 0), (1.0,) * len(ends), (1.0,) * len(ends), "t", (0,)) for i in ids]
    run = Run(prm, rows, [], options, "")
    prm.model.train(config.gradient_checkpointing)
    return lambda: run.update(list(range(len(rows))), 0)


def learning(config: PlanConfig, ids: list[list[int]]) -> Callable[[], None]:
    import torch
    from transformers import AutoModelForCausalLM

    from rl.roles import Batch, Roles

    model = AutoModelForCausalLM.from_pretrained(config.base, dtype=getattr(torch, config.dtype))
    roles = Roles(model, lora_rank=config.lora_rank, gradient_checkpointing=config.gradient_checkpointing)
    # The PRM, which `Roles` does not hold: an adapter, or one more backbone.
    parts = roles.parameters("critic").values() if config.lora_rank else roles.critic.parameters()
    scorer = [torch.full_like(p, 0.5, requires_grad=False) for p in parts]
    optimisers = [torch.optim.AdamW(roles.parameters(r).values(), lr=1e-5, fused=True) for r in ("policy", "critic")]
    first = config.length - round(config.policy_share * config.length)

    def update() -> None:
        rows = config.batch_tokens // config.length
        batch = Batch.of(ids[:rows], [list(range(max(1, first), config.length))] * rows)
        for _ in range(2):
            logprobs, entropy = roles.logprobs(batch)
            roles.backward(logprobs.sum() - entropy.sum(), "policy")
            del logprobs, entropy
            roles.backward(roles.values(batch).sum(), "critic")
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        assert scorer

    return update


def made(folder: str) -> str:
    """A model of some 30 M parameters, with a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.tiny import tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def main() -> None:
    from distill.plan import PlanConfig, plan

    quick = "--quick" in sys.argv
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        made(folder)
        small = {"base": folder, "dtype": "float32", "length": LENGTH, "batch": ROWS, "batch_tokens": LENGTH * ROWS}
        cases = [(name, small | case) for name, case in CASES.items() if not quick or name in QUICK]
        if not quick and (qwen := os.environ.get("QWEN")):
            cases.append(("distil 0.5 B LoRA bfloat16 checkpointing", REAL | {"base": qwen}))
        for name, case in cases:
            # Freed memory goes back at once, so that what is resident is what is alive.
            env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            command = [sys.executable, __file__, "--child", json.dumps(case)]
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                raise SystemExit(done.stderr)
            measured = int(done.stdout.splitlines()[-1])
            options = {k: v for k, v in case.items() if k != "stage"}
            planned = plan(PlanConfig(episodes=1, **options), str(case.get("stage", "distil")))  # type: ignore[arg-type]
            errors.append(abs(planned.peak / measured - 1))
            print(f"{name}: planned {planned.peak / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB", flush=True)
    line = {"name": "plan_memory_error", "value": round(max(errors), 3), "target": 0.15}
    print(json.dumps(line | {"better": "lower", "unit": "largest relative error"}))


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(json.loads(sys.argv[-1]))
    else:
        main()
