"""Other people's PRMs behind the same `score`, with the token ids and the arithmetic of their authors' own code.

    trl            TRL's PRMTrainer: a token classifier with two classes, read at the newline after each step
    qwen-math      Qwen2.5-Math-PRM (arXiv 2501.07301): two classes at the token <extra_0> after each step
    math-shepherd  Math-Shepherd (arXiv 2312.08935): "+" against "-" at the tag ки after each step
    rlhflow        RLHFlow: each step is a user turn, answered "+"; "+" against "-" where that answer is predicted
    skywork        Skywork-o1-Open-PRM: a value head, read at the newline after each step, through a sigmoid
    yes-no         a language model that is asked about each step: "Yes" against "No"

A step's text is its action; the observation before it, where there is one, stands in front of it with a newline, as
`prm convert --to trl` writes it. The head comes from the checkpoint's files: one that is missing or has another shape
is an error. Only the rows of the language-model head that are compared are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prm import checkpoint
from prm.batching import StepScorer
from prm.checkpoint import Settings
from prm.errors import DataError, ModelError, UsageError
from prm.foreign_text import SEPARATOR, TAG, Pieces, Reading, single
from prm.records import Trajectory
from prm.render import Rendered

KINDS = ("trl", "qwen-math", "math-shepherd", "rlhflow", "skywork", "yes-no")
PUBLISHED = {
    "math-shepherd-mistral-7b-prm": "math-shepherd",
    "Llama3.1-8B-PRM-Mistral-Data": "rlhflow",
    "Llama3.1-8B-PRM-Deepseek-Data": "rlhflow",
}
PROMPTS = {
    "qwen-math": "Please reason step by step, and put your final answer within \\boxed{}.",
    "yes-no": "Is the last step correct? Answer Yes or No.",
}
PROMPT_USE = "the system prompt of qwen-math, the question of yes-no, or what stands before each step, {k} its number"


class ForeignPRM(StepScorer):
    """Somebody else's PRM. Made by `PRM.load`.

    Attributes:
        kind: one of `KINDS`.
    """

    windowed = False

    def __init__(self, backbone: Any, head: nn.Module, tokenizer: Any, settings: Settings, name: str, reading: Reading):
        self.backbone = self.model = backbone
        self.head, self.tokenizer, self.settings, self.name, self.prompt = (
            head,
            tokenizer,
            settings,
            name,
            reading.prompt,
        )
        self.kind = settings.layout
        self._pieces: Callable[[str, list[str]], list[Pieces]] = {
            "trl": reading.trl,
            "qwen-math": reading.qwen_math,
            "math-shepherd": reading.math_shepherd,
            "rlhflow": reading.rlhflow,
            "skywork": reading.skywork,
            "yes-no": reading.yes_no,
        }[self.kind]

    def readout(self, hidden: Tensor) -> Tensor:
        """The logit of P(good): of two classes, the difference of theirs, so that its sigmoid is their softmax."""
        with torch.autocast(self.device.type, enabled=False):
            logits = self.head(hidden.float())
            if self.kind in ("math-shepherd", "rlhflow", "yes-no"):
                logits = _scaled(logits, self.backbone.config.get_text_config())
            return logits[..., 0] if logits.shape[-1] == 1 else logits[..., 1] - logits[..., 0]

    def render(self, trajectory: Trajectory, *, skip_long: bool = False) -> list[Rendered]:
        """The trajectory as its authors' code reads it.

        Raises:
            DataError: a step ends beyond `max_tokens` (with `skip_long` it is left out), or cannot be told from a mark.
        """
        where = f"trajectory {trajectory.id}"
        try:
            read = self._pieces(trajectory.task, self._texts(trajectory))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        out, first = [], 0
        limit = self.settings.max_tokens
        for ids, ends in read:
            kept = [end for end in ends if limit is None or end < limit]
            if len(kept) < len(ends) and not skip_long:
                step = first + len(kept)
                raise DataError(
                    f"{where}: step {step} with all before it takes {ends[len(kept)] + 1} tokens, the limit is {limit}"
                )
            if kept:
                out.append(Rendered(ids[: kept[-1] + 1], kept, [], first))
            first += len(ends)
        return out

    def fingerprint(self) -> str:
        """16 hex digits of weights, kind and prompt."""
        named = [*self.backbone.named_parameters(), *((f"head.{n}", p) for n, p in self.head.named_parameters())]
        own = f"{self.kind} {self.prompt} {self.settings.vocabulary}"
        return checkpoint.fingerprint([*named, (own, torch.empty(0))])

    def _texts(self, trajectory: Trajectory) -> list[str]:
        texts, before = [], ""
        for k, step in enumerate(trajectory.steps):
            text = f"{before}\n{step.action}" if before else step.action
            if self.kind not in PROMPTS:
                text = self.prompt.replace("{k}", str(k + 1)) + text
            texts.append(text)
            before = step.observation
        return texts


# --- loading ----------------------------------------------------------------------------------------------------------


def load_foreign(
    folder: Path,
    name: str,
    kind: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    prompt: str | None = None,
) -> ForeignPRM:
    """Load a checkpoint of one of `KINDS`, or, with "auto", of the kind that it shows itself to be.

    Raises:
        ModelError: the kind cannot be seen, or the checkpoint is not of it: its head or a weight is missing or has
            another shape, or a mark is not one token.
    """
    from prm.model import DTYPES, _check_fit, _device, _tokenizer

    if kind not in ("auto", *KINDS):
        raise UsageError(f"kind must be auto, prm or one of {', '.join(KINDS)}, got {kind!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    config, names = _look(folder)
    kind = _detect(folder, name, config, names) if kind == "auto" else kind
    tokenizer = _tokenizer(folder)
    reading = Reading(kind, tokenizer, prompt if prompt is not None else PROMPTS.get(kind, ""))
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    weights = dtype or ("bfloat16" if stored in ("bfloat16", "float16") else "float32")
    backbone = _backbone(folder, DTYPES[weights])
    head = _head(folder, kind, config.num_labels, backbone, tokenizer)
    _check_fit(tokenizer, backbone, name)
    limits = (
        getattr(backbone.config.get_text_config(), "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    )
    settings = Settings(
        layout=kind,
        max_tokens=min((n for n in limits if n and n < 1 << 30), default=None),
        step_token={"qwen-math": SEPARATOR, "math-shepherd": TAG}.get(kind),
        lora=False,
        base=str(folder),
        base_fingerprint="",
        rows=backbone.get_input_embeddings().weight.shape[0],
        added=(),
        vocabulary=checkpoint.vocabulary_digest(tokenizer),
        causal=_causal(backbone),
        dtype=weights,
    )
    place = device or _device()
    backbone = backbone.to(place).eval().requires_grad_(False)
    head = head.float().to(place).eval().requires_grad_(False)
    return ForeignPRM(backbone, head, tokenizer, settings, name, reading)


def _look(folder: Path) -> tuple[Any, frozenset[str]]:
    """Its configuration and the names of its tensors."""
    from transformers import AutoConfig

    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder}: has no {checkpoint.FILE}; it holds an adapter, merge it into its base first")
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder}: has no {checkpoint.FILE}; it holds no model")
    try:
        with checkpoint.quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # As with models: broken files raise whatever their reader raises.
        raise ModelError(f"{folder}: {checkpoint.first_line(error)}") from error
    return config, frozenset(_tensors(folder, lambda _: False))


def _detect(folder: Path, name: str, config: Any, names: frozenset[str]) -> str:
    classes = " ".join(getattr(config, "architectures", None) or ())
    if any(n.startswith("v_head.") for n in names):
        return "skywork"
    if "ForProcessRewardModel" in classes or {"score.0.weight", "score.2.weight"} <= names:
        return "qwen-math"
    if "ForTokenClassification" in classes:
        return "trl"
    for known in (name, str(getattr(config, "_name_or_path", ""))):
        if (kind := PUBLISHED.get(known.rstrip("/").rsplit("/", 1)[-1])) is not None:
            return kind
    raise ModelError(
        f"{folder}: has no {checkpoint.FILE}; it holds a model, but no PRM of this toolkit; if it is somebody else's, "
        f"say whose: kind {', '.join(KINDS)}"
    )


def _backbone(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModel

    try:
        with checkpoint.quiet(), torch.random.fork_rng():
            model, info = AutoModel.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(f"{folder}: cannot be loaded: {checkpoint.first_line(error)}") from error
    lost = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if lost := [n for n in lost if not n.startswith("pooler.")]:
        raise ModelError(f"{folder}: {len(lost)} weights are missing or of another shape: {', '.join(lost[:3])}")
    return model


def _head(folder: Path, kind: str, labels: int, backbone: Any, tokenizer: Any) -> nn.Module:
    width = backbone.config.get_text_config().hidden_size
    if kind == "trl":
        if labels != 2:
            raise ModelError(f"{folder}: has no {checkpoint.FILE}, and {labels} outputs where a TRL model has two")
        names = _tensors(folder, lambda _: False)
        return _linears(
            folder, [(next((f"{h}." for h in checkpoint.HEADS if f"{h}.weight" in names), "score."), width, 2)]
        )
    if kind == "qwen-math":
        return _linears(folder, [("score.0.", width, width), ("score.2.", width, 2)])
    if kind == "skywork":
        return _linears(folder, [("v_head.summary.", width, 1)])
    if kind == "yes-no":
        pairs = ((" No", " Yes"), ("No", "Yes")) if not getattr(tokenizer, "chat_template", None) else (("No", "Yes"),)
        encoded = [[tokenizer(w, add_special_tokens=False).input_ids for w in pair] for pair in pairs]
        rows = next(([a[0], b[0]] for a, b in encoded if len(a) == len(b) == 1), None)
        if rows is None:
            raise ModelError(f"{folder}: Yes and No are not one token each")
    elif kind == "rlhflow":
        rows = [single(tokenizer, "-"), single(tokenizer, "+")]
    else:
        pair = tokenizer("+ -", add_special_tokens=False).input_ids
        if len(pair) != 2:
            raise ModelError(f"{folder}: '+ -' encodes to {len(pair)} tokens, expected two")
        rows = pair[::-1]
    return _rows(folder, backbone, rows, width)


def _linears(folder: Path, parts: Sequence[tuple[str, int, int]]) -> nn.Module:
    """Linear layers with ReLU between them, from the checkpoint's files; a bias where there is one."""
    layers: list[nn.Module] = []
    for prefix, inputs, outputs in parts:
        stored = _tensors(folder, lambda name, prefix=prefix: name.startswith(prefix))  # type: ignore[misc]
        weight = stored.get(f"{prefix}weight")
        if weight is None:
            raise ModelError(f"{folder}: the head {prefix}weight is missing")
        if tuple(weight.shape) != (outputs, inputs):
            raise ModelError(
                f"{folder}: the head {prefix}weight is {tuple(weight.shape)}, expected {(outputs, inputs)}"
            )
        bias = stored.get(f"{prefix}bias")
        layer = nn.Linear(inputs, outputs, bias=bias is not None)
        layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        layers += [nn.ReLU(), layer] if layers else [layer]
    return nn.Sequential(*layers)


