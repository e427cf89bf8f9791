"""The first error of a trajectory, by bisection with noisy answers.

After the first error no continuation succeeds; before it, each succeeds with some chance. Nothing else is assumed: one
success clears every step up to where it left the trajectory, a failure makes an earlier error more likely. The next
continuation goes where its answer is expected to say most about where the error is. So the number of continuations
grows with the logarithm of the number of steps, as in OmegaPRM's binary search (Luo et al. 2024, arXiv 2406.06592,
section 3.2), without a fixed number of them at each cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from labeling.continuations import RESTORE, Continuation, Request, Strategy
from labeling.draws import MonteCarloConfig, chosen_steps, common, counts, is_over
from prm.records import StepLabel, Trajectory

PRIOR = (2.0, 1.0)  # Beta, of the chance to succeed while nothing is wrong: more likely than not


def first_error(trajectories: Sequence[Trajectory], config: MonteCarloConfig, source: str) -> Strategy:
    """Labels for all steps of one trajectory from the posterior of where its first error is.

    The score is P(the first error comes later than this step), the weight the number of valid continuations of the
    whole search, `meta["first_error"]` the most likely step (None: there is none). An episode that succeeded has no
    error. No labels where the task itself seems out of the policy's reach.
    """
    (trajectory,) = trajectories
    total = len(trajectory.steps)
    restored = (yield [Request(trajectory, total, RESTORE)])[0]
    if is_over(restored) and (restored is None or restored.outcome is None):
        return []
    succeeded = is_over(restored) and bool(restored and restored.outcome)
    # Prefixes are numbered by their length. Hypothesis h: those shorter than h are alive, the others are not; h = 0 is
    # a task out of reach, h = 1 an error in step 0, h = `total` + 1 no error, which a failed episode cannot have.
    hypotheses = total + 1 if is_over(restored) else total + 2
    good, bad = [0] * (total + 1), [0] * (total + 1)
    draws: list[Continuation] = []
    launched: Counter[int] = Counter()
    chance = [1 / hypotheses] * hypotheses
    most = config.k * total
    while not succeeded and max(chance) < config.confidence and sum(launched.values()) < most:
        at = _next(good, bad, hypotheses)
        draw = (yield [Request(trajectory, at, launched[at])])[0]
        if draw is None:
            break
        launched[at] += 1
        draws.append(draw)
        if draw.outcome is not None:
            # A success shows that the trajectory was alive up to where the two part.
            if draw.outcome > 0:
                good[at + common(draw.steps, trajectory.steps[at:])] += 1
            else:
                bad[at] += 1
        chance = posterior(good, bad, hypotheses)
    best = max(range(hypotheses), key=chance.__getitem__)
    if not succeeded and (best == 0 or not sum(good) + sum(bad)):
        return []
    meta = {"first_error": None if succeeded or best == total + 1 else best - 1, "n_requested": len(draws)}
    meta |= {"valid": sum(good) + sum(bad), "successes": sum(good)} | counts(draws)
    meta["low_confidence"] = not succeeded and chance[best] < config.confidence
    weight = max(1, sum(good) + sum(bad))
    labels = []
    for t in chosen_steps(trajectory, config):
        later = 1.0 if succeeded else sum(chance[t + 2 :]) / (1 - chance[0])
        score = float(later > 0.5) if config.hard else min(1.0, later)
        labels.append(StepLabel(trajectory.id, t, score, source, weight, meta=meta))
    return labels


def posterior(good: Sequence[int], bad: Sequence[int], hypotheses: int) -> list[float]:
    """P(the first h prefixes are alive and no others), for h below `hypotheses`, which are equally likely beforehand.

    Alive prefixes share one chance of success, with a beta prior, so the evidence for h is B(successes + a,
    failures + b) of the prefixes before it, and none where there is a success after it.
    """
    weights = []
    s = f = 0
    for h in range(hypotheses):
        if h:
            s, f = s + good[h - 1], f + bad[h - 1]
        a, b = PRIOR
        evidence = math.lgamma(s + a) + math.lgamma(f + b) - math.lgamma(s + f + a + b)
        weights.append(evidence if s == sum(good) else -math.inf)
    weights = [math.exp(w - max(weights)) for w in weights]
    return [w / sum(weights) for w in weights]


def _next(good: list[int], bad: list[int], hypotheses: int) -> int:
    """The prefix whose next continuation leaves the least entropy on average."""
    chance = posterior(good, bad, hypotheses)
    alive = max((n for n, s in enumerate(good) if s), default=-1)
    best, least = alive + 1, math.inf
    for at in range(alive + 1, hypotheses - 1):
        success, s, f = 0.0, 0, 0
        for h in range(hypotheses):
            if h:
                s, f = s + good[h - 1], f + bad[h - 1]
            if h > at:
                success += chance[h] * (s + PRIOR[0]) / (s + f + sum(PRIOR))
        left = 0.0
        for counted, p in ((good, success), (bad, 1 - success)):
            counted[at] += 1
            left += p * -math.fsum(c * math.log(c) for c in posterior(good, bad, hypotheses) if c > 0)
            counted[at] -= 1
        if left < least - 1e-12:
            best, least = at, left
    return best
