"""The main job on the embedded default, as a list of the commands that a user would type.

Expert episodes -> a tiny warm-started policy -> its own episodes -> Monte-Carlo step labels -> a PRM -> PPO with the
outcome alone, and PPO with the PRM's step rewards, on the same number of episodes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prm import report
from prm.config import option, write_text
from prm.errors import PrmError
from prm.records import StepLabel, Trajectory, read_jsonl

ENV = "rl.envs.multihop:MultiHop"
EXPERT, EXACT = "rl.envs.multihop:sloppy", "rl.envs.multihop:exact"
SUCCESS = {
    "warm_start_success": "warm start",
    "sparse_success": "PPO, outcome only",
    "dense_success": "PPO, step rewards",
}
QUALITY = {"prm_auc": "AUC", "prm_first_error_f1": "first-error F1", "prm_ece": "calibration error"}
ENV_ARGS = '{"hops": [2, 3], "snippets": 1}'
HELD_OUT = 2700  # the first seed whose questions are held out: no stage learns from them
QUESTIONS = 3003  # every name in them, held out or not, is one token of the tiny policy


@dataclass(frozen=True)
class DemoConfig:
    out: str = option("runs/demo", "write everything here; what is there already is not made again")
    seed: int = option(0, "of the tiny model, the data and the episodes")
    expert: int = option(2000, "expert episodes to start from, mistakes included")
    copy_updates: int = option(250, "updates of the tiny model on quoting, before it sees the task")
    warm_updates: int = option(600, "updates of the warm start")
    labelled: int = option(700, "episodes whose steps are labelled, on questions that the warm start did not see")
    k: int = option(1, "continuations a step; twice as many where the PRM is measured")
    updates: int = option(16, "PPO updates, in each of the two runs")
    episodes: int = option(64, "episodes an update")
    evaluated: int = option(200, "held-out episodes that success is measured on")


def demo(config: DemoConfig, run: Callable[[Sequence[str]], int]) -> dict[str, Any]:
    """Run all stages; `run` runs one command and gives its exit status. Returns the summary.

    Writes `summary.json` and `report.html` beside the products of the stages.

    Raises:
        PrmError: a stage failed.
    """
    out = Path(config.out)
    at = {
        name: str(out / name)
        for name in ("words.jsonl", "expert.jsonl", "warm", "trajectories.jsonl", "labels.jsonl", "prm")
    }
    at |= {name: str(out / name) for name in ("test.jsonl", "test_labels.jsonl", "test_scores.jsonl", "evaluation")}
    warm, prm = at["warm"], at["prm"]
    acting = ["--policy", warm, "--max-action-tokens", "24", "--temperature", "0.6"]
    env = ["--env", ENV, "--env-args", ENV_ARGS]
    held_out = ["--n", str(config.evaluated), "--seed", str(HELD_OUT)]
    ppo = [
        *("ppo", *env, *acting, "--eval-episodes", str(config.evaluated), "--eval-seed", str(HELD_OUT)),
        *("--updates", str(config.updates), "--episodes", str(config.episodes), "--seed", str(config.seed)),
        *("--lr", "3e-4", "--critic-lr", "1e-3", "--max-steps", "8"),
    ]
    tiny = [
        "--min-outcome",
        "0",
        "--epochs",
        "100",
        "--lr",
        "2e-3",
        "--batch",
        "32",
        "--micro-batch",
        "32",
        "--max-updates",
        str(config.warm_updates),
    ]
    tiny += ["--copy-updates", str(config.copy_updates), "--seed", str(config.seed)]
    tiny += ["--vocabulary", "8192", "--vocabulary-from", at["words.jsonl"]]
    fit = ["--base", warm, "--epochs", "5", "--lr", "1e-3", "--lora-rank", "16"]
    labelled = ["--n", str(config.labelled), "--seed", str(HELD_OUT - config.labelled)]
    stages: list[tuple[str, str, list[list[str]]]] = [
        (
            "warm start",
            warm,
            [
                ["rollout", *env, "--policy", EXACT, "--n", str(QUESTIONS), "--out", at["words.jsonl"]],
                ["rollout", *env, "--policy", EXPERT, "--n", str(config.expert), "--out", at["expert.jsonl"]],
                ["sft", at["expert.jsonl"], "--base", "tiny", "--out", warm, *tiny],
            ],
        ),
        (
            "episodes",
            at["test.jsonl"],
            [
                ["rollout", *env, *acting, *labelled, "--out", at["trajectories.jsonl"]],
                ["rollout", *env, *acting, *held_out, "--out", at["test.jsonl"]],
            ],
        ),
        (
            "labels",
            at["test_labels.jsonl"],
            [
                ["mc", at["trajectories.jsonl"], *env, *acting, "--k", str(config.k), "--out", at["labels.jsonl"]],
                ["mc", at["test.jsonl"], *env, *acting, "--k", str(2 * config.k), "--out", at["test_labels.jsonl"]],
            ],
        ),
        ("distil", prm, [["distill", at["trajectories.jsonl"], at["labels.jsonl"], "--out", prm, *fit]]),
        (
            "evaluate",
            at["evaluation"],
            [
                ["score", prm, at["test.jsonl"], "--out", at["test_scores.jsonl"]],
                ["evaluate", at["test_labels.jsonl"], at["test_scores.jsonl"], "--out", at["evaluation"]],
            ],
        ),
        ("sparse ppo", "", [[*ppo, "--process-weight", "0", "--out", str(out / "sparse")]]),
        ("dense ppo", "", [[*ppo, "--prm", prm, "--out", str(out / "dense")]]),
    ]
    seconds = {}
    for number, (name, product, commands) in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages)}] {name}", flush=True)
        started = time.monotonic()
        for command in commands:
            print("  $ prm " + " ".join(command), flush=True)
            if command[0] in ("sft", "distill") and Path(product, f"{command[0]}.config.yaml").exists():
                print("  (there already)")
            elif status := run(command):
                raise PrmError(f"stage {name!r} ended with exit status {status}")
        seconds[name] = round(time.monotonic() - started, 1)
    return _summary(out, seconds)


def _summary(out: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Collect the figures, print the table, write `summary.json` and `report.html`."""
    quality = json.loads((out / "evaluation" / "report.json").read_text())
    start = read_jsonl(out / "test.jsonl", Trajectory)
    results = {run: json.loads((out / run / "result.json").read_text()) for run in ("sparse", "dense")}
    summary = {
        "warm_start_success": sum(t.outcome or 0.0 for t in start) / len(start),
        "sparse_success": results["sparse"]["success"],
        "dense_success": results["dense"]["success"],
        "prm_auc": quality["auc"],
        "prm_first_error_f1": quality["first_error"]["f1"],
        "prm_ece": quality["ece"],
        "seconds": seconds,
    }
    write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_text(out / "report.html", _report(out, summary))
    print("\non held-out questions        success")
    for key, name in SUCCESS.items():
        print(f"  {name:<24} {summary[key]:8.3f}")
    print("the PRM on held-out tasks")
    for key, name in QUALITY.items():
        print(f"  {name:<24} {summary[key]:8.3f}")
    print("seconds")
    for name, value in seconds.items():
        print(f"  {name:<24} {value:8.1f}")
    print(f"  {'all':<24} {sum(seconds.values()):8.1f}\n{out / 'report.html'}")
    return summary


