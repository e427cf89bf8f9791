"""The process reward model: a token classifier with one output, read where each step's action ends."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prm import checkpoint
from prm.batching import StepScorer
from prm.batching import by_length as by_length
from prm.checkpoint import Settings
from prm.errors import DataError, ModelError, UsageError
from prm.records import Trajectory
from prm.render import Layout, Rendered, chat_layout, plain_layout, text_layout, tools_key, windows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = {"plain": plain_layout, "text": text_layout}


class PRM(StepScorer):
    """A process reward model. Made by `PRM.create` (a fresh head on a base) or `PRM.load`.

    Attributes:
        model: the token classifier (or the PEFT model around it).
        tokenizer: its tokenizer.
        settings: how it reads trajectories and turns logits into scores; `dataclasses.replace` it to change them.
        name: where it came from; part of the source of its labels.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, name: str) -> None:
        self.model, self.tokenizer, self.settings, self.name = model, tokenizer, settings, name
        self.classifier = model.get_base_model() if settings.lora else model
        self.backbone = getattr(self.classifier, self.classifier.base_model_prefix)
        self.head_name = next(n for n in checkpoint.HEADS if hasattr(self.classifier, n))
        self.step_token = None if settings.step_token is None else _one_id(tokenizer, settings.step_token)

    @classmethod
    def create(
        cls,
        base: str | os.PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_targets: str | Sequence[str] = "all-linear",
        layout: str = "plain",
        max_tokens: int | None = None,
        add_tokens: Sequence[str] = (),
        step_token: str | None = None,
        dtype: str = "float32",
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> PRM:
        """Put a fresh head on a base model.

        Args:
            base: a folder or hub id of any checkpoint that loads as a token classifier (a causal language model, for
                one), or a model in memory, whose weights are copied.
            tokenizer: for a model in memory; otherwise the base's own.
            lora_rank: train a LoRA of this rank (Hu et al. 2021) with the head, on a frozen base; None trains all.
            lora_alpha: its scale times its rank; twice the rank by default.
            lora_targets: names of the layers that get one, or "all-linear".
            layout: "plain", "chat" (the tokenizer's template) or "text".
            max_tokens: the most tokens read at once; by default what the model allows.
            add_tokens: new tokens. With LoRA only their rows of the embedding are trained and saved.
            step_token: put after each action and read there; one token of the vocabulary.
            dtype: of the weights, "float32" or "bfloat16"; head and LoRA are float32 in either.
            seed: of the head, the LoRA and the rows of new tokens.
            device: by default a GPU where there is one.

        Raises:
            ModelError: the base cannot be loaded or does not fit its tokenizer, or the step token is several tokens.
            UsageError: an option makes no sense.
        """
        if layout not in ("plain", "chat", "text"):
            raise UsageError(f"layout must be plain, chat or text, got {layout!r}")
        if dtype not in DTYPES:
            raise UsageError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {max_tokens}")
        if lora_rank is not None and lora_rank < 1:
            raise UsageError(f"lora_rank must be at least 1, got {lora_rank}")
        if isinstance(base, str | os.PathLike):
            model = checkpoint.load_classifier(base, DTYPES[dtype], fresh_head=True)
            tokenizer = tokenizer or _tokenizer(checkpoint.locate(base))
            where = str(Path(base).resolve()) if Path(base).is_dir() else str(base)
        else:
            if tokenizer is None:
                raise UsageError("a model in memory needs its tokenizer")
            model, tokenizer = _as_classifier(base, DTYPES[dtype]), copy.deepcopy(tokenizer)
            where = str(Path(base.name_or_path).resolve()) if Path(base.name_or_path or "/nowhere").is_dir() else ""
        head, prefix = checkpoint.head_name(model), model.base_model_prefix
        model.config.classifier_dropout = 0.0
        base_fingerprint = checkpoint.fingerprint(getattr(model, prefix).named_parameters(), rounded=True)
        _check_fit(tokenizer, model, where or "the base")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = getattr(model, head).float()
            nn.init.normal_(module.weight, std=0.1 * module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            added = _add_tokens(model, tokenizer, add_tokens)
            if step_token is not None:
                row = model.get_input_embeddings().weight[_one_id(tokenizer, step_token)]
                if not bool(row.any()):
                    warnings.warn(f"the embedding of the step token {step_token!r} is all zeros", stacklevel=2)
            if lora_rank is not None:
                model = _with_lora(model, lora_rank, lora_alpha, lora_targets, [i for _, i in added])
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit and max_tokens and max_tokens > limit:
            raise UsageError(f"max_tokens {max_tokens} is more than the {limit} that the model reads")
        settings = Settings(
            layout=layout,
            max_tokens=max_tokens or limit,
            step_token=step_token,
            lora=lora_rank is not None,
            base=where,
            base_fingerprint=base_fingerprint,
            rows=model.get_input_embeddings().weight.shape[0],
            added=tuple(token for token, _ in added),
            vocabulary=checkpoint.vocabulary_digest(tokenizer),
            causal=_is_causal(model.get_base_model() if lora_rank is not None else model),
            dtype=dtype,
        )
        if not settings.causal:
            warnings.warn("the base reads both ways: a step's score depends on the steps after it", stacklevel=2)
        prm = cls(model.to(device or _device()).eval(), tokenizer, settings, where or "memory")
        layout_of(prm, ())
        return prm

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        base: str | os.PathLike[str] | None = None,
        kind: str = "auto",
        prompt: str | None = None,
        compile: bool = False,
    ) -> StepScorer:
        """Load what `save` wrote, or somebody else's PRM.

        Args:
            path: a folder, or a hub id.
            device: by default a GPU where there is one.
            dtype: of the weights; by default as saved. The head stays float32.
            base: where an adapter's base is now, if it moved.
            kind: "prm" (as `save` wrote it), one of `prm.foreign.KINDS`, or "auto": what the checkpoint shows it to be.
            prompt: for the kind "yes-no", the question put after the steps.
            compile: `torch.compile` the backbone; batches are then padded.

        Returns:
            A `PRM`, or a `prm.foreign.ForeignPRM`, which scores alike.

        Raises:
            ModelError: anything is missing or does not fit: the head, the base, a token, a weight; or nothing shows
                what kind of PRM it is.
        """
        folder = checkpoint.locate(path)
        if kind != "prm" and (kind != "auto" or not (folder / checkpoint.FILE).exists()):
            from prm.foreign import load_foreign

            made: StepScorer = load_foreign(folder, str(path), kind, device=device, dtype=dtype, prompt=prompt)
        else:
            made = cls._load(folder, path, device, dtype, base)
        if compile:
            made.compiled = torch.compile(made.backbone, dynamic=True)
        return made

    @classmethod
    def _load(
        cls,
        folder: Path,
        path: str | os.PathLike[str],
        device: str | torch.device | None,
        dtype: str | None,
        base: str | os.PathLike[str] | None,
    ) -> PRM:
        settings = Settings.read(folder)
        if (dtype or settings.dtype) not in DTYPES:
            raise ModelError(f"dtype must be {' or '.join(DTYPES)}, got {dtype or settings.dtype!r}")
        weights = DTYPES[dtype or settings.dtype]
        tokenizer = _tokenizer(folder)
        vocabulary = tokenizer.get_vocab()
        for token in filter(None, (*settings.added, settings.step_token)):
            if token not in vocabulary and _encoded(tokenizer, token) != 1:
                raise ModelError(f"{path}: the tokenizer lacks the token {token!r} that the model was trained with")
        if checkpoint.vocabulary_digest(tokenizer) != settings.vocabulary:
            raise ModelError(f"{path}: the tokenizer is not the one that the model was trained with")
        if settings.lora:
            model = _load_lora(folder, settings, base, weights)
        else:
            model = checkpoint.load_classifier(folder, weights, fresh_head=False)
        _check_fit(tokenizer, model, str(path))
        model = model.to(device or _device()).eval().requires_grad_(False)
        return cls(model, tokenizer, dataclasses.replace(settings, dtype=dtype or settings.dtype), str(path))

    def save(self, path: str | os.PathLike[str], *, merge: bool = False) -> None:
        """Write the PRM to a folder, whole or not at all; a PRM that was there is replaced.

        Args:
            path: the folder.
            merge: with LoRA, write a whole model, which plain transformers loads, and not the adapter and head.

        Raises:
            ModelError: `path` holds something else, or an adapter's base is only in memory.
        """
        settings = self.settings
        if settings.lora and not merge and not settings.base:
            raise ModelError("the base is only in memory; save it first, or save the PRM with merge=True")
        with checkpoint.written_whole(path) as folder, checkpoint.quiet():
            self.tokenizer.save_pretrained(folder)
            if settings.lora and merge:
                merged = copy.deepcopy(self.model).merge_and_unload()
                merged.save_pretrained(folder)
                settings = dataclasses.replace(settings, lora=False)
            elif settings.lora:
                self.model.save_pretrained(folder, save_embedding_layers=False)
                (folder / "README.md").unlink(missing_ok=True)
            else:
                self.model.save_pretrained(folder)
            checkpoint.write_settings(folder, settings)

    @property
    def head(self) -> nn.Module:
        """The linear layer from a hidden state to a logit, in float32."""
        return getattr(self.classifier, self.head_name)

    def fingerprint(self) -> str:
        """16 hex digits of weights and settings: what gives the same scores has the same."""
        own = dataclasses.replace(self.settings, base="", threshold=0.5).to_json()
        if self.settings.lora:
            from peft import get_peft_model_state_dict

            # The base counts by its own fingerprint, which is among the settings.
            weights = get_peft_model_state_dict(self.model, save_embedding_layers=False).items()
        else:
            weights = self.model.named_parameters()
        return checkpoint.fingerprint([*weights, (own, torch.empty(0))])

    def render(self, trajectory: Trajectory, *, skip_long: bool = False) -> list[Rendered]:
        """The trajectory as this model reads it; several parts where it is longer than `max_tokens`.

        Raises:
            DataError: a step does not fit together with the task. With `skip_long` it is left out.
        """
        return render_windows(self, trajectory, skip_long)

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits (...) of hidden states (..., width), in float32."""
        with torch.autocast(self.device.type, enabled=False):
            return self.head(hidden.float()).squeeze(-1)


def render_windows(prm: Any, trajectory: Trajectory, skip_long: bool) -> list[Rendered]:
    """A trajectory as the settings of a PRM with this toolkit's layouts say; the layouts are made once."""
    token = prm.settings.step_token
    tools = trajectory.meta.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"trajectory {trajectory.id}: meta.tools must be a list of objects, got {tools!r:.60}")
    return windows(
        trajectory,
        prm.tokenizer,
        layout_of(prm, tools),
        max_tokens=prm.settings.max_tokens,
        step_token=None if token is None else _one_id(prm.tokenizer, token),
        skip_long=skip_long,
    )


