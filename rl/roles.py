"""The models of a PPO run: policy, reference and critic, as separate models or as adapters on one frozen base."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prm.errors import ModelError, UsageError


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences and the places of the policy's tokens in them.

    Args:
        ids, mask: (rows, length).
        row, column: (tokens,) where each policy token stands; column >= 1.
    """

    ids: Tensor
    mask: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], places: Sequence[Sequence[int]], device: Any = "cpu") -> Batch:
        """From token ids and, for each sequence, the indices of its policy tokens."""
        length = max(map(len, sequences))
        ids = torch.zeros(len(sequences), length, dtype=torch.long)
        mask = torch.zeros(len(sequences), length, dtype=torch.long)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = torch.tensor(sequence)
            mask[i, : len(sequence)] = 1
        row = torch.tensor([i for i, own in enumerate(places) for _ in own], dtype=torch.long)
        column = torch.tensor([place for own in places for place in own], dtype=torch.long)
        return cls(ids.to(device), mask.to(device), row.to(device), column.to(device))


class Roles:
    """Who is who.

    With a full policy the reference is a frozen copy, and the critic a copy of the policy's (or the PRM's) backbone
    with a value head. With a LoRA policy all share one frozen base: the critic is a second adapter, the reference the
    base with the adapter as it started. The value head starts at zero.

    Args:
        model: the policy, a causal language model or a `peft.PeftModel` around one.
        lora_rank: wrap a full model in a fresh adapter of this rank.
        critic: a model whose backbone the critic starts from (of any architecture); None is the policy's own.
        temperature: what the policy samples at; its log-probabilities are taken at it.
        gradient_checkpointing: trade time for memory in the passes that train.
    """

    def __init__(
        self,
        model: Any,
        *,
        lora_rank: int | None = None,
        critic: Any = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        from peft import LoraConfig, PeftModel, get_peft_model

        if temperature <= 0:
            raise UsageError(f"training needs a sampling temperature > 0, got {temperature}")
        self.temperature = temperature
        if lora_rank is not None and not isinstance(model, PeftModel):
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
        self.lora = isinstance(model, PeftModel)
        self.model = model
        inner = model.get_base_model() if self.lora else model
        self.head = inner.get_output_embeddings()
        if self.lora:
            if critic is not None:
                raise UsageError("with LoRA the critic is an adapter on the policy's base; it cannot start from a PRM")
            config = copy.deepcopy(model.peft_config["default"])
            config.modules_to_save = None
            self.start = {k: v.detach().clone() for k, v in model.named_parameters() if ".default." in k}
            model.add_adapter("reference", config)
            self._copy_adapter("reference")
            model.add_adapter("critic", config)
            self.backbone = backbone_of(inner)
            self.reference = self.critic = self.backbone
        else:
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            self.backbone = backbone_of(model)
            self.reference = copy.deepcopy(self.backbone).requires_grad_(False)
            self.critic = copy.deepcopy(self.backbone if critic is None else backbone_of(critic))
            self.critic.requires_grad_(True)
        width = self.critic.config.get_text_config().hidden_size
        device = next(self.backbone.parameters()).device
        self.value_head = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._no_dropout()
        if gradient_checkpointing:
            inner.gradient_checkpointing_enable({"use_reentrant": False})
            if not self.lora:
                self.critic.gradient_checkpointing_enable({"use_reentrant": False})
        if not plain_head(inner):
            raise ModelError("this architecture's logits are not its output layer applied to its last hidden state")

    @property
    def device(self) -> Any:
        return next(self.backbone.parameters()).device

    def logprobs(self, batch: Batch, role: str = "policy") -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of each policy token, each (tokens,), float32, at the sampling temperature."""
        hidden = self._hidden(batch, role)
        logits = self.head(hidden).float() / self.temperature
        logprobs = torch.log_softmax(logits, -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        tokens = batch.ids[batch.row, batch.column]
        return logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropy

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before each place, (tokens,)."""
        return self.value_head(self._hidden(batch, "critic").float()).squeeze(-1)

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What a role trains, by name."""
        if self.lora:
            adapter = "default" if role == "policy" else "critic"
            found = {k: v for k, v in self.model.named_parameters() if f".{adapter}." in k}
        else:
            found = dict((self.model if role == "policy" else self.critic).named_parameters())
        if role == "critic":
            found |= {f"value_head.{k}": v for k, v in self.value_head.named_parameters()}
        return found

    def save_policy(self, path: Any, tokenizer: Any) -> None:
        """Write the policy as a checkpoint (the adapter alone with LoRA) with its tokenizer."""
        kwargs = {"selected_adapters": ["default"]} if self.lora else {}
        self.model.save_pretrained(path, **kwargs)
        tokenizer.save_pretrained(path)

    def _hidden(self, batch: Batch, role: str) -> Tensor:
        """The backbone's last hidden state at the token before each place, (tokens, width)."""
        with self._as(role):
            backbone = {"policy": self.backbone, "reference": self.reference, "critic": self.critic}[role]
            positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
            output = backbone(input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions, use_cache=False)
        return output.last_hidden_state[batch.row, batch.column - 1]

    @contextmanager
    def _as(self, role: str) -> Iterator[None]:
        if not self.lora:
            yield
            return
        self.model.set_adapter({"policy": "default"}.get(role, role))
        try:
            with torch.no_grad() if role == "reference" else nullcontext():
                yield
        finally:
            self.model.set_adapter("default")

    def _copy_adapter(self, to: str) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.start.items():
                if (target := parameters.get(name.replace(".default.", f".{to}."))) is not None:
                    target.copy_(value)

    def _no_dropout(self) -> None:
        """Dropout would make the ratio differ from 1 before any update."""
        for module in [*self.model.modules(), *self.reference.modules(), *self.critic.modules()]:
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0


def plain_head(model: Any) -> bool:
    """Whether a causal language model's logits are its output layer applied to its last hidden state, and no more."""
    ids = torch.arange(1, 5, device=next(model.parameters()).device)[None]
    training = model.training
    model.eval()
    with torch.no_grad():
        direct = model(input_ids=ids).logits.float()
        ours = model.get_output_embeddings()(backbone_of(model)(input_ids=ids).last_hidden_state).float()
    model.train(training)
    return torch.allclose(direct, ours, atol=1e-3, rtol=1e-3)


def backbone_of(model: Any) -> Any:
    """The transformer below a model's head."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = getattr(model, model.base_model_prefix, None)
    if backbone is None:
        raise ModelError(f"{type(model).__name__} has no backbone named {model.base_model_prefix!r}")
    return backbone
