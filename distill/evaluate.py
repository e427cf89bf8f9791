"""How far one label file agrees with another: a PRM, a judge or a person against gold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.data import Targets, check_labels, merge
from prm import metrics, report
from prm.config import write_text
from prm.errors import DataError, UsageError
from prm.records import StepLabel, Trajectory

GOOD = 0.5
FIGURES = {
    "auc": "AUC",
    "step_accuracy": "step accuracy",
    "balanced_accuracy": "balanced step accuracy",
    "kappa": "Cohen's kappa",
    "ece": "calibration error (ECE)",
    "brier": "Brier score",
}


@dataclass(frozen=True)
class Report:
    """The agreement of predictions with gold, over the steps that both have; None where a figure is not defined.

    Attributes:
        n: steps compared.
        trajectories: trajectories that they are of.
        first_error: ProcessBench's measure, over the trajectories where gold settles which step is the first bad one.
        auc: of scores, gold at 0.5 or more being good.
        step_accuracy, balanced_accuracy, kappa: of steps, a prediction at the threshold or more being good.
        ece, brier: of scores against gold scores as they are.
        threshold: on predictions; `threshold_from` says where it came from.
        bins: the reliability plot.
        notes: what was counted and left out.
    """

    n: int
    trajectories: int
    first_error: metrics.FirstError
    auc: float | None
    step_accuracy: float | None
    balanced_accuracy: float | None
    kappa: float | None
    ece: float | None
    brier: float | None
    threshold: float
    threshold_from: str
    bins: tuple[metrics.Bin, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `report.json` holds."""
        return asdict(self)


def evaluate(
    gold: Iterable[StepLabel],
    predicted: Iterable[StepLabel],
    *,
    trajectories: Sequence[Trajectory] | None = None,
    threshold: float | None = None,
    threshold_from: str = "given",
) -> Report:
    """Compare two sets of labels, step by step.

    Args:
        gold: what is taken as right; several labels of a step are averaged by weight.
        predicted: what is judged.
        trajectories: where given, every label must be of a step of theirs, and a trajectory counts as free of errors
            only when all its steps are labelled good. Otherwise its labelled steps are taken as all it has.
        threshold: on predictions. By default the one that a PRM stored in its labels, else 0.5.
        threshold_from: where a given threshold came from, for the report.

    Raises:
        DataError: there are no labels, none in common, or one of an unknown step.
    """
    left, right = _merged("gold", gold), _merged("predicted", predicted)
    notes = [f"gold: {note}" for note in left[0].notes] + [f"predicted: {note}" for note in right[0].notes]
    if trajectories is not None:
        for own, _ in (left, right):
            check_labels(trajectories, own)
    truth, guess = left[0].of, right[0].of
    if threshold is None:
        threshold, threshold_from = _stored_threshold(right[1])
    if not 0 <= threshold <= 1:
        raise UsageError(f"threshold must lie in [0, 1], got {threshold:g}")
    common = [(i, s) for i, own in truth.items() for s in sorted(own) if s in guess.get(i, {})]
    if not common:
        raise DataError("gold and predictions have no step in common")
    if missing := len(left[0]) - len(common):
        notes.append(f"{missing} of {len(left[0])} gold labels have no prediction")
    if extra := len(right[0]) - len(common):
        notes.append(f"{extra} of {len(right[0])} predictions have no gold label")
    targets = [truth[i][s][0] for i, s in common]
    scores = [guess[i][s][0] for i, s in common]
    good, positive = [t >= GOOD for t in targets], [s >= threshold for s in scores]
    steps = {t.id: len(t.steps) for t in trajectories} if trajectories is not None else {}
    first, found, unsettled = [], [], 0
    for trajectory_id, marks in truth.items():
        answer = _first_error(marks, steps.get(trajectory_id))
        if answer is None:
            unsettled += 1
            continue
        first.append(answer)
        last = answer if answer >= 0 else steps.get(trajectory_id, max(marks) + 1) - 1
        found.append(_predicted_first(guess.get(trajectory_id, {}), last, threshold))
    if unsettled:
        notes.append(f"first error: {unsettled} trajectories left out, gold does not settle where it is")
    return Report(
        n=len(common),
        trajectories=len({i for i, _ in common}),
        first_error=metrics.first_error_f1(first, found),
        auc=metrics.auc(good, scores),
        step_accuracy=metrics.accuracy(good, positive),
        balanced_accuracy=metrics.balanced_accuracy(good, positive),
        kappa=metrics.cohen_kappa(good, positive),
        ece=metrics.ece(scores, targets),
        brier=metrics.brier(scores, targets),
        threshold=threshold,
        threshold_from=threshold_from,
        bins=tuple(metrics.reliability(scores, targets)),
        notes=tuple(notes),
    )