def layout_of(prm: Any, tools: Sequence[Any]) -> Layout:
    """The layout of a PRM for an environment with these tools."""
    layouts: dict[str, Layout] = prm.__dict__.setdefault("_layouts", {})
    key = tools_key(tools)
    if key not in layouts:
        make = LAYOUTS.get(prm.settings.layout)
        layouts[key] = make(prm.tokenizer) if make else chat_layout(prm.tokenizer, tools=tools)
    return layouts[key]


def _device() -> str:
    # Launched on several GPUs, each process takes its own.
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        with checkpoint.quiet():
            return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        # As with models: broken files raise whatever their reader raises.
        raise ModelError(f"{folder}: no tokenizer can be loaded: {checkpoint.first_line(error)}") from error


def _as_classifier(model: Any, dtype: torch.dtype) -> Any:
    """A token classifier with a copy of the backbone of a model in memory."""
    from transformers import AutoModelForTokenClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    try:
        with checkpoint.quiet(), torch.random.fork_rng():
            made = AutoModelForTokenClassification.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(f"{type(model).__name__} has no token classifier: {checkpoint.first_line(error)}") from error
    backbone = getattr(model, model.base_model_prefix, model)
    getattr(made, made.base_model_prefix).load_state_dict(backbone.state_dict())
    return made


