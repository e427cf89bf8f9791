"""A PRM for other programs: a whole plain checkpoint, or ONNX.

merged  an `AutoModelForTokenClassification` checkpoint with the tokenizer: plain transformers and `vllm serve`
        read it, and so does `PRM.load`
onnx    `model.onnx`, from `input_ids` (1 or more rows, int64) to `logits` (rows, tokens), with the tokenizer;
        `OnnxPRM.load` scores with it, without torch's model
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prm import checkpoint
from prm.batching import StepScorer, by_length
from prm.checkpoint import Settings
from prm.config import option
from prm.errors import ModelError, UsageError
from prm.render import Rendered

FILE = "model.onnx"
TOLERANCE = 1e-3


@dataclass(frozen=True)
class ExportConfig:
    out: str = option(..., "the folder to write; must not exist yet")
    to: str = option("merged", "what to write", choices=("merged", "onnx"))
    base: str | None = option(None, "where an adapter's base is, if it moved")
    dtype: str | None = option(None, "of the merged weights (default: as saved)", choices=("float32", "bfloat16"))


def export(model: str, config: ExportConfig) -> Path:
    """Write a PRM in another form; the folder.

    Raises:
        UsageError: the folder exists, or an option does not fit.
        ModelError: the PRM cannot be loaded, or ONNX gives other logits than it.
    """
    from prm.model import PRM

    if Path(config.out).exists():
        raise UsageError(f"{config.out} exists already; remove it or write elsewhere")
    if config.to == "onnx" and config.dtype not in (None, "float32"):
        raise UsageError("onnx is written in float32")
    dtype = "float32" if config.to == "onnx" else config.dtype
    prm = PRM.load(model, kind="prm", base=config.base, dtype=dtype, device="cpu")
    assert isinstance(prm, PRM)
    if config.to == "onnx":
        write_onnx(prm, config.out)
    else:
        prm.save(config.out, merge=True)
    return Path(config.out)


class _Logits(nn.Module):
    """From ids to a logit a token, with no more inputs than that."""

    def __init__(self, prm: Any) -> None:
        super().__init__()
        self.backbone, self.head = prm.backbone, prm.head

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.head(hidden.float()).squeeze(-1)


def write_onnx(prm: Any, path: str | os.PathLike[str]) -> None:
    """Write the PRM as ONNX, and check on drawn ids that onnxruntime gives its logits.

    Raises:
        ModelError: it reads both ways (its padding would need a mask), onnx is not installed, the model cannot be
            exported, or its logits differ.
    """
    if not prm.settings.causal:
        raise ModelError(f"{prm.name}: reads both ways, which is not exported to ONNX")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        _need(module)
    rows = prm.backbone.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    example = torch.randint(rows, (2, 9), generator=draw)
    sizes = {0: torch.export.Dim("rows", min=1), 1: torch.export.Dim("tokens", min=2)}
    settings = dataclasses.replace(prm.settings, lora=False, dtype="float32")
    with checkpoint.written_whole(path) as folder, torch.no_grad():
        with _quiet():
            try:
                torch.onnx.export(
                    _Logits(prm).eval(),
                    (example,),
                    folder / FILE,
                    input_names=["input_ids"],
                    output_names=["logits"],
                    dynamic_shapes=(sizes,),
                    dynamo=True,
                )
            except Exception as error:
                # The exporter raises whatever it met in the model's code.
                raise ModelError(f"{prm.name}: cannot be exported: {checkpoint.first_line(error)}") from error
            prm.tokenizer.save_pretrained(folder)
        checkpoint.write_settings(folder, settings)
        check(prm, _session(folder))


@torch.no_grad()
def check(prm: Any, runtime: Any) -> None:
    """Raises ModelError: an onnxruntime session gives other logits than the PRM on drawn ids."""
    rows = prm.backbone.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(1)
    for shape in ((1, 2), (3, 17), (1, 40)):
        ids = torch.randint(rows, shape, generator=draw)
        expected = prm.head(prm.backbone(input_ids=ids).last_hidden_state.float()).squeeze(-1)
        found = torch.from_numpy(runtime.run(["logits"], {"input_ids": ids.numpy()})[0])
        if not bool((found - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))):
            raise ModelError(f"{prm.name}: ONNX gives other logits on {shape[0]} x {shape[1]} tokens")


class OnnxPRM(StepScorer):
    """A PRM that onnxruntime runs. Scores as the PRM that it was made of.

    Attributes:
        runtime: the `onnxruntime.InferenceSession`.
    """

    def __init__(self, runtime: Any, tokenizer: Any, settings: Settings, name: str) -> None:
        self.runtime, self.tokenizer, self.settings, self.name = runtime, tokenizer, settings, name
        self.__dict__["shares"] = False

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OnnxPRM:
        """Load what `prm export --to onnx` wrote. Raises ModelError: it is not there, or its parts do not fit."""
        from prm.model import _tokenizer

        folder = checkpoint.locate(path)
        settings, tokenizer = Settings.read(folder), _tokenizer(folder)
        if checkpoint.vocabulary_digest(tokenizer) != settings.vocabulary:
            raise ModelError(f"{path}: the tokenizer is not the one that the model was trained with")
        return cls(_session(folder), tokenizer, settings, str(path))

    def render(self, trajectory: Any, *, skip_long: bool = False) -> list[Rendered]:
        """As `PRM.render`."""
        from prm.model import render_windows

        return render_windows(self, trajectory, skip_long)

    def raw(self, parts: Sequence[Rendered], *, batch_tokens: int = 16384, reader: Any = None) -> list[Tensor]:
        """As `StepScorer.raw`, in padded batches."""
        out: list[Tensor] = [torch.empty(0)] * len(parts)
        for batch in by_length([len(p.ids) for p in parts], batch_tokens):
            width = max(2, *(len(parts[i].ids) for i in batch))
            ids = torch.tensor([parts[i].ids + [0] * (width - len(parts[i].ids)) for i in batch])
            logits = torch.from_numpy(self.runtime.run(["logits"], {"input_ids": ids.numpy()})[0])
            if not bool(logits.isfinite().all()):
                raise ModelError(f"{self.name}: a logit is not finite; the weights are broken")
            for row, i in enumerate(batch):
                out[i] = logits[row, parts[i].ends]
        return out

    def fingerprint(self) -> str:
        """16 hex digits of settings and the file."""
        import hashlib

        digest = hashlib.sha256(self.settings.to_json().encode())
        folder = checkpoint.locate(self.name)
        for file in sorted(folder.glob(f"{FILE}*")):
            with open(file, "rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
        return digest.hexdigest()[:16]


def _session(folder: Path) -> Any:
    _need("onnxruntime")
    import onnxruntime

    if not (folder / FILE).exists():
        raise ModelError(f"{folder}: has no {FILE}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(
            str(folder / FILE), options, providers=onnxruntime.get_available_providers()
        )
    except Exception as error:
        raise ModelError(f"{folder / FILE}: {checkpoint.first_line(error)}") from error


def _need(module: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise ModelError(f"{module} is not installed; pip install 'prm-toolkit[onnx]'")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's report of its stages."""
    import logging

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [x.level for x in loggers]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), checkpoint.quiet():
        warnings.simplefilter("ignore")
        for x in loggers:
            x.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for x, level in zip(loggers, levels, strict=True):
                x.setLevel(level)