def _rows(folder: Path, backbone: Any, rows: list[int], width: int) -> nn.Module:
    """Those rows of the language-model head, of the embedding where the two are tied."""
    config = backbone.config
    bias = None
    if getattr(config, "tie_word_embeddings", False) or getattr(config.get_text_config(), "tie_word_embeddings", False):
        weight = backbone.get_input_embeddings().weight.detach()[rows]
    else:
        stored = _tensors(folder, lambda name: name.startswith("lm_head."))
        if "lm_head.weight" not in stored:
            raise ModelError(f"{folder}: the head lm_head.weight is missing, so there is nothing to read + and - from")
        whole, bias = stored["lm_head.weight"], stored.get("lm_head.bias")
        if whole.ndim != 2 or whole.shape[1] != width or whole.shape[0] <= max(rows):
            expected = f"more than {max(rows)} rows of {width}"
            raise ModelError(f"{folder}: the head lm_head.weight is {tuple(whole.shape)}, expected {expected}")
        weight = whole[rows]
    layer = nn.Linear(width, len(rows), bias=bias is not None)
    layer.load_state_dict({"weight": weight.float()} | ({} if bias is None else {"bias": bias[rows].float()}))
    return layer


def _scaled(logits: Tensor, config: Any) -> Tensor:
    """What a language model does to its logits after the head."""
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def _tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The names of a checkpoint's tensors, with those that are wanted (others are empty)."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                found |= {n: tensors.get_tensor(n) if wanted(n) else torch.empty(0) for n in tensors.keys()}  # noqa: SIM118
        for file in sorted(folder.glob("pytorch_model*.bin")) if not found else ():
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            found |= {n: t if wanted(n) else torch.empty(0) for n, t in stored.items()}
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{folder}: {checkpoint.first_line(error)}") from None
    return {n: t for n, t in found.items() if t.numel() or not wanted(n)}


def _causal(backbone: Any) -> bool:
    ids = torch.tensor([[0, 1, 2], [0, 1, 3]], device=backbone.get_input_embeddings().weight.device)
    with torch.no_grad():
        first, second = backbone.eval()(input_ids=ids).last_hidden_state[:, 1]
    return bool(torch.allclose(first, second, atol=1e-4, rtol=1e-4))
