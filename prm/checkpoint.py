"""What stands in a PRM's folder, and how it is written and read whole or not at all.

A folder holds `prm.json` (the `Settings`), the tokenizer, and either a plain `AutoModelForTokenClassification`
checkpoint or a PEFT adapter with the head, whose base is named in `prm.json`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prm.config import write_text
from prm.errors import DataError, ModelError
from prm.records import parse_json

FORMAT = 1
FILE = "prm.json"
HEADS = ("score", "classifier")
OTHER_FILES = ["*.gguf", "*.pth", "*.onnx", "*.h5", "*.msgpack", "*.ot"]
MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".md")


@dataclass(frozen=True)
class Calibration:
    """From a logit to P(good): `none` is a sigmoid, `temperature` a sigmoid of logit / temperature, `isotonic` a line
    through (`knots[i]`, `values[i]`), constant beyond the first and the last knot."""

    kind: str = "none"
    temperature: float = 1.0
    knots: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("none", "temperature", "isotonic"):
            raise ModelError(f"calibration must be none, temperature or isotonic, got {self.kind!r}")
        if not self.temperature > 0:
            raise ModelError(f"temperature must be > 0, got {self.temperature}")
        if len(self.knots) != len(self.values) or (self.kind == "isotonic") != bool(self.knots):
            raise ModelError(f"{self.kind} calibration with {len(self.knots)} knots and {len(self.values)} values")
        if list(self.knots) != sorted(set(self.knots)):
            raise ModelError("the knots of an isotonic calibration must rise")

    def __call__(self, logits: Tensor) -> Tensor:
        """Scores in [0, 1] of raw logits, in float32."""
        logits = logits.float()
        if self.kind != "isotonic":
            return torch.sigmoid(logits / self.temperature)
        knots = torch.tensor(self.knots, dtype=torch.float64)
        values = torch.tensor(self.values, dtype=torch.float64)
        x = logits.cpu().double()
        if len(knots) == 1:
            return values.expand(x.shape).float().to(logits.device)
        at = torch.searchsorted(knots, x).clamp(1, len(knots) - 1)
        share = ((x - knots[at - 1]) / (knots[at] - knots[at - 1])).clamp(0, 1)
        return torch.lerp(values[at - 1], values[at], share).clamp(0, 1).float().to(logits.device)


@dataclass(frozen=True)
class Settings:
    """What a PRM needs beside its weights and tokenizer; the content of `prm.json`.

    Args:
        layout: how trajectories are rendered, "plain", "chat" or "text".
        max_tokens: the most tokens read at once; None where neither the user nor the model set a limit.
        step_token: the token put after each action and read there; None reads the action's last token.
        lora: the folder holds an adapter and the head, not a whole model.
        base: where the base model is, an absolute path or a hub id.
        base_fingerprint: of the base's weights, as it was when the head was put on it.
        rows: rows of the embedding matrix, added tokens included.
        added: tokens that the base did not have.
        vocabulary: a digest of the tokenizer's vocabulary.
        causal: a step's score does not depend on later steps.
        dtype: of the weights, "float32" or "bfloat16".
        calibration: from logits to scores.
        threshold: scores below it mean that the step is bad.
    """

    layout: str
    max_tokens: int | None
    step_token: str | None
    lora: bool
    base: str
    base_fingerprint: str
    rows: int
    added: tuple[str, ...]
    vocabulary: str
    causal: bool
    dtype: str
    calibration: Calibration = Calibration()
    threshold: float = 0.5
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Raises ModelError: the file is missing or is not what `to_json` writes."""
        file = folder / FILE
        try:
            row = parse_json(file.read_bytes())
        except FileNotFoundError:
            there = "a model, but no PRM of this toolkit" if (folder / "config.json").exists() else "no model"
            raise ModelError(f"{folder}: has no {FILE}; it holds {there}") from None
        except (OSError, DataError) as error:
            raise ModelError(f"{file}: {error}") from None
        if not isinstance(row, dict):
            raise ModelError(f"{file}: expected a JSON object")
        if row.get("format") != FORMAT:
            raise ModelError(f"{file}: format {row.get('format')!r}, this version reads {FORMAT}")
        names = {f.name for f in dataclasses.fields(cls)}
        if set(row) != names:
            raise ModelError(f"{file}: missing or unknown fields: {', '.join(sorted(set(row) ^ names))}")
        try:
            found = row["calibration"]
            calibration = Calibration(**found | {k: tuple(map(float, found[k])) for k in ("knots", "values")})
            return cls(**row | {"calibration": calibration, "added": tuple(row["added"])})
        except (TypeError, KeyError, ValueError) as error:
            raise ModelError(f"{file}: malformed: {error}") from None


