"""The commands `prm ppo` and `prm run`: training, and a trained policy at work, behind the same guard."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from prm.config import option, progress, save
from prm.env import EnvConfig
from prm.errors import UsageError
from prm.records import Trajectory, Writer, mend, read_jsonl
from rl.guard import GuardConfig, guarded
from rl.policies import PolicyConfig, TransformersPolicy, load_policy
from rl.rewards import Reward, load_frozen
from rl.rollout import episodes, failed_action
from rl.scorers import NAMES, load_scorers


@dataclass(frozen=True)
class TrainingConfig:
    prm: str | None = option(None, "the PRM that scores steps: a folder, a hub id, or the address of a server")
    critic_from_prm: bool = option(False, "start the critic from the PRM's backbone")
    checks: tuple[str, ...] = option((), f"scorers that need no PRM: {', '.join(NAMES)}, or module:attribute")
    expected_tools: tuple[str, ...] = option((), "right-tool: the tools to call, in order")
    eval_args: str | None = option(None, "the environment's arguments where success is measured, as JSON")
    warm_start: str | None = option(None, "first clone the good trajectories in this file, then train on")
    warm_epochs: float = option(2.0, "passes of the warm start")
    warm_batch: int = option(16, "trajectories an update of the warm start")
    warm_lr: float = option(1e-4, "learning rate of the warm start")
    serve_url: str | None = option(None, "sample at this vLLM server, which loads each update's adapter")


@dataclass(frozen=True)
class RunConfig:
    out: str = option(..., "append the episodes here, as trajectories; seeds that are there already are not run again")
    like: str | None = option(None, "a training run: its guard, and its reward, kept for each step in meta")
    n: int = option(1, "how many episodes")
    seed: int = option(0, "the seeds are seed, seed + 1, ...")
    batch: int = option(16, "episodes side by side")
    max_steps: int = option(50, "cut an episode after so many steps")
    approve: bool = option(True, "ask at the terminal where a rule says to ask; without a terminal it is blocked")


def ppo(where: EnvConfig, acting: PolicyConfig, guard: GuardConfig, training: TrainingConfig, config: Any) -> int:
    """Train; `config` is a `rl.ppo.PPOConfig`. The exit status."""
    from prm.parallel import Ranks
    from rl.ppo import check, train
    from rl.roles import Roles

    ranks = Ranks.started()
    make = where.factory()
    check(config)
    guarded(make, guard)  # what is wrong with the rules is said before anything is loaded
    eval_env = replace(where, env_args=training.eval_args).factory() if training.eval_args else make
    plain = make()
    listed = getattr(plain, "tools", None)
    tools = listed() if callable(listed) else []
    checks = load_scorers(training.checks, tools=tools, expected=training.expected_tools)
    if training.critic_from_prm and not training.prm:
        raise UsageError("--critic-from-prm needs --prm")
    if training.warm_start:
        warm_start(ranks, acting, training, config)
        acting = replace(acting, policy=str(Path(config.out, "warm")))
    lora = config.lora_rank is not None or Path(acting.policy, "adapter_config.json").exists()
    scorer = _load(training.prm) if training.prm and not lora else None
    policy = load_policy(acting)
    if not isinstance(policy, TransformersPolicy):
        raise UsageError(f"--policy {acting.policy}: training needs a checkpoint")
    if training.serve_url:
        from rl.served import ServedPolicy

        policy = ServedPolicy(policy, training.serve_url, Path(config.out, "served"))
    critic: Any = None
    if training.critic_from_prm:
        critic = training.prm if lora else getattr(scorer, "model", None)
        if critic is None:
            raise UsageError(f"--critic-from-prm: {training.prm} is a server, its weights are not here")
    roles = Roles(
        policy.model,
        lora_rank=config.lora_rank,
        critic=critic if config.advantages == "gae" else False,
        temperature=policy.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
        seed=config.seed,
    )
    if training.prm and lora:
        scorer = _shared(training.prm, roles)
    reward = Reward(config, scorer, checks)
    if ranks.first:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        save(config.out, "ppo", where, acting, guard, training, config)
    about = {"prm": training.prm, "tools": tools, "expected_tools": list(training.expected_tools)}
    result = train(
        policy,
        guarded(make, guard),
        reward,
        config,
        eval_env=guarded(eval_env, guard),
        roles=roles,
        frozen={**about, "guard": asdict(guard)},
        ranks=ranks,
    )
    if ranks.first:
        print(f"{result.out}/policy: success {result.success:.3f} on {config.eval_episodes} episodes")
    return 0


def warm_start(ranks: Any, acting: PolicyConfig, training: TrainingConfig, config: Any) -> None:
    """Clone trajectories into OUT/warm, once: a run that goes on finds it there."""
    from rl.sft import SFTConfig, sft

    out = Path(config.out, "warm")
    done = out / "sft.config.yaml"

    def clone() -> None:
        if done.exists():
            return
        warm = SFTConfig(
            base=acting.policy,
            out=str(out),
            layout=acting.layout,
            system=acting.system,
            epochs=training.warm_epochs,
            batch=training.warm_batch,
            lr=training.warm_lr,
            lora_rank=config.lora_rank,
            gradient_checkpointing=config.gradient_checkpointing,
            dtype=acting.dtype,
            seed=config.seed,
        )
        sft(read_jsonl(str(training.warm_start), Trajectory), warm)
        save(out, "sft", warm, trajectories=training.warm_start)

    ranks.together(clone)


def run(where: EnvConfig, acting: PolicyConfig, guard: GuardConfig, config: RunConfig) -> int:
    """Drive a policy through an environment behind the guard; the exit status."""
    reward: Reward | None = None
    if config.like:
        guard = guard if guard.on else read_guard(load_frozen(config.like)[1], config.like)
        reward = frozen_reward(config.like)
    asking = config.approve and sys.stdin.isatty()
    make = guarded(where.factory(), guard, _ask if asking else None)
    mend(config.out)
    there = read_jsonl(config.out, Trajectory) if Path(config.out).exists() else []
    done = {t.meta.get("seed") for t in there}
    seeds = [s for s in range(config.seed, config.seed + config.n) if s not in done]
    policy = load_policy(acting) if seeds else None
    save(config.out, "run", where, acting, guard, config)
    bar = progress(config.n, "run", "episode", initial=config.n - len(seeds))
    counts = dict.fromkeys(("success", "known", "blocked", "failed", "steps", "lost"), 0.0)
    meta = {"env": where.env, "policy": acting.policy, "guard": list(guard.rules)}
    size = 1 if asking else config.batch
    with Writer(config.out) as writer:
        for _, episode in episodes(policy, make, seeds, batch=size, max_steps=config.max_steps) if policy else ():
            bar.update()
            if failed_action(episode):
                counts["lost"] += 1
                continue
            counts["known"] += episode.outcome is not None
            counts["success"] += episode.outcome or 0.0
            counts["steps"] += len(episode.infos)
            counts["blocked"] += sum(bool(info.get("blocked")) for info in episode.infos)
            counts["failed"] += sum(bool(info.get("error")) for info in episode.infos)
            own: dict[str, Any] = dict(meta)
            if reward is not None:
                trajectory = episode.trajectory(**meta)
                scores = reward.score([trajectory])
                (paid,) = reward([episode], [trajectory], scores)
                own |= {"step_rewards": paid.total, "scores": scores[0] if scores else None}
            writer.add(episode.trajectory(**own))
    bar.close()
    played = len(seeds) - int(counts["lost"])
    if counts["lost"]:
        print(f"{int(counts['lost'])} episodes without an answer of the policy, not written", file=sys.stderr)
    rate = counts["success"] / counts["known"] if counts["known"] else float("nan")
    print(
        f"{config.out}: {played} episodes, success {rate:.3f}; of {int(counts['steps'])} actions "
        f"{int(counts['blocked'])} blocked, {int(counts['failed'])} failed"
    )
    return 0 if played or not seeds else 1


def frozen_reward(run: str) -> Reward:
    """The reward of a training run, from its `reward.json`: the function that it was trained on.

    Raises:
        DataError: the folder holds none.
        UsageError: the PRM is not the one that the run was trained with.
    """
    config, frozen = load_frozen(run)
    tools, expected = frozen.get("tools") or (), frozen.get("expected_tools") or ()
    checks = load_scorers(frozen.get("checks") or (), tools=tools, expected=expected)
    if not frozen.get("prm") and frozen.get("prm_fingerprint"):
        raise UsageError(f"{run}: reward.json does not say where the PRM is")
    scorer = _load(frozen["prm"]) if frozen.get("prm") and config.process_weight else None
    if scorer is not None and scorer.fingerprint() != frozen.get("prm_fingerprint"):
        raise UsageError(f"{run}: {frozen['prm']} is not the PRM that the run was trained with")
    return Reward(config if scorer is not None else replace(config, process_weight=0.0), scorer, checks)


def read_guard(frozen: dict[str, Any], run: str) -> GuardConfig:
    """The guard of a training run."""
    given = frozen.get("guard") or {}
    names = {field.name for field in fields(GuardConfig)}
    if not isinstance(given, dict) or not set(given) <= names:
        raise UsageError(f"{run}: the guard in reward.json must have {', '.join(sorted(names))}")
    return GuardConfig(**{name: tuple(map(str, values)) for name, values in given.items()})


def _shared(prm: str, roles: Any) -> Any:
    """The PRM as one more adapter on the policy's base, where it is one; else as a model of its own."""
    from prm.remote import is_url
    from rl.roles import adapter_prm

    if is_url(prm):
        return _load(prm)
    try:
        return adapter_prm(prm, roles)
    except UsageError as error:
        print(f"{error}; the PRM is loaded as a model of its own", file=sys.stderr)
        return _load(prm)


def _load(prm: str) -> Any:
    from prm.remote import load_prm

    return load_prm(prm)


def _ask(action: str, reason: str) -> bool:
    """Ask a person at the terminal; anything but yes is no. Control characters of the action are shown as escapes."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in action)
    answer = input(f"\n{shown}\n{reason}. Carry it out? [y/N] ")
    return answer.strip().lower() in ("y", "yes")

