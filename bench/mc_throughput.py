"""How fast labels from continuations are made with a local model, against plain generation and against re-reading.

A random Llama writes actions of a fixed number of tokens, so that both sides write the same. Plain generation is
`model.generate` on the same prompts in the same batch size. Re-reading is the same labelling run with a policy that
forgets its cache between actions.

    python bench/mc_throughput.py [--quick]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from labeling.draws import MonteCarloConfig
from labeling.montecarlo import rollout_labels
from prm.env import Action, Episode, History
from prm.render import prompt
from rl.policies import PolicyConfig, TransformersPolicy
from rl.tiny import tiny_model, tiny_tokenizer

warnings.simplefilter("ignore")
QUICK = "--quick" in sys.argv
LENGTH, TOKENS, BATCH = 5, 24, 32  # actions an episode, tokens an action, episodes in flight
REPEATS = 1 if QUICK else 5


class Story:
    """A long task and a fixed number of actions."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.left = LENGTH
        return f"Chapter {seed}. " + "It was a dark and stormy night, and the rain fell in torrents. " * 6, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return "", 0.0, self.left == 0, False, {"success": len(action) % 2} if self.left == 0 else {}


class Fixed:
    """A transformers policy whose actions are all `TOKENS` long, and count as ended there."""

    name, temperature = "fixed", 1.0

    def __init__(self, policy: TransformersPolicy, forgets: bool = False) -> None:
        self.policy, self.forgets = policy, forgets
        policy.generator.stop_ids = frozenset()

    def act(self, histories: Sequence[History]) -> list[Action]:
        if self.forgets:
            self.policy.generator.forget()
        return [replace(action, finish="stop") for action in self.policy.act(histories)]


def plain(policy: TransformersPolicy, prompts: list[tuple[list[int], int]]) -> float:
    """Tokens a second of `model.generate`, batch by batch; (prompt, tokens to write) sorted by the latter."""
    started, written = time.perf_counter(), 0
    for at in range(0, len(prompts), BATCH):
        part = prompts[at : at + BATCH]
        width, new = max(len(ids) for ids, _ in part), part[0][1]
        ids = torch.tensor([[0] * (width - len(one)) + one for one, _ in part])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one, _ in part])
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "pad_token_id": 0}
        with torch.inference_mode():
            written += policy.model.generate(ids, attention_mask=mask, **options)[:, width:].numel()
    return written / (time.perf_counter() - started)


def main() -> None:
    tokenizer = tiny_tokenizer([Story().reset(seed=s)[0] for s in range(50)], 2000)
    model = tiny_model(tokenizer, width=256 if QUICK else 384, layers=6, context=1024)
    config = PolicyConfig("bench", layout="text", max_action_tokens=TOKENS)
    policy = TransformersPolicy(model, tokenizer, config)
    trajectories = []
    for seed in range(2 if QUICK else 4):
        episode = Episode(Story(), seed)
        while not episode.done:
            episode.step(Fixed(policy).act([episode.history])[0])
        trajectories.append(episode.trajectory())
    k = 8
    labelling = MonteCarloConfig(k=k, batch=BATCH)
    prompts = [
        (prompt(History.of(one, t + 1), tokenizer, policy.layout()), (LENGTH - t - 1) * TOKENS)
        for one in trajectories
        for t in range(LENGTH - 1)
        for _ in range(k)
    ]
    prompts.sort(key=lambda row: -row[1])
    ratios, savings, reads = [], [], []
    for _ in range(REPEATS):
        speeds, read, seconds = [], [], []
        for forgets in (False, True):
            fresh = TransformersPolicy(model, tokenizer, config)
            started = time.perf_counter()
            rollout_labels(trajectories, Story, Fixed(fresh, forgets), labelling)
            seconds.append(time.perf_counter() - started)
            speeds.append(fresh.sampled_tokens / seconds[-1])
            read.append(fresh.generator.read_tokens)
        ratios.append(speeds[0] / plain(policy, prompts))
        savings.append(seconds[1] / seconds[0])
        reads.append(read[1] / read[0])
    print(f"labelling writes {speeds[0]:.0f} tokens/s, {statistics.median(ratios):.2f} of plain generation")
    print(
        f"with the cache {statistics.median(reads):.2f} times fewer tokens are read, and labelling is "
        f"{statistics.median(savings):.2f} times faster than re-reading"
    )
    print(json.dumps({"name": "labelling against plain generation, tokens a second", "value": statistics.median(ratios),
                      "target": 0.8, "better": "higher", "unit": "ratio"}))  # fmt: skip


if __name__ == "__main__":
    main()
