"""What `prm select` saves: the share of a teacher's labels with which a student agrees with it, on held-out tasks, as
well as one trained on all its labels does (less half a point).

A pool of trajectories, most of them alike; the teacher calls a step bad where a word of forty stands in it, eight
common and thirty-two rare. The student is scikit-learn's logistic regression on the words of a step, which trains in
milliseconds, so that ten seeds can be run. Rounds of a few percent of the pool: train, score the pool, select, "buy"
the labels. Random choice is measured beside it. Means over the seeds.

Usage: python bench/select_saving.py [--quick]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from distill.select import SelectConfig, select
from prm import Step, StepLabel, Trajectory

GOOD = [f"word{i}" for i in range(150)]
COMMON, RARE = [f"bad{i}" for i in range(8)], [f"rare{i}" for i in range(32)]
BAD = {*COMMON, *RARE}
ROUNDS = (0.02, 0.05, 0.10, 0.15, 0.20, 0.25)
SLACK = 0.005


def episodes(n: int, seed: int) -> list[Trajectory]:
    """Common bad words in 15 % of the trajectories, rare ones in 15 %; the rest has none."""
    random, made = Random(seed), []
    for i in range(n):
        draw = random.random()
        words = COMMON if draw < 0.15 else RARE if draw < 0.30 else []
        steps = []
        for _ in range(random.randint(2, 4)):
            own = [random.choice(GOOD) for _ in range(6)]
            if words and random.random() < 0.5:
                own[random.randrange(6)] = random.choice(words)
            steps.append(Step(" ".join(own)))
        made.append(Trajectory(f"question {seed} {i}", tuple(steps)))
    return made


def taught(trajectories: list[Trajectory]) -> list[StepLabel]:
    return [
        StepLabel(t.id, k, float(not set(s.action.split()) & BAD), "judge:teacher")
        for t in trajectories
        for k, s in enumerate(t.steps)
    ]


def trained(trajectories: list[Trajectory]) -> Any:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = [s.action for t in trajectories for s in t.steps]
    good = [x.score > 0.5 for x in taught(trajectories)]
    student = make_pipeline(CountVectorizer(), LogisticRegression(C=10, class_weight="balanced", max_iter=1000))
    return student.fit(texts, good) if len(set(good)) == 2 else None


def scores(student: Any, trajectories: list[Trajectory]) -> list[StepLabel]:
    if student is None:
        return []
    found = iter(student.predict_proba([s.action for t in trajectories for s in t.steps])[:, 1])
    return [StepLabel(t.id, k, float(next(found)), "prm:student") for t in trajectories for k in range(len(t.steps))]


def agreement(student: Any, test: list[Trajectory]) -> float:
    """Balanced: the mean of the agreement on the steps that the teacher calls good, and on those it calls bad."""
    from sklearn.metrics import balanced_accuracy_score

    gold = [x.score > 0.5 for x in taught(test)]
    said = [x.score > 0.5 for x in scores(student, test)] or [True] * len(gold)
    return float(balanced_accuracy_score(gold, said))


def rounds(pool: list[Trajectory], test: list[Trajectory], seed: int, choose: bool) -> list[float]:
    """Agreement after each round."""
    order = list(pool)
    Random(seed).shuffle(order)
    by_id = {t.id: t for t in pool}
    bought = order[: round(ROUNDS[0] * len(pool))]
    student = trained(bought)
    found = [agreement(student, test)]
    for share in ROUNDS[1:]:
        more = round(share * len(pool)) - len(bought)
        if choose:
            labels = scores(student, pool) + taught(bought)
            picked = select(pool, labels, SelectConfig(n=more, settled=("judge",), seed=seed))
            bought = bought + [by_id[c.trajectory_id] for c in picked.choices]
        else:
            bought = order[: len(bought) + more]
        student = trained(bought)
        found.append(agreement(student, test))
    return found


def main() -> None:
    quick = "--quick" in sys.argv
    size, seeds = (800, 2) if quick else (1600, 10)
    test = episodes(1000, 10**6)
    total, chosen, drawn = 0.0, [0.0] * len(ROUNDS), [0.0] * len(ROUNDS)
    for seed in range(seeds):
        pool = episodes(size, seed)
        total += agreement(trained(pool), test) / seeds
        for sums, choose in ((chosen, True), (drawn, False)):
            for i, value in enumerate(rounds(pool, test, seed, choose)):
                sums[i] += value / seeds
    print(f"all labels: {total:.4f}")
    for share, mine, other in zip(ROUNDS, chosen, drawn, strict=True):
        print(f"{share:4.0%} of the labels: selected {mine:.4f}, at random {other:.4f}")
    enough = next((share for share, mine in zip(ROUNDS, chosen, strict=True) if mine >= total - SLACK), 1.0)
    line = {"name": "select_saving", "value": enough, "target": 0.25, "better": "lower"}
    print(json.dumps(line | {"unit": "share of the teacher's labels for the agreement of all"}))


if __name__ == "__main__":
    main()