def write(result: Report, out: str | Path, *, title: str = "Step labels against gold") -> Path:
    """Write `report.json`, `report.md` and `report.html` (one file, readable offline) into a folder."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.json", json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
    figures = _figures(result)
    notes = [*result.first_error.notes, *result.notes]
    bins = [(f"{b.low:.1f} to {b.high:.1f}", b.n, b.score, b.target) for b in result.bins]
    about = (
        f"{result.n} steps of {result.trajectories} trajectories. A prediction of {result.threshold:.3f} or more "
        f"counts as good (threshold: {result.threshold_from}); a gold score of {GOOD:g} or more is good."
    )
    header = ("scores", "steps", "mean score", "mean gold")
    lines = [f"# {_plain(title)}", "", about, "", "| figure | value |", "| - | - |"]
    lines += [f"| {name} | {_shown(value)} |" for name, value in figures]
    lines += ["", "| " + " | ".join(header) + " |", "| - | - | - | - |"]
    lines += ["| " + " | ".join(v if isinstance(v, str) else _shown(v) for v in row) + " |" for row in bins]
    lines += ["", *[f"- {_plain(note)}" for note in notes]]
    write_text(folder / "report.md", "\n".join(lines).rstrip() + "\n")
    drawn = {"these scores": [(b.score, b.target) for b in result.bins], "calibrated": [(0.0, 0.0), (1.0, 1.0)]}
    parts = [
        report.paragraph(about),
        report.section("Figures", report.table(["figure", "value"], [[n, v] for n, v in figures])),
        report.section(
            "Reliability",
            report.curves(drawn, "mean score of a bin", "mean gold", (0.0, 1.0)),
            report.table(header, [list(row) for row in bins]),
        ),
    ]
    if notes:
        parts.append(report.section("Notes", *map(report.paragraph, notes)))
    write_text(folder / "report.html", report.page(title, *parts))
    return folder


def _merged(name: str, labels: Iterable[StepLabel]) -> tuple[Targets, list[StepLabel]]:
    own = list(labels)
    if not own:
        raise DataError(f"{name}: there are no labels")
    return merge(own), own


def _stored_threshold(labels: Sequence[StepLabel]) -> tuple[float, str]:
    found = {label.meta.get("threshold") for label in labels}
    value = found.pop() if len(found) == 1 else None
    if isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value), "stored with the predictions"
    return 0.5, "default"


def _first_error(own: dict[int, tuple[float, float]], steps: int | None) -> int | None:
    """The first bad step, -1 where all are good; None where an unlabelled step leaves it open."""
    total = max(own) + 1 if steps is None else steps
    for step in range(total):
        if step not in own:
            return None
        if own[step][0] < GOOD:
            return step
    return -1


def _predicted_first(own: dict[int, tuple[float, float]], last: int, threshold: float) -> int | None:
    """The first step up to `last` predicted bad, else -1; None where a prediction that decides is missing."""
    for step in range(last + 1):
        if step not in own:
            return None
        if own[step][0] < threshold:
            return step
    return -1


def _figures(result: Report) -> list[tuple[str, float | None]]:
    first = result.first_error
    rows: list[tuple[str, float | None]] = [
        ("first-error F1", first.f1),
        (f"exact first error, of {first.n_error}", first.error_accuracy),
        (f"no error found, of {first.n_correct} without", first.correct_accuracy),
    ]
    return rows + [(name, getattr(result, key)) for key, name in FIGURES.items()]


def _shown(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _plain(text: str) -> str:
    """Outside text on one line of Markdown, as text."""
    return "".join("\\" + c if c in "\\`*_{}[]<>#|!" else c for c in " ".join(text.split()))
