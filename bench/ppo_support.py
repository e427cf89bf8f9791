"""What the PPO benches share: a few multi-hop questions, and a tiny policy that has seen an expert who errs."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from prm.records import Trajectory
from rl.envs.multihop import Expert, MultiHop
from rl.policies import PolicyConfig, TransformersPolicy
from rl.rollout import rollout
from rl.sft import SFTConfig, sft
from rl.tiny import tiny_model

ACTING = {"max_action_tokens": 24, "temperature": 0.8}


class Few(MultiHop):
    """Multi-hop questions, the same few again and again: seeds count modulo `questions`."""

    def __init__(self, questions: int = 48, hops: Sequence[int] = (3,), max_steps: int = 8) -> None:
        super().__init__(hops=hops, snippets=1, max_steps=max_steps)
        self.questions = questions

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None if seed is None else seed % self.questions, options=options)


def warm_start(out: Path, make: Any, *, error: float, updates: int, seed: int, episodes: int = 200) -> str:
    """Train a tiny policy on an expert's episodes, mistakes included; the folder of the policy."""
    if not (out / "config.json").exists():
        said: list[Trajectory] = rollout(Expert(error), make, range(episodes), max_steps=8)
        config = SFTConfig(
            base="tiny",
            out=str(out),
            min_outcome=0.0,
            epochs=1000,
            max_updates=updates,
            lr=3e-3,
            batch=8,
            micro_batch=8,
            seed=seed,
            width=64,
            layers=2,
            vocabulary=2048,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            sft(said, config)
    return str(out)


def load(folder: str) -> TransformersPolicy:
    return TransformersPolicy.load(folder, PolicyConfig(folder, **ACTING))


def untrained(folder: str, seed: int) -> TransformersPolicy:
    """A policy with the tokenizer and shape of another, and weights that have seen nothing."""
    like = load(folder)
    model = tiny_model(like.tokenizer, width=64, layers=2, seed=seed)
    return TransformersPolicy(model, like.tokenizer, PolicyConfig(folder, **ACTING))
