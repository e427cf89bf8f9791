"""How far one label file agrees with another: a PRM, a judge or a person against gold."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill import markdown, tables
from distill.choices import BestOfN, PairAccuracy, best_of_n, pair_accuracy
from distill.data import Targets, check_labels, group_of, merge
from distill.tables import Compared, Line
from prm import metrics, report
from prm.config import option, write_text
from prm.errors import DataError, UsageError
from prm.records import StepLabel, Trajectory, parse_json, read_jsonl

GOOD = 0.5
FIGURES = {
    "auc": "AUC",
    "step_accuracy": "step accuracy",
    "balanced_accuracy": "balanced step accuracy",
    "kappa": "Cohen's kappa",
    "ece": "calibration error (ECE)",
    "brier": "Brier score",
}
NAMES = FIGURES | {"first_error_f1": "first-error F1", "prm_score": "PRMScore"}


Part = tuple[str, Sequence[str], list[list[Any]]]  # heading, header, rows


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
        intervals: 95 % bootstrap intervals over tasks, of the figures that have one.
        tables: the figures by "source", "domain", "length" and "category", where gold and trajectories tell.
        teacher: agreement with the teacher's labels, apart from that with gold; and the teacher's own with gold.
        best_of_n, pairs: choosing whole answers by their step scores.
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
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    tables: dict[str, list[Line]] = field(default_factory=dict)
    teacher: dict[str, dict[str, float | None]] | None = None
    best_of_n: BestOfN | None = None
    pairs: PairAccuracy | None = None

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
    tune: bool = False,
    teacher: Iterable[StepLabel] = (),
    draws: int = 500,
    seed: int = 0,
) -> Report:
    """Compare two sets of labels, step by step.

    Args:
        gold: what is taken as right; several labels of a step are averaged by weight.
        predicted: what is judged.
        trajectories: where given, every label must be of a step of theirs, and a trajectory counts as free of errors
            only when all its steps are labelled good. Otherwise its labelled steps are taken as all it has.
        threshold: on predictions. By default the one that a PRM stored in its labels, else 0.5.
        threshold_from: where a given threshold came from, for the report.
        tune: choose the threshold on these very labels, which the report says: an upper bound, no result.
        teacher: labels of the teacher that the predictions were distilled from.
        draws: of the bootstrap; 0 for no intervals.
        seed: of the bootstrap.

    Raises:
        DataError: there are no labels, none in common, or one of an unknown step.
    """
    left, right = _merged("gold", gold), _merged("predicted", predicted)
    notes = [f"gold: {note}" for note in left[0].notes] + [f"predicted: {note}" for note in right[0].notes]
    if trajectories is not None:
        for own, _ in (left, right):
            check_labels(trajectories, own)
    truth, guess = left[0].of, right[0].of
    if tune:
        if threshold is not None:
            raise UsageError("a threshold is given or tuned, not both")
        threshold, threshold_from = _tuned(truth, guess)
    if threshold is None:
        threshold, threshold_from = _stored_threshold(right[1])
    if draws < 0:
        raise UsageError(f"draws must be at least 0, got {draws}")
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
    by_id = {t.id: t for t in trajectories or ()}
    steps = {i: len(t.steps) for i, t in by_id.items()}
    first: dict[str, tuple[int, int | None]] = {}
    unsettled = 0
    for trajectory_id, marks in truth.items():
        answer = _first_error(marks, steps.get(trajectory_id))
        if answer is None:
            unsettled += 1
            continue
        last = answer if answer >= 0 else steps.get(trajectory_id, max(marks) + 1) - 1
        first[trajectory_id] = (answer, _predicted_first(guess.get(trajectory_id, {}), last, threshold))
    sources = {label.trajectory_id: label.source for label in left[1]}
    rows = []
    for i in truth:
        both = [s for s in sorted(truth[i]) if s in guess.get(i, {})]
        gold_scores, found_scores = tuple(truth[i][s][0] for s in both), tuple(guess[i][s][0] for s in both)
        sides = tuple(g >= GOOD for g in gold_scores), tuple(p >= threshold for p in found_scores)
        trajectory = by_id.get(i)
        groups = tables.groups_of(trajectory, sources[i], max(truth[i]) + 1)
        cluster = group_of(trajectory) if trajectory is not None else i
        rows.append(Compared(i, cluster, gold_scores, found_scores, *sides, first.get(i), groups))
    if unsettled:
        notes.append(f"first error: {unsettled} trajectories left out, gold does not settle where it is")
    return Report(
        n=len(common),
        trajectories=len({i for i, _ in common}),
        first_error=metrics.first_error_f1([g for g, _ in first.values()], [p for _, p in first.values()]),
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
        intervals=tables.intervals(rows, draws, seed),
        tables=tables.tables(rows, draws=draws, seed=seed),
        teacher=_teacher(list(teacher), truth, guess, threshold, notes),
        best_of_n=best_of_n(list(by_id.values()), _scores(guess), seed=seed),
        pairs=pair_accuracy(list(trajectories or ()), _scores(guess)),
    )


def evaluate_choices(
    trajectories: Sequence[Trajectory], predicted: Iterable[StepLabel], *, seed: int = 0
) -> tuple[BestOfN | None, PairAccuracy | None]:
    """What predictions are worth for choosing answers, where there are outcomes or pairs and no gold steps.

    Raises:
        DataError: there are no labels, or nothing to choose from.
    """
    guess = _scores(_merged("predicted", predicted)[0].of)
    found = (
        best_of_n(list({t.id: t for t in trajectories}.values()), guess, seed=seed),
        pair_accuracy(trajectories, guess),
    )
    if found == (None, None):
        raise DataError("nothing to choose from: neither pairs, nor two answers with outcomes to one task")
    return found


def write(result: Report, out: str | Path, *, title: str = "Step labels against gold") -> Path:
    """Write `report.json`, `report.md` and `report.html` (one file, readable offline) into a folder."""
    about = (
        f"{result.n} steps of {result.trajectories} trajectories. A prediction of {result.threshold:.3f} or more "
        f"counts as good (threshold: {result.threshold_from}); a gold score of {GOOD:g} or more is good."
    )
    parts: list[Part] = [("Figures", ("figure", "value", "95 % interval"), _figures(result))]
    bins = [[f"{b.low:.1f} to {b.high:.1f}", b.n, b.score, b.target] for b in result.bins]
    parts.append(("Reliability", ("scores", "steps", "mean score", "mean gold"), bins))
    for dimension, lines in result.tables.items():
        names = list(lines[0].figures)
        header = (dimension, "steps", "trajectories", *(NAMES.get(n, n.replace("_", " ")) for n in names))
        parts.append((f"By {dimension}", header, [[x.name, x.n, x.trajectories, *_with_intervals(x)] for x in lines]))
    if result.teacher:
        names = list(result.teacher["gold"])
        rows = [[f"{who} with the teacher", *own.values()] for who, own in result.teacher.items()]
        parts.append(("Teacher", ("agreement of", *(n.replace("_", " ") for n in names)), rows))
    drawn = {"these scores": [(b.score, b.target) for b in result.bins], "calibrated": [(0.0, 0.0), (1.0, 1.0)]}
    plots = {"Reliability": report.curves(drawn, "mean score of a bin", "mean gold", (0.0, 1.0))}
    notes = [*result.first_error.notes, *result.notes]
    return _write(
        result.to_dict(),
        out,
        title,
        about,
        parts + _choice_parts(result.best_of_n, result.pairs),
        plots | _choice_plots(result.best_of_n),
        notes + _choice_notes(result.best_of_n, result.pairs),
    )


def write_choices(best: BestOfN | None, pairs: PairAccuracy | None, out: str | Path, *, title: str) -> Path:
    """`write`, where there are only choices to report: the figures of steps are null."""
    row: dict[str, Any] = dict.fromkeys(["auc", "ece", "brier", "kappa", "step_accuracy", "balanced_accuracy"])
    row |= {"n": 0, "first_error": {"f1": None, "error_accuracy": None, "correct_accuracy": None}}
    row |= {"best_of_n": asdict(best) if best else None, "pairs": asdict(pairs) if pairs else None}
    about = "Whole answers, chosen by their step scores; there are no gold labels of steps."
    return _write(row, out, title, about, _choice_parts(best, pairs), _choice_plots(best), _choice_notes(best, pairs))


def _write(
    row: dict[str, Any],
    out: str | Path,
    title: str,
    about: str,
    parts: Sequence[Part],
    plots: Mapping[str, str],
    notes: Sequence[str],
) -> Path:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.json", json.dumps(row, indent=2, allow_nan=False) + "\n")
    lines, html = [f"# {markdown.plain(title)}", "", markdown.plain(about), ""], [report.paragraph(about)]
    for name, header, rows in parts:
        lines += [f"## {markdown.plain(name)}", "", *markdown.table(header, rows), ""]
        plot = [plots[name]] if name in plots else []
        html.append(report.section(name, *plot, report.table(header, rows)))
    lines += [f"- {markdown.plain(note)}" for note in notes]
    html += [report.section("Notes", *map(report.paragraph, notes))] if notes else []
    write_text(folder / "report.md", "\n".join(lines).rstrip() + "\n")
    write_text(folder / "report.html", report.page(title, *html))
    return folder


def _choice_parts(best: BestOfN | None, pairs: PairAccuracy | None) -> list[Part]:
    parts: list[Part] = []
    if best:
        curves = best.by | ({"majority vote": best.majority} if best.majority else {}) | {"pass@n": best.pass_at_n}
        rows = [[n, *(curve[i] for curve in curves.values())] for i, n in enumerate(best.n)]
        parts.append((f"Best of n, {best.tasks} tasks", ("n", *curves), rows))
    if pairs:
        every = [["all", pairs.n, *pairs.by.values()]]
        parts.append(("Pairs: the better answer scores higher", ("", "pairs", *pairs.by), every))
        subsets = [[name, n, share] for name, (n, share) in pairs.subsets.items()]
        parts += [("Pairs by subset", ("subset", "pairs", "accuracy (min)"), subsets)] if subsets else []
    return parts


def _choice_plots(best: BestOfN | None) -> dict[str, str]:
    if not best:
        return {}
    curves = best.by | ({"majority vote": best.majority} if best.majority else {}) | {"pass@n": best.pass_at_n}
    drawn = {name: [(math.log2(n), y) for n, y in zip(best.n, own, strict=True)] for name, own in curves.items()}
    return {f"Best of n, {best.tasks} tasks": report.curves(drawn, "log2 of n", "success", (0.0, 1.0))}


def _choice_notes(best: BestOfN | None, pairs: PairAccuracy | None) -> list[str]:
    notes = [f"best of n: {note}" for note in best.notes] if best else []
    return notes + ([f"pairs: {note}" for note in pairs.notes] if pairs else [])


def _with_intervals(line: Line) -> list[str | None]:
    return [
        None if value is None else f"{value:.3f}" + _interval(line.intervals.get(name), " ({})")
        for name, value in line.figures.items()
    ]


def _interval(found: tuple[float, float] | None, shape: str = "{}") -> str:
    return shape.format(f"{found[0]:.3f} to {found[1]:.3f}") if found else ""


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


def _tuned(truth: Mapping[str, Any], guess: Mapping[str, Any]) -> tuple[float, str]:
    from distill.calibrate import choose_threshold

    both = [(own, guess[i]) for i, own in truth.items() if i in guess]
    steps = [[s for s in sorted(g) if s in p] for g, p in both]
    gold = [[g[s][0] for s in own] for (g, _), own in zip(both, steps, strict=True)]
    said = [[p[s][0] for s in own] for (_, p), own in zip(both, steps, strict=True)]
    threshold, by = choose_threshold(gold, said)
    return threshold, f"tuned on these very labels by {by.removeprefix('held-out ')}: an upper bound, no result"


def _scores(own: Mapping[str, Mapping[int, tuple[float, float]]]) -> dict[str, dict[int, float]]:
    return {i: {step: score for step, (score, _) in steps.items()} for i, steps in own.items()}


def _teacher(
    labels: list[StepLabel], truth: Mapping[str, Any], guess: Mapping[str, Any], threshold: float, notes: list[str]
) -> dict[str, dict[str, float | None]] | None:
    """Agreement of predictions, and of gold, with the teacher, each over the steps that both have."""
    if not labels:
        return None
    merged, _ = _merged("teacher", labels)
    notes += [f"teacher: {note}" for note in merged.notes]
    found: dict[str, dict[str, float | None]] = {}
    for name, other, limit in (("predictions", guess, threshold), ("gold", truth, GOOD)):
        pairs = [
            (score, other[i][step][0])
            for i, own in merged.of.items()
            for step, (score, _) in own.items()
            if step in other.get(i, {})
        ]
        taught, said = [t >= GOOD for t, _ in pairs], [s >= limit for _, s in pairs]
        found[name] = {
            "n": len(pairs),
            "agreement": metrics.accuracy(taught, said),
            "kappa": metrics.cohen_kappa(taught, said),
            "mean_distance": sum(abs(t - s) for t, s in pairs) / len(pairs) if pairs else None,
        }
    return found


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


def _figures(result: Report) -> list[list[Any]]:
    first = result.first_error
    rows: list[tuple[str, float | None, str]] = [
        ("first-error F1", first.f1, "first_error_f1"),
        (f"exact first error, of {first.n_error}", first.error_accuracy, "error_accuracy"),
        (f"no error found, of {first.n_correct} without", first.correct_accuracy, "correct_accuracy"),
    ]
    rows += [(name, getattr(result, key), key) for key, name in FIGURES.items()]
    return [[name, value, _interval(result.intervals.get(key))] for name, value, key in rows]


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluateConfig:
    out: str = option(..., "write report.json, report.md and report.html into this folder")
    trajectories: str | None = option(None, "the trajectories: which steps have no label, tables, best of n, pairs")
    threshold: float | None = option(None, "scores below it are bad (default: the PRM's own, else 0.5)")
    tune: bool = option(False, "choose the threshold on these very labels: an upper bound, and called that")
    teacher: str | None = option(None, "the teacher's labels: agreement with them is reported apart from gold")
    draws: int = option(500, "of the bootstrap behind the intervals; 0 for none")
    seed: int = option(0, "of the bootstrap")


def evaluate_files(gold: str, predicted: str, config: EvaluateConfig) -> Path:
    """Compare files. `gold` holds labels; or trajectories with outcomes, or preference pairs, to choose among."""
    title = f"{Path(predicted).name} against {Path(gold).name}"
    labels = _read(predicted, StepLabel)
    known = list(_read(config.trajectories, Trajectory)) if config.trajectories else None
    if _holds_labels(gold):
        result = evaluate(
            _read(gold, StepLabel),
            labels,
            trajectories=known,
            threshold=config.threshold,
            tune=config.tune,
            teacher=_read(config.teacher, StepLabel) if config.teacher else (),
            draws=config.draws,
            seed=config.seed,
        )
        return write(result, config.out, title=title)
    from prm.formats import convert

    converted = convert(gold)
    if converted.skipped:
        print(converted.summary(), file=sys.stderr)
    given = [*converted.trajectories, *(known or ())]
    best, pairs = evaluate_choices(given, labels, seed=config.seed)
    return write_choices(best, pairs, config.out, title=title)


def _read(path: str, cls: type[Any]) -> list[Any]:
    records = read_jsonl(path, cls)
    if not records:
        raise DataError(f"{path}: holds no {'trajectory' if cls is Trajectory else 'label'}")
    return records


def _holds_labels(path: str) -> bool:
    """Whether the first row has the keys of a label; what is no row is left for the reader to name."""
    try:
        with open(path, "rb") as file:
            line = next((line for line in file if line.strip()), b"")
        row = parse_json(line)
    except OSError:
        return True
    except DataError:
        return not line.lstrip().startswith(b"[")
    return not isinstance(row, dict) or not ("steps" in row or ("chosen" in row and "rejected" in row))
