"""Step scores that need no PRM: were the right tools called, do the arguments parse, does it rest on evidence.

Each is a function of trajectories to scores in [0, 1], as `PRM.score` is. A score says how things stand after the
step, so that the progress shape pays each gain once: calling again, calling more and padding earn nothing, and the
whole of an episode's bonus is at most the scorer's weight. Only what the policy wrote counts, never an example in the
task or a tool's output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from prm.env import load_attribute
from prm.errors import UsageError
from prm.records import Trajectory
from rl.calls import find_calls

Scorer = Callable[[Sequence[Trajectory]], list[list[float]]]
Tools = Sequence[Mapping[str, Any]]
_WORD = re.compile(r"[^\W_]+")
NAMES = ("arguments", "evidence", "right-tool")


def arguments(trajectories: Sequence[Trajectory], *, tools: Tools = ()) -> list[list[float]]:
    """Do the calls parse and fit their tool: 0 until a call does, then 1 / (1 + broken calls so far).

    A broken call costs for good: no number of later calls makes up for it. Without a call there is no bonus.
    """

    def score(trajectory: Trajectory) -> list[float]:
        scores, good, broken = [], False, 0
        for step in trajectory.steps:
            calls = find_calls(step.action, tools)
            good = good or any(not call.problem for call in calls)
            broken += any(call.problem for call in calls)
            scores.append(1 / (1 + broken) if good else 0.0)
        return scores

    return [score(t) for t in trajectories]


def right_tool(
    trajectories: Sequence[Trajectory], *, expected: Sequence[str] = (), tools: Tools = ()
) -> list[list[float]]:
    """The share of the expected tools that were called, in this order, as the steps go on.

    Args:
        trajectories: their `meta["expected_tools"]`, where there is one, goes before `expected`.
        expected: names of tools; one that is to be called twice stands there twice.
        tools: the environment's functions.

    Raises:
        UsageError: nothing says which tools are expected.
    """

    def score(trajectory: Trajectory) -> list[float]:
        wanted = [str(name).casefold() for name in trajectory.meta.get("expected_tools") or expected]
        if not wanted:
            raise UsageError("right-tool: neither an option nor the trajectory's meta says which tools are expected")
        scores, done = [], 0
        for step in trajectory.steps:
            for call in find_calls(step.action, tools):
                if done < len(wanted) and not call.problem and call.name.casefold() == wanted[done]:
                    done += 1
            scores.append(done / len(wanted))
        return scores

    return [score(t) for t in trajectories]


def evidence(trajectories: Sequence[Trajectory], *, tools: Tools = ()) -> list[list[float]]:
    """Of the words that a step adds to the task's, the share that stands in an earlier observation; none added is 0.

    Read in the arguments of the step's calls, or in its whole text (reasoning left out) where it has none. The policy's
    own words are no evidence, and repeating the question cites nothing.
    """

    def score(trajectory: Trajectory) -> list[float]:
        given, seen, scores = _words([trajectory.task]), set[str](), []
        for step in trajectory.steps:
            calls = find_calls(step.action, tools)
            texts = [text for call in calls for text in _texts(call.arguments)]
            added = _words(texts if calls else [step.action.rpartition("</think>")[2]]) - given
            scores.append(len(added & seen) / len(added) if added else 0.0)
            seen |= _words([step.observation])
        return scores

    return [score(t) for t in trajectories]


def load_scorers(names: Iterable[str], *, tools: Tools = (), expected: Sequence[str] = ()) -> dict[str, Scorer]:
    """Scorers by name: `arguments`, `right-tool`, `evidence`, or `module:attribute` of a function like these.

    Raises:
        UsageError: there is none of that name.
    """
    known: dict[str, Scorer] = {
        "arguments": partial(arguments, tools=tools),
        "evidence": partial(evidence, tools=tools),
        "right-tool": partial(right_tool, expected=expected, tools=tools),
    }
    found = {}
    for name in names:
        if name in known:
            found[name] = known[name]
        elif ":" in name:
            own = load_attribute(name)
            found[name] = getattr(own, "score", own)
            if not callable(found[name]):
                raise UsageError(f"scorer {name}: expected a function of trajectories, got {type(own).__name__}")
        else:
            raise UsageError(f"unknown scorer {name!r}; known: {', '.join(NAMES)}, or module:attribute")
    return found


def _words(texts: Iterable[str]) -> set[str]:
    return {word.casefold() for text in texts for word in _WORD.findall(text)}


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [] if value is None or isinstance(value, bool) else [str(value)]
