"""The same labels for fewer continuations: shared among the states they pass, and fewer where the answer is clear.

Sharing. A continuation that comes by another state to be labelled (it took the same steps as a trajectory of this task)
is a draw like any other from there, so it counts there too, and only what is missing to K is drawn anew. And what was
drawn anew counts further back: of n draws at a state, each that comes by a next state s can be given the estimate V(s),
which rests on K draws, in place of its own outcome (`values`). Trajectories of one task are labelled together. A policy
that often acts alike shares much, one that never writes a text twice nothing.

Stopping, with `width` or `threshold`. 5/8 K draws are made at each state, the rest of K only where they leave the
question open (`labeling.intervals.Plan`); the score is the unbiased estimate for that plan, from the state's own draws.

Labels are unbiased. The draws of a stage are used in that stage alone: whether one of the second stage is made, at any
state, depends on outcomes of the first, never on its own, so each state sees independent draws, in numbers that depend
on its own first outcomes as its plan says. And which states a draw comes by does not depend on its outcome from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from labeling.continuations import RESTORE, Continuation, Request, Strategy
from labeling.draws import MonteCarloConfig, chosen_steps, draws_label, is_over, onward, over_label
from labeling.intervals import Plan
from prm.records import Step, Trajectory

Path = tuple[Step, ...]


@dataclass
class State:
    """A state to be labelled, `steps` steps into `trajectory`; `bank` holds what was drawn in this stage."""

    trajectory: Trajectory
    steps: int
    drawn: list[Continuation] = field(default_factory=list)
    bank: list[Continuation] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    launched: int = 0
    asked: int = 0
    clear: bool = False


def plan_of(config: MonteCarloConfig) -> Plan:
    """One look after K draws; where one may stop, one after 5/8 K before it."""
    if config.width is None and config.threshold is None:
        return Plan((config.k,))
    looks = tuple(sorted({-(-5 * config.k // 8), config.k}))
    return Plan(looks, config.width or 0.0, config.threshold, len(looks))


def staged(trajectories: Sequence[Trajectory], config: MonteCarloConfig, source: str) -> Strategy:
    """Labels for trajectories of one task by shared draws, in the stages of the plan."""
    plan = plan_of(config)
    restored = yield [Request(one, len(one.steps), RESTORE) for one in trajectories]
    states: dict[Path, State] = {}
    for one, end in zip(trajectories, restored, strict=True):
        for t in chosen_steps(one, config):
            if t < len(one.steps) - 1 or not is_over(end):
                states.setdefault(one.steps[: t + 1], State(one, t + 1))
    by_depth = sorted(states.values(), key=lambda state: state.steps)
    for stage, (before, after) in enumerate(pairwise((0, *plan.looks))):
        for state in by_depth:
            state.bank = []
        for _, level in groupby(by_depth, key=lambda state: state.steps):
            unclear = [state for state in level if not state.clear]
            requests = []
            for state in unclear:
                missing = max(0, after - before - len(state.bank))
                requests += [Request(state.trajectory, state.steps, state.launched + i, stage) for i in range(missing)]
                state.launched += missing
            for request, draw in zip(requests, (yield requests), strict=True):
                if draw is not None:
                    path = request.trajectory.steps[: request.steps]
                    for passed in range(len(draw.steps) + 1):
                        if (there := states.get(path + draw.steps[:passed])) is not None:
                            there.bank.append(onward(draw, passed))
            for state in unclear:
                state.drawn += state.bank[: after - before]
                state.asked = after
                outcomes = [d.outcome for d in state.drawn if d.outcome is not None]
                if len(outcomes) > sum(state.looks[-1:]):
                    state.looks.append(len(outcomes))
                    state.clear = plan.stops(sum(outcomes), len(outcomes))
    shared = values(states) if len(plan.looks) == 1 else {}
    labels = []
    for one, end in zip(trajectories, restored, strict=True):
        for t in chosen_steps(one, config):
            path = one.steps[: t + 1]
            if (known := states.get(path)) is None:
                labels.append(over_label(one, t, end, source, config))
            else:
                how = replace(plan, looks=tuple(known.looks))
                labels.append(draws_label(one, t, known.drawn, source, config, how, known.asked, shared.get(path)))
    return [label for label in labels if label is not None]


def values(states: Mapping[Path, State]) -> dict[Path, tuple[float, float]]:
    """For each state with a valid draw: (V, the number of independent draws that this is worth, at least its own).

    V is the mean, over the n draws at the state, of V of the next state that the draw comes by, or of its outcome where
    there is none. With n_b of them on branch b, whose value V_b is worth w_b draws, and p = V (1 - V), its variance is
    sum_b (n_b / n)^2 p / w_b, and sum_b n_b / n (V_b - V)^2 / n for the chance of taking one branch or another.
    """
    found: dict[Path, tuple[float, float]] = {}
    for path in sorted(states, key=len, reverse=True):
        away: list[float] = []
        branches: dict[Path, int] = {}
        for draw in states[path].drawn:
            if draw.outcome is not None:
                on_way = (path + draw.steps[:passed] for passed in range(1, len(draw.steps) + 1))
                if (by := next((p for p in on_way if p in found), None)) is None:
                    away.append(draw.outcome)
                else:
                    branches[by] = branches.get(by, 0) + 1
        parts = [(m, *found[p]) for p, m in branches.items()]
        if away:
            parts.append((len(away), sum(away) / len(away), len(away)))
        if n := sum(m for m, _, _ in parts):
            value = sum(m * v for m, v, _ in parts) / n
            spread = (value * n + 0.5) * (n - value * n + 0.5) / (n + 1) ** 2  # p, and not 0 where all draws agree
            between = sum(m * (v - value) ** 2 for m, v, _ in parts) / n**2
            found[path] = value, max(n, 1 / (sum((m / n) ** 2 / w for m, _, w in parts) + between / spread))
    return found
