"""Scoring throughput as ratios, all in one process on the same model and tokens.

packed    against the bare backbone on the same number of tokens, perfectly packed into full rows (a bound)
single    against a loop that scores one short trajectory at a time, as people write it with transformers
single_mixed  the same with longer ones of mixed lengths
resteps   against re-scoring every prefix of 12-step trajectories, as code that scores "the last step" does
siblings  8 siblings that share 75 % of their tokens, against scoring each of them independently in packed batches

Usage: python bench/score_throughput.py [NAME ...] [--quick]
"""

from __future__ import annotations

import json
import random
import sys

import torch
from score_support import WORDS, made, mixed, ratio, tokens, words

from prm import Step, Trajectory

TARGETS = {"packed": 0.9, "single": 3.0, "single_mixed": 3.0, "resteps": 5.0, "siblings": 2.5}
ROW = 512


def pairs(quick: bool) -> int:
    return 2 if quick else 4


def packed(quick: bool) -> float:
    prm, data = made(), mixed(16 if quick else 64)
    ids = [i for t in data for part in prm.render(t) for i in part.ids]
    ids += ids[: -len(ids) % ROW]
    rows = torch.tensor(ids).view(-1, ROW)

    @torch.inference_mode()
    def bare() -> None:
        for batch in rows.split(8):
            prm.backbone(input_ids=batch, use_cache=False)

    return tokens(prm, data) / rows.numel() * ratio(lambda: prm.score(data, batch_tokens=4096), bare, pairs(quick))


def single(quick: bool) -> float:
    """About 40 tokens each: what a loop loses is a call's fixed cost."""
    draw = random.Random(0)
    return against_loop(
        [Trajectory(f"{i} {words(draw, 8)}", (Step(words(draw, 5)), Step(words(draw, 4)))) for i in range(256)], quick
    )


def single_mixed(quick: bool) -> float:
    """About 380 tokens each: on two cores such a trajectory fills a call alone, so that there is little to win."""
    return against_loop(mixed(48 if quick else 256), quick)


def against_loop(data: list[Trajectory], quick: bool) -> float:
    prm = made(width=128, layers=4)

    @torch.inference_mode()
    def loop() -> None:
        for t in data:
            (part,) = prm.render(t)
            logits = prm.model(input_ids=torch.tensor([part.ids])).logits[0, part.ends, 0]
            logits.sigmoid().tolist()

    return ratio(lambda: prm.score(data), loop, pairs(quick))


def resteps(quick: bool) -> float:
    prm, draw = made(), random.Random(0)
    data = [
        Trajectory(words(draw, 20), tuple(Step(words(draw, 12), words(draw, 12)) for _ in range(12)))
        for _ in range(2 if quick else 8)
    ]
    prefixes = [[Trajectory(t.task, t.steps[: n + 1]) for t in data] for n in range(12)]
    parts = [[part for t in own for part in prm.render(t)] for own in prefixes]

    @torch.inference_mode()
    def again() -> None:
        for own in parts:
            prm.logits(own)[-1:].sigmoid().tolist()

    return ratio(lambda: prm.score(data), again, pairs(quick))


def siblings(quick: bool) -> float:
    prm, draw = made(), random.Random(0)
    groups = []
    for _ in range(1 if quick else 4):
        task, steps = words(draw, 30), tuple(Step(words(draw, 20), words(draw, 25)) for _ in range(6))
        shared = tokens(prm, [Trajectory(task, steps)])
        group: list[Trajectory] = []
        for _ in range(8):
            last = words(draw, 5)
            while tokens(prm, [Trajectory(task, (*steps, Step(last)))]) < shared / 0.75:
                last += " " + draw.choice(WORDS)
            group.append(Trajectory(task, (*steps, Step(last))))
        groups.append(group)
    parts = [[part for t in group for part in prm.render(t)] for group in groups]
    data = [t for group in groups for t in group]

    @torch.inference_mode()
    def independent() -> None:
        for own in parts:
            prm.logits(own).sigmoid().tolist()

    return ratio(lambda: prm.score(data), independent, pairs(quick))


def main() -> None:
    quick = "--quick" in sys.argv
    names = [a for a in sys.argv[1:] if a in TARGETS] or list(TARGETS)
    for name in names:
        value = globals()[name](quick)
        line = {"name": f"score_{name}", "value": round(value, 3), "target": TARGETS[name]}
        print(json.dumps(line | {"better": "higher", "unit": "ratio"}), flush=True)


if __name__ == "__main__":
    main()
