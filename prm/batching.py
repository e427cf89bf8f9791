"""From trajectories to step scores: what this toolkit's PRM and other people's have in common, and `prm score`."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prm.config import option, progress, save
from prm.errors import DataError, ModelError, UsageError
from prm.records import StepLabel, Trajectory, append_jsonl, iter_jsonl, mend

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from prm.checkpoint import Settings
    from prm.render import Rendered
    from prm.shared import SharedReader

CHUNK_CHARACTERS = 1 << 20
CHUNK_TRAJECTORIES = 1024
KEEP_TOKENS = 65536
AGGREGATES = ("min", "last", "mean", "product")


class StepScorer:
    """Scores steps with a transformers backbone and a small read-out; `PRM` and `prm.foreign.ForeignPRM` are two.

    Attributes:
        backbone: the model without its head.
        tokenizer: its tokenizer.
        settings: how it reads trajectories and turns logits into scores.
        name: where it came from; part of the source of its labels.
    """

    backbone: Any
    model: Any
    tokenizer: Any
    settings: Settings
    name: str
    compiled: Any = None
    windowed = True  # several parts of a trajectory are windows over it, and not questions about its steps

    def render(self, trajectory: Trajectory, *, skip_long: bool = False) -> list[Rendered]:
        """The trajectory as this model reads it, in one part or several; each step is read in exactly one."""
        raise NotImplementedError

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits (...) in float32 of hidden states (..., width)."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """16 hex digits: what gives the same scores has the same."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.backbone.get_input_embeddings().weight.device

    def logits(self, parts: Sequence[Rendered]) -> Tensor:
        """Raw logits at all `ends` of a padded batch of parts, in order, flat: (steps,), float32, with gradients."""
        import torch

        width = max(len(p.ids) for p in parts)
        ids = torch.tensor([p.ids + [0] * (width - len(p.ids)) for p in parts], device=self.device)
        places = torch.arange(width, device=self.device)
        kwargs: dict[str, Any] = {}
        if not self.settings.causal:
            sizes = torch.tensor([len(p.ids) for p in parts], device=self.device)
            kwargs["attention_mask"] = (places < sizes[:, None]).long()
        else:
            # Padding comes after all that is read, so a causal model needs no mask, and attention is faster without.
            given = {"position_ids": places.expand(len(parts), -1), "use_cache": False}
            kwargs |= {name: value for name, value in given.items() if name in self._arguments}
        backbone = self.backbone if self.compiled is None else self.compiled
        hidden = backbone(input_ids=ids, **kwargs).last_hidden_state
        rows = [row for row, p in enumerate(parts) for _ in p.ends]
        return self.readout(hidden[rows, [end for p in parts for end in p.ends]])

    def raw(
        self, parts: Sequence[Rendered], *, batch_tokens: int = 16384, reader: SharedReader | None = None
    ) -> list[Tensor]:
        """Logits of each part, (its steps,), float32 on the CPU, in order.

        A causal model reads all parts as a tree, each distinct prefix once and nothing padded; another one, and one
        that does not read a tree as it reads alone (it is tried), in padded batches made by length.

        Args:
            batch_tokens: the most tokens at once (a longer part goes alone).
            reader: one that keeps what it read; see `session`.

        Raises:
            ModelError: a logit is not finite.
        """
        import torch

        out: list[Tensor] = [torch.empty(0)] * len(parts)
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                if self.shares:
                    reader = reader or self._reader()
                    read = reader([p.ids for p in parts], pass_tokens=batch_tokens)
                    for i, part in enumerate(parts):
                        out[i] = read[i][part.ends]
                else:
                    for batch in by_length([len(p.ids) for p in parts], batch_tokens):
                        logits = self.logits([parts[i] for i in batch]).cpu()
                        for i, own in zip(batch, logits.split([len(parts[i].ends) for i in batch]), strict=True):
                            out[i] = own
        finally:
            self.model.train(training)
        if not all(bool(own.isfinite().all()) for own in out):
            raise ModelError(f"{self.name}: a logit is not finite; the weights are broken")
        return out

    def score(
        self, trajectories: Sequence[Trajectory], *, batch_tokens: int = 16384, reader: SharedReader | None = None
    ) -> list[list[float]]:
        """P(good) of every step of every trajectory, calibrated; no steps, no scores.

        Args:
            trajectories: in any number; results come in their order. What begins alike is read once.
            batch_tokens: the most tokens at once (a longer trajectory goes alone).

        Raises:
            DataError: a step does not fit into `max_tokens` together with the task.
        """
        rendered = [self.render(t) for t in trajectories]
        return self.scores(rendered, batch_tokens=batch_tokens, reader=reader)

    def scores(
        self, rendered: Sequence[Sequence[Rendered]], *, batch_tokens: int = 16384, reader: SharedReader | None = None
    ) -> list[list[float]]:
        """`score` of what `render` gave: one list of scores for each list of parts."""
        import torch

        parts = [part for own in rendered for part in own if part.ends]
        logits = iter(self.raw(parts, batch_tokens=batch_tokens, reader=reader))
        out = []
        for own in rendered:
            read = [next(logits) for part in own if part.ends]
            out.append(self.settings.calibration(torch.cat(read)).tolist() if read else [])
        return out

    def label(self, trajectories: Sequence[Trajectory], *, batch_tokens: int = 16384) -> list[StepLabel]:
        """`score` as records: source "prm:NAME", meta with the model's fingerprint and its threshold."""
        scores = self.score(trajectories, batch_tokens=batch_tokens)
        return labels_of(self, trajectories, scores)

    def stream(
        self, trajectories: Iterable[Trajectory], *, batch_tokens: int = 16384
    ) -> Iterator[tuple[Trajectory, list[float]]]:
        """Scores of any number of trajectories, a chunk in memory at a time, in order."""
        for chunk in chunks(trajectories):
            yield from zip(chunk, self.score(chunk, batch_tokens=batch_tokens), strict=True)

    def session(self, *, keep_tokens: int = KEEP_TOKENS) -> Session:
        """A scorer that keeps what it read between calls, for trajectories that grow (search, running episodes)."""
        return Session(self, keep_tokens)

    @cached_property
    def shares(self) -> bool:
        """Whether this model reads a tree of trajectories as it reads each alone; tried once, on the model."""
        from prm.shared import readable

        training = self.model.training
        self.model.eval()
        try:
            return self.compiled is None and self.settings.causal and readable(self.backbone, self.readout)
        finally:
            self.model.train(training)

    def _reader(self, keep_tokens: int = 0) -> SharedReader:
        from prm.shared import SharedReader

        return SharedReader(self.backbone, self.readout, keep_tokens)

    @cached_property
    def _arguments(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.backbone.forward).parameters)


