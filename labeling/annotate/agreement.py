"""How far people agree: Cohen's kappa, Krippendorff's alpha, the first error, error types.

Undefined figures (nothing in common, only one category in use) are None, never 0 or 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Ratings = Mapping[str, Mapping[int, float]]  # trajectory -> step -> rating


def cohen_kappa(pairs: Iterable[tuple[Hashable, Hashable]]) -> float | None:
    """Cohen's kappa of two raters' pairs of categories: (observed - expected) / (1 - expected) agreement."""
    pairs = list(pairs)
    if not pairs:
        return None
    n = len(pairs)
    left, right = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    expected = sum(left[c] * right[c] for c in left) / n**2
    observed = sum(a == b for a, b in pairs) / n
    return None if expected == 1 else (observed - expected) / (1 - expected)


def krippendorff_alpha(units: Iterable[Sequence[float]], *, ordinal: bool = True) -> float | None:
    """Krippendorff's alpha over units (steps), each the ratings it got; a unit with less than two says nothing.

    Args:
        ordinal: the distance between two categories is the number of ratings from the one to the other, half of its own
            at each end, squared; else any two differ by 1.
    """
    counted = [Counter(unit) for unit in units if len(unit) > 1]
    totals: Counter[float] = Counter()
    for unit in counted:
        totals.update(unit)
    categories, n = sorted(totals), sum(totals.values())

    def distance(low: float, high: float) -> float:
        if not ordinal:
            return float(low != high)
        between = sum(totals[c] for c in categories if low <= c <= high)
        return (between - (totals[low] + totals[high]) / 2) ** 2

    expected = sum(2 * totals[a] * totals[b] * distance(a, b) for a, b in combinations(categories, 2))
    if not expected:
        return None
    observed = 0.0
    for unit in counted:
        apart = sum(2 * unit[a] * unit[b] * distance(a, b) for a, b in combinations(sorted(unit), 2))
        observed += apart / (sum(unit.values()) - 1)
    return 1 - (n - 1) * observed / expected


def first_error(ratings: Mapping[int, float], length: int | None) -> int | None:
    """The 0-based index of the first step rated bad; -1 where all steps are rated and none is; None where unknown."""
    bad = [k for k, r in ratings.items() if r < 0.5]
    if bad:
        return min(bad)
    return -1 if length and len(ratings) >= length else None


def compare(left: Ratings, right: Ratings, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Two raters side by side, on what both rated.

    Returns:
        `steps` both rated, share of them that `agree`, `kappa`; `trajectories` where both say where the first error is
        (or that there is none), the shares that agree on it exactly (`first_error`) and `within_one` step. A first
        error and no error are never within one.
    """
    pairs = []
    errors = []
    for t in left.keys() & right.keys():
        pairs += [(left[t][k], right[t][k]) for k in left[t].keys() & right[t].keys()]
        a, b = first_error(left[t], lengths.get(t)), first_error(right[t], lengths.get(t))
        if a is not None and b is not None:
            errors.append((a, b))
    exact = [a == b for a, b in errors]
    near = [a == b or (min(a, b) >= 0 and abs(a - b) <= 1) for a, b in errors]
    return {
        "steps": len(pairs),
        "agree": _share([a == b for a, b in pairs]),
        "kappa": cohen_kappa(pairs),
        "trajectories": len(errors),
        "first_error": _share(exact),
        "within_one": _share(near),
    }


def alpha(raters: Mapping[str, Ratings]) -> float | None:
    """Krippendorff's ordinal alpha of all raters."""
    units: dict[tuple[str, int], list[float]] = {}
    for ratings in raters.values():
        for t, steps in ratings.items():
            for k, value in steps.items():
                units.setdefault((t, k), []).append(value)
    return krippendorff_alpha(units.values())


def error_type_agreement(
    raters: Mapping[str, Mapping[tuple[str, int], frozenset[str]]], rated: Mapping[str, Ratings]
) -> list[dict[str, Any]]:
    """For each error type, over all pairs of raters and the steps that both rated.

    Returns:
        rows of `type`; `steps` where one or both named it; `both`; `agree` = 2 both / (the times it was named), the
        specific agreement; `kappa`.
    """
    types = sorted({name for marks in raters.values() for names in marks.values() for name in names})
    rows = []
    for name in types:
        pairs = []
        for a, b in combinations(sorted(rated), 2):
            for t in rated[a].keys() & rated[b].keys():
                for k in rated[a][t].keys() & rated[b][t].keys():
                    empty: frozenset[str] = frozenset()
                    marks = [raters.get(who, {}).get((t, k), empty) for who in (a, b)]
                    pairs.append((name in marks[0], name in marks[1]))
        both = sum(a and b for a, b in pairs)
        named = sum(a + b for a, b in pairs)
        agree = 2 * both / named if named else None
        rows.append(
            {"type": name, "steps": named - both, "both": both, "agree": agree, "kappa": cohen_kappa(pairs)}
        )
    return rows


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
