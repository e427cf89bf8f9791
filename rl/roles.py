"""The models of a PPO run: policy, reference, critic and PRM, as separate models or as adapters on one frozen base."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from prm import checkpoint
from prm.errors import ModelError, UsageError
from prm.model import PRM


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
    base with the adapter as it started (the bare base where the adapter is fresh), and a PRM that is an adapter on the
    same base can be a third (`adapter_prm`). The value head starts at zero.

    Args:
        model: the policy, a causal language model or a `peft.PeftModel` around one.
        lora_rank: wrap a full model in a fresh adapter of this rank.
        critic: a model whose backbone the critic starts from (of any architecture); with LoRA the folder of a PRM that
            is an adapter on the policy's base. None is the policy's own; False: there is no critic.
        temperature: what the policy samples at; its log-probabilities are taken at it.
        gradient_checkpointing: trade time for memory in the passes that train.
        seed: of fresh adapters.
    """

    def __init__(
        self,
        model: Any,
        *,
        lora_rank: int | None = None,
        critic: Any = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        from peft import LoraConfig, PeftModel, get_peft_model

        if temperature <= 0:
            raise UsageError(f"training needs a sampling temperature > 0, got {temperature}")
        self.temperature = temperature
        fresh = lora_rank is not None and not isinstance(model, PeftModel)
        if lora_rank is not None and not fresh and model.peft_config["default"].r != lora_rank:
            raise UsageError(f"the policy is an adapter of rank {model.peft_config['default'].r}, not {lora_rank}")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if lora_rank is not None and fresh:
                alpha = 2 * lora_rank
                lora = LoraConfig(r=lora_rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
                model = get_peft_model(model, lora)
            self.lora = isinstance(model, PeftModel)
            self.model = model
            inner = model.get_base_model() if self.lora else model
            self.head = inner.get_output_embeddings()
            self.backbone = backbone_of(inner)
            if self.lora:
                self._adapters(fresh, critic)
            else:
                self._copies(critic)
        width = (self.critic or self.backbone).config.get_text_config().hidden_size
        device = next(self.backbone.parameters()).device
        self.value_head = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._no_dropout()
        if gradient_checkpointing:
            self.model.train()  # in evaluation mode transformers does not checkpoint
            inner.gradient_checkpointing_enable({"use_reentrant": False})
            if not self.lora and self.critic is not None:
                self.critic.train().gradient_checkpointing_enable({"use_reentrant": False})
        if not plain_head(inner):
            raise ModelError("this architecture's logits are not its output layer applied to its last hidden state")

    def _adapters(self, fresh: bool, critic: Any) -> None:
        """One base: the reference is it as the policy started, the critic an adapter of its own."""
        config = copy.deepcopy(self.model.peft_config["default"])
        config.modules_to_save = None
        self.reference = self.backbone
        self.critic = None if critic is False else self.backbone
        self.bare_reference = fresh
        if not fresh:
            start = {k: v.detach().clone() for k, v in self.model.named_parameters() if ".default." in k}
            self.model.add_adapter("reference", config)
            self._set_adapter("reference", {k.replace(".default.", ".reference."): v for k, v in start.items()})
        if isinstance(critic, str | Path):
            self.load_prm_adapter(critic, "critic")
        elif critic is None:
            self.model.add_adapter("critic", config)
        elif critic is not False:
            raise UsageError("with LoRA the critic starts from a PRM that is an adapter on the policy's base")

    def _copies(self, critic: Any) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        self.reference = copy.deepcopy(self.backbone).requires_grad_(False)
        self.critic = None
        if critic is not False:
            self.critic = copy.deepcopy(self.backbone if critic is None else backbone_of(critic))
            self.critic.requires_grad_(True)

    @property
    def device(self) -> Any:
        return next(self.backbone.parameters()).device

    def load_prm_adapter(self, folder: Any, name: str) -> dict[str, Tensor]:
        """Put the adapter of a PRM on the policy's base under a name; returns the stored tensors, head included.

        Raises:
            UsageError: the PRM is no adapter, or not one on the policy's base.
        """
        from peft import LoraConfig, PeftConfig

        found = checkpoint.locate(folder)
        settings = checkpoint.Settings.read(found)
        base = ((k.replace(".base_layer", ""), v) for k, v in self.backbone.named_parameters() if ".lora_" not in k)
        if not (self.lora and settings.lora and not settings.added):
            raise UsageError(f"{folder}: only a PRM that is a LoRA adapter without tokens of its own can share a base")
        if checkpoint.fingerprint(base, rounded=True) != settings.base_fingerprint:
            raise UsageError(f"{folder}: its base is not the policy's: the weights differ")
        own = PeftConfig.from_pretrained(str(found))
        targets = own.target_modules if isinstance(own.target_modules, str) else sorted(own.target_modules)
        config = LoraConfig(
            r=own.r,
            lora_alpha=own.lora_alpha,
            target_modules=targets,
            use_rslora=own.use_rslora,
            rank_pattern=own.rank_pattern,
            alpha_pattern=own.alpha_pattern,
            task_type="CAUSAL_LM",
        )
        self.model.add_adapter(name, config)
        stored = checkpoint.stored_tensors(found, "")
        # A causal model and a classifier hold the same backbone, so its weights have the same names in both.
        weights = {k.replace(".weight", f".{name}.weight"): v for k, v in stored.items() if ".lora_" in k}
        self._set_adapter(name, weights)
        return stored

    def _set_adapter(self, name: str, weights: dict[str, Tensor]) -> None:
        """Set an adapter's weights; all must be there, and no others."""
        own = {k: v for k, v in self.model.named_parameters() if f".{name}." in k}
        if set(own) != set(weights):
            raise ModelError(f"the adapter has other weights: {', '.join(sorted(set(own) ^ set(weights))[:3])}")
        with torch.no_grad():
            for key, parameter in own.items():
                parameter.copy_(weights[key])

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

    def backward(self, loss: Tensor, role: str) -> None:
        """Back-propagate a role's loss with its adapter on: checkpointing runs the forward pass once more."""
        with self.as_role(role):
            loss.backward()

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What a role trains, by name."""
        if self.lora:
            adapter = "default" if role == "policy" else "critic"
            found = {k: v for k, v in self.model.named_parameters() if f".{adapter}." in k}
        else:
            model: Any = self.model if role == "policy" else self.critic
            found = dict(model.named_parameters())
        if role == "critic":
            found |= {f"value_head.{k}": v for k, v in self.value_head.named_parameters()}
        return found

    def save_policy(self, path: Any, tokenizer: Any) -> None:
        """Write the policy as a checkpoint (the adapter alone with LoRA) with its tokenizer."""
        kwargs = {"selected_adapters": ["default"]} if self.lora else {}
        with checkpoint.quiet():
            self.model.save_pretrained(path, **kwargs)
            tokenizer.save_pretrained(path)

    def _hidden(self, batch: Batch, role: str) -> Tensor:
        """The backbone's last hidden state at the token before each place, (tokens, width)."""
        with self.as_role(role):
            backbone = {"policy": self.backbone, "reference": self.reference, "critic": self.critic}[role]
            positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
            output = backbone(input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions, use_cache=False)
        return output.last_hidden_state[batch.row, batch.column - 1]

    @contextmanager
    def as_role(self, role: str) -> Iterator[None]:
        """With LoRA: what runs inside runs with the role's adapter."""
        if not self.lora:
            yield
        elif role == "reference" and self.bare_reference:
            with torch.no_grad(), self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter({"policy": "default"}.get(role, role))
            try:
                with nullcontext() if role in ("policy", "critic") else torch.no_grad():
                    yield
            finally:
                self.model.set_adapter("default")

    def _no_dropout(self) -> None:
        """Dropout would make the ratio differ from 1 before any update."""
        models = [self.model, self.reference, *([self.critic] if self.critic is not None else [])]
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0


class AdapterPRM(PRM):
    """A PRM on a base that other roles use too: its adapter is on only while it reads. Made by `adapter_prm`."""

    def __init__(self, roles: Roles, folder: str, head: nn.Linear, digest: str) -> None:
        from transformers import AutoTokenizer

        found = checkpoint.locate(folder)
        classifier = SimpleNamespace(base_model_prefix="backbone", backbone=roles.backbone, score=head)
        model = SimpleNamespace(get_base_model=lambda: classifier)
        super().__init__(model, AutoTokenizer.from_pretrained(found), checkpoint.Settings.read(found), folder)
        self.model, self.roles, self.digest = roles.model, roles, digest

    def raw(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        with self.roles.as_role("prm"):
            return super().raw(*args, **kwargs)

    def fingerprint(self) -> str:
        return self.digest


def adapter_prm(folder: Any, roles: Roles) -> AdapterPRM:
    """A PRM that is a LoRA adapter, loaded as one more adapter on the policy's frozen base.

    Raises:
        UsageError: it is no adapter, or not one on the policy's base.
        ModelError: the folder holds no PRM, or one without a head.
    """
    stored = roles.load_prm_adapter(folder, "prm")
    heads = {k.rpartition(".")[2]: v.float() for k, v in stored.items() if ".lora_" not in k}
    if "weight" not in heads:
        raise ModelError(f"{folder}: the head is missing")
    head = nn.Linear(heads["weight"].shape[1], 1, bias="bias" in heads, device=roles.device)
    head.load_state_dict(heads)
    own = dataclasses.replace(checkpoint.Settings.read(checkpoint.locate(folder)), base="", threshold=0.5).to_json()
    digest = checkpoint.fingerprint([*stored.items(), (own, torch.empty(0))])  # as `PRM.fingerprint` makes it
    return AdapterPRM(roles, str(folder), head, digest)


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