class Session:
    """`score` that reads only what is new since the last calls. Made by `StepScorer.session`; weights must not change.

    Attributes:
        read_tokens: how many tokens went through the model so far (0 where the model cannot share).
    """

    def __init__(self, scorer: StepScorer, keep_tokens: int) -> None:
        self.scorer = scorer
        self._reader = scorer._reader(keep_tokens) if scorer.shares else None

    def score(self, trajectories: Sequence[Trajectory], *, batch_tokens: int = 16384) -> list[list[float]]:
        """As `StepScorer.score`."""
        return self.scorer.score(trajectories, batch_tokens=batch_tokens, reader=self._reader)

    @property
    def read_tokens(self) -> int:
        return self._reader.read_tokens if self._reader else 0


def labels_of(scorer: Any, trajectories: Sequence[Trajectory], scores: Sequence[Sequence[float]]) -> list[StepLabel]:
    """Scores of a PRM as records; a step without a score has no label."""
    meta = {"model": scorer.fingerprint(), "threshold": scorer.settings.threshold}
    return [
        StepLabel(trajectory.id, i, score, f"prm:{scorer.name}", meta=meta)
        for trajectory, own in zip(trajectories, scores, strict=True)
        for i, score in enumerate(own)
    ]


def aggregate(scores: Sequence[float], how: str) -> float:
    """One number of step scores, one of `AGGREGATES`. What has no step has earned nothing: 0."""
    if not scores:
        return 0.0
    if how == "product":
        return math.prod(scores)
    return {"min": min(scores), "last": scores[-1], "mean": sum(scores) / len(scores)}[how]


