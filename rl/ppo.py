"""Multi-turn PPO with a reward for every step: the whole algorithm, top to bottom.

Token in, token out: the ids that were sampled are trained on. The time axis holds the policy's tokens only, so what an
environment says, and how long it says it, cannot enter advantages, KL, entropy or the loss. A step's reward sits on the
step's last policy token. (Schulman et al. 2017, arXiv 1707.06347; GAE, arXiv 1506.02438.)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from prm.config import option, progress, write_text
from prm.env import Env, EnvFactory, Episode
from prm.errors import UsageError
from prm.records import Trajectory, append_jsonl, dump_json
from prm.render import prompt
from rl.policies import TransformersPolicy
from rl.rewards import RewardConfig, StepRewards, step_rewards
from rl.roles import Batch, Roles
from rl.rollout import episodes, rollout


@dataclass(frozen=True)
class PPOConfig(RewardConfig):
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
    gamma: float = option(1.0, "discount, per policy token")
    gae_lambda: float = option(0.95, "GAE's lambda, per policy token")
    clip: float = option(0.2, "clip range of the ratio")
    value_clip: float = option(0.2, "clip range of the value; 0 is none")
    kl: float = option(0.01, "coefficient of the KL to the starting policy")
    kl_form: str = option("k3", "k3: in the loss; k1: in the reward", choices=("k3", "k1"))
    kl_adaptive: bool = option(True, "halve the coefficient below an episode KL of 0.5, double it above 5")
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
    audit_every: int = option(10, "write trajectories to audit.jsonl after every so many updates")
    audit: int = option(20, "how many of them, successes and failures")


@dataclass(frozen=True)
class RunResult:
    """What a run left: its folder, one dict of metrics an update, and the last evaluation's success in [0, 1]."""

    out: Path
    metrics: list[dict[str, float]]
    success: float


@dataclass
class Sample:
    """One episode as PPO sees it; n policy tokens.

    Args:
        ids: all token ids of the episode, as read and sampled.
        places: indices of the policy's tokens in `ids`, n of them.
        logprobs: (n,) log-probabilities when sampled.
        rewards: (n,) rewards; a step's reward on its last policy token.
        bootstraps: the episode was cut, so its last state has a value (that of the state after all of `ids`).
    """

    ids: list[int]
    places: list[int]
    logprobs: Tensor
    rewards: Tensor
    bootstraps: bool = False


