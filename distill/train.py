"""Distil step labels into a PRM: one plain loop, whose every update is planned before it runs.

The plan of an epoch (which rows make an update, and how an update is cut into pieces that fit memory) follows from the
seed alone. So neither the size of the pieces nor an interruption changes the numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill import calibrate
from distill.data import Row, Targets, check_labels, merge, rows, split
from distill.targets import NEUTRAL, TARGETS, UNLABELLED, mixed, settle, teach
from prm.checkpoint import Calibration, quiet, refuse_other
from prm.config import option, progress
from prm.errors import DataError, ModelError, UsageError
from prm.metrics import accuracy, auc, cohen_kappa
from prm.model import PRM
from prm.parallel import Ranks
from prm.records import StepLabel, Trajectory

STATE = "training.pt"
WINDOW = 32  # batches whose rows are put in order of length together
NEAR = 0.75  # a piece's shortest row is at least this share of its longest


@dataclass(frozen=True)
class DistillConfig:
    base: str | None = option(None, "what becomes a PRM: a checkpoint of any causal language model, or a hub id")
    out: str = option(..., "write the PRM here")
    from_: str | None = option(None, "go on from this PRM of ours, in place of a base (same layout, tokens and LoRA)")
    lora_rank: int | None = option(None, "train a LoRA of this rank and the head, instead of all weights")
    lora_alpha: float | None = option(None, "the LoRA's scale times its rank (default: twice the rank)")
    lora_targets: tuple[str, ...] = option(("all-linear",), "names of the layers that get one")
    layout: str = option("plain", "how a trajectory is read", choices=("plain", "chat", "text"))
    step_token: str | None = option(None, "a token put after each action and read there")
    add_tokens: tuple[str, ...] = option((), "tokens to add to the vocabulary")
    max_tokens: int | None = option(None, "the most tokens read at once (default: what the model allows)")
    epochs: int = option(3, "passes over the labels; the best by held-out loss is kept")
    batch: int = option(8, "trajectories an update (parts, of those longer than max-tokens)")
    batch_tokens: int = option(8192, "the most tokens at a time, with padding; a matter of memory, not of results")
    lr: float | None = option(None, "learning rate (default: 2e-4 with LoRA; 1e-5 for 7B weights, more for fewer)")
    warmup: float = option(0.1, "share of the updates in which the rate rises; then it falls linearly to 0")
    weight_decay: float = option(0.01, "of matrices")
    max_grad_norm: float = option(1.0, "longer gradients are shortened to this")
    weights: bool = option(True, "labels count by their weight; otherwise all the same")
    neutral: str = option("keep", "labels of exactly 0.5 stay, are left out, or count as good or bad", choices=NEUTRAL)
    unlabelled: str = option("ignore", "steps without a label, or such after a bad one", choices=UNLABELLED)
    target: str = option("labels", "what is trained towards; both is their mean", choices=TARGETS)
    teacher: str | None = option(None, "a PRM whose scores are targets: a folder, a hub id, or the address of a server")
    teacher_share: float = option(0.5, "target both: the teacher's share; also its weight where there is no label")
    balance: bool = option(False, "good and bad steps count the same in total (calibrate by isotonic then)")
    holdout: float = option(0.2, "share of the trajectories held out, by task, to choose, calibrate and test on")
    calibration: str = option("temperature", "fitted on what is held out", choices=("temperature", "isotonic", "none"))
    patience: int = option(0, "stop after so many epochs without a better held-out loss (0: never)")
    dtype: str = option("float32", "what is computed in; a LoRA's base is kept in it", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, "trade time for memory")
    checkpoint_every: int = option(100, "updates between two states to resume from")
    seed: int = option(0, "of the head, the split and the order")


def distill(
    trajectories: Sequence[Trajectory], labels: Sequence[StepLabel], config: DistillConfig, *, teacher: Any = None
) -> PRM:
    """Train a PRM on step labels and save it in `config.out`.

    The loss is the cross-entropy of scores and labels in [0, 1], the weighted mean over an update's labelled steps.
    Unlabelled steps are read but never learned. `log.jsonl` in the folder has a line for each update and epoch. When
    the same call was interrupted before, it goes on from its last state, to the same numbers. Several processes, as
    `accelerate launch` starts them, share every update and give the numbers of one.

    Args:
        trajectories, labels: what to learn from. With a teacher, also trajectories without a label.
        config: see its fields.
        teacher: anything with `score(trajectories)`, in place of `config.teacher`.

    Returns:
        The PRM as saved: the best epoch's weights, calibrated, with a threshold, both from the held-out tasks.

    Raises:
        DataError: a label is of no known step, nothing is labelled, or there is one task only.
        ModelError: the base cannot be loaded, or does not fit its tokenizer or the options; `out` holds another model.
        UsageError: `out` holds an unfinished run of other data or options.
    """
    _check(config, teacher)
    ranks = Ranks.started()
    say = print if ranks.first else _silent
    by_id = {t.id: t for t in trajectories}
    gold = merge(labels)
    check_labels(by_id.values(), gold)
    dropped: Counter[str] = Counter()
    settle(gold, list(by_id.values()), config.neutral, config.unlabelled, dropped)
    taught = Targets()
    if config.target != "labels":
        taught = teach(_teacher(config, teacher), list(by_id.values()))
    targets = mixed(gold, taught, config.target, config.teacher_share)
    if not targets:
        raise DataError(f"none of {len(by_id)} trajectories has a label to learn from" + _counts(dropped, "; "))
    known = [t for t in by_id.values() if t.id in targets.of]
    train_set, held_set = split(known, config.holdout, config.seed)
    prm = _student(config)
    dropped["trajectories without a label"] = len(by_id) - len(known)
    train_rows, held_rows = (rows(prm, part, targets, dropped) for part in (train_set, held_set))
    if not train_rows:
        raise DataError("no labelled step is left to learn from: " + _counts(dropped))
    supervised = sum(len(row.scores) for row in train_rows)
    for note in targets.notes:
        say(note)
    say(
        f"{supervised} supervised steps an epoch in {len(train_set)} trajectories; "
        f"{sum(len(r.scores) for r in held_rows)} in {len(held_set)} are held out" + _counts(dropped, "; ")
    )
    run = Run(prm, train_rows, held_rows, config, _key(config, by_id.values(), targets), ranks)
    run.train()
    known_rows = rows(prm, held_set, gold, Counter())
    report = calibrate.calibrate(prm, known_rows or held_rows, config.calibration, config.weights, config.batch_tokens)
    if report:
        report["gold"] = _agreement(prm, known_rows, 0.5)
        if config.target != "labels":
            report["teacher"] = _agreement(prm, rows(prm, held_set, taught, Counter()), 0.5)
    say(calibrate.describe(report))
    for name in ("gold", "teacher"):
        if found := report.get(name):
            shown = ", ".join(f"{k} {v:.3f}" for k, v in found.items() if isinstance(v, float))
            say(f"held out, with {name} ({found['n']} steps): {shown}")
    run.log({"calibrated": report})
    prm.model.requires_grad_(False)
    prm.name = config.out
    ranks.together(lambda: _finish(prm, run))
    return prm


def objective(logits: Tensor, scores: Tensor, weights: Tensor, balance: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """The summed cross-entropy of steps, each by its weight: the loss times the steps' total weight.

    Args:
        logits: (n,), float32.
        scores: labels in [0, 1], (n,).
        weights: (n,).
        balance: factors of the good and the bad part of each label.
    """
    good, bad = balance
    each = good * scores * functional.logsigmoid(logits) + bad * (1 - scores) * functional.logsigmoid(-logits)
    return -(weights * each).sum()


class Run:
    """A training run that can stop after any update and go on."""

    def __init__(
        self, prm: PRM, train: list[Row], held: list[Row], config: DistillConfig, key: str, ranks: Ranks | None = None
    ) -> None:
        self.prm, self.rows, self.held, self.config, self.key = prm, train, held, config, key
        self.ranks = ranks or Ranks()
        self.balance = _balance(train, config)
        self.lr = config.lr if config.lr is not None else default_lr(prm)
        self.per_epoch = math.ceil(len(train) / config.batch)
        self.total = self.per_epoch * config.epochs
        self.parameters = {n: p for n, p in prm.model.named_parameters() if p.requires_grad}
        decay = [p for p in self.parameters.values() if p.ndim > 1]
        rest = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, fused=True)
        self.done, self.best, self.best_loss, self.worse = 0, {}, math.inf, 0  # type: ignore[var-annotated]
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        self.state, self.lines = out / STATE, out / "log.jsonl"
        _no_dropout(prm.model)
        if config.gradient_checkpointing:
            with quiet():
                prm.classifier.gradient_checkpointing_enable({"use_reentrant": False})

    def train(self) -> None:
        """Run all epochs, or those that are left, and put back the best weights."""
        self._resume()
        config = self.config
        # Evaluation mode is training without dropout; only gradient checkpointing asks for the other.
        self.prm.model.train(config.gradient_checkpointing)
        bar = progress(self.total if self.ranks.first else None, "distil", "update", initial=self.done)
        for epoch in range(self.done // self.per_epoch, config.epochs):
            if config.patience and self.worse >= config.patience:
                break
            updates = self.plan(epoch)
            for update in updates[self.done - epoch * self.per_epoch :]:
                self.update(update, epoch)
                bar.update()
                if self.done % self.per_epoch and self.done % config.checkpoint_every == 0:
                    self._save()
            if self.held:
                loss = self.held_loss()
                self.log({"epoch": epoch + 1, "held_out_loss": loss})
                self.worse = 0 if loss < self.best_loss else self.worse + 1
                if loss < self.best_loss:
                    self.best_loss = loss
                    self.best = {n: p.detach().cpu().clone() for n, p in self.parameters.items()}
            if self.total > config.checkpoint_every and epoch + 1 < config.epochs:
                self._save()
        bar.close()
        self._restore(self.best)
        self.prm.model.eval()
        if config.gradient_checkpointing:
            with quiet():
                self.prm.classifier.gradient_checkpointing_disable()

    def plan(self, epoch: int) -> list[list[int]]:
        """The rows of each update of an epoch: shuffled, then of similar length within an update."""
        random = Random(f"{self.config.seed}/{epoch}")
        order = list(range(len(self.rows)))
        random.shuffle(order)
        size = self.config.batch
        updates = []
        for start in range(0, len(order), WINDOW * size):
            near = sorted(order[start : start + WINDOW * size], key=lambda i: len(self.rows[i].part.ids))
            updates += [near[i : i + size] for i in range(0, len(near), size)]
        random.shuffle(updates)
        return updates

    def update(self, update: Sequence[int], epoch: int) -> None:
        """One step of the optimiser, over the rows of an update, piece by piece."""
        own = [self.rows[i] for i in update]
        total = sum(self.weight(row) for row in own)
        rate = self._rate()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=self.prm.device)
        lengths = [len(row.part.ids) for row in own]
        pieces = cut(lengths, self._piece_tokens(lengths))
        for piece in self.ranks.mine(pieces):
            part = self._summed([own[i] for i in piece]) / total
            part.backward()
            loss += part.detach()
        self.ranks.add_gradients(self.parameters.values())
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.config.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.done += 1
        self.log(
            {
                "update": self.done,
                "epoch": epoch + 1,
                "loss": self.ranks.add([float(loss)])[0],
                "lr": rate,
                "grad_norm": float(norm),
                "steps": sum(len(row.scores) for row in own),
                "tokens": sum(lengths),
                "padding": sum(len(p) * max(lengths[i] for i in p) for p in pieces) - sum(lengths),
            }
        )

    def weight(self, row: Row) -> float:
        """What the row's labelled steps weigh in the mean."""
        good, bad = self.balance
        weights = row.weights if self.config.weights else (1.0,) * len(row.scores)
        return sum(w * (good * s + bad * (1 - s)) for s, w in zip(row.scores, weights, strict=True))

    @torch.no_grad()
    def held_loss(self) -> float:
        """The loss on the held-out rows."""
        total = sum(self.weight(row) for row in self.held)
        lengths = [len(row.part.ids) for row in self.held]
        pieces = self.ranks.mine(cut(lengths, self._piece_tokens(lengths)))
        found = sum(float(self._summed([self.held[i] for i in piece])) for piece in pieces)
        return self.ranks.add([found])[0] / total

    def log(self, line: dict[str, Any]) -> None:
        if not self.ranks.first:
            return
        with open(self.lines, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _piece_tokens(self, lengths: Sequence[int]) -> int:
        """The most tokens of a piece; few enough that every process has one, where there are rows enough."""
        most = self.config.batch_tokens
        return most if self.ranks.size == 1 else min(most, max(*lengths, math.ceil(sum(lengths) / self.ranks.size)))

    def _summed(self, own: Sequence[Row]) -> Tensor:
        with _autocast(self.prm, self.config):
            logits = self.prm.logits([row.part for row in own])
        scores = torch.tensor([s for row in own for s in row.scores], device=logits.device)
        weights = torch.tensor([w for row in own for w in row.weights], device=logits.device)
        return objective(logits, scores, weights if self.config.weights else torch.ones_like(weights), self.balance)

    def _rate(self) -> float:
        warm = max(1, round(self.config.warmup * self.total))
        if self.done < warm:
            return self.lr * (self.done + 1) / warm
        return self.lr * (self.total - self.done) / max(1, self.total - warm)

    def _save(self) -> None:
        self.ranks.together(self._write)

    def _write(self) -> None:
        state = {
            "key": self.key,
            "done": self.done,
            "best": self.best,
            "best_loss": self.best_loss,
            "worse": self.worse,
            "weights": {n: p.detach().cpu() for n, p in self.parameters.items()},
            "optimiser": self.optimiser.state_dict(),
            "log_bytes": self.lines.stat().st_size,
        }
        partial = self.state.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.state)

    def _resume(self) -> None:
        if not self.state.exists():
            self.ranks.together(lambda: self.lines.unlink(missing_ok=True))
            return
        state = torch.load(self.state, map_location="cpu", weights_only=True)
        if state["key"] != self.key:
            raise UsageError(f"{self.config.out}: holds an unfinished run of other data or options; remove it first")
        self.done, self.best, self.best_loss = state["done"], state["best"], state["best_loss"]
        self.worse = state["worse"]
        self._restore(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.ranks.together(lambda: os.truncate(self.lines, state["log_bytes"]))
        if self.ranks.first:
            print(f"{self.config.out}: goes on after update {self.done} of {self.total}")

    @torch.no_grad()
    def _restore(self, weights: dict[str, Tensor]) -> None:
        for name, value in weights.items():
            self.parameters[name].copy_(value)


def cut(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices in pieces of similar length, the longest first: with its padding a piece has at most `most` tokens."""
    pieces: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[pieces[-1][0]] if pieces else 0
        if pieces and longest * (len(pieces[-1]) + 1) <= most and lengths[i] >= NEAR * longest:
            pieces[-1].append(i)
        else:
            pieces.append([i])
    return pieces


def default_lr(prm: PRM) -> float:
    """2e-4 for a LoRA; for all weights 1e-5 at 7e9 of them, growing with the root of what is smaller, up to 1e-3."""
    if prm.settings.lora:
        return 2e-4
    return min(1e-3, 1e-5 * math.sqrt(7e9 / sum(p.numel() for p in prm.model.parameters())))


def _student(config: DistillConfig) -> PRM:
    """The PRM that learns: a fresh head on a base, or an earlier PRM with what it trained free again."""
    if config.from_ is None:
        assert config.base is not None
        return PRM.create(
            config.base,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_targets="all-linear" if config.lora_targets == ("all-linear",) else config.lora_targets,
            layout=config.layout,
            max_tokens=config.max_tokens,
            add_tokens=config.add_tokens,
            step_token=config.step_token,
            dtype=config.dtype if config.lora_rank is not None else "float32",
            seed=config.seed,
        )
    prm = PRM.load(config.from_, base=config.base)
    if isinstance(prm, PRM) and not prm.settings.lora:
        prm = PRM.load(config.from_, dtype="float32")
    if not isinstance(prm, PRM):
        raise ModelError(f"{config.from_}: only a PRM that this toolkit saved can be trained on")
    prm.settings = dataclasses.replace(
        prm.settings,
        calibration=Calibration(),
        threshold=0.5,
        max_tokens=config.max_tokens or prm.settings.max_tokens,
    )
    learned = ("lora_", ".modules_to_save.", "trainable_tokens")
    for name, parameter in prm.model.named_parameters():
        parameter.requires_grad_(not prm.settings.lora or any(part in name for part in learned))
    return prm


def _teacher(config: DistillConfig, teacher: Any) -> Any:
    if teacher is not None:
        return teacher
    from prm.remote import load_prm

    assert config.teacher is not None
    return load_prm(config.teacher)


def _finish(prm: PRM, run: Run) -> None:
    prm.save(run.config.out)
    run.state.unlink(missing_ok=True)


def _silent(*words: Any) -> None:
    pass


def _agreement(prm: PRM, own: list[Row], side: float) -> dict[str, float | int | None] | None:
    """How far the scores of the held-out steps agree with some targets, good from `side` on."""
    if not own:
        return None
    scores = [s for logits in prm.raw([row.part for row in own]) for s in prm.settings.calibration(logits).tolist()]
    gold = [s for row in own for s in row.scores]
    good, said = [g >= side for g in gold], [s >= prm.settings.threshold for s in scores]
    distance = sum(abs(g - s) for g, s in zip(gold, scores, strict=True)) / len(gold)
    values = {"agreement": accuracy(good, said), "kappa": cohen_kappa(good, said), "auc": auc(good, scores)}
    return {"n": len(gold), **values, "mean_distance": distance}


def _check(config: DistillConfig, teacher: Any) -> None:
    if config.base is None and config.from_ is None:
        raise UsageError("--base is required (or --from, to go on from a PRM)")
    if config.from_ is not None:
        fresh = {f.name: f.default for f in dataclasses.fields(DistillConfig)}
        kept = ("lora_rank", "lora_alpha", "lora_targets", "layout", "step_token", "add_tokens")
        if changed := [name for name in kept if getattr(config, name) != fresh[name]]:
            raise UsageError(f"--from keeps the PRM's own {', '.join(changed)}")
        if Path(config.from_).resolve() == Path(config.out).resolve():
            raise UsageError("--from and --out are the same folder; write elsewhere")
    if (config.target == "labels") != (config.teacher is None and teacher is None):
        raise UsageError("a teacher goes with the target teacher or both, and these with a teacher")
    if not 0 < config.teacher_share < 1:
        raise UsageError(f"teacher_share must lie in (0, 1), got {config.teacher_share:g}")
    for name in ("epochs", "batch", "batch_tokens", "checkpoint_every"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("lr", "max_grad_norm"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} must be > 0, got {value}")
    if not 0 <= config.warmup <= 1:
        raise UsageError(f"warmup must lie in [0, 1], got {config.warmup:g}")
    kinds = {"neutral": NEUTRAL, "unlabelled": UNLABELLED, "target": TARGETS}
    for name, allowed in (kinds | {"calibration": ("temperature", "isotonic", "none")}).items():
        if getattr(config, name) not in allowed:
            raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")
    refuse_other(config.out)


def _balance(train: list[Row], config: DistillConfig) -> tuple[float, float]:
    """Factors that make the good and the bad labels weigh the same, and as much together as before."""
    if not config.balance:
        return 1.0, 1.0
    pairs = [(s, w if config.weights else 1.0) for row in train for s, w in zip(row.scores, row.weights, strict=True)]
    good, bad = sum(s * w for s, w in pairs), sum((1 - s) * w for s, w in pairs)
    if not good or not bad:
        raise DataError(f"balance needs good and bad labels; all are {'bad' if bad else 'good'}")
    return (good + bad) / (2 * good), (good + bad) / (2 * bad)


def _no_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


@contextlib.contextmanager
def _autocast(prm: PRM, config: DistillConfig) -> Iterator[None]:
    with torch.autocast(prm.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
        yield


def _key(config: DistillConfig, trajectories: Any, targets: Targets) -> str:
    options = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out", "checkpoint_every")}
    text = json.dumps([options, [t.id for t in trajectories], targets.of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _counts(counts: Counter[str], before: str = "") -> str:
    shown = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    return before + shown if shown else ""
