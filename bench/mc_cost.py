"""What labels from continuations cost: adaptive labels and first-error search against K = 8 from every step.

On a chain with exact chances of success, and on multi-hop questions with an expert that errs, each over several seeds.
"At equal error" means: brute force with the K whose mean absolute error is that of the cheap method, by
error ~ 1 / sqrt(K), which holds for shares of K draws. The last line is the worst of the ratios.

    python bench/mc_cost.py [--quick]
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from labeling import continuations
from labeling.draws import MonteCarloConfig
from labeling.montecarlo import first_error_labels, rollout_labels
from prm.env import Episode
from prm.records import StepLabel, Trajectory
from rl.envs.multihop import Expert, MultiHop
from tests.chain import Chain, LongChain, Walker, values, walks

warnings.simplefilter("ignore")
QUICK = "--quick" in sys.argv
SEEDS = range(5)
Truth = dict[str, list[float]]


class NoisyExpert(Expert):
    """Errs now and then; counts characters as tokens."""

    name, temperature = "expert", 1.0

    def __init__(self, error: float = 0.1) -> None:
        super().__init__(error)
        self.sampled_tokens = 0

    def act(self, histories: Any) -> Any:
        actions = super().act(histories)
        self.sampled_tokens += sum(len(action.text) for action in actions)
        return actions


def measured(label: Callable[..., Any], *arguments: Any) -> tuple[list[StepLabel], int, int]:
    """(labels, continuations, tokens) of a run."""
    runners = []
    original = continuations.Runner.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runners.append(self)

    continuations.Runner.__init__ = remember  # type: ignore[method-assign]
    try:
        labels = label(*arguments)
    finally:
        continuations.Runner.__init__ = original  # type: ignore[method-assign]
    return labels, runners[0].launched, runners[0].tokens


def mean_error(labels: Sequence[StepLabel], truth: Truth) -> float:
    return statistics.mean(abs(x.score - truth[x.trajectory_id][x.step]) for x in labels if not x.meta.get("over"))


def adaptive_ratio(name: str, env: Any, policy: Any, truths: Callable[[int], tuple[list[Trajectory], Truth]]) -> float:
    """Continuations a label at equal error, adaptive over K = 8; printed with the tokens' ratio."""
    ratios, tokens, errors = [], [], []
    for seed in SEEDS:
        trajectories, truth = truths(seed)
        brute = measured(rollout_labels, trajectories, env, policy, MonteCarloConfig(seed=seed))
        cheap = measured(rollout_labels, trajectories, env, policy, MonteCarloConfig(seed=seed, adaptive=True))
        error = mean_error(cheap[0], truth), mean_error(brute[0], truth)
        equal = (error[0] / error[1]) ** 2  # brute force with 8 / equal draws would be as far off
        states = sum(not x.meta.get("over") for x in brute[0])
        ratios.append(cheap[1] / (8 * states) * equal)
        tokens.append(cheap[2] / (brute[2] * 8 * states / brute[1]) * equal)
        errors.append(error)
    ratio = statistics.mean(ratios)
    print(
        f"{name}: mean absolute error {statistics.mean(e for e, _ in errors):.4f} against "
        f"{statistics.mean(e for _, e in errors):.4f}; at equal error {ratio:.3f} of the continuations "
        f"(seeds {', '.join(f'{r:.3f}' for r in ratios)}), {statistics.mean(tokens):.3f} of the tokens"
    )
    return ratio


def chain(env: type[Chain], walker: Walker) -> Callable[[int], tuple[list[Trajectory], Truth]]:
    def truths(seed: int) -> tuple[list[Trajectory], Truth]:
        trajectories = walks(walker, 30 if QUICK else 150, env, 1000 * seed)
        return trajectories, {one.id: values(one, walker, env.length) for one in trajectories}

    return truths


