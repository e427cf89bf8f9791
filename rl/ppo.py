"""Multi-turn PPO with a reward for every step: the whole algorithm, top to bottom.

Token in, token out: the ids that were sampled are trained on. The time axis holds the policy's tokens only, so what an
environment says, and how long it says it, cannot enter advantages, KL, entropy or the loss. A step's reward sits on the
step's last policy token. (Schulman et al. 2017, arXiv 1707.06347; GAE, arXiv 1506.02438.)
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from prm.config import option, progress, write_text
from prm.env import Env, EnvFactory, Episode
from prm.errors import UsageError
from prm.parallel import ALONE, Ranks
from prm.render import prompt
from rl.advantages import explained_variance, gae, group_advantages, step_credit, whiten
from rl.monitor import Line, Monitor, MonitorConfig, Played, check_boards, describe
from rl.policies import TransformersPolicy
from rl.rewards import Reward, RewardConfig
from rl.roles import Batch, Roles
from rl.rollout import episodes


@dataclass(frozen=True)
class PPOConfig(MonitorConfig, RewardConfig):
    out: str = option(..., "write the run here")
    updates: int = option(100, "policy updates")
    episodes: int = option(64, "episodes an update")
    epochs: int = option(2, "passes over the episodes of an update")
    minibatch: int = option(32, "episodes an optimiser step")
    micro_tokens: int = option(16384, "the most tokens at a time; changes memory, not the objective")
    lr: float = option(1e-6, "learning rate of the policy (1e-6 suits 7B, 2e-4 a tiny model)")
    critic_lr: float = option(1e-5, "learning rate of the critic")
    critic_warmup: int = option(1, "updates in which the critic alone learns")
    eval_seed: int = option(10**9, "the evaluation's seeds are these and the next")
    critic_epochs: int = option(4, "passes of the critic over the episodes in those updates")
    advantages: str = option(
        "gae", "gae: a critic; rloo, grpo: other episodes of the same seed", choices=("gae", "rloo", "grpo")
    )
    credit: str = option(
        "return", "process rewards: in the return, or each to its own step alone", choices=("return", "step")
    )
    group: int = option(8, "rloo and grpo: episodes a seed")
    gamma: float = option(1.0, "discount, per policy token")
    gae_lambda: float = option(0.95, "GAE's lambda, per policy token")
    clip: float = option(0.2, "clip range of the ratio")
    value_clip: float = option(0.2, "clip range of the value; 0 is none")
    kl: float = option(0.01, "coefficient of the KL to the starting policy")
    kl_form: str = option("k2", "k2, k3: in the loss; k1: in the reward", choices=("k2", "k3", "k1"))
    kl_adaptive: bool = option(True, "halve the coefficient below an episode KL of 0.5, double above 5, to tenfold")
    kl_stop: float = option(0.0, "end an update's passes when the KL to its own start, a token, is above; 0 is never")
    entropy: float = option(0.0, "coefficient of an entropy bonus")
    max_grad_norm: float = option(1.0, "clip the gradient's norm")
    lora_rank: int | None = option(None, "train a LoRA of this rank on a frozen base, the critic as a second one")
    gradient_checkpointing: bool = option(False, "trade time for memory")
    max_steps: int = option(50, "cut an episode after so many steps")
    batch: int = option(64, "episodes side by side")
    seed: int = option(0, "training seeds are seed, seed + 1, ...")
    eval_every: int = option(0, "evaluate after every so many updates (0: at the end only)")
    eval_episodes: int = option(200, "episodes of an evaluation")
    save_every: int = option(10, "checkpoint after every so many updates")


# What decides no number of the run, and may be changed when it goes on.
FREE = {"out", "updates", "eval_every", "eval_episodes", "eval_seed", "save_every", "micro_tokens", "batch"}
FREE |= {field.name for field in fields(MonitorConfig)}


@dataclass(frozen=True)
class RunResult:
    """What a run left: its folder, one dict of metrics an update, and the last evaluation's success in [0, 1]."""

    out: Path
    metrics: list[Line]
    success: float


