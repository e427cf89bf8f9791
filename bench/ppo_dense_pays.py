"""Do step rewards pay: episodes until success passes 0.8, with a PRM's step rewards and with the outcome alone.

For each seed: a tiny policy, warm-started on an expert who errs, labels its own episodes by continuations; a
PRM is distilled from them; PPO runs on its step rewards (progress), on the outcome alone, and, on step rewards, from a
policy that has seen nothing. Same questions, options and number of episodes. An arm that does not get there counts with
the whole budget, so its ratio is a lower bound (printed with >=). Success is the mean of three updates.

    python bench/ppo_dense_pays.py [--quick] [--seeds N] [--hops 3 4]

The value is the ratio sparse / dense of the medians over seeds; the table has the intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.ppo_support import Few, load, untrained, warm_start
from distill.train import DistillConfig, distill
from labeling.draws import MonteCarloConfig
from labeling.montecarlo import rollout_labels
from prm.model import PRM
from rl.ppo import PPOConfig, train
from rl.rollout import rollout

warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--seeds", type=int, default=0)
parser.add_argument("--hops", type=int, nargs="+", default=[])
options = parser.parse_args()
QUICK = options.quick
SEEDS = range(options.seeds or (1 if QUICK else 5))
HOPS = tuple(options.hops or ([2] if QUICK else [3, 4]))
UPDATES, EPISODES, QUESTIONS = (8, 32, 4) if QUICK else (40, 64, 32)
GOAL = 0.8


def episodes_to(lines: list[dict[str, float]]) -> tuple[int, bool, float]:
    """(episodes until success passed the goal, whether it did, success at the end), smoothed over three updates."""
    smooth = [fmean(line["success"] for line in lines[i : i + 3]) for i in range(len(lines) - 2)]
    at = next((i for i, value in enumerate(smooth) if value >= GOAL), None)
    return (len(lines) if at is None else at + 3) * EPISODES, at is not None, smooth[-1]


def one_seed(folder: Path, seed: int) -> dict[str, tuple[int, bool, float]]:
    make = partial(Few, QUESTIONS, hops=HOPS, max_steps=max(HOPS) + 3)
    warm = warm_start(folder / "warm", make, error=0.3, updates=100 if QUICK else 600, seed=seed)
    own = rollout(load(warm), make, range(32 if QUICK else 256), salt=seed)
    labels = rollout_labels(own, make, load(warm), MonteCarloConfig(k=2 if QUICK else 4), out=folder / "labels.jsonl")
    distill(own, labels, DistillConfig(base=warm, out=str(folder / "prm"), epochs=4, lr=1e-3))
    prm = PRM.load(folder / "prm")
    found = {}
    for arm in ("dense", "sparse", "dense, no warm start"):
        config = PPOConfig(
            out=str(folder / arm), updates=UPDATES, episodes=EPISODES, lr=5e-4, critic_lr=1e-3, eval_episodes=0,
            process_weight=0.0 if arm == "sparse" else 1.0, max_steps=8, save_every=1000, audit_every=0,
            boards=("none",), seed=10_000 * seed,
        )  # fmt: skip
        policy = untrained(warm, seed) if "no warm" in arm else load(warm)
        lines = train(policy, make, None if arm == "sparse" else prm, config).metrics
        found[arm] = episodes_to(lines)
        took, there, end = found[arm]
        print(
            f"seed {seed}: {arm:<22} {'' if there else '>='}{took} episodes, success at the end {end:.2f}", flush=True
        )
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for seed in SEEDS:
            (where := Path(folder, str(seed))).mkdir()
            runs.append(one_seed(where, seed))
    print(f"{'arm':<22} {'median':>8} {'smallest':>9} {'largest':>8}  there  success at the end (smallest)")
    medians = {}
    for arm in runs[0]:
        took = [run[arm][0] for run in runs]
        medians[arm] = median(took)
        there, end = sum(run[arm][1] for run in runs), min(run[arm][2] for run in runs)
        print(f"{arm:<22} {medians[arm]:8.0f} {min(took):9} {max(took):8}  {there}/{len(runs)}   {end:.2f}")
    warm = medians["dense, no warm start"] / medians["dense"]
    ratio = medians["sparse"] / medians["dense"]
    print(f"no warm start / warm start: {warm:.2f} (target 5)")
    result = {"name": "ppo_dense_pays", "value": round(ratio, 2), "target": 3.0, "better": "higher"}
    print(
        json.dumps({**result, "unit": "episodes to 0.8 success, sparse over dense", "warm_start_ratio": round(warm, 2)})
    )


if __name__ == "__main__":
    main()
