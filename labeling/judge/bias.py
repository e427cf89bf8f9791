"""Is the judge swayed by what should not matter? The same steps are judged again after a change, and compared.

again       nothing is changed: the judge's own noise, against which the others are to be read
reordered   the steps are shown last to first, with their numbers: scores should stay
padded      every action says the same in more words: scores should stay
answer      the final answer is another: the last step should fall, the steps before it should stay
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from labeling.judge.calls import Caller, Job, Result, run_jobs
from labeling.judge.prompt import Rubric, Window, messages, own_text, too_long
from prm.config import progress, write_text
from prm.records import Step, Trajectory

if TYPE_CHECKING:
    from labeling.judge.run import JudgeConfig

CHANGES = ("again", "reordered", "padded", "answer")
BEFORE = "Taking all of the above into account, and going about it carefully, one thing at a time: "
AFTER = " In other words, what has just been written is what this step does, no more and no less than that."
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ANSWER = re.compile(r"(?:answer(?: is)?|finish|final)\W{1,3}", re.I)


@dataclass(frozen=True)
class Shift:
    """What a change did to the scores of some steps: `mean` is signed; `flips` is the share that crossed 0.5."""

    change: str
    of: str
    n: int
    mean: float
    absolute: float
    flips: float


@dataclass
class Bias:
    """The shifts, and what could not be measured (a reason and how often)."""

    shifts: list[Shift] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        """A table, and a line for each thing that was left out."""
        lines = [f"{'change':<10} {'of':<12} {'steps':>5} {'mean':>7} {'absolute':>8} {'flips':>6}"]
        for s in self.shifts:
            lines.append(f"{s.change:<10} {s.of:<12} {s.n:>5} {s.mean:>+7.3f} {s.absolute:>8.3f} {s.flips:>6.1%}")
        lines += [f"left out: {n} {what}" for what, n in self.left_out.most_common()]
        return "\n".join(lines)


def padded(trajectory: Trajectory) -> Trajectory:
    """Every action in more words; what came back stays."""
    return replace(
        trajectory, id="", steps=tuple(Step(f"{BEFORE}{s.action}{AFTER}", s.observation) for s in trajectory.steps)
    )


def other_answer(trajectory: Trajectory, random: Random, answers: Sequence[str]) -> Trajectory | None:
    """The trajectory with another final answer; None where none can be told in its last action.

    The last number becomes another one; without numbers, what follows the last "answer" or "finish" is taken from
    another trajectory (`answers`).
    """
    if not trajectory.steps:
        return None
    last = trajectory.steps[-1]
    numbers, said = list(_NUMBER.finditer(last.action)), answer_of(last.action)
    if numbers:
        at = numbers[-1]
        digits = at[0].replace(".", "")
        changed = str(int(digits) + random.choice((1, 3, 7, 20)))
        start, stop, text = at.start(), at.end(), changed
    elif said and (others := sorted({a for a in answers if a.casefold() != said[0].casefold()})):
        start, stop, text = said[1], said[1] + len(said[0]), random.choice(others)
    else:
        return None
    action = last.action[:start] + text + last.action[stop:]
    return replace(trajectory, id="", steps=(*trajectory.steps[:-1], Step(action, last.observation)))


def answer_of(action: str) -> tuple[str, int] | None:
    """(answer, where it begins) of an action that names one in words."""
    marks = list(_ANSWER.finditer(action))
    if not marks:
        return None
    found = re.match(r"[^\n\])}\"']+", action[marks[-1].end() :])
    return (found[0].rstrip(" ."), marks[-1].end()) if found and found[0].strip(" .") else None


def bias_jobs(
    trajectories: Sequence[Trajectory], config: JudgeConfig, rubric: Rubric, setup: str, left_out: Counter[str]
) -> dict[tuple[str, str], Job]:
    """(id of the trajectory, change or "") -> the call that judges it."""
    usable = []
    for t in trajectories:
        whole = Window(0, 0, len(t.steps) - 1)
        if not t.steps or too_long(padded(t), whole, config.window):
            left_out["trajectories without steps" if not t.steps else "trajectories longer than one window"] += 1
        else:
            usable.append(t)
    random = Random(0)
    sample = usable if len(usable) <= config.bias_sample else random.sample(usable, config.bias_sample)
    answers = [said[0] for t in usable if (said := answer_of(t.steps[-1].action))]
    jobs: dict[tuple[str, str], Job] = {}
    for t in sample:
        changed = {"": t, "again": t, "reordered": t, "padded": padded(t)}
        if len(t.steps) == 1:
            del changed["reordered"]
            left_out["trajectories of one step, not reordered"] += 1
        if (other := other_answer(t, Random(t.id), answers)) is not None:
            changed["answer"] = other
        else:
            left_out["trajectories without a final answer that could be changed"] += 1
        for change, text in changed.items():
            steps = range(len(t.steps))
            window = Window(0, 0, len(t.steps) - 1)
            chat = messages(text, window, rubric, verdicts=config.logprobs, backwards=change == "reordered")
            cap = config.max_output_tokens or 200 + 100 * len(steps)
            jobs[t.id, change] = Job(f"{t.id}/bias:{change}/{setup}", chat, steps, own_text(text), cap)
    return jobs


def measure(
    caller: Caller, jobs: Mapping[tuple[str, str], Job], results: dict[str, Result], left_out: Counter[str]
) -> Bias:
    """Make the calls that have no result yet, and compare."""
    todo = [job for job in jobs.values() if job.key not in results]
    bar = progress(len(todo), "bias", "call")

    def done(index: int, result: Result) -> None:
        results[todo[index].key] = result
        bar.update()

    try:
        run_jobs(caller, todo, done)
    finally:
        bar.close()
    scores: dict[tuple[str, str], list[float]] = {}
    for name, job in jobs.items():
        result = results.get(job.key) or caller.stopped or Result("not asked")
        if result.status == "ok":
            scores[name] = [v.score for v in result.verdicts]
        else:
            left_out[f"calls: {result.status}"] += 1
    bias = Bias(left_out=left_out)
    for change, of, pairs in _pairs(scores):
        if pairs:
            moves = [after - before for before, after in pairs]
            flips = sum((a >= 0.5) != (b >= 0.5) for a, b in pairs)
            mean, absolute = sum(moves) / len(moves), sum(map(abs, moves)) / len(moves)
            bias.shifts.append(Shift(change, of, len(pairs), mean, absolute, flips / len(pairs)))
    return bias


def write(bias: Bias, path: str) -> None:
    """The shifts as JSON."""
    write_text(
        path, json.dumps({"shifts": [asdict(s) for s in bias.shifts], "left_out": bias.left_out}, indent=2) + "\n"
    )


def _pairs(scores: Mapping[tuple[str, str], list[float]]) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """(change, which steps, (score before, after) of each)."""
    parts: dict[str, Callable[[list[Any]], list[Any]]] = {"all steps": lambda x: x}
    before_last: dict[str, Callable[[list[Any]], list[Any]]] = {
        "last step": lambda x: x[-1:],
        "steps before": lambda x: x[:-1],
    }
    for change in CHANGES:
        for of, part in (before_last if change == "answer" else parts).items():
            pairs = [
                pair
                for (name, kind), after in scores.items()
                if kind == change and (name, "") in scores
                for pair in zip(part(scores[name, ""]), part(after), strict=True)
            ]
            yield change, of, pairs