@dataclass
class Sample:
    """One episode as PPO sees it; n policy tokens.

    Args:
        ids: all token ids of the episode, as read and sampled.
        places: indices of the policy's tokens in `ids`, n of them.
        logprobs: (n,) log-probabilities when sampled.
        rewards: (n,) rewards; a step's reward on its last policy token.
        process: (n,) the process reward of each token's own step, where it is not in `rewards` (credit "step").
        turns: (n,) the number of each token's step.
        bootstraps: the episode was cut, so its last state has a value (that of the state after all of `ids`).
        kl: set by `learn`: the KL of the episode to the reference, in nats (the k1 estimate).
    """

    ids: list[int]
    places: list[int]
    logprobs: Tensor
    rewards: Tensor
    bootstraps: bool = False
    kl: float = 0.0
    process: Tensor | None = None
    turns: Tensor | None = None


def train(
    policy: TransformersPolicy,
    env: str | Env | EnvFactory,
    scorer: Any,
    config: PPOConfig,
    *,
    eval_env: str | Env | EnvFactory | None = None,
    critic: Any = None,
    roles: Roles | None = None,
    frozen: dict[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Train a policy by PPO on step rewards.

    Args:
        policy: the policy; its model is trained in place.
        env: where episodes are played, as for `rl.rollout.rollout`.
        scorer: a `prm.PRM`, anything with `score(trajectories) -> list[list[float]]`, or that function; None for none;
            or a `rl.rewards.Reward`, which has checks as well.
        config: see its fields. A run whose folder holds a checkpoint goes on from it.
        eval_env: where success is measured (default: `env`), on seeds that training does not use.
        critic: a model the critic's backbone starts from.
        roles: the models, where they are made already (as when the PRM is an adapter on the policy's base).
        frozen: what else `reward.json` shall say (the PRM's path, the guard, ...).
        ranks: the processes that share the work.

    Raises:
        UsageError: process weight without a scorer; a folder that holds another run; options that do not go together.
    """
    reward = replace(scorer, config=config) if isinstance(scorer, Reward) else Reward(config, scorer)
    group = check(config)
    if policy.config.top_p < 1:
        warnings.warn("--top-p filters what is sampled, and the ratio knows nothing of it: leave it at 1", stacklevel=2)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    roles = roles or Roles(
        policy.model,
        lora_rank=config.lora_rank,
        critic=critic if group == 1 else False,
        temperature=policy.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
        seed=config.seed,
    )
    policy.model = policy.generator.model = roles.model
    rates = {"policy": config.lr} | ({"critic": config.critic_lr} if group == 1 else {})
    optimisers: dict[str, torch.optim.Optimizer] = {
        role: torch.optim.AdamW(roles.parameters(role).values(), lr=lr, weight_decay=0.0) for role, lr in rates.items()
    }
    options = {k: v for k, v in vars(config).items() if k not in FREE}
    options |= {k: getattr(policy.config, k) for k in ("temperature", "top_p", "max_action_tokens")}
    first, kl_coefficient = _resume(out, roles, optimisers, config.kl, options)
    for role in optimisers:
        ranks.spread(roles.parameters(role).values())
    monitor = Monitor(out, config, first) if ranks.first else None
    if monitor:
        reward.freeze(out / "reward.json", going_on=first > 0, **(frozen or {}))
    metrics: list[Line] = monitor.history if monitor else []
    bar = progress(config.updates, "ppo", "update", initial=first)
    for update in range(first, config.updates):
        started = time.monotonic()
        policy.generator.forget()
        if hasattr(policy, "refresh"):  # the others wait until the server has the weights
            ranks.together(lambda: policy.refresh(update, roles))  # noqa: B023
            policy.refresh(update, roles, first=False)
        start = config.seed + update * (config.episodes // group)
        seeds = [start + i // group for i in range(config.episodes)]
        played, samples = _play(policy, env, seeds, reward, config, ranks, update)
        rolled = time.monotonic()
        learned = learn(samples, roles, optimisers, config, kl_coefficient, update, ranks)
        line: Line = {"update": update, "episodes": (update + 1) * config.episodes} | describe(played) | learned
        line |= {"kl_coefficient": kl_coefficient}
        line |= {"seconds_rollout": rolled - started, "seconds_update": time.monotonic() - rolled}
        if config.kl_adaptive:
            kl_coefficient = adapt_kl(kl_coefficient, learned["kl"], config.kl)
        if config.eval_every and (update + 1) % config.eval_every == 0:
            line["eval_success"] = evaluate(policy, eval_env or env, config, ranks)
        if monitor is None:
            metrics.append(line)
        else:
            monitor.add(line, played, [s.kl for s in samples])
            if (update + 1) % config.save_every == 0 or update + 1 == config.updates:
                rest = {"update": update + 1, "kl_coefficient": kl_coefficient, "options": options}
                _save(out, roles, optimisers, rest)
        bar.set_postfix(success=f"{line['success']:.2f}", reward=f"{line['reward']:.2f}", kl=f"{line['kl']:.2f}")
        bar.update()
    bar.close()
    policy.generator.forget()
    if hasattr(policy, "refresh"):
        ranks.together(lambda: policy.refresh(config.updates, roles))
        policy.refresh(config.updates, roles, first=False)
    success = evaluate(policy, eval_env or env, config, ranks)
    if monitor:
        monitor.close()
        known = success if config.eval_episodes else None
        write_text(out / "result.json", json.dumps({"success": known, "updates": len(metrics)}) + "\n")
        roles.save_policy(out / "policy", policy.tokenizer)
    return RunResult(out, metrics, success)


def check(config: PPOConfig) -> int:
    """Episodes a seed: 1 with a critic. Raises UsageError on options that make no sense together."""
    check_boards(config.boards)
    for name in ("updates", "episodes", "epochs", "minibatch", "micro_tokens", "max_steps", "batch", "save_every"):
        if (value := getattr(config, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("lr", "critic_lr", "clip", "max_grad_norm"):
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be > 0, got {value:g}")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= (value := getattr(config, name)) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} must lie in [0, 1], got {value:g}")
    if config.advantages == "gae":
        return 1
    if config.group < 2 or config.episodes % config.group:
        raise UsageError(f"--group must be at least 2 and divide --episodes {config.episodes}, got {config.group}")
    return config.group


def _play(
    policy: TransformersPolicy,
    env: str | Env | EnvFactory,
    seeds: Sequence[int],
    reward: Reward,
    config: PPOConfig,
    ranks: Ranks,
    update: int,
) -> tuple[list[Played], list[Sample]]:
    """The episodes of an update, one a seed, as the monitor sees them and as PPO does."""
    deals = ranks.mine(sorted(set(seeds)))  # episodes of one seed stay together: their draws go by their number
    own = [(i, seed) for i, seed in enumerate(seeds) if seed in deals]
    limits = {"batch": config.batch, "max_steps": config.max_steps}
    found = dict(episodes(policy, env, [seed for _, seed in own], salt=update, **limits))
    batch = [found[i] for i in range(len(own))]
    trajectories = [episode.trajectory(update=update) for episode in batch]
    scores = reward.score(trajectories)
    rewards = reward(batch, trajectories, scores)
    pairs = []
    for i, ((place, _), episode) in enumerate(zip(own, batch, strict=True)):
        process = rewards[i].process if config.credit == "step" else None
        made = sample(policy, episode, rewards[i].total, process)
        failed = sum(bool(info.get("error") or info.get("blocked")) for info in episode.infos)
        tokens = len(made.places), len(made.ids)
        seen = Played(trajectories[i], rewards[i], scores[i] if scores else None, failed, episode.cut, *tokens)
        pairs.append((place, (seen, made)))
    both = ranks.gather(pairs)
    return [seen for seen, _ in both], [made for _, made in both]


# --- the algorithm ----------------------------------------------------------------------------------------------------


def sample(
    policy: TransformersPolicy, episode: Episode, rewards: Sequence[float], process: Sequence[float] | None = None
) -> Sample:
    """An episode as ids and places. Its ids are what the policy read and sampled, nothing is encoded again.

    `rewards` are those of the T steps, whole; `process` is the part of them that is credited to its own step alone.
    """
    history = episode.history
    layout = policy.layout(history.tools)
    ids: list[int] = []
    places: list[int] = []
    logprobs: list[float] = []
    placed: list[float] = []
    turns: list[int] = []
    own = process or [0.0] * len(rewards)
    for t, action in enumerate(history.actions):
        if action.token_ids is None or action.logprobs is None:
            raise UsageError("PPO trains on sampled ids: this policy's actions have none")
        before = replace(history, actions=history.actions[:t], observations=history.observations[:t])
        ids = prompt(before, policy.tokenizer, layout)
        places += range(len(ids), len(ids) + len(action.token_ids))
        logprobs += action.logprobs
        placed += [0.0] * len(action.token_ids)
        if placed:  # where nothing was sampled, what the step earned belongs to the tokens that led there
            placed[-1] += rewards[t] - own[t]
        turns += [t] * len(action.token_ids)
        ids = ids + list(action.token_ids)
    bootstraps = episode.truncated and episode.outcome is None
    if bootstraps:
        ids = prompt(history, policy.tokenizer, layout)
    made = Sample(ids, places, torch.tensor(logprobs), torch.tensor(placed), bootstraps)
    if process is not None:
        made.process, made.turns = torch.tensor([own[t] for t in turns]), torch.tensor(turns)
    return made


def adapt_kl(coefficient: float, kl: float, start: float = 0.0) -> float:
    """The adaptive rule on the mean KL of an episode, in nats, within a tenth and ten times of `start` (0: no bounds).

    Without bounds a policy that has to leave its start by more than 5 nats is dragged all the way back: the coefficient
    doubles at each update until the penalty outweighs any reward, and between 0.5 and 5 nothing lowers it again.
    """
    adapted = coefficient / 2 if kl < 0.5 else coefficient * 2 if kl > 5 else coefficient
    return min(max(adapted, start / 10), start * 10) if start else adapted


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(clipped surrogate loss, 1 where it clips), each (n,)."""
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages), (ratio != clipped).float()


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Squared error (n,), the larger of that of the value and of the value kept within `clip` of the old one."""
    loss = (values - returns).pow(2)
    if clip > 0:
        near = old + (values - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).pow(2))
    return loss / 2


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log-ratio, (n,): its gradient is, in the mean, that of KL(policy || reference)."""
    return (logprobs - reference).pow(2) / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token KL to the reference, the never negative estimator (Schulman 2020): e^d - d - 1, d = ref - logp."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


SEEN = ("entropy", "clip_share", "policy_loss", "value_loss", "kl_step")  # summed over the tokens of a minibatch


def learn(
    samples: Sequence[Sample],
    roles: Roles,
    optimisers: dict[str, torch.optim.Optimizer],
    config: PPOConfig,
    kl_coefficient: float,
    update: int,
    ranks: Ranks = ALONE,
) -> Line:
    """One PPO update on the episodes of one iteration. Returns what it measured."""
    critic = "critic" in optimisers
    group_rewards = [s.rewards for s in samples]  # whole groups, the empty episodes too
    everyone, samples = samples, [s for s in samples if s.places]
    if not samples:
        names = ("kl", "kl_k3", "ratio_error", "sampling_error", "stopped_early", "explained_variance")
        return dict.fromkeys((*SEEN, *names), 0.0)
    sampling_error = None
    if roles.head.weight.dtype != torch.float32:
        # Sampling (with a cache) and training (without) round differently; the ratio's old side is that of training.
        own = _no_grad(samples, config, roles, lambda b: roles.logprobs(b)[0], ranks)
        sampling_error = max(((o - s.logprobs).exp() - 1).abs().max().item() for s, o in zip(samples, own, strict=True))
        for s, o in zip(samples, own, strict=True):
            s.logprobs = o
    reference = _no_grad(samples, config, roles, lambda b: roles.logprobs(b, "reference")[0], ranks)
    if config.kl_form == "k1":
        kls = {id(s): s.logprobs - ref for s, ref in zip(samples, reference, strict=True)}
        group_rewards = [s.rewards - kl_coefficient * kls[id(s)] if s.places else s.rewards for s in everyone]
    values, returns, explained = list[Tensor](), list[Tensor](), None
    if critic:
        values, last = _values(samples, config, roles, ranks)
        rewards = [r for s, r in zip(everyone, group_rewards, strict=True) if s.places]
        advantages = [
            gae(r, own, v if s.bootstraps else 0.0, config.gamma, config.gae_lambda)
            for s, r, own, v in zip(samples, rewards, values, last, strict=True)
        ]
        returns = [a + own for a, own in zip(advantages, values, strict=True)]
        explained = explained_variance(torch.cat(values), torch.cat(returns))
    else:
        advantages = group_advantages(group_rewards, config.group, config.gamma, scale=config.advantages == "grpo")
        advantages = [a for s, a in zip(everyone, advantages, strict=True) if s.places]
    if config.credit == "step":
        pairs = [(s.process, s.turns) for s in samples if s.process is not None and s.turns is not None]
        own = step_credit([p for p, _ in pairs], [t for _, t in pairs])
        advantages = [a + c for a, c in zip(advantages, own, strict=True)]
    if critic or config.advantages == "rloo":
        advantages = list(whiten(torch.cat(advantages)).split([len(a) for a in advantages]))
    warm = critic and update < config.critic_warmup
    seen: dict[str, list[float]] = {name: [] for name in SEEN}
    ratio_error = 0.0
    stopped = False
    random = Random(f"{config.seed}:{update}")
    order = list(range(len(samples)))
    for epoch in range(config.critic_epochs if warm else config.epochs):
        random.shuffle(order)
        for start in range(0, len(order), config.minibatch):
            chosen = order[start : start + config.minibatch]
            tokens = sum(len(samples[i].places) for i in chosen)
            first = epoch == 0 and start == 0
            for optimiser in optimisers.values():
                optimiser.zero_grad(set_to_none=True)
            sums = dict.fromkeys(seen, 0.0)
            errors = [0.0]
            for micro in ranks.mine(_micro([len(samples[i].ids) for i in chosen], config.micro_tokens)):
                rows = [chosen[j] for j in micro]
                batch = Batch.of([samples[i].ids for i in rows], [samples[i].places for i in rows], roles.device)
                old = torch.cat([samples[i].logprobs for i in rows]).to(roles.device)
                if not warm or first:
                    with torch.set_grad_enabled(not warm):
                        logprobs, entropy = roles.logprobs(batch)
                    if first:
                        errors.append(((logprobs - old).exp() - 1).abs().max().item())
                    sums["entropy"] += entropy.sum().item()
                    sums["kl_step"] += k3(old, logprobs.detach()).sum().item()
                if not warm:
                    advantage = torch.cat([advantages[i] for i in rows]).to(roles.device)
                    loss, clips = policy_loss(logprobs, old, advantage, config.clip)
                    if config.kl_form != "k1" and kl_coefficient:
                        ref = torch.cat([reference[i] for i in rows]).to(roles.device)
                        loss = loss + kl_coefficient * {"k2": k2, "k3": k3}[config.kl_form](logprobs, ref)
                    roles.backward((loss - config.entropy * entropy).sum().div(tokens), "policy")
                    sums["policy_loss"] += loss.sum().item()
                    sums["clip_share"] += clips.sum().item()
                if critic:
                    value = roles.values(batch)
                    before = torch.cat([values[i] for i in rows]).to(roles.device)
                    target = torch.cat([returns[i] for i in rows]).to(roles.device)
                    error_v = value_loss(value, before, target, 0.0 if warm else config.value_clip)
                    roles.backward(error_v.sum().div(tokens), "critic")
                    sums["value_loss"] += error_v.sum().item()
            sums = dict(zip(sums, ranks.add(list(sums.values())), strict=True))
            if first:
                ratio_error = max(max(own) for own in ranks.gather([(ranks.rank, errors)]))
            # The measured KL is that before this step; with the gradient in hand it is not applied any more.
            stopped = not warm and bool(config.kl_stop) and sums["kl_step"] / tokens > config.kl_stop
            if stopped:
                break
            for name, optimiser in optimisers.items():
                if name == "policy" and warm:
                    continue
                parameters = [p for group in optimiser.param_groups for p in group["params"]]
                ranks.add_gradients(parameters)
                torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                optimiser.step()
            for name, total in sums.items():
                if not warm or first or name == "value_loss":
                    seen[name].append(total / tokens)
        if stopped:
            break
    result: Line = {name: sum(several) / max(len(several), 1) for name, several in seen.items()}
    result["kl_k3"] = 0.0
    for s, ref in zip(samples, reference, strict=True):
        s.kl = (s.logprobs - ref).sum().item()
        result["kl_k3"] += k3(s.logprobs, ref).sum().item() / len(samples)
    result["kl"] = sum(s.kl for s in samples) / len(samples)
    result["sampling_error"] = ratio_error if sampling_error is None else sampling_error
    result |= {"ratio_error": ratio_error, "stopped_early": float(stopped), "explained_variance": explained}
    return result


def evaluate(policy: TransformersPolicy, env: Any, config: PPOConfig, ranks: Ranks = ALONE) -> float:
    """Success in [0, 1] over the evaluation's episodes, on seeds that training does not use."""
    if not config.eval_episodes:
        return float("nan")
    seeds = ranks.mine(range(config.eval_seed, config.eval_seed + config.eval_episodes))
    played = dict(episodes(policy, env, seeds, batch=config.batch, max_steps=config.max_steps))
    outcomes = ranks.gather([(seeds[i], episode.outcome or 0.0) for i, episode in played.items()])
    return sum(outcomes) / len(outcomes)


def _values(
    samples: Sequence[Sample], config: PPOConfig, roles: Roles, ranks: Ranks
) -> tuple[list[Tensor], list[float]]:
    """The critic's values before each policy token, and after the last token of all (0 where the episode ended)."""
    longer = [replace_places(s) for s in samples]
    found = _no_grad(longer, config, roles, roles.values, ranks)
    values = [v[: len(s.places)] for v, s in zip(found, samples, strict=True)]
    return values, [v[-1].item() if s.bootstraps else 0.0 for v, s in zip(found, samples, strict=True)]


def replace_places(s: Sample) -> Sample:
    """A cut episode with one more place: the one after its last token, whose state the critic is asked about."""
    return Sample([*s.ids, 0], [*s.places, len(s.ids)], s.logprobs, s.rewards) if s.bootstraps else s


def _no_grad(
    samples: Sequence[Sample], config: PPOConfig, roles: Roles, call: Callable[[Batch], Tensor], ranks: Ranks
) -> list[Tensor]:
    """`call` on all samples, by micro-batches, without gradients; one (n,) tensor on the CPU a sample."""
    pairs: list[tuple[int, Tensor]] = []
    with torch.no_grad():
        for rows in ranks.mine(_micro([len(s.ids) for s in samples], config.micro_tokens)):
            batch = Batch.of([samples[i].ids for i in rows], [samples[i].places for i in rows], roles.device)
            parts = call(batch).float().cpu().split([len(samples[i].places) for i in rows])
            pairs += zip(rows, parts, strict=True)
    return ranks.gather(pairs)


def _micro(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in groups of like length, each padded to at most `budget` tokens (one sequence may pass it alone)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def _save(out: Path, roles: Roles, optimisers: dict[str, torch.optim.Optimizer], rest: dict[str, Any]) -> None:
    """Write the checkpoint whole or not at all; a kill leaves the last one."""
    weights = {role: {k: v.detach() for k, v in roles.parameters(role).items()} for role in optimisers}
    state = {"weights": weights, "optimisers": {role: o.state_dict() for role, o in optimisers.items()}, **rest}
    partial = out / ".checkpoint.pt.partial"
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, out / "checkpoint.pt")


def _resume(
    out: Path,
    roles: Roles,
    optimisers: dict[str, torch.optim.Optimizer],
    kl_coefficient: float,
    options: dict[str, Any],
) -> tuple[int, float]:
    """(updates done, KL coefficient), with weights and optimisers set to the checkpoint's where there is one."""
    path = out / "checkpoint.pt"
    if not path.exists():
        return 0, kl_coefficient
    state = torch.load(path, map_location=roles.device, weights_only=True)
    defaults = {field.name: field.default for field in fields(PPOConfig)}
    then = {**{k: defaults.get(k, v) for k, v in options.items()}, **state["options"]}
    if other := [k for k, v in options.items() if then[k] != v]:
        raise UsageError(f"{out} holds a run with another {', '.join(other)}; write elsewhere, or use the same options")
    with torch.no_grad():
        for role, optimiser in optimisers.items():
            for name, parameter in roles.parameters(role).items():
                parameter.copy_(state["weights"][role][name])
            optimiser.load_state_dict(state["optimisers"][role])
    return state["update"], state["kl_coefficient"]
