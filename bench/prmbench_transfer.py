"""Real step labels: a LoRA PRM trained on all error classes of PRMBench but one, judged on that one, each in turn.

Against chance, and against a plain classifier: scikit-learn's logistic regression on the frozen base's hidden states,
averaged over each step's tokens, on the same training steps. Original and modified versions of a problem, and all that
share its question, are on one side. Only solutions of at most `--limit` tokens are taken.

Usage: python bench/prmbench_transfer.py DATA BASE OUT [--problems 32] [--test 30] [--limit 260] [--epochs 2]
                                         [--last-layers 0] [--dtype float32] [--quick]
    DATA: PRMBench's files, one a class (confidence.jsonl, ...);  BASE: a transformers checkpoint
    OUT: results.json and a folder for each class; a class that is there is not run again
    --last-layers: put the LoRA on so many of the last layers only (0: on all), which costs less than half the time
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from distill.data import group_of
from distill.evaluate import evaluate, write
from distill.train import DistillConfig, distill
from prm import PRM, StepLabel, Trajectory, convert

Rows = list[Trajectory]


def chosen(data: Path, prm: PRM, problems: int, test: int, limit: int) -> tuple[dict[str, tuple[Rows, Rows]], list]:
    """For each class (problems to train on, problems to test on), both versions of each; and all labels."""
    found, labels, used = {}, [], set()
    for file in sorted(data.glob("*.jsonl")):
        converted = convert(file, skip_bad=True)
        groups: dict[str, Rows] = {}
        for trajectory in converted.trajectories:
            groups.setdefault(group_of(trajectory), []).append(trajectory)
        short = [
            own
            for own in groups.values()
            if len({t.id for t in own}) == 2 and all(sum(len(p.ids) for p in prm.render(t)) <= limit for t in own)
        ]
        Random(0).shuffle(short)
        # A problem that several classes have is taken once.
        short = [own for own in short if group_of(own[0]) not in used][: problems + test]
        used |= {group_of(own[0]) for own in short}
        sides = (short[:problems], short[problems:])
        found[file.stem] = ([t for own in sides[0] for t in own], [t for own in sides[1] for t in own])
        labels += converted.labels
    return found, labels


@torch.no_grad()
def embedded(prm: PRM, trajectories: Rows) -> dict[str, np.ndarray]:
    """The base's last hidden state, averaged over each step's own tokens: (steps, width) by trajectory id."""
    out = {}
    for trajectory in trajectories:
        (part,) = prm.render(trajectory)
        hidden = prm.backbone(input_ids=torch.tensor([part.ids]), use_cache=False).last_hidden_state[0].float()
        starts = [0, *(end + 1 for end in part.ends)]
        out[trajectory.id] = torch.stack(
            [hidden[a : b + 1].mean(0) for a, b in zip(starts, part.ends, strict=False)]
        ).numpy()
    return out


def plain(train: Rows, test: Rows, gold: dict, states: dict[str, np.ndarray]) -> list[StepLabel]:
    """Scores of the plain classifier."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = np.concatenate([states[t.id] for t in train])
    y = [gold[t.id, k] >= 0.5 for t in train for k in range(len(t.steps))]
    fitted = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=2000)).fit(x, y)
    return [
        StepLabel(t.id, k, float(p), "prm:plain")
        for t in test
        for k, p in enumerate(fitted.predict_proba(states[t.id])[:, 1])
    ]


def lora_targets(base: PRM, last_layers: int) -> tuple[str, ...]:
    """The linear layers of so many of the last blocks; all of them for 0. What lies before needs no gradients."""
    if not last_layers:
        return ("all-linear",)
    depth = base.backbone.config.num_hidden_layers
    last = tuple(f"layers.{i}." for i in range(depth - last_layers, depth))
    linear = (name for name, part in base.backbone.named_modules() if isinstance(part, torch.nn.Linear))
    return tuple(name for name in linear if name.startswith(last))


def figures(gold: list[StepLabel], said: list[StepLabel], test: Rows, out: Path, title: str) -> dict:
    own = {t.id for t in test}
    found = evaluate([x for x in gold if x.trajectory_id in own], said, trajectories=test)
    write(found, out, title=title)
    row = {"auc": found.auc, "auc_interval": found.intervals.get("auc"), "f1": found.first_error.f1}
    return row | {"balanced_accuracy": found.balanced_accuracy, "ece": found.ece, "n": found.n}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "base", "out"):
        parser.add_argument(name, type=Path)
    for name, default in (("problems", 32), ("test", 30), ("limit", 260), ("epochs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--last-layers", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.problems, options.test, options.limit = 4, 4, 200
    options.out.mkdir(parents=True, exist_ok=True)
    base = PRM.create(options.base, dtype=options.dtype)
    targets = lora_targets(base, options.last_layers)
    classes, labels = chosen(options.data, base, options.problems, options.test, options.limit)
    # A solution that stands in several files has its labels once.
    gold = {(x.trajectory_id, x.step): x.score for x in labels}
    labels = list({(x.trajectory_id, x.step): x for x in labels}.values())
    store = options.out / "states.npz"
    if store.exists():
        states = dict(np.load(store))
    else:
        states = embedded(base, [t for own in classes.values() for side in own for t in side])
        np.savez(store, **states)
    del base
    results = {}
    for name, (_, test) in classes.items():
        folder = options.out / name
        if (folder / "figures.json").exists():
            results[name] = json.loads((folder / "figures.json").read_text())
            continue
        start = time.time()
        train = [t for other, (own, _) in classes.items() if other != name for t in own]
        own = {t.id for t in train}
        prm = distill(
            train,
            [x for x in labels if x.trajectory_id in own],
            DistillConfig(
                base=str(options.base),
                out=str(folder / "prm"),
                lora_rank=16,
                lora_targets=targets,
                dtype=options.dtype,
                max_tokens=512,
                epochs=options.epochs,
                batch=4,
                batch_tokens=1024,
                lr=options.lr,
                holdout=0.15,
            ),
        )
        row = {"prm": figures(labels, prm.label(test, batch_tokens=2048), test, folder / "report", f"PRM on {name}")}
        row["plain"] = figures(labels, plain(train, test, gold, states), test, folder / "plain", f"Plain on {name}")
        bad = [gold[t.id, k] < 0.5 for t in test for k in range(len(t.steps))]
        row |= {"bad_share": sum(bad) / len(bad), "seconds": round(time.time() - start)}
        row |= {"train_trajectories": len(train), "test_trajectories": len(test)}
        results[name] = row
        (folder / "figures.json").write_text(json.dumps(row, indent=2) + "\n")
        print(name, json.dumps(row), flush=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    over = [row["prm"]["auc"] - row["plain"]["auc"] for row in results.values()]
    mean = sum(row["prm"]["auc"] for row in results.values()) / len(results)
    print(f"mean AUC on the class left out: {mean:.3f}; over the plain classifier by {sum(over) / len(over):+.3f}")
    line = {"name": "prmbench_transfer_auc", "value": round(mean, 3), "target": 0.5, "better": "higher"}
    print(json.dumps(line | {"unit": "AUC of steps, chance is 0.5"}))


if __name__ == "__main__":
    main()