# --- models -----------------------------------------------------------------------------------------------------------


def locate(path: str | os.PathLike[str], only: list[str] | None = None) -> Path:
    """The folder of a model: `path` itself, or a download of the hub's repository of that name (or of `only` files)."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise ModelError(f"{path}: is a file, expected a model's folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=only, ignore_patterns=OTHER_FILES))
    except HFValidationError:
        raise ModelError(f"{path}: no such folder") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{path}: no such folder, and no download of that name: {first_line(error)}") from None


def load_classifier(path: str | os.PathLike[str], dtype: torch.dtype, *, fresh_head: bool) -> Any:
    """A token classifier with one output.

    Args:
        path: a folder, or a hub id.
        fresh_head: the checkpoint is a base, of any task, and the head is new; otherwise the head must be in it.

    Raises:
        ModelError: it cannot be loaded, lacks weights, or has no head where it must.
    """
    from transformers import AutoModelForTokenClassification

    folder = locate(path)
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{path}: is an adapter, expected a whole model; merge it first")
    try:
        with quiet(), torch.random.fork_rng():
            model, info = AutoModelForTokenClassification.from_pretrained(
                folder, num_labels=1, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:
        # Broken files raise whatever their reader raises: OSError, ValueError, RuntimeError, SafetensorError, ...
        raise ModelError(f"{path}: cannot be loaded as a token classifier: {first_line(error)}") from error
    head = head_name(model)
    lost = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if fresh_head:
        lost = [name for name in lost if not name.startswith(f"{head}.")]
    if lost:
        raise ModelError(f"{path}: {len(lost)} weights are missing or of another shape: {', '.join(lost[:3])}")
    if not fresh_head:
        # The head is kept in float32, whatever the model's dtype.
        stored = stored_tensors(folder, f"{head}.")
        getattr(model, head).float().load_state_dict({k.removeprefix(f"{head}."): v for k, v in stored.items()})
    return model


def head_name(model: Any) -> str:
    """The name of a token classifier's head. Raises ModelError: none that is a linear layer with one output."""
    for name in HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear) and head.out_features == 1:
            return name
    raise ModelError(f"{type(model).__name__} has no linear head with one output")


def stored_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with `prefix`."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                found |= {key: tensors.get_tensor(key) for key in tensors.keys() if key.startswith(prefix)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: {first_line(error)}") from None
    return found


def fingerprint(tensors: Iterable[tuple[str, Tensor]], *, rounded: bool = False) -> str:
    """16 hex digits over names, shapes and up to 257 evenly spaced values of each tensor.

    `rounded` takes the values in bfloat16, so that a checkpoint has one fingerprint whatever dtype it is loaded in.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)][:257]
        sample = sample.to(torch.bfloat16) if rounded else sample
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def vocabulary_digest(tokenizer: Any) -> str:
    """16 hex digits over the tokens and their ids."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' bars and reports on new weights: what is missing is checked here, by name."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- folders ----------------------------------------------------------------------------------------------------------


def refuse_other(path: str | os.PathLike[str]) -> None:
    """Raises ModelError: `path` is a file, or holds files of a model that is no PRM."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ModelError(f"{path}: is a file, expected a folder to write")
    if (ours := _model_files(target)) and not (target / FILE).exists():
        raise ModelError(f"{path}: holds {ours[0].name} but no PRM; remove it or write elsewhere")


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `path` at the end, in one step.

    Files and folders in `path` that are no part of a model (logs, options) stay; a model that was there is replaced.

    Raises:
        ModelError: as `refuse_other`.
    """
    refuse_other(path)
    target = Path(path)
    there = list(target.iterdir()) if target.is_dir() else []
    ours = _model_files(target)
    new = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        folders = [p.name for p in there if p.is_dir()]
        for file in (p for p in there if p.is_file() and p not in ours):
            _link(file, new / file.name)
        if not target.exists():
            os.rename(new, target)
            return
        _exchange(new, target)
        for name in folders:
            os.rename(new / name, target / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _model_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in MODEL_FILES)


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the system can (Linux); otherwise in two, the old one kept beside."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 is not None and renameat2(here, os.fsencode(new), here, os.fsencode(old), both) == 0:
        return
    aside = new.with_suffix(".old")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def write_settings(folder: Path, settings: Settings) -> None:
    write_text(folder / FILE, settings.to_json())
