"""The same labels for fewer continuations: shared among the states they pass, and fewer where the answer is clear.

Sharing. A continuation that comes by another state to be labelled (it took the same steps as a trajectory of this task)
is a draw like any other from there, so it counts there too, and only what is missing is drawn anew. Trajectories of one
task are labelled together. A policy that often acts alike shares much, one that never writes a text twice nothing.

Stopping. 5/8 K draws are made at each state; the rest of K only where they leave the interval wide
(`labeling.intervals.Plan`). The score is the unbiased estimate for that plan.

Labels stay unbiased because a stage's draws are used in that stage alone: whether a draw of the second stage is made,
at any state, depends on outcomes of the first, never on its own. So each state sees independent draws, in numbers that
depend on its own first outcomes as its plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from labeling.continuations import RESTORE, Continuation, Request, Strategy
from labeling.draws import MonteCarloConfig, chosen_steps, draws_label, is_over, onward, over_label
from labeling.intervals import Plan
from prm.records import Step, Trajectory


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

    @property
    def path(self) -> tuple[Step, ...]:
        return self.trajectory.steps[: self.steps]


def plan_of(config: MonteCarloConfig) -> Plan:
    """Looks after 5/8 K and after K draws."""
    first = -(-5 * config.k // 8)
    return Plan(tuple(sorted({first, config.k})), config.width, config.threshold, 2)


def staged(trajectories: Sequence[Trajectory], config: MonteCarloConfig, source: str) -> Strategy:
    """Labels for trajectories of one task by staged, shared draws."""
    plan = plan_of(config)
    restored = yield [Request(one, len(one.steps), RESTORE) for one in trajectories]
    states: dict[tuple[Step, ...], State] = {}
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
    labels = []
    for one, end in zip(trajectories, restored, strict=True):
        for t in chosen_steps(one, config):
            if (known := states.get(one.steps[: t + 1])) is None:
                labels.append(over_label(one, t, end, source, config))
            else:
                how = replace(plan, looks=tuple(known.looks))
                labels.append(draws_label(one, t, known.drawn, source, config, how, known.asked))
    return [label for label in labels if label is not None]
