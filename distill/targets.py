"""What a step is trained towards: what options make of neutral and missing labels, and a teacher's scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from distill.data import Targets
from prm.config import progress
from prm.errors import DataError
from prm.records import Trajectory

NEUTRAL = ("keep", "drop", "good", "bad")
UNLABELLED = ("ignore", "bad-after-error")
TARGETS = ("labels", "teacher", "both")


def settle(
    targets: Targets, trajectories: Sequence[Trajectory], neutral: str, unlabelled: str, counts: Counter[str]
) -> None:
    """Apply the options for neutral and unlabelled steps to `targets`, and count what they did.

    neutral: labels of exactly 0.5 stay, are left out, or count as good (as PRM800K's users have it) or bad.
    unlabelled: steps without a label are ignored; or, where they come after a bad one (below 0.5), they are bad too, by
        the weight of that one: data that was labelled up to the first error, for a PRM that is to stay down after it.
    """
    for trajectory_id, own in list(targets.of.items()):
        for step in [step for step, (score, _) in own.items() if score == 0.5] if neutral != "keep" else []:
            if neutral == "drop":
                counts["neutral labels left out"] += 1
                del own[step]
            else:
                counts[f"neutral labels taken as {neutral}"] += 1
                own[step] = (float(neutral == "good"), own[step][1])
        if not own:
            del targets.of[trajectory_id]
    if unlabelled == "ignore":
        return
    for trajectory in trajectories:
        own = targets.of.get(trajectory.id, {})
        bad = next((k for k in sorted(own) if own[k][0] < 0.5), None)
        if bad is None:
            continue
        for step in range(bad + 1, len(trajectory.steps)):
            if step not in own:
                counts["unlabelled steps after an error taken as bad"] += 1
                own[step] = (0.0, own[bad][1])


def teach(scorer: Any, trajectories: Sequence[Trajectory]) -> Targets:
    """A teacher's scores of every step, with weight 1. `scorer` has `score(trajectories)`.

    Raises:
        DataError: the teacher cannot read a trajectory, or gives no score of a step.
    """
    found = Targets()
    bar = progress(len(trajectories), "teacher", "trajectory")
    for start in range(0, len(trajectories), 64):
        chunk = trajectories[start : start + 64]
        for trajectory, scores in zip(chunk, scorer.score(chunk), strict=True):
            if len(scores) != len(trajectory.steps):
                raise DataError(f"the teacher gave {len(scores)} scores of {len(trajectory.steps)} steps")
            if scores:
                found.of[trajectory.id] = {k: (float(score), 1.0) for k, score in enumerate(scores)}
        bar.update(len(chunk))
    bar.close()
    return found


def mixed(labels: Targets, taught: Targets, target: str, share: float) -> Targets:
    """What is trained towards: "labels", "teacher", or "both".

    Both: a labelled step's target is (1 - share) * label + share * teacher's score, with the label's weight; another
    step's is the teacher's score, by `share` of the mean weight of the labels.
    """
    if target == "labels":
        return labels
    if target == "teacher" or not labels:
        return taught
    weights = [w for own in labels.of.values() for _, w in own.values()]
    mean = sum(weights) / len(weights)
    found = Targets(notes=labels.notes)
    for trajectory_id in dict.fromkeys([*labels.of, *taught.of]):
        own, said = labels.of.get(trajectory_id, {}), taught.of.get(trajectory_id, {})
        row = found.of[trajectory_id] = {}
        for step in sorted(own.keys() | said.keys()):
            if step not in own:
                row[step] = (said[step][0], share * mean)
            else:
                score, weight = own[step]
                row[step] = ((1 - share) * score + share * said[step][0] if step in said else score, weight)
    return found
