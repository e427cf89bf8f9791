"""Advantages over a policy's tokens: from a critic (GAE), or from the other episodes of the same task (RLOO, GRPO)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prm.errors import DataError


def gae(rewards: Tensor, values: Tensor, last_value: float, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (n,) over an episode's policy tokens (arXiv 1506.02438, eq. 16).

    `last_value` is that of the state after the last token: 0 unless the episode was cut.
    """
    advantages = torch.zeros_like(rewards)
    running, after = torch.zeros(()), torch.tensor(last_value)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * after - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        after = values[t]
    return advantages


def returns_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token on, (n,)."""
    return gae(rewards, torch.zeros_like(rewards), 0.0, gamma, 1.0)


def group_advantages(rewards: Sequence[Tensor], group: int, gamma: float, *, scale: bool) -> list[Tensor]:
    """Returns-to-go less a baseline of the whole trajectory, (n,) an episode.

    The baseline of an episode is the mean return of the other episodes of its group (leave-one-out, RLOO, arXiv
    2402.14740): it does not depend on the episode's own actions, so the gradient stays unbiased. A baseline for each
    turn by its number would not be: how many turns there are is the policy's own choice.

    Args:
        rewards: of each episode, (n,); `group` of the same task stand side by side.
        group: episodes a task, at least 2.
        gamma: discount, per policy token.
        scale: divide by the standard deviation of the group's returns, and let the baseline hold the episode itself
            (GRPO, arXiv 2402.03300). A group whose returns are all equal teaches nothing: zeros for its first tokens.

    Raises:
        DataError: the episodes are no whole groups of at least two.
    """
    if group < 2 or len(rewards) % group:
        raise DataError(f"{len(rewards)} episodes are no whole groups of {group}; a group has at least 2")
    out = []
    for start in range(0, len(rewards), group):
        togo = [returns_to_go(r, gamma) for r in rewards[start : start + group]]
        totals = torch.stack([r[0] if len(r) else r.new_zeros(()) for r in togo])
        for own, total in zip(togo, totals, strict=True):
            if scale:
                deviation = totals.var(unbiased=False).sqrt()
                out.append((own - totals.mean()) / deviation if deviation > 1e-6 else torch.zeros_like(own))
            else:
                out.append(own - (totals.sum() - total) / (group - 1))
    return out


def step_credit(process: Sequence[Tensor], turns: Sequence[Tensor]) -> list[Tensor]:
    """What each step itself changed, less the mean over the episodes' steps of the same number: (n,) an episode.

    A step is credited with its own progress alone, in place of summing progress into the returns of the steps before it
    (Setlur et al. 2024, arXiv 2410.08146, eq. 3): there it telescopes, and all that is left of it with lambda = 1 is a
    baseline and the last score. The number of a step is known before the step is taken, so its mean is no bias but for
    the episode's own share in it; a step that is alone with its number gets nothing.

    Args:
        process: of each episode, the process reward of the step that each policy token belongs to, (n,).
        turns: the number of that step, (n,).
    """
    if not process:
        return []
    steps = [dict(zip(own.tolist(), values.tolist(), strict=True)) for own, values in zip(turns, process, strict=True)]
    by_turn: dict[int, list[float]] = {}
    for episode in steps:
        for turn, value in episode.items():
            by_turn.setdefault(turn, []).append(value)
    means = {turn: sum(values) / len(values) for turn, values in by_turn.items()}
    return [
        values - torch.tensor([means[turn] for turn in own.tolist()], dtype=values.dtype)
        for own, values in zip(turns, process, strict=True)
    ]


def whiten(values: Tensor) -> Tensor:
    """Zero mean and unit deviation (n,); equal values give zeros, a single one is left as it is. Always finite."""
    if len(values) < 2:
        return values
    centred = values - values.mean()
    deviation = centred.pow(2).mean().sqrt()
    return centred / deviation if deviation > 1e-6 else torch.zeros_like(values)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    variance = returns.var(unbiased=False).item()
    return 1 - (returns - values).var(unbiased=False).item() / variance if variance > 1e-12 else 0.0
