"""A finite chain with a stochastic policy, in which the chance to succeed from every state is computed exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from prm.env import Action, Episode
from prm.records import Trajectory

LENGTH = 8


class Chain:
    """Damage goes up by "slip", down by "fix", stays by "ok"; 2 is beyond repair. Success: no damage at the end."""

    length = LENGTH

    def reset(self, *, seed=None, options=None):
        self.t, self.damage = 0, 0
        return f"keep it whole ({seed})", {}

    def step(self, action):
        self.t += 1
        move = {"slip": 1, "fix": -1}.get(action.split()[0], 0)
        if self.damage < 2:
            self.damage = max(0, self.damage + move)
        over = self.t >= self.length
        return f"{self.damage}", 0.0, over, False, {"success": self.damage == 0} if over else {}


class LongChain(Chain):
    length = 20


@dataclass(frozen=True)
class Walker:
    """Slips with one chance when whole, slips or fixes with others when damaged; `words` ways to say the same thing."""

    slip: float = 0.12
    again: float = 0.25
    fix: float = 0.3
    words: int = 1
    name: str = "walker"
    temperature: float = 1.0

    def chances(self, damage):
        """Action -> probability."""
        if damage == 0:
            return {"slip": self.slip, "ok": 1 - self.slip}
        if damage == 1:
            return {"slip": self.again, "fix": self.fix, "ok": 1 - self.again - self.fix}
        return {"ok": 1.0}

    def act(self, histories):
        return [self._act(history) for history in histories]

    def _act(self, history):
        random = Random(f"{history.seed}:{len(history.actions)}")
        chances = self.chances(int(history.observations[-1]) if history.observations else 0)
        (move,) = random.choices(list(chances), list(chances.values()))
        return Action(f"{move} {random.randrange(self.words)}", token_ids=(1, 2, 3))


def truth(walker: Walker, length: int = LENGTH):
    """value(t, damage): the chance to succeed with `t` steps done."""

    @cache
    def value(t, damage):
        if t == length:
            return float(damage == 0)
        moves = {"slip": 1, "fix": -1, "ok": 0}
        return sum(
            p * value(t + 1, damage if damage == 2 else max(0, damage + moves[move]))
            for move, p in walker.chances(damage).items()
        )

    return value


def values(trajectory: Trajectory, walker: Walker, length: int = LENGTH) -> list[float]:
    """The chance to succeed after each step."""
    value = truth(walker, length)
    return [value(t + 1, int(step.observation)) for t, step in enumerate(trajectory.steps)]


def walks(walker: Walker, n: int, env=Chain, seed: int = 0) -> list[Trajectory]:
    """Episodes of the walker, one for each of the seeds seed, seed + 1, ..."""
    episodes = [Episode(env(), s) for s in range(seed, seed + n)]
    while running := [e for e in episodes if not e.done]:
        for episode, action in zip(running, walker.act([e.history for e in running]), strict=True):
            episode.step(action)
    return [episode.trajectory() for episode in episodes]
