"""What to label next: where a model is unsure, where sources differ, and not the same thing twice; within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prm.config import option, progress
from prm.errors import DataError, UsageError
from prm.records import StepLabel, Trajectory, dump_json

UNITS = ("trajectories", "steps")


@dataclass(frozen=True)
class SelectConfig:
    n: int = option(..., "the budget: how many trajectories or steps to label")
    unit: str = option("trajectories", "what is labelled at a time, and counted", choices=UNITS)
    uncertainty: float = option(1.0, "weight of scores near 0.5; no score at all is as unsure as can be")
    disagreement: float = option(1.0, "weight of sources, or of several models' scores, that differ")
    diversity: float = option(0.5, "share of being unlike what is labelled or chosen already, in [0, 1]")
    settled: tuple[str, ...] = option(("human", "gold"), "sources or kinds whose label means that a step needs none")
    model: str | None = option(None, "a PRM whose hidden states say what is alike (default: the words)")
    seed: int = option(0, "decides among equals")


@dataclass(frozen=True)
class Choice:
    """One item of the queue, the most wanted first.

    Attributes:
        trajectory_id, step: what to label; step is None for the whole trajectory.
        priority: in (0, 1], falling; `labeling.annotate` hands out the highest first.
        value: uncertainty and disagreement, weighted, in [0, 1]; of a trajectory the mean over its open steps.
        uncertainty, disagreement: the same means of the two parts.
        distance: from what is labelled or chosen before it, in [0, 1].
    """

    trajectory_id: str
    step: int | None
    priority: float
    value: float
    uncertainty: float
    disagreement: float
    distance: float

    def to_json(self) -> str:
        """A line of a queue file."""
        return dump_json({k: v for k, v in self.__dict__.items() if k != "step" or v is not None}).decode() + "\n"


@dataclass(frozen=True)
class Selection:
    """The queue, how many items there were to choose from, and what was left out."""

    choices: list[Choice]
    candidates: int
    dropped: dict[str, int]


def select(
    trajectories: Sequence[Trajectory],
    labels: Iterable[StepLabel],
    config: SelectConfig,
    *,
    embeddings: Mapping[str, np.ndarray] | None = None,
) -> Selection:
    """Choose what to label next.

    A step's uncertainty is 4 p (1 - p) of the mean p of its scores (1 where there is none); its disagreement is twice
    their standard deviation over sources. Items are taken one by one, each the best of
    (1 - diversity) * value + diversity * distance, the distance (1 - cosine) being to the nearest that is settled or
    taken, as in the greedy k-centre method (Sener and Savarese 2018).

    Args:
        trajectories: the pool. One is open while a step of it has no label of a settled source.
        labels: scores of models, of several sources, and what is settled; a source's later label replaces its earlier.
        config: budget and weights.
        embeddings: a vector for each trajectory id, or an array (steps, width) where steps are chosen; by default
            made of the words, or by `config.model`.

    Raises:
        DataError: there is nothing to choose from.
    """
    _check(config)
    opinions: dict[tuple[str, int], dict[str, float]] = {}
    settled: set[tuple[str, int]] = set()
    known = {t.id: t for t in trajectories}
    dropped: Counter[str] = Counter()
    for label in labels:
        place = (label.trajectory_id, label.step)
        if label.trajectory_id not in known or label.step >= len(known[label.trajectory_id].steps):
            dropped["labels of other trajectories or steps"] += 1
        elif label.source in config.settled or label.source.partition(":")[0] in config.settled:
            settled.add(place)
        else:
            opinions.setdefault(place, {})[label.source] = label.score
    items: list[tuple[str, int | None]] = []
    parts: list[tuple[float, float]] = []
    old: list[tuple[str, int | None]] = []
    for trajectory in known.values():
        steps = range(len(trajectory.steps))
        dropped["trajectories without a step"] += not trajectory.steps
        free = [k for k in steps if (trajectory.id, k) not in settled]
        own = [_parts(list(opinions.get((trajectory.id, k), {}).values())) for k in free]
        if config.unit == "steps":
            items += [(trajectory.id, k) for k in free]
            parts += own
            old += [(trajectory.id, k) for k in steps if k not in free]
        elif free:
            items.append((trajectory.id, None))
            parts.append((sum(u for u, _ in own) / len(own), sum(d for _, d in own) / len(own)))
        elif trajectory.steps:
            old.append((trajectory.id, None))
    if not items:
        raise DataError("every step has a label of a settled source; there is nothing left to label")
    weight = config.uncertainty + config.disagreement
    both = np.array(parts)
    value = both @ np.array([config.uncertainty, config.disagreement]) / weight if weight else np.zeros(len(items))
    order, distance = _greedy(value, _vectors(known, items, old, config, embeddings), len(items), config)
    choices = [
        Choice(*items[i], 1 - rank / len(order), float(value[i]), float(both[i, 0]), float(both[i, 1]), d)
        for rank, (i, d) in enumerate(zip(order, distance, strict=True))
    ]
    return Selection(choices, len(items), {k: n for k, n in dropped.items() if n})


def _check(config: SelectConfig) -> None:
    if config.n < 1:
        raise UsageError(f"n must be at least 1, got {config.n}")
    if config.unit not in UNITS:
        raise UsageError(f"unit must be one of {', '.join(UNITS)}, got {config.unit!r}")
    if not 0 <= config.diversity <= 1:
        raise UsageError(f"diversity must lie in [0, 1], got {config.diversity:g}")
    if min(config.uncertainty, config.disagreement) < 0:
        raise UsageError("weights must be at least 0")
    if not config.uncertainty + config.disagreement and not config.diversity:
        raise UsageError("all weights are 0, so nothing is to choose by")


def _parts(scores: Sequence[float]) -> tuple[float, float]:
    """(uncertainty, disagreement), each in [0, 1], of the scores of a step."""
    if not scores:
        return 1.0, 0.0
    p = sum(scores) / len(scores)
    return 4 * p * (1 - p), 2 * (sum((s - p) ** 2 for s in scores) / len(scores)) ** 0.5


def _greedy(value: np.ndarray, vectors: Any, n: int, config: SelectConfig) -> tuple[list[int], list[float]]:
    """Indices of the items in the order in which they are taken, and each one's distance when it was.

    `vectors` has the items' rows first, then those of what is settled, each of length 1 or 0.
    """
    random = np.random.default_rng(config.seed)
    own = vectors[:n]
    near = np.zeros(n)  # the largest cosine with anything settled or taken
    for start in range(n, vectors.shape[0], 256):
        near = np.maximum(near, _dense(own @ vectors[start : start + 256].T).max(axis=1))
    tie = random.random(n) * 1e-9
    open_ = np.ones(n, bool)
    order: list[int] = []
    distance: list[float] = []
    for _ in range(min(config.n, n)):
        far = 1 - np.clip(near, 0, 1)
        gain = (1 - config.diversity) * value + config.diversity * far + tie
        best = int(np.argmax(np.where(open_, gain, -1.0)))
        order.append(best)
        distance.append(float(far[best]))
        open_[best] = False
        near = np.maximum(near, _dense(own @ vectors[best : best + 1].T)[:, 0])
    return order, distance


def _dense(matrix: Any) -> np.ndarray:
    return matrix.toarray() if hasattr(matrix, "toarray") else np.asarray(matrix)


def _vectors(
    known: Mapping[str, Trajectory],
    items: Sequence[tuple[str, int | None]],
    old: Sequence[tuple[str, int | None]],
    config: SelectConfig,
    embeddings: Mapping[str, np.ndarray] | None,
) -> Any:
    """A row of length 1 (or 0) for each item, then for each settled one; sparse where made of words."""
    every = [*items, *old]
    if config.model and embeddings is None:
        from prm.remote import load_prm

        ids = dict.fromkeys(i for i, _ in every)
        states = embed(load_prm(config.model), [known[i] for i in ids])
        embeddings = states if config.unit == "steps" else {i: own.mean(axis=0) for i, own in states.items()}
    if embeddings is not None:
        try:
            rows = np.stack([embeddings[i] if k is None else embeddings[i][k] for i, k in every]).astype(float)
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(f"embeddings must hold a vector of one width for each item: {error}") from None
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [_text(known[i], k) for i, k in every]
    try:
        return TfidfVectorizer(token_pattern=r"(?u)\w+|[^\w\s]", sublinear_tf=True, max_features=1 << 16).fit_transform(
            texts
        )
    except ValueError:
        return np.zeros((len(every), 1))  # no text has a word


def _text(trajectory: Trajectory, step: int | None) -> str:
    if step is not None:
        return trajectory.steps[step].action
    return "\n".join([trajectory.task, *(s.action for s in trajectory.steps)])


def embed(prm: Any, trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """A PRM's last hidden state where it reads each step, (steps, width), by trajectory id."""
    import torch

    if not hasattr(prm, "backbone"):
        raise UsageError("hidden states need a PRM on this machine, not a server")
    out = {}
    bar = progress(len(trajectories), "embed", "trajectory")
    for trajectory in trajectories:
        states = []
        for part in prm.render(trajectory):
            with torch.no_grad():
                ids = torch.tensor([part.ids], device=prm.device)
                hidden = prm.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
            states.append(hidden[part.ends].float().cpu().numpy())
        if states:
            out[trajectory.id] = np.concatenate(states)
        bar.update()
    bar.close()
    return out
