"""How far a share of successes can be trusted, also where the number of draws depended on what was drawn.

A plan says after which numbers of draws one looks, and where one stops. Stopping early pulls the plain share s/n
outwards. But a plan that depends on (s, n) alone makes the probability of ending at (s, n) a number of paths times
p^s (1-p)^(n-s), from which everything follows exactly: the unbiased estimate, and how often an interval covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

Z95 = 1.959963984540054


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval for a share (1927). `z` is the two-sided normal quantile, 1.96 for 95 %; n = 0 gives (0, 1)."""
    if n <= 0:
        return 0.0, 1.0
    share = min(1.0, successes / n)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Plan:
    """Look after each of `looks` draws; stop where Wilson's interval is narrow enough or beside the threshold.

    Args:
        looks: increasing numbers of draws; at the last one always stops.
        width: stop where the interval is at most so wide. 0 never does.
        threshold: stop where the interval leaves this out; None never does.
        tests: how many looks may be decided at the threshold: each one's interval has the level 1 - 0.05 / tests
            (Bonferroni), so that all together decide wrongly in about 5 % of cases at most.
    """

    looks: tuple[int, ...]
    width: float = 0.0
    threshold: float | None = None
    tests: int = 1

    def stops(self, successes: float, n: int) -> bool:
        """Whether to stop at a look, the last one apart."""
        low, high = wilson(successes, n)
        if high - low <= self.width:
            return True
        if self.threshold is None:
            return False
        low, high = wilson(successes, n, NormalDist().inv_cdf(1 - 0.025 / self.tests))
        return not low <= self.threshold <= high


@lru_cache(maxsize=100_000)
def ends(plan: Plan) -> dict[tuple[int, int], tuple[int, int]]:
    """Where a plan can end: (s, n) -> (paths that end there, those of them that begin with a success)."""
    going = {(0, 0): (1, 0)}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for look in plan.looks:
        reached: dict[tuple[int, int], tuple[int, int]] = {}
        for (s, n), (paths, first) in going.items():
            for more in range(look - n + 1):
                ways = math.comb(look - n, more)
                ones = math.comb(look - 1, more - 1) if n == 0 and more else 0
                old = reached.get((s + more, look), (0, 0))
                reached[s + more, look] = old[0] + paths * ways, old[1] + (ones if n == 0 else first * ways)
        stop = {at for at in reached if look == plan.looks[-1] or plan.stops(*at)}
        found |= {at: reached[at] for at in stop}
        going = {at: reached[at] for at in reached.keys() - stop}
    return found


def estimate(plan: Plan, successes: int, n: int) -> float:
    """The unbiased estimate of the chance of success after stopping at (s, n) under this plan; with one look s/n.

    It is the share of the paths to that end whose first draw is a success (Girshick, Mosteller and Savage 1946,
    "Unbiased estimates for certain binomial sampling problems", theorem 3).
    """
    paths, first = ends(plan)[successes, n]
    return first / paths