def by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length, the longest first, each of at most `batch_tokens` with its padding."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def chunks(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Trajectories in lists of about a megabyte of text."""
    chunk: list[Trajectory] = []
    size = 0
    for trajectory in trajectories:
        chunk.append(trajectory)
        size += len(trajectory.task) + sum(len(s.action) + len(s.observation) for s in trajectory.steps)
        if size >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_TRAJECTORIES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreConfig:
    out: str = option(..., "append the scores here, as labels; what is there already is not scored again")
    kind: str = option("auto", "how the checkpoint reads steps: auto, prm, or whose it is (see docs/serve.md)")
    prompt: str | None = option(None, "kind yes-no: the question put after the steps")
    base: str | None = option(None, "where an adapter's base is, if it moved")
    dtype: str | None = option(None, "of the weights (default: as saved)", choices=("float32", "bfloat16"))
    compile: bool = option(False, "torch.compile the model (then in padded batches)")
    batch_tokens: int = option(16384, "the most tokens at a time")
    skip_bad: bool = option(
        False, "count bad lines and trajectories with a step longer than the model reads, and go on"
    )


def score_file(model: str, trajectories: str, config: ScoreConfig) -> int:
    """Score the trajectories of a file into a file of labels; the exit status.

    Both are streamed. Under `accelerate launch` or `torchrun` each process scores its share, on its own device.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if config.batch_tokens < 1:
        raise UsageError(f"batch_tokens must be at least 1, got {config.batch_tokens}")
    if next(iter_jsonl(trajectories, Trajectory, skip_bad=config.skip_bad), None) is None:
        raise DataError(f"{trajectories}: holds no trajectory")
    # Before a model is loaded, so before another process of the same launch writes.
    done: dict[str, int] = {}
    by: set[object] = set()
    mend(config.out)
    for label in iter_jsonl(config.out, StepLabel) if Path(config.out).exists() else ():
        by.add(label.meta.get("model"))
        done[label.trajectory_id] = max(done.get(label.trajectory_id, 0), label.step + 1)
    from prm.remote import load_prm

    prm = load_prm(
        model,
        kind=config.kind,
        prompt=config.prompt,
        base=config.base,
        dtype=config.dtype,
        compile=config.compile,
    )
    if by - {prm.fingerprint()}:
        raise UsageError(f"{config.out}: holds labels that {model} as it is now did not write")
    if rank == 0:
        save(config.out, "score", config, model=model, trajectories=trajectories)
    before = sum(done.values())
    written = too_long = 0
    bar = progress(None, "score", "trajectory")
    rows = iter_jsonl(trajectories, Trajectory, skip_bad=config.skip_bad)
    for chunk in chunks(row for i, row in enumerate(rows) if i % world == rank):
        bar.update(len(chunk))
        fresh = list({t.id: t for t in chunk if done.get(t.id, 0) < len(t.steps)}.values())
        labels, skipped = _labels(prm, fresh, config)
        too_long += skipped
        written += append_jsonl(config.out, [x for x in labels if x.step >= done.get(x.trajectory_id, 0)])
        done |= {t.id: len(t.steps) for t in fresh}
    bar.close()
    if too_long:
        print(f"{too_long} trajectories left out: a step is longer than the model reads", file=sys.stderr)
    print(f"{config.out}: {written} steps scored, {before} from before")
    return 0


def _labels(prm: Any, trajectories: list[Trajectory], config: ScoreConfig) -> tuple[list[StepLabel], int]:
    """Labels, and how many trajectories were left out because they cannot be read (with `skip_bad`)."""
    if not trajectories:
        return [], 0
    try:
        return prm.label(trajectories, batch_tokens=config.batch_tokens), 0
    except DataError:
        if not config.skip_bad:
            raise
        if len(trajectories) == 1:
            return [], 1
    middle = len(trajectories) // 2
    (first, lost), (second, more) = (_labels(prm, t, config) for t in (trajectories[:middle], trajectories[middle:]))
    return first + second, lost + more