def _check_fit(tokenizer: Any, model: Any, where: str) -> None:
    """Every id that the tokenizer can give has a row in the embedding."""
    rows, ids = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values()) + 1
    if ids > rows:
        raise ModelError(f"{where}: the tokenizer has {ids} ids, the embedding only {rows} rows")


def _encoded(tokenizer: Any, token: str) -> int:
    return len(tokenizer(token, add_special_tokens=False).input_ids)


def _one_id(tokenizer: Any, token: str) -> int:
    """The id of a token that is one. Raises ModelError: it encodes to several."""
    ids = tokenizer(token, add_special_tokens=False).input_ids
    if len(ids) == 1:
        return ids[0]
    # Alone, a SentencePiece token may encode with a blank before it.
    if (found := tokenizer.get_vocab().get(token)) is not None:
        return found
    raise ModelError(f"the step token {token!r} encodes to {len(ids)} tokens, expected one; name it in add_tokens")


def _add_tokens(model: Any, tokenizer: Any, tokens: Sequence[str]) -> list[tuple[str, int]]:
    """Add those tokens that are new, with rows near the mean of the others; an embedding is never shrunk."""
    if isinstance(tokens, str):
        raise UsageError(f"add_tokens must be a list of tokens, got {tokens!r}")
    new = [t for t in dict.fromkeys(tokens) if t not in tokenizer.get_vocab()]
    if not new:
        return []
    # As control tokens, so that no outside text can spell them.
    tokenizer.add_tokens(new, special_tokens=True)
    added = [(t, tokenizer.get_vocab()[t]) for t in new]
    rows, needed = model.get_input_embeddings().weight.shape[0], max(i for _, i in added) + 1
    if needed > rows:
        model.resize_token_embeddings(needed, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        known = weight[: min(i for _, i in added)].float()
        for token, i in added:
            if i < rows and not bool(weight[i].any()):
                warnings.warn(f"the row of the new token {token!r} was all zeros; it starts at the mean", stacklevel=3)
            weight[i] = (known.mean(0) + 0.1 * known.std(0) * torch.randn(weight.shape[1])).to(weight.dtype)
    return added


def _with_lora(model: Any, rank: int, alpha: float | None, targets: str | Sequence[str], rows: list[int]) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    head = checkpoint.head_name(model)
    config = LoraConfig(
        task_type=TaskType.TOKEN_CLS,
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=[head],
        modules_to_save=[head],
        trainable_token_indices=rows or None,
    )
    try:
        with checkpoint.quiet():
            made = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"no LoRA fits: {checkpoint.first_line(error)}") from error
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return made


