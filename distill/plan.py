"""What memory a run needs, before it is rented: from the model's configuration alone, no weights loaded.

Parameters are counted on the model built without memory. Activations come from running one training step of a two-layer
and a four-layer model of that configuration on tensors that have shapes and no data, counting what is alive at every
operation; the rest of the layers is the difference. So attention, LoRA, bfloat16 and checkpointing count as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from prm.checkpoint import HEADS, first_line, head_name, locate, quiet
from prm.config import option
from prm.errors import ModelError, UsageError

GIB = 2**30
UNITS = {"": GIB, "g": GIB, "gb": GIB, "gib": GIB, "m": 2**20, "mb": 2**20, "mib": 2**20}
STAGES = ("distil", "ppo")
DEPTHS = (2, 4)


@dataclass(frozen=True)
class PlanConfig:
    base: str = option(..., "the base model: a folder or a hub id; only its configuration is read")
    gpu: str = option("24GB", "the memory of a card, as makers count it: 24GB is 24 GiB")
    lora_rank: int | None = option(None, "train LoRAs of this rank on a frozen base, instead of all weights")
    dtype: str = option("bfloat16", "as in training: what is computed in", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, "as in training")
    length: int = option(2048, "tokens of the longest trajectory")
    batch: int = option(8, "distil: trajectories an update")
    batch_tokens: int = option(8192, "distil --batch-tokens, ppo --micro-tokens: the most tokens at a time")
    policy_share: float = option(0.5, "ppo: share of the tokens that the policy wrote; the rest are observations")
    episodes: int = option(16, "ppo: episodes side by side in rollouts, each with its key-value cache")
    reserve: str = option("1GB", "kept free for the driver's context and fragmentation")


@dataclass(frozen=True)
class Plan:
    """Bytes of one stage.

    Attributes:
        stage: "distil" or "ppo".
        parameters, trained: how many.
        weights: of all models and adapters of the stage.
        optimiser: AdamW's two moments, float32.
        gradients: of what is trained.
        activations: the most that is alive beside these, in training.
        cache: ppo: the key-value cache of rollouts, which is not alive at the same time as activations.
        peak: the most at once.
        capacity: of the card, less what is kept free.
        batch_tokens: what the activations are of.
        largest: the most tokens at a time that fit, in whole trajectories; 0 where not even one does.
    """

    stage: str
    parameters: int
    trained: int
    weights: int
    optimiser: int
    gradients: int
    activations: int
    cache: int
    peak: int
    capacity: int
    batch_tokens: int
    largest: int

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity


def plan(config: PlanConfig, stage: str = "distil", *, model_config: Any = None) -> Plan:
    """Plan one stage.

    distil: a token classifier; without LoRA its weights are float32 whatever is computed in, as `prm distill` has them.
    ppo: policy and critic learn in turn. With LoRA they, and the PRM, are adapters on one base; without, policy,
    critic, reference and PRM are four models.

    Args:
        stage: "distil" or "ppo".
        model_config: a transformers configuration, in place of the one of `config.base`.

    Raises:
        ModelError: there is no configuration, or no step can be run without data (data-dependent routing, for one).
        UsageError: an option makes no sense.
    """
    if stage not in STAGES:
        raise UsageError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    _check(config)
    own = _configuration(config.base) if model_config is None else model_config
    capacity = max(0, size(config.gpu) - size(config.reserve))
    with quiet():
        whole = _model(own, config, stage)
        weights, trained = _counts(whole, config, stage)
        rows = max(1, config.batch_tokens // config.length)
        rows = min(rows, config.batch) if stage == "distil" else rows
        points = [_activations(_cut(own, depth), config, stage, rows) for depth in DEPTHS if depth < _depth(own)]
        if len(points) == len(DEPTHS):
            layer = (points[1] - points[0]) / (DEPTHS[1] - DEPTHS[0])
            activations = round(points[1] + layer * (_depth(own) - DEPTHS[1]))
        else:
            activations = _activations(own, config, stage, rows)
    optimiser, gradients = 8 * trained, 4 * trained
    if stage == "ppo" and config.lora_rank is None and config.dtype == "bfloat16":
        optimiser, gradients = 4 * trained, 2 * trained  # the policy is trained in the dtype that it is loaded in
    cache = _cache(own, config) if stage == "ppo" else 0
    pieces = stage == "ppo" or config.batch * config.length > config.batch_tokens
    learning = gradients + activations if pieces else max(gradients, activations)
    still = weights + optimiser
    each = activations / rows
    room = capacity - still - (gradients if pieces else 0)
    return Plan(
        stage,
        sum(p.numel() for p in whole.parameters()),
        trained,
        weights,
        optimiser,
        gradients,
        activations,
        cache,
        still + max(learning, cache),
        capacity,
        rows * config.length,
        max(0, int(room // each)) * config.length if still + max(gradients, cache) <= capacity else 0,
    )


def describe(plans: list[Plan]) -> list[str]:
    """A table in GiB, a row a stage, and a sentence on what fits."""
    names = ("weights", "optimiser", "gradients", "activations", "cache", "peak")
    lines = ["| stage | " + " | ".join(names) + " | fits |", "|" + " - |" * (len(names) + 2)]
    for own in plans:
        values = [f"{getattr(own, name) / GIB:.2f}" for name in names]
        lines.append(f"| {own.stage} | " + " | ".join(values) + f" | {'yes' if own.fits else 'no'} |")
    for own in plans:
        head = f"{own.stage}: {own.trained / 1e6:,.1f} M of {own.parameters / 1e6:,.1f} M parameters learn; "
        head += f"{own.batch_tokens} tokens at a time take {own.peak / GIB:.1f} of {own.capacity / GIB:.1f} GiB; "
        room = f"up to {own.largest} tokens at a time fit" if own.largest else "not even one trajectory at a time fits"
        lines.append(head + room)
    return lines


def size(text: str) -> int:
    """Bytes of "24GB", "24GiB", "800MB" or "24" (GiB); makers of cards count in powers of two."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in UNITS:
        raise UsageError(f"a size is a number with GB or MB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


def _check(config: PlanConfig) -> None:
    for name in ("length", "batch", "batch_tokens", "episodes"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.lora_rank is not None and config.lora_rank < 1:
        raise UsageError(f"lora_rank must be at least 1, got {config.lora_rank}")
    if config.dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype must be float32 or bfloat16, got {config.dtype!r}")
    if not 0 < config.policy_share <= 1:
        raise UsageError(f"policy_share must lie in (0, 1], got {config.policy_share:g}")


def _configuration(base: str) -> Any:
    from transformers import AutoConfig

    folder = locate(base, ["config.json"])
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder)
    except Exception as error:
        # As with models: a broken or missing file raises whatever its reader raises.
        raise ModelError(f"{base}: no configuration can be loaded: {first_line(error)}") from error


def _depth(config: Any) -> int:
    return config.get_text_config().num_hidden_layers


def _cut(config: Any, depth: int) -> Any:
    """The configuration with fewer layers."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    return cut


def _model(config: Any, options: PlanConfig, stage: str) -> Any:
    """The model of a stage, without memory; LoRA and head float32 as in training."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    own = copy.deepcopy(config)
    full_distil = stage == "distil" and options.lora_rank is None
    dtype = torch.float32 if full_distil or options.dtype == "float32" else torch.bfloat16
    try:
        with torch.device("meta"):
            if stage == "distil":
                own.num_labels = 1
                model = AutoModelForTokenClassification.from_config(own, dtype=dtype)
                getattr(model, head_name(model)).float()
            else:
                model = AutoModelForCausalLM.from_config(own, dtype=dtype)
                model.tie_weights()
            if options.lora_rank is not None:
                model = _with_lora(model, options.lora_rank, stage)
    except ValueError as error:
        raise ModelError(f"{options.base}: no model can be made of its configuration: {first_line(error)}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _with_lora(model: Any, rank: int, stage: str) -> Any:
    from peft import LoraConfig, get_peft_model

    head = [head_name(model)] if stage == "distil" else None
    task = "TOKEN_CLS" if head else "CAUSAL_LM"
    lora = LoraConfig(r=rank, target_modules="all-linear", exclude_modules=head, modules_to_save=head, task_type=task)
    made = get_peft_model(model, lora)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return made


def _counts(model: Any, options: PlanConfig, stage: str) -> tuple[int, int]:
    """(bytes of all weights of a stage, parameters that it trains)."""
    sizes = {id(p): (p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()}.values()
    weights = sum(n * each for n, each, _ in sizes)
    trained = sum(n for n, _, learns in sizes if learns)
    if stage == "distil":
        return weights, trained
    if options.lora_rank is not None:
        return weights + 2 * 4 * trained, 2 * trained  # the critic's adapter, which learns, and the PRM's
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    backbone = trained - (0 if tied else head.numel())
    each = next(model.parameters()).element_size()
    return weights + 3 * backbone * each, trained + backbone  # reference, critic, PRM


def _activations(config: Any, options: PlanConfig, stage: str, rows: int) -> int:
    """The most bytes alive beside weights and gradients in one training step, gradients having been there before."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _model(config, options, stage)
    base = model.get_base_model() if options.lora_rank is not None else model
    backbone = getattr(base, base.base_model_prefix)
    head = next((name for name in HEADS if hasattr(base, name)), "")
    model.train(options.gradient_checkpointing)
    if options.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    length = options.length
    try:
        with FakeTensorMode(), _not_packed():
            _materialise(model)
            ids = torch.zeros(rows, length, dtype=torch.long)
            read = {"input_ids": ids, "use_cache": False, "position_ids": torch.arange(length).expand(rows, -1)}
            if stage == "distil":
                with _alive() as count, torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                    hidden = backbone(**read).last_hidden_state[:, ::32]
                    with torch.autocast("cpu", enabled=False):
                        logits = getattr(base, head)(hidden.float()).squeeze(-1)
                    functional.logsigmoid(logits).sum().backward()
                return count.peak
            with _alive() as count:
                hidden = backbone(**read).last_hidden_state
                hidden = hidden.reshape(rows * length, -1)[: max(1, round(options.policy_share * rows * length))]
                logits = base.get_output_embeddings()(hidden).float() / 1.0
                logprobs = torch.log_softmax(logits, -1)
                entropy = -(logprobs.exp() * logprobs).sum(-1)
                tokens = torch.zeros(len(hidden), 1, dtype=torch.long)
                (logprobs.gather(-1, tokens).squeeze(-1).sum() - entropy.sum()).backward()
            return count.peak + rows * length * length  # and the mask of attention
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ModelError(f"{options.base}: a step cannot be run without data: {first_line(error)}") from error


@contextmanager
def _not_packed() -> Iterator[None]:
    """transformers looks at position ids for packed rows, which needs data; there are none here."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    if before is not None:
        setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        if before is not None:
            setattr(masking_utils, name, before)


def _materialise(model: Any) -> None:
    """Give parameters and buffers shapes on a device, and parameters gradients, still without data."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                new = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
                new.grad = torch.empty_like(new) if parameter.requires_grad else None
                made[id(parameter)] = new
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations make, as long as they live; `peak` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and not any(one is given for given in args):
                storage = one.untyped_storage()
                if storage not in self._seen and not _views(storage, args):
                    bytes_ = self._seen[storage] = storage.nbytes()
                    self.now += bytes_
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, bytes_)
        return out

    def _gone(self, bytes_: int) -> None:
        self.now -= bytes_


def _views(storage: Any, args: Any) -> bool:
    """Whether what came out is a view of what went in (a weight, which is not counted)."""
    return any(isinstance(one, Tensor) and one.untyped_storage() is storage for one in args)


@contextmanager
def _alive() -> Iterator[_Alive]:
    with _Alive() as count:
        yield count


def _cache(config: Any, options: PlanConfig) -> int:
    """Bytes of the key-value cache of all episodes at their full length."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    each = 2 if options.dtype == "bfloat16" else 4
    return 2 * text.num_hidden_layers * heads * width * each * options.length * options.episodes


def presets(config: PlanConfig) -> dict[str, PlanConfig]:
    """The same run with the usual ways to save memory, each on top of the one before."""
    lora = dataclasses.replace(config, lora_rank=config.lora_rank or 16, dtype="bfloat16")
    return {
        "all weights": dataclasses.replace(config, lora_rank=None, gradient_checkpointing=False),
        "all weights, checkpointing": dataclasses.replace(config, lora_rank=None, gradient_checkpointing=True),
        f"LoRA {lora.lora_rank}, bfloat16": dataclasses.replace(lora, gradient_checkpointing=False),
        f"LoRA {lora.lora_rank}, bfloat16, checkpointing": dataclasses.replace(lora, gradient_checkpointing=True),
    }
