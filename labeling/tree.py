"""Tree search for step labels: OmegaPRM (Luo et al. 2024, arXiv 2406.06592), for one task.

A node is a state, by the steps that lead to it. From a node K continuations are drawn; MC(s) is their share of
successes. Wrong rollouts of nodes with 0 < MC < 1 make the pool. Again and again the rollout with the highest Q + U is
taken out, once for all, and its first error is found by binary search, which makes nodes along it:

    Q(s, r) = alpha^(1 - MC(s)) beta^(len(r) / L)        U(s) = c_puct sqrt(sum_i N(s_i)) / (1 + N(s))    (their 3.3)

A continuation counts at every state that it passes, so each of those becomes a label. To keep labels unbiased, what is
chosen for being wrong must not count for being wrong: only the first quarter of a node's continuations may enter the
pool, those count at their node alone, and states on a searched rollout count only what was drawn at them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from labeling.continuations import RESTORE, Continuation, Request, Strategy
from labeling.draws import MonteCarloConfig, draws_label, is_over, onward, over_label
from prm.records import Step, StepLabel, Trajectory

Path = tuple[Step, ...]


@dataclass
class Node:
    """A state. `draws` began here, `passing` began before and came by; `visits` is N(s) of the paper."""

    draws: list[Continuation] = field(default_factory=list)
    passing: list[Continuation] = field(default_factory=list)
    visits: int = 0
    searched: bool = False

    @property
    def value(self) -> float | None:
        """MC(s); None without a valid continuation."""
        outcomes = [d.outcome for d in self.draws if d.outcome is not None]
        return sum(outcomes) / len(outcomes) if outcomes else None


@dataclass(frozen=True)
class Rollout:
    """A wrong way to the end, from the node at `start` on."""

    start: Path
    steps: Path
    length: float  # in tokens


@dataclass
class Tree:
    """What is known of one task: nodes by their path, the pool, and the continuations whose paths are kept."""

    start: Trajectory
    nodes: dict[Path, Node] = field(default_factory=dict)
    pool: list[Rollout] = field(default_factory=list)
    drawn: list[tuple[Path, Continuation]] = field(default_factory=list)
    seen: set[tuple[Path, Path]] = field(default_factory=set)  # (node, rollout) that are or were in the pool

    def trajectory(self, path: Path, outcome: float | None = None) -> Trajectory:
        """A path as a record that starts where the task's trajectories do."""
        kept = {key: self.start.meta[key] for key in ("seed", "options") if key in self.start.meta}
        return Trajectory(self.start.task, path, outcome, kept)

    def grow(self, path: Path, config: MonteCarloConfig) -> Generator[list[Request], list[Continuation | None], Node]:
        """The node at a path, with its K continuations, which are drawn once."""
        node = self.nodes.setdefault(path, Node())
        if node.draws:
            return node
        prefix = self.trajectory(path)
        results = yield [Request(prefix, len(path), draw) for draw in range(config.k)]
        node.draws = [draw for draw in results if draw is not None]
        value = node.value
        for i, draw in enumerate(node.draws):
            if i < max(1, config.k // 4):
                if draw.outcome == 0 and value and draw.steps and (path, draw.steps) not in self.seen:
                    self.seen.add((path, draw.steps))
                    self.pool.append(Rollout(path, draw.steps, length(draw.steps, draw.tokens)))
            elif draw.outcome is not None:
                self.drawn.append((path, draw))
                for passed in range(1, len(draw.steps)):
                    on_way = self.nodes.setdefault(path + draw.steps[:passed], Node())
                    on_way.passing.append(onward(draw, passed))
        return node

    def select(self, config: MonteCarloConfig) -> Rollout:
        """Take the rollout with the highest Q + U out of the pool."""
        total = math.sqrt(sum(node.visits for node in self.nodes.values()))

        def rank(rollout: Rollout) -> float:
            node = self.nodes[rollout.start]
            q = config.alpha ** (1 - (node.value or 0.0)) * config.beta ** (rollout.length / config.length)
            return q + config.c_puct * total / (1 + node.visits)

        best = max(self.pool, key=rank)
        self.pool.remove(best)
        self.nodes[best.start].visits += 1
        return best

    def search(
        self, rollout: Rollout, config: MonteCarloConfig
    ) -> Generator[list[Request], list[Continuation | None], bool]:
        """Find a rollout's first error by binary search; False where the budget did not reach."""
        whole = rollout.start + rollout.steps
        for n in range(1, len(whole) + 1):
            self.nodes.setdefault(whole[:n], Node()).searched = True
        alive, dead = len(rollout.start), len(whole)
        while dead - alive > 1:
            middle = (alive + dead) // 2
            node = yield from self.grow(whole[:middle], config)
            if not node.draws:
                return False
            if node.value:
                alive = middle
            else:
                dead = middle
        return True


def grown(trajectories: Sequence[Trajectory], config: MonteCarloConfig, source: str) -> Strategy:
    """Grow one tree for trajectories of one task; its product is (labels, new trajectories that some of them name)."""
    tree = Tree(trajectories[0])
    restored = yield [Request(one, len(one.steps), RESTORE) for one in trajectories]
    root = yield from tree.grow((), config)
    going = bool(root.draws)
    for one, end in zip(trajectories, restored, strict=True):
        if going and end is not None and end.outcome == 0:
            going = yield from tree.search(Rollout((), one.steps, length(one.steps, 0)), config)
            root.visits += 1
    for _ in range(config.searches):
        if not going or not tree.pool:
            break
        going = yield from tree.search(tree.select(config), config)
    labels = []
    new: list[Trajectory] = []
    labelled: set[Path] = set()
    for one, end in zip(trajectories, restored, strict=True):
        for t in range(len(one.steps)):
            last = t == len(one.steps) - 1 and is_over(end)
            path = one.steps[: t + 1]
            label = over_label(one, t, end, source, config) if last else _label(tree, one, path, source, config)
            labelled.add(path)
            if label is not None:
                labels.append(label)
    for start, draw in tree.drawn:
        whole = start + draw.steps
        fresh = [n for n in range(1, len(whole) + 1) if whole[:n] not in labelled]
        if not fresh:
            continue
        one = tree.trajectory(whole, draw.outcome)
        new.append(one)
        for n in fresh:
            labelled.add(whole[:n])
            if n == len(whole):
                label = over_label(one, n - 1, draw, source, config)
            else:
                label = _label(tree, one, whole[:n], source, config)
            if label is not None:
                labels.append(label)
    return labels, new


def _label(tree: Tree, one: Trajectory, path: Path, source: str, config: MonteCarloConfig) -> StepLabel | None:
    """The label of a state from what may count there."""
    node = tree.nodes.get(path)
    if node is None:
        return None
    draws = node.draws if node.searched else node.draws + node.passing
    return draws_label(one, len(path) - 1, draws, source, config, requested=len(draws)) if draws else None


def length(steps: Sequence[Step], tokens: int) -> float:
    """The length of a rollout in tokens: as the policy counted them, else a quarter of its characters."""
    return tokens or sum(len(s.action) for s in steps) / 4


def same_start(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories by the episode they begin: task, seed and options."""
    groups: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        groups.setdefault(Request(one, 0, 0).key, []).append(one)
    return list(groups.values())
