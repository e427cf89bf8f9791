"""What the scoring benches share: a PRM of a size at which the model, not Python, takes the time, and trajectories."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from prm import PRM, Step, Trajectory
from tests.tiny import tokenizer

TEXT = "search the capital of France is Paris answer river country long number add two result none"
WORDS = TEXT.split()


def made(width: int = 512, layers: int = 6) -> PRM:
    """A random Qwen2-shaped PRM (by default 18 M parameters), float32."""
    own = tokenizer()
    config = Qwen2Config(
        vocab_size=len(own),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    return PRM.create(Qwen2ForCausalLM(config), tokenizer=own)


def words(draw: random.Random, n: int) -> str:
    return " ".join(draw.choices(WORDS, k=n))


def mixed(count: int, seed: int = 0) -> list[Trajectory]:
    """Trajectories of 1 to 12 steps, with actions and observations of very different length."""
    draw = random.Random(seed)
    out = []
    for i in range(count):
        seen = (0, 5, 20, 60)
        steps = [
            Step(words(draw, draw.randint(3, 25)), words(draw, draw.choice(seen))) for _ in range(draw.randint(1, 12))
        ]
        out.append(Trajectory(f"{i} {words(draw, draw.randint(5, 30))}", tuple(steps)))
    return out


def tokens(prm: PRM, trajectories: list[Trajectory]) -> int:
    return sum(len(part.ids) for t in trajectories for part in prm.render(t))


def ratio(ours, theirs, pairs: int = 3) -> float:
    """How many times faster `ours` is than `theirs`: run in turn, after a warm run each, the best times compared."""
    best = [float("inf"), float("inf")]
    for turn in range(pairs + 1):
        for i, call in enumerate((ours, theirs)):
            start = time.perf_counter()
            call()
            if turn:
                best[i] = min(best[i], time.perf_counter() - start)
    return best[1] / best[0]