def _load_lora(folder: Path, settings: Settings, base: str | os.PathLike[str] | None, dtype: torch.dtype) -> Any:
    from peft import PeftModel, get_peft_model_state_dict

    where = base or settings.base
    try:
        model = checkpoint.load_classifier(where, dtype, fresh_head=True)
    except ModelError as error:
        raise ModelError(f"{folder}: its base: {error}" + ("" if base else "; if it moved, give base=")) from None
    found = checkpoint.fingerprint(getattr(model, model.base_model_prefix).named_parameters(), rounded=True)
    if found != settings.base_fingerprint:
        raise ModelError(f"{folder}: {where} is not the base that it was trained on: the weights differ")
    model.config.classifier_dropout = 0.0
    getattr(model, checkpoint.head_name(model)).float()
    if settings.rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(settings.rows, mean_resizing=False)
    stored = checkpoint.stored_tensors(folder, "")
    try:
        with checkpoint.quiet():
            made = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:
        # A head or rows that are not in the file are a KeyError, a missing file an OSError or ValueError, ...
        what = "" if stored else ": there are no weights"
        raise ModelError(f"{folder}: the adapter cannot be loaded{what}: {checkpoint.first_line(error)}") from error
    expected = get_peft_model_state_dict(made, save_embedding_layers=False)
    if lost := sorted(set(expected) - set(stored)):
        raise ModelError(f"{folder}: {len(lost)} weights of the adapter are missing: {', '.join(lost[:3])}")
    return made


def _is_causal(classifier: Any) -> bool:
    """Whether what is read at a token is independent of the tokens after it."""
    backbone = getattr(classifier, classifier.base_model_prefix)
    ids = torch.tensor([[0, 1, 2], [0, 1, 3]], device=classifier.device)
    with torch.no_grad():
        first, second = backbone.eval()(input_ids=ids).last_hidden_state[:, 1]
    return bool(torch.allclose(first, second, atol=1e-4, rtol=1e-4))
