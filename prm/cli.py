"""The command line: one function a command. The one file that may import the wings, inside functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prm.config import Positional, option, parse, save
from prm.errors import DataError, PrmError, UsageError
from prm.records import StepLabel, Trajectory, append_jsonl, read_jsonl


def main(argv: Sequence[str] | None = None) -> int:
    """Run `prm COMMAND ...`; the exit status. Bad usage and bad data print one line on stderr and give 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(version("prm-toolkit"))
        return 0
    command = argv[0]
    if command not in COMMANDS:
        print(f"prm: unknown command {command!r}; prm --help lists them", file=sys.stderr)
        return 2
    try:
        return COMMANDS[command](argv[1:]) or 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except (PrmError, OSError) as error:
        print(f"prm {command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"prm {command}: interrupted; what is written is whole, the same command goes on", file=sys.stderr)
        return 130


def usage() -> str:
    """The text of `prm --help`."""
    lines = [f"  {name:<10} {(call.__doc__ or '').splitlines()[0]}" for name, call in COMMANDS.items()]
    return "\n".join(
        ["usage: prm COMMAND ...   (prm COMMAND --help for its options)", "", "commands:", *lines]
    )


def convert(argv: list[str]) -> int:
    """read what people have (chats, reasoning text, data sets) as trajectories or labels"""
    from dataclasses import dataclass

    from prm import formats
    from prm.config import write_text
    from prm.records import dump_json

    @dataclass(frozen=True)
    class ConvertConfig:
        out: str = option(..., "write here; must not exist yet")
        to: str = option(
            "trajectories", "what to write; dataset: a folder", choices=("trajectories", "labels", "trl", "dataset")
        )
        kind: str = option("auto", "the format of IN: " + ", ".join(formats.KINDS))
        split: str | None = option(None, "how reasoning text becomes steps", choices=("blank-line", "line"))
        skip_bad: bool = option(False, "count bad rows and go on")
        soft: bool = option(False, "trl: write soft labels as they are")
        threshold: float | None = option(None, "trl: a step is good from this score on")

    places = [Positional("in", "the file to read")]
    where, config = parse("convert", convert.__doc__ or "", places, [ConvertConfig], argv)
    refuse_existing(config.out)
    converted = formats.convert(getattr(where, "in"), kind=config.kind, split=config.split, skip_bad=config.skip_bad)
    if config.to == "trl":
        rows, skipped = formats.to_trl(
            converted.trajectories, converted.labels, soft=config.soft, threshold=config.threshold
        )
        write_text(config.out, b"".join(dump_json(row) + b"\n" for row in rows).decode())
        written = len(rows)
        for reason, count in skipped.items():
            print(f"skipped {count}: {reason}", file=sys.stderr)
    elif config.to == "dataset":
        import datasets

        datasets.disable_progress_bars()
        if written := len(converted.trajectories):
            formats.to_dataset(converted.trajectories, converted.labels).save_to_disk(config.out)
    else:
        written = append_jsonl(config.out, getattr(converted, config.to))
    print(converted.summary(), file=sys.stderr)
    if not written:
        raise DataError(f"nothing to write to {config.out}: IN holds no {config.to}")
    save(config.out, "convert", config)
    print(config.out)
    return 0


def rollout(argv: list[str]) -> int:
    """play episodes of a policy in an environment"""
    from prm.config import progress
    from prm.env import EnvConfig
    from prm.records import Writer, mend
    from rl.policies import PolicyConfig, load_policy
    from rl.rollout import RolloutConfig, episodes, failed_action

    description = rollout.__doc__ or ""
    _, where, policy_config, config = parse("rollout", description, [], [EnvConfig, PolicyConfig, RolloutConfig], argv)
    make = where.factory()
    if config.n < 0:
        raise UsageError(f"--n must be >= 0, got {config.n}")
    mend(config.out)
    wanted = range(config.seed, config.seed + config.n)
    found = read_jsonl(config.out, Trajectory) if Path(config.out).exists() else []
    there = [t for t in found if t.meta.get("seed") in wanted]
    meta = {"env": where.env, "env_args": where.env_args, "policy": policy_config.policy}
    for t in there:
        if other := {k: t.meta[k] for k, v in meta.items() if t.meta.get(k, v) != v}:
            raise UsageError(
                f"{config.out}: holds an episode of seed {t.meta['seed']} with {other}, and this run has "
                f"{ {k: meta[k] for k in other} }: give another --out or --seed"
            )
    done = {t.meta["seed"] for t in there}
    seeds = [s for s in wanted if s not in done]
    policy = load_policy(policy_config) if seeds else None
    if policy:
        save(config.out, "rollout", where, policy_config, config)
    bar = progress(config.n, "rollout", "episode", initial=config.n - len(seeds))
    good, failed = [t.outcome for t in there if t.outcome is not None], 0
    played = episodes(policy, make, seeds, batch=config.batch, max_steps=config.max_steps) if policy else ()
    with Writer(config.out) as writer:
        for _, episode in played:
            if failed_action(episode):
                failed += 1
            else:
                writer.add(episode.trajectory(**meta))
                if episode.outcome is not None:
                    good.append(episode.outcome)
            bar.update()
    bar.close()
    if failed:
        reason = getattr(policy, "errors", None) or ["no reason given"]
        print(f"{failed} of {len(seeds)} episodes failed, the last reason: {reason[-1]}", file=sys.stderr)
        if failed == len(seeds):
            return 1
    mean = sum(good) / len(good) if good else float("nan")
    print(f"{config.out}: {config.n - failed} episodes, {len(there)} of them from before; success {mean:.3f}")
    return 0


def annotate(argv: list[str]) -> int:
    """label steps in the browser, by one person or several"""
    from labeling.annotate.run import AnnotateConfig
    from labeling.annotate.run import annotate as run

    places = [Positional("traj", "the trajectories to label; not needed to export", optional=True)]
    where, config = parse("annotate", annotate.__doc__ or "", places, [AnnotateConfig], argv)
    return run(where.traj, config)


def show(argv: list[str]) -> int:
    """trajectories or labels to read, in the browser or the terminal"""
    from labeling.annotate.show import ShowConfig
    from labeling.annotate.show import show as run

    places = [Positional("path", "a file of trajectories or labels, or the directory of a training run")]
    where, config = parse("show", show.__doc__ or "", places, [ShowConfig], argv)
    return run(where.path, config)


def judge(argv: list[str]) -> int:
    """label steps by a strong model behind an OpenAI-compatible endpoint"""
    from labeling.judge.run import JudgeConfig, command

    places = [Positional("trajectories", "whose steps to judge")]
    files, config = parse("judge", judge.__doc__ or "", places, [JudgeConfig], argv)
    return command(files.trajectories, read_records(files.trajectories, Trajectory), config)


def mc(argv: list[str]) -> int:
    """label steps by continuations of a policy"""
    import warnings
    from dataclasses import dataclass
    from functools import partial

    from labeling.montecarlo import MonteCarloConfig, first_error_labels, rollout_labels, tree_labels
    from prm.env import EnvConfig, load_attribute
    from prm.records import parse_json
    from rl.policies import PolicyConfig, load_policy

    @dataclass(frozen=True)
    class OutConfig:
        out: str = option(..., "append labels here; trajectories that have labels there are not run again")
        method: str = option("rollouts", "how to spend continuations", choices=("rollouts", "first-error", "tree"))
        new: str | None = option(None, "tree: the trajectories it makes go here (default: OUT.trajectories.jsonl)")

    places = [Positional("trajectories", "whose steps to label, as recorded in the environment")]
    configs = [EnvConfig, PolicyConfig, OutConfig, MonteCarloConfig]
    files, where, policy_config, target, config = parse("mc", mc.__doc__ or "", places, configs, argv)
    trajectories = read_records(files.trajectories, Trajectory)
    make, policy = where.factory(), load_policy(policy_config)
    if config.workers:
        make = partial(load_attribute(where.env), **parse_json(where.env_args or "{}"))
    save(target.out, "mc", where, policy_config, target, config, trajectories=files.trajectories)
    with warnings.catch_warnings(record=True) as said:
        if target.method == "tree":
            new = target.new or f"{target.out}.trajectories.jsonl"
            labels, made = tree_labels(trajectories, make, policy, config, out=target.out, new=new)
            print(f"{new}: {len(made)} trajectories")
        else:
            label = first_error_labels if target.method == "first-error" else rollout_labels
            labels = label(trajectories, make, policy, config, out=target.out)
    for warning in said:
        print(warning.message, file=sys.stderr)
    mean = sum(label.score for label in labels) / len(labels) if labels else float("nan")
    print(f"{target.out}: {len(labels)} labels, mean score {mean:.3f}")
    return 0 if labels else 1


def fuse(argv: list[str]) -> int:
    """labels of several sources to one label a step"""
    import json
    from dataclasses import dataclass

    from labeling.fuse import FuseConfig, fusion
    from prm.config import write_text

    @dataclass(frozen=True)
    class OutConfig:
        out: str = option(..., "write the fused labels here; must not exist yet")

    places = [Positional("labels", "label files", many=True)]
    where, target, config = parse("fuse", fuse.__doc__ or "", places, [OutConfig, FuseConfig], argv)
    refuse_existing(target.out)
    result = fusion((label for path in where.labels for label in read_records(path, StepLabel)), config)
    print(result.summary())
    if not append_jsonl(target.out, result.labels):
        raise DataError("no label is left: " + ", ".join(f"{n} {reason}" for reason, n in result.dropped.items()))
    write_text(f"{target.out}.sources.json", json.dumps(result.to_dict(), indent=2) + "\n")
    save(target.out, "fuse", target, config, labels=" ".join(where.labels))
    print(f"{target.out}: {len(result.labels)} labels")
    return 0


def plan(argv: list[str]) -> int:
    """what memory distilling and PPO need on a card, from a model's configuration alone"""
    import json
    from dataclasses import asdict, dataclass

    from distill.plan import STAGES, PlanConfig, describe, presets
    from distill.plan import plan as run
    from prm.config import write_text

    @dataclass(frozen=True)
    class OutConfig:
        out: str | None = option(None, "also write the bytes here, as JSON")
        compare: bool = option(False, "also plan the usual ways to save memory")

    _, target, config = parse("plan", plan.__doc__ or "", [], [OutConfig, PlanConfig], argv)
    plans = [run(config, stage) for stage in STAGES]
    print("\n".join(describe(plans)))
    for name, own in presets(config).items() if target.compare else ():
        print("\n".join(["", f"{name}:", *describe([run(own, stage) for stage in STAGES])]))
    if target.out:
        write_text(target.out, json.dumps({p.stage: asdict(p) for p in plans}, indent=2) + "\n")
    return 0


def select(argv: list[str]) -> int:
    """what to label next: unsure, disputed, unlike the rest, within a budget"""
    from dataclasses import dataclass

    from distill.select import SelectConfig
    from distill.select import select as run
    from prm.config import write_text

    @dataclass(frozen=True)
    class QueueConfig:
        out: str = option(..., "write the queue here, for annotate --queue; must not exist yet")
        labels: tuple[str, ...] = option((), "label files: scores of models and other sources, and what is labelled")

    places = [Positional("trajectories", "the pool to choose from")]
    where, target, config = parse("select", select.__doc__ or "", places, [QueueConfig, SelectConfig], argv)
    refuse_existing(target.out)
    labels = [label for path in target.labels for label in read_records(path, StepLabel)]
    found = run(read_records(where.trajectories, Trajectory), labels, config)
    write_text(target.out, "".join(choice.to_json() for choice in found.choices))
    save(target.out, "select", target, config, trajectories=where.trajectories)
    for reason, n in found.dropped.items():
        print(f"left out: {n} {reason}", file=sys.stderr)
    print(f"{target.out}: {len(found.choices)} of {found.candidates} {config.unit} to label next")
    return 0


def distill(argv: list[str]) -> int:
    """train a PRM on step labels"""
    from distill.train import DistillConfig
    from distill.train import distill as run

    places = [
        Positional("trajectories", "the trajectories that the labels are of"),
        Positional("labels", "label files", many=True),
    ]
    where, config = parse("distill", distill.__doc__ or "", places, [DistillConfig], argv)
    refuse_existing(str(Path(config.out, "distill.config.yaml")))
    trajectories = read_records(where.trajectories, Trajectory)
    labels = [label for path in where.labels for label in read_records(path, StepLabel)]
    run(trajectories, labels, config)
    if os.environ.get("RANK", "0") == "0":
        save(config.out, "distill", config, trajectories=where.trajectories, labels=" ".join(where.labels))
        print(config.out)
    return 0


def score(argv: list[str]) -> int:
    """score every step of trajectories with a PRM"""
    from prm.batching import ScoreConfig, score_file

    places = [
        Positional("model", "a PRM: a folder, a hub id, or the address of a server"),
        Positional("trajectories", "what to score"),
    ]
    where, config = parse("score", score.__doc__ or "", places, [ScoreConfig], argv)
    return score_file(where.model, where.trajectories, config)


def serve(argv: list[str]) -> int:
    """score over HTTP: batching across clients, OpenRLHF's and vLLM's protocols"""
    from prm.serve.config import ServeConfig
    from prm.serve.run import serve as run

    places = [Positional("model", "a PRM: a folder or hub id")]
    where, config = parse("serve", serve.__doc__ or "", places, [ServeConfig], argv)
    return run(where.model, config)


def export(argv: list[str]) -> int:
    """a PRM for other programs: a plain merged checkpoint, or ONNX"""
    from prm.export import ExportConfig
    from prm.export import export as run

    where, config = parse("export", export.__doc__ or "", [Positional("model", "a PRM")], [ExportConfig], argv)
    run(where.model, config)
    save(config.out, "export", config, model=where.model)
    print(config.out)
    return 0


def evaluate(argv: list[str]) -> int:
    """compare labels with gold: first-error F1, AUC, calibration, kappa"""
    from distill.evaluate import EvaluateConfig, evaluate_files

    places = [
        Positional("gold", "labels taken as right; or trajectories with outcomes, or preference pairs"),
        Positional("predicted", "labels to judge"),
    ]
    where, config = parse("evaluate", evaluate.__doc__ or "", places, [EvaluateConfig], argv)
    folder = evaluate_files(where.gold, where.predicted, config)
    save(config.out, "evaluate", config, gold=where.gold, predicted=where.predicted)
    print((folder / "report.md").read_text(encoding="utf-8"), end="")
    return 0


def audit(argv: list[str]) -> int:
    """attack a PRM: what repeating, padding, praise, reordering or stopping early pays"""
    from distill.audit import HEADER, AuditConfig, summary, write
    from distill.audit import audit as run
    from distill.markdown import table
    from prm.remote import load_prm

    places = [
        Positional("model", "a PRM: a folder, a hub id, or the address of a server"),
        Positional("trajectories", "what to attack, as the policy writes it"),
    ]
    where, config = parse("audit", audit.__doc__ or "", places, [AuditConfig], argv)
    trajectories = read_records(where.trajectories, Trajectory)
    result = run(load_prm(where.model), trajectories, config)
    if config.out:
        write(result, config.out)
        save(config.out, "audit", config, model=where.model, trajectories=where.trajectories)
    print("\n".join([*table(HEADER, result.rows()), "", summary(result)]))
    for what, n in result.skipped.items():
        print(f"left out: {n} {what}", file=sys.stderr)
    return 0


def sft(argv: list[str]) -> int:
    """warm start: clone the behaviour in good trajectories"""
    from rl.sft import SFTConfig
    from rl.sft import sft as run

    places = [Positional("trajectories", "what to learn from")]
    where, config = parse("sft", sft.__doc__ or "", places, [SFTConfig], argv)
    run(read_records(where.trajectories, Trajectory), config)
    save(config.out, "sft", config, trajectories=where.trajectories)
    print(config.out)
    return 0


def ppo(argv: list[str]) -> int:
    """train a policy by PPO on a reward for every step"""
    from prm.env import EnvConfig
    from rl.guard import GuardConfig
    from rl.policies import PolicyConfig
    from rl.ppo import PPOConfig
    from rl.run import TrainingConfig
    from rl.run import ppo as work

    configs = [EnvConfig, PolicyConfig, GuardConfig, TrainingConfig, PPOConfig]
    return work(*parse("ppo", ppo.__doc__ or "", [], configs, argv)[1:])


def run(argv: list[str]) -> int:
    """drive a policy through an environment behind the guard"""
    from prm.env import EnvConfig
    from rl.guard import GuardConfig
    from rl.policies import PolicyConfig
    from rl.run import RunConfig
    from rl.run import run as work

    configs = [EnvConfig, PolicyConfig, GuardConfig, RunConfig]
    return work(*parse("run", run.__doc__ or "", [], configs, argv)[1:])


def search(argv: list[str]) -> int:
    """the best trajectory a PRM finds: best-of-n, beam search, rejection sampling"""
    from dataclasses import dataclass

    from prm.env import EnvConfig
    from prm.remote import load_prm
    from rl.policies import PolicyConfig, load_policy
    from rl.search import SearchConfig, run

    @dataclass(frozen=True)
    class ScorerConfig:
        prm: str = option(..., "the PRM that scores steps: a checkpoint, or the address of a server")

    configs = [EnvConfig, PolicyConfig, ScorerConfig, SearchConfig]
    _, where, policy_config, scorer, config = parse("search", search.__doc__ or "", [], configs, argv)
    make, prm, policy = where.factory(), load_prm(scorer.prm), load_policy(policy_config)
    save(config.out, "search", where, policy_config, scorer, config)
    meta = {"env": where.env, "env_args": where.env_args, "policy": policy_config.policy}
    return run(policy, make, prm, config, meta)


def demo(argv: list[str]) -> int:
    """the whole pipeline on the embedded default, minutes on two cores"""
    from prm.demo import DemoConfig
    from prm.demo import demo as run

    _, config = parse("demo", demo.__doc__ or "", [], [DemoConfig], argv)
    run(config, main)
    return 0


# --- shared by the commands -------------------------------------------------------------------------------------------


def read_records(path: str, cls: type[Any], *, skip_bad: bool = False) -> list[Any]:
    """The records of an input file; one that holds none is an error."""
    records = read_jsonl(path, cls, skip_bad=skip_bad)
    if not records:
        raise DataError(f"{path}: holds no {'trajectory' if cls is Trajectory else 'label'}")
    return records


def refuse_existing(path: str) -> None:
    """Commands that write their product at once do not write over another."""
    if Path(path).exists():
        raise UsageError(f"{path} exists already; remove it or write elsewhere")


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "demo": demo,
    "convert": convert,
    "rollout": rollout,
    "annotate": annotate,
    "judge": judge,
    "mc": mc,
    "show": show,
    "fuse": fuse,
    "plan": plan,
    "select": select,
    "distill": distill,
    "score": score,
    "serve": serve,
    "export": export,
    "search": search,
    "evaluate": evaluate,
    "audit": audit,
    "sft": sft,
    "ppo": ppo,
    "run": run,
}

if __name__ == "__main__":
    sys.exit(main())