def _report(out: Path, summary: dict[str, Any]) -> str:
    success, reward = {}, {}
    for name in ("sparse", "dense"):
        lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        success[name] = [(line["episodes"], line["success"]) for line in lines]
        reward[name] = [(line["episodes"], line["reward"]) for line in lines]
    scores: dict[str, dict[int, float]] = {}
    for label in read_jsonl(out / "test_scores.jsonl", StepLabel):
        scores.setdefault(label.trajectory_id, {})[label.step] = label.score
    start = sorted(read_jsonl(out / "test.jsonl", Trajectory), key=lambda t: -len(t.steps))
    good = [t for t in start if t.outcome][:1]
    chosen = good + [t for t in start if not t.outcome][: 3 - len(good)]
    return report.page(
        "From step labels to a better agent",
        report.section(
            "Success on held-out questions",
            report.table(["", "success"], [[name, summary[key]] for key, name in SUCCESS.items()]),
        ),
        report.section(
            "Learning curves",
            report.curves(success, "episodes", "success in training", (0.0, 1.0)),
            report.curves(reward, "episodes", "mean reward of an episode", None),
        ),
        report.section(
            "The PRM on held-out tasks", report.table(["", "value"], [[n, summary[k]] for k, n in QUALITY.items()])
        ),
        report.section(
            "Three held-out episodes of the warm start, by step score",
            *[
                report.trajectory(t, [scores.get(t.id, {}).get(i) for i in range(len(t.steps))], f"episode {i}")
                for i, t in enumerate(chosen, 1)
            ],
        ),
        report.section(
            "Seconds by stage", report.table(["stage", "seconds"], [[k, v] for k, v in summary["seconds"].items()])
        ),
    )
