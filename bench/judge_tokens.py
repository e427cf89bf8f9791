"""What one call a trajectory saves against one call a step, same rubric, same steps shown, same form of reply.

The baseline asks for step t and shows the task and steps 0 to t: what judging a step needs. Tokens are those of a
byte-level BPE trained on the prompts, so the ratio is of text and not of any provider's tokenizer; a reply has a
sentence a step. With a provider's cache the fixed prefix is cheaper in both; the second ratio counts it at a tenth.

    python bench/judge_tokens.py [--quick]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from labeling.judge.prompt import Window, load_rubric, messages, prefix
from prm.records import Step, Trajectory
from rl.tiny import tiny_tokenizer

QUICK = "--quick" in sys.argv
STEPS = 12
WORDS = [f"{a}{b}" for a in ("river", "price", "order", "page", "list", "file") for b in ("", "s", " of the", " is")]
REASON = "It looks up what the task needs, and the observation confirms it."


def episode(random: Random, said: int, seen: int) -> Trajectory:
    """`said` words an action, `seen` words an observation."""
    text = lambda n: " ".join(random.choices(WORDS, k=n))  # noqa: E731
    return Trajectory(text(30), tuple(Step(text(said), text(seen)) for _ in range(STEPS)))


def main() -> None:
    rubric, random = load_rubric("general"), Random(0)
    shapes = [(15, 0), (30, 30), (40, 120)]  # reasoning; tools; search with long observations
    episodes = {shape: [episode(random, *shape) for _ in range(3 if QUICK else 20)] for shape in shapes}
    sample = [m["content"] for ts in episodes.values() for m in messages(ts[0], Window(0, 0, STEPS - 1), rubric)]
    tokenizer = tiny_tokenizer(sample, 2000)
    count = lambda chat: sum(4 + len(tokenizer(m["content"])["input_ids"]) for m in chat)  # noqa: E731
    reply = lambda n: count([{"content": json.dumps({"steps": [  # noqa: E731
        {"step": i, "score": 0.9, "error": None, "reason": REASON} for i in range(n)]})}])  # fmt: skip
    fixed = count(prefix(rubric))
    ratios, cached = [], []
    for (said, seen), trajectories in episodes.items():
        ours, naive = [], []
        for t in trajectories:
            ours.append((count(messages(t, Window(0, 0, STEPS - 1), rubric)), reply(STEPS)))
            singly = [count(messages(t, Window(0, i, i), rubric)) for i in range(STEPS)]
            naive.append((sum(singly), reply(1) * STEPS))
        tokens = [sum(map(sum, side)) / len(trajectories) for side in (ours, naive)]
        ratios.append(tokens[0] / tokens[1])
        cached.append((tokens[0] - 0.9 * fixed) / (tokens[1] - 0.9 * fixed * STEPS))
        print(f"{said:>3} words an action, {seen:>3} an observation: {tokens[0]:.0f} tokens a trajectory instead of "
              f"{tokens[1]:.0f}: {ratios[-1]:.3f}; with the prefix cached at a tenth: {cached[-1]:.3f}")  # fmt: skip
    print(json.dumps({"name": "tokens of one call a trajectory against one call a step (12 steps), the worst case",
                      "value": max(ratios), "median": statistics.median(ratios), "target": 0.2, "better": "lower",
                      "unit": "ratio"}))  # fmt: skip


if __name__ == "__main__":
    main()
