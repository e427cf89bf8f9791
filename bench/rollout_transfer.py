"""Rollout labels on a real model: a LoRA PRM on Monte-Carlo labels of multi-hop episodes, judged on held-out entities.

Episodes of an expert who errs, no step to spare, so that a slip is fatal; each step's label is the share of K
continuations that succeed. The PRM learns questions of the train split and is judged on those of the test split, which
share no start or bridge with them. Against chance, and against a plain classifier: scikit-learn's logistic regression
on the frozen base's hidden states, averaged over each step's tokens.

Usage: python bench/rollout_transfer.py BASE OUT [--train 80] [--test 80] [--k 8] [--epochs 2] [--last-layers 0]
                                        [--dtype float32] [--quick]
    BASE: a transformers checkpoint;  OUT: results.json, the labels, the PRM, and both reports with their plots
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.prmbench_transfer import embedded, figures, lora_targets, plain
from distill.train import DistillConfig, distill
from labeling.draws import MonteCarloConfig
from labeling.montecarlo import rollout_labels
from prm import PRM, append_jsonl
from rl.envs.multihop import MultiHop, sloppy
from rl.rollout import rollout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("base", "out"):
        parser.add_argument(name, type=Path)
    for name, default in (("train", 80), ("test", 80), ("k", 8), ("epochs", 2), ("last-layers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.train, options.test, options.k, options.epochs = 12, 12, 2, 1
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    sides = {}
    for split, count in (("train", options.train), ("test", options.test)):
        def make(split: str = split) -> MultiHop:
            return MultiHop(split, hops=(2, 3), snippets=1, spare=0)

        episodes = rollout(sloppy, make, range(count))
        sides[split] = episodes, rollout_labels(episodes, make, sloppy, MonteCarloConfig(k=options.k))
        for name, rows in (("episodes", episodes), ("labels", sides[split][1])):
            (file := options.out / f"{split}_{name}.jsonl").unlink(missing_ok=True)
            append_jsonl(file, rows)
    (train, labels), (test, test_labels) = sides["train"], sides["test"]
    base = PRM.create(options.base, dtype=options.dtype)
    states, targets = embedded(base, [*train, *test]), lora_targets(base, options.last_layers)
    del base
    prm = distill(
        train,
        labels,
        DistillConfig(
            base=str(options.base),
            out=str(options.out / "prm"),
            lora_rank=16,
            lora_targets=targets,
            dtype=options.dtype,
            epochs=options.epochs,
            batch=4,
            batch_tokens=1024,
            lr=options.lr,
            holdout=0.15,
        ),
    )
    gold = {(x.trajectory_id, x.step): x.score for x in labels}
    said = {"prm": prm.label(test, batch_tokens=2048), "plain": plain(train, test, gold, states)}
    results = {name: figures(test_labels, found, test, options.out / name, name) for name, found in said.items()}
    bad = sum(x.score < 0.5 for x in test_labels) / len(test_labels)
    print(json.dumps(results | {"bad_share": bad, "seconds": round(time.time() - start)}, indent=2))
    (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    line = {"name": "rollout_transfer_auc", "value": round(results["prm"]["auc"], 3), "target": 0.5, "better": "higher"}
    print(json.dumps(line | {"unit": "AUC of steps, chance is 0.5", "plain": round(results["plain"]["auc"], 3)}))


if __name__ == "__main__":
    main()