def train(
    policy: TransformersPolicy,
    env: str | Env | EnvFactory,
    scorer: Any,
    config: PPOConfig,
    *,
    eval_env: str | Env | EnvFactory | None = None,
    critic: Any = None,
) -> RunResult:
    """Train a policy by PPO on step rewards.

    Args:
        policy: the policy; its model is trained in place.
        env: where episodes are played, as for `rl.rollout.rollout`.
        scorer: a `prm.PRM`, anything with `score(trajectories) -> list[list[float]]`, or that function; None for none.
        config: see its fields. A run whose folder holds a checkpoint goes on from it.
        eval_env: where success is measured (default: `env`), on seeds that training does not use.
        critic: a model the critic's backbone starts from.

    Raises:
        UsageError: process weight without a scorer; a folder that holds another run.
    """
    score = _scorer(scorer, config)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    roles = Roles(
        policy.model,
        lora_rank=config.lora_rank,
        critic=critic,
        temperature=policy.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    policy.model = policy.generator.model = roles.model
    optimisers: dict[str, torch.optim.Optimizer] = {
        "policy": torch.optim.AdamW(roles.parameters("policy").values(), lr=config.lr, weight_decay=0.0),
        "critic": torch.optim.AdamW(roles.parameters("critic").values(), lr=config.critic_lr, weight_decay=0.0),
    }
    kl_coefficient = config.kl
    first, kl_coefficient = _resume(out, roles, optimisers, kl_coefficient, config)
    metrics: list[dict[str, float]] = _read_metrics(out, first)
    board = _board(out)
    bar = progress(config.updates, "ppo", "update", initial=first)
    for update in range(first, config.updates):
        started = time.monotonic()
        policy.generator.forget()
        seeds = range(config.seed + update * config.episodes, config.seed + (update + 1) * config.episodes)
        played = dict(episodes(policy, env, seeds, batch=config.batch, max_steps=config.max_steps, salt=update))
        batch = [played[i] for i in sorted(played)]
        rolled = time.monotonic()
        trajectories = [episode.trajectory(update=update) for episode in batch]
        scores = score(trajectories) if score else None
        scored = time.monotonic()
        rewards = [
            step_rewards(
                [a.text for a in episode.history.actions],
                config,
                scores=scores[i] if scores else None,
                outcome=episode.outcome,
                environment=episode.rewards,
                infos=episode.infos,
                out_of_steps=episode.truncated,
            )
            for i, episode in enumerate(batch)
        ]
        samples = [sample(policy, e, r.total) for e, r in zip(batch, rewards, strict=True)]
        learned = learn(samples, roles, optimisers, config, kl_coefficient, update)
        line: dict[str, float] = {"update": update, "episodes": (update + 1) * config.episodes}
        line |= _describe(batch, rewards, scores, samples) | learned
        line |= {"kl_coefficient": kl_coefficient, "seconds_rollout": rolled - started}
        line |= {"seconds_score": scored - rolled, "seconds_update": time.monotonic() - scored}
        if config.kl_adaptive:
            kl_coefficient = adapt_kl(kl_coefficient, learned["kl"])
        if config.eval_every and (update + 1) % config.eval_every == 0:
            line["eval_success"] = evaluate(policy, eval_env or env, config)
        metrics.append(line)
        with open(out / "metrics.jsonl", "ab") as file:
            file.write(dump_json(line) + b"\n")
        for name, value in line.items():
            board.add_scalar(name, value, update)
        if config.audit_every and (update + 1) % config.audit_every == 0:
            append_jsonl(out / "audit.jsonl", _audit(trajectories, scores, config.audit))
        if (update + 1) % config.save_every == 0 or update + 1 == config.updates:
            _save(out, roles, optimisers, kl_coefficient, update + 1, config)
        bar.set_postfix(success=f"{line['success']:.2f}", reward=f"{line['reward']:.2f}", kl=f"{line['kl']:.2f}")
        bar.update()
    bar.close()
    board.close()
    policy.generator.forget()
    success = evaluate(policy, eval_env or env, config)
    write_text(out / "result.json", json.dumps({"success": success, "updates": len(metrics)}) + "\n")
    roles.save_policy(out / "policy", policy.tokenizer)
    return RunResult(out, metrics, success)


# --- the algorithm ----------------------------------------------------------------------------------------------------


def sample(policy: TransformersPolicy, episode: Episode, rewards: Sequence[float]) -> Sample:
    """An episode as ids and places. Its ids are what the policy read and sampled, nothing is encoded again."""
    history = episode.history
    layout = policy.layout(history.tools)
    ids: list[int] = []
    places: list[int] = []
    logprobs: list[float] = []
    placed: list[float] = []
    for t, action in enumerate(history.actions):
        if action.token_ids is None or action.logprobs is None:
            raise UsageError("PPO trains on sampled ids: this policy's actions have none")
        before = replace(history, actions=history.actions[:t], observations=history.observations[:t])
        ids = prompt(before, policy.tokenizer, layout)
        places += range(len(ids), len(ids) + len(action.token_ids))
        logprobs += action.logprobs
        placed += [0.0] * len(action.token_ids)
        if placed:  # where nothing was sampled, what the step earned belongs to the tokens that led there
            placed[-1] += rewards[t]
        ids = ids + list(action.token_ids)
    bootstraps = episode.truncated and episode.outcome is None
    if bootstraps:
        ids = prompt(history, policy.tokenizer, layout)
    return Sample(ids, places, torch.tensor(logprobs), torch.tensor(placed), bootstraps)


def gae(rewards: Tensor, values: Tensor, last_value: float, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (n,) over an episode's policy tokens; `last_value` is 0 unless it was cut."""
    advantages = torch.zeros_like(rewards)
    running, after = torch.zeros(()), torch.tensor(last_value)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * after - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        after = values[t]
    return advantages


def whiten(values: Tensor) -> Tensor:
    """Zero mean and unit deviation (n,); equal values give zeros, a single one is left as it is. Always finite."""
    if len(values) < 2:
        return values
    centred = values - values.mean()
    deviation = centred.pow(2).mean().sqrt()
    return centred / deviation if deviation > 1e-6 else torch.zeros_like(values)


def adapt_kl(coefficient: float, kl: float) -> float:
    """The adaptive rule on the mean KL of an episode, in nats."""
    return coefficient / 2 if kl < 0.5 else coefficient * 2 if kl > 5 else coefficient


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


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token KL to the reference, the never negative estimator (Schulman 2020): e^d - d - 1, d = ref - logp."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


def learn(
    samples: Sequence[Sample],
    roles: Roles,
    optimisers: dict[str, torch.optim.Optimizer],
    config: PPOConfig,
    kl_coefficient: float,
    update: int,
) -> dict[str, float]:
    """One PPO update on the episodes of one iteration. Returns what it measured."""
    samples = [s for s in samples if s.places]
    if not samples:
        return dict.fromkeys(("kl", "kl_k3", "entropy", "ratio_error", "clip_share", "policy_loss", "value_loss"), 0.0)
    reference = _no_grad(samples, config, roles, lambda b: roles.logprobs(b, "reference")[0])
    values, last = _values(samples, config, roles)
    advantages, returns = [], []
    for s, own, ref, v in zip(samples, values, reference, last, strict=True):
        rewards = s.rewards
        if config.kl_form == "k1":
            rewards = rewards - kl_coefficient * (s.logprobs - ref)
        advantages.append(gae(rewards, own, v if s.bootstraps else 0.0, config.gamma, config.gae_lambda))
        returns.append(advantages[-1] + own)
    explained = _explained(torch.cat(values), torch.cat(returns))
    white = list(whiten(torch.cat(advantages)).split([len(a) for a in advantages]))
    warm = update < config.critic_warmup
    seen: dict[str, list[float]] = {"entropy": [], "clip_share": [], "policy_loss": [], "value_loss": []}
    ratio_error: float | None = None
    random = Random(f"{config.seed}:{update}")
    order = list(range(len(samples)))
    for epoch in range(config.critic_epochs if warm else config.epochs):
        random.shuffle(order)
        for start in range(0, len(order), config.minibatch):
            chosen = order[start : start + config.minibatch]
            tokens = sum(len(samples[i].places) for i in chosen)
            for optimiser in optimisers.values():
                optimiser.zero_grad(set_to_none=True)
            sums = dict.fromkeys(seen, 0.0)
            for micro in _micro([len(samples[i].ids) for i in chosen], config.micro_tokens):
                rows = [chosen[j] for j in micro]
                batch = Batch.of([samples[i].ids for i in rows], [samples[i].places for i in rows], roles.device)
                old = torch.cat([samples[i].logprobs for i in rows]).to(roles.device)
                if not warm or ratio_error is None:
                    with torch.set_grad_enabled(not warm):
                        logprobs, entropy = roles.logprobs(batch)
                    if ratio_error is None or (epoch == 0 and start == 0):
                        error = ((logprobs - old).exp() - 1).abs().max().item()
                        ratio_error = max(ratio_error or 0.0, error)
                    sums["entropy"] += entropy.sum().item()
                if not warm:
                    advantage = torch.cat([white[i] for i in rows]).to(roles.device)
                    loss, clips = policy_loss(logprobs, old, advantage, config.clip)
                    if config.kl_form == "k3" and kl_coefficient:
                        ref = torch.cat([reference[i] for i in rows]).to(roles.device)
                        loss = loss + kl_coefficient * k3(logprobs, ref)
                    (loss - config.entropy * entropy).sum().div(tokens).backward()
                    sums["policy_loss"] += loss.sum().item()
                    sums["clip_share"] += clips.sum().item()
                value = roles.values(batch)
                before = torch.cat([values[i] for i in rows]).to(roles.device)
                target = torch.cat([returns[i] for i in rows]).to(roles.device)
                error_v = value_loss(value, before, target, 0.0 if warm else config.value_clip)
                error_v.sum().div(tokens).backward()
                sums["value_loss"] += error_v.sum().item()
            for name, optimiser in optimisers.items():
                if name == "policy" and warm:
                    continue
                parameters = [p for group in optimiser.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                optimiser.step()
            for name, total in sums.items():
                seen[name].append(total / tokens)
    pairs = list(zip(samples, reference, strict=True))
    result = {name: sum(several) / len(several) for name, several in seen.items()}
    result["kl"] = sum((s.logprobs - ref).sum().item() for s, ref in pairs) / len(pairs)
    result["kl_k3"] = sum(k3(s.logprobs, ref).sum().item() for s, ref in pairs) / len(pairs)
    return result | {"ratio_error": ratio_error or 0.0, "explained_variance": explained}


def evaluate(policy: TransformersPolicy, env: str | Env | EnvFactory, config: PPOConfig) -> float:
    """Success in [0, 1] over the evaluation's episodes, on seeds that training does not use."""
    if not config.eval_episodes:
        return float("nan")
    seeds = range(config.eval_seed, config.eval_seed + config.eval_episodes)
    played = rollout(policy, env, seeds, batch=config.batch, max_steps=config.max_steps)
    return sum(t.outcome or 0.0 for t in played) / len(played)


def _values(samples: Sequence[Sample], config: PPOConfig, roles: Roles) -> tuple[list[Tensor], list[float]]:
    """The critic's values before each policy token, and after the last token of all (0 where the episode ended)."""
    longer = [replace_places(s) for s in samples]
    found = _no_grad(longer, config, roles, roles.values)
    values = [v[: len(s.places)] for v, s in zip(found, samples, strict=True)]
    return values, [v[-1].item() if s.bootstraps else 0.0 for v, s in zip(found, samples, strict=True)]


def replace_places(s: Sample) -> Sample:
    """A cut episode with one more place: the one after its last token, whose state the critic is asked about."""
    return Sample([*s.ids, 0], [*s.places, len(s.ids)], s.logprobs, s.rewards) if s.bootstraps else s


def _no_grad(
    samples: Sequence[Sample], config: PPOConfig, roles: Roles, call: Callable[[Batch], Tensor]
) -> list[Tensor]:
    """`call` on all samples, by micro-batches, without gradients; one (n,) tensor on the CPU a sample."""
    out: list[Tensor | None] = [None] * len(samples)
    with torch.no_grad():
        for rows in _micro([len(s.ids) for s in samples], config.micro_tokens):
            batch = Batch.of([samples[i].ids for i in rows], [samples[i].places for i in rows], roles.device)
            parts = call(batch).float().cpu().split([len(samples[i].places) for i in rows])
            for i, part in zip(rows, parts, strict=True):
                out[i] = part
    return [part for part in out if part is not None]


def _micro(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in groups of like length, each padded to at most `budget` tokens (one sequence may pass it alone)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _explained(values: Tensor, returns: Tensor) -> float:
    variance = returns.var(unbiased=False).item()
    return 1 - (returns - values).var(unbiased=False).item() / variance if variance > 1e-12 else 0.0


# --- what is written --------------------------------------------------------------------------------------------------


def _describe(
    batch: Sequence[Episode],
    rewards: Sequence[StepRewards],
    scores: Sequence[Sequence[float]] | None,
    samples: Sequence[Sample],
) -> dict[str, float]:
    """The means an update logs: return by part, success, length, tool-call success, scores of both outcomes."""
    n = len(batch)
    steps = sum(len(e.rewards) for e in batch)
    line = {
        "success": sum(e.outcome or 0.0 for e in batch) / n,
        "reward": sum(sum(r.total) for r in rewards) / n,
        "reward_process": sum(sum(r.process) for r in rewards) / n,
        "reward_outcome": sum(sum(r.outcome) for r in rewards) / n,
        "reward_environment": sum(sum(r.environment) for r in rewards) / n,
        "steps": steps / n,
        "tokens_policy": sum(len(s.places) for s in samples) / n,
        "tokens": sum(len(s.ids) for s in samples) / n,
        "action_success": 1 - sum(bool(i.get("error")) for e in batch for i in e.infos) / max(steps, 1),
        "cut": sum(e.cut for e in batch) / n,
    }
    for name in rewards[0].penalties:
        line[f"penalty_{name}"] = sum(sum(r.penalties[name]) for r in rewards) / n
    if scores:
        for name, good in (("score_success", True), ("score_failure", False)):
            own = [sum(s) / len(s) for e, s in zip(batch, scores, strict=True) if s and bool(e.outcome) is good]
            if own:
                line[name] = sum(own) / len(own)
    return line


def _audit(
    trajectories: Sequence[Trajectory], scores: Sequence[Sequence[float]] | None, count: int
) -> list[Trajectory]:
    """Half successes, half failures (as far as there are), with their step scores in meta."""
    marked = []
    for i, t in enumerate(trajectories):
        more = {"scores": list(scores[i])} if scores else {}
        marked.append(Trajectory(t.task, t.steps, t.outcome, {**t.meta, **more}))
    good = [t for t in marked if t.outcome]
    bad = [t for t in marked if not t.outcome]
    half = count // 2
    take = min(len(good), max(half, count - len(bad)))
    return good[:take] + bad[: count - take]


def _scorer(scorer: Any, config: PPOConfig) -> Callable[[list[Trajectory]], list[list[float]]] | None:
    if scorer is None:
        if config.process_weight:
            raise UsageError("a process weight needs a PRM; give one, or --process-weight 0")
        return None
    found: Callable[[list[Trajectory]], list[list[float]]] = getattr(scorer, "score", scorer)
    return found if config.process_weight else None


def _save(
    out: Path,
    roles: Roles,
    optimisers: dict[str, torch.optim.Optimizer],
    kl_coefficient: float,
    update: int,
    config: PPOConfig,
) -> None:
    """Write the checkpoint whole or not at all; a kill leaves the last one."""
    state = {
        "update": update,
        "kl_coefficient": kl_coefficient,
        "weights": {role: {k: v.detach() for k, v in roles.parameters(role).items()} for role in optimisers},
        "optimisers": {role: optimiser.state_dict() for role, optimiser in optimisers.items()},
        "options": _options(config),
    }
    partial = out / ".checkpoint.pt.partial"
    torch.save(state, partial)
    os.replace(partial, out / "checkpoint.pt")


def _resume(
    out: Path, roles: Roles, optimisers: dict[str, torch.optim.Optimizer], kl_coefficient: float, config: PPOConfig
) -> tuple[int, float]:
    """(updates done, KL coefficient), with weights and optimisers set to the checkpoint's where there is one."""
    path = out / "checkpoint.pt"
    if not path.exists():
        return 0, kl_coefficient
    state = torch.load(path, map_location=roles.device, weights_only=True)
    if state["options"] != _options(config):
        other = [k for k, v in _options(config).items() if state["options"].get(k) != v]
        raise UsageError(f"{out} holds a run with another {', '.join(other)}; write elsewhere, or use the same options")
    for role, optimiser in optimisers.items():
        with torch.no_grad():
            for name, parameter in roles.parameters(role).items():
                parameter.copy_(state["weights"][role][name])
        optimiser.load_state_dict(state["optimisers"][role])
    return state["update"], state["kl_coefficient"]


def _options(config: PPOConfig) -> dict[str, Any]:
    """The options that decide the numbers; how long to go on and what to write do not."""
    free = {"out", "updates", "eval_every", "eval_episodes", "eval_seed", "save_every"}
    free |= {"audit_every", "audit", "micro_tokens"}
    return {k: v for k, v in vars(config).items() if k not in free}


def _read_metrics(out: Path, updates: int) -> list[dict[str, float]]:
    """The metrics of the updates that the checkpoint holds; later lines, which will be made again, are removed."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the empty end, or a line torn by a kill
        if line["update"] < updates:
            lines.append(line)
    partial = out / ".metrics.jsonl.partial"
    partial.write_bytes(b"".join(dump_json(line) + b"\n" for line in lines))
    os.replace(partial, path)
    return lines


def _board(out: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"))