def multihop(siblings: int) -> Callable[[int], tuple[list[Trajectory], Truth]]:
    """Episodes on 3- and 4-hop questions, several a question; the truth is the mean of many more continuations."""

    def truths(seed: int) -> tuple[list[Trajectory], Truth]:
        policy = NoisyExpert()
        episodes = []
        for i in range(siblings * (5 if QUICK else 25)):
            episode = Episode(questions(), 1000 * seed + i // siblings)
            episode.history = replace(episode.history, seed=10**6 * seed + i)
            while not episode.done:
                episode.step(policy.act([episode.history])[0])
            episodes.append(episode.trajectory())
        many = MonteCarloConfig(k=100 if QUICK else 400, seed=99)
        truth: Truth = {one.id: [0.0] * len(one.steps) for one in episodes}
        for label in rollout_labels(episodes, questions, policy, many):
            truth[label.trajectory_id][label.step] = label.score
        return list({one.id: one for one in episodes}.values()), truth

    return truths


def questions() -> MultiHop:
    return MultiHop(hops=(3, 4))


def first_error_ratio(length: int, walker: Walker) -> float:
    """Continuations a trajectory, first-error search over K = 8 at every step; both right about the step how often."""

    class Long(Chain):
        pass

    Long.length = length
    ratios, right, brute_right = [], [], []
    for seed in SEEDS:
        failed = [one for one in walks(walker, 30 if QUICK else 150, Long, 10**5 * seed) if one.outcome == 0]
        firsts = {one.id: values(one, walker, length).index(0) for one in failed}
        config = MonteCarloConfig(seed=seed)
        labels, launched, _ = measured(first_error_labels, failed, Long, walker, config)
        found = {x.trajectory_id: x.meta["first_error"] for x in labels}
        brute, spent, _ = measured(rollout_labels, failed, Long, walker, config)
        dead: dict[str, int] = {}
        for label in brute:
            if label.score == 0:
                dead.setdefault(label.trajectory_id, label.step)
        ratios.append(launched / spent)
        right.append(statistics.mean(found.get(i) == t for i, t in firsts.items()))
        brute_right.append(statistics.mean(dead.get(i) == t for i, t in firsts.items()))
    ratio = statistics.mean(ratios)
    print(
        f"first error, {length} steps, slips {walker.slip:g}: right {statistics.mean(right):.3f} against "
        f"{statistics.mean(brute_right):.3f}; {ratio:.3f} of the continuations "
        f"(seeds {', '.join(f'{r:.3f}' for r in ratios)})"
    )
    return ratio


def main() -> None:
    adaptive = [
        adaptive_ratio("chain, 8 steps", Chain, Walker(slip=0.08), chain(Chain, Walker(slip=0.08))),
        adaptive_ratio("chain, 20 steps", LongChain, Walker(), chain(LongChain, Walker())),
        adaptive_ratio("multi-hop, 8 episodes a question", questions, NoisyExpert(), multihop(8)),
    ]
    once = adaptive_ratio("multi-hop, 1 episode a question (not counted)", questions, NoisyExpert(), multihop(1))
    never = adaptive_ratio(
        "chain, no text twice (not counted)", Chain, Walker(words=50), chain(Chain, Walker(words=50))
    )
    print(f"what cannot be shared: {once:.2f} and {never:.2f}")
    search = [
        first_error_ratio(16, Walker(slip=0.03, again=1.0, fix=0.0)),
        first_error_ratio(32, Walker(slip=0.03, again=1.0, fix=0.0, words=3)),
    ]
    print(json.dumps({"name": "first-error search, continuations against K = 8 at every step", "value": max(search),
                      "target": 0.1, "better": "lower", "unit": "ratio"}))  # fmt: skip
    print(json.dumps({"name": "adaptive labels, continuations against K = 8 at equal error", "value": max(adaptive),
                      "target": 1 / 3, "better": "lower", "unit": "ratio"}))  # fmt: skip


if __name__ == "__main__":
    main()
