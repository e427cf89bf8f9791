"""Warm start: behaviour cloning on good trajectories, with the loss on the policy's own tokens only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prm.config import option
from prm.errors import DataError, ModelError, UsageError
from prm.records import Trajectory, read_jsonl
from prm.render import render


@dataclass(frozen=True)
class SFTConfig:
    base: str = option(..., "a checkpoint, or 'tiny' for a tiny model made on the spot")
    out: str = option(..., "write the policy here")
    layout: str = option("auto", "how an episode is read", choices=("auto", "chat", "plain"))
    system: str | None = option(None, "system prompt, for the chat layout")
    min_outcome: float = option(1.0, "learn from trajectories with at least this outcome (unknown outcomes are kept)")
    epochs: float = option(2.0, "passes over the data")
    max_updates: int | None = option(None, "stop after so many updates")
    batch: int = option(16, "trajectories an update")
    micro_batch: int = option(16, "trajectories at a time")
    lr: float = option(1e-4, "learning rate (cosine, 5 % warm-up)")
    lora_rank: int | None = option(None, "train a LoRA of this rank instead of all weights")
    max_tokens: int = option(4096, "longer trajectories lose their oldest steps")
    gradient_checkpointing: bool = option(False, "trade time for memory")
    dtype: str = option("auto", "weights", choices=("auto", "float32", "bfloat16"))
    seed: int = option(0, "of data order and of a tiny model's weights")
    width: int = option(128, "tiny: width")
    layers: int = option(2, "tiny: layers")
    vocabulary: int = option(4096, "tiny: size of the vocabulary")
    vocabulary_from: str | None = option(None, "tiny: more trajectories whose words are put into the vocabulary")
    copy_updates: int = option(0, "tiny: first so many updates on quoting random tokens")

    def __post_init__(self) -> None:
        for name in ("max_updates", "batch", "micro_batch", "lora_rank", "max_tokens", "width", "layers", "vocabulary"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        for name in ("epochs", "lr"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise UsageError(f"{name} must be > 0, got {value}")
        if self.copy_updates < 0:
            raise UsageError(f"copy_updates must be >= 0, got {self.copy_updates}")


def sft(trajectories: Sequence[Trajectory], config: SFTConfig) -> Path:
    """Clone the behaviour in `trajectories` with `trl.SFTTrainer`; returns the folder of the policy.

    Every token that the policy wrote is learned, its end of turn included; task and observations are not.

    Raises:
        DataError: no trajectory is left to learn from.
        ModelError: the base cannot be loaded.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import SFTConfig as TrainerConfig
    from trl import SFTTrainer

    from prm.checkpoint import locate
    from prm.config import progress
    from rl.policies import PolicyConfig, TransformersPolicy
    from rl.roles import backbone_of, plain_head
    from rl.tiny import teach_copying, tiny_model, tiny_tokenizer

    kept = [t for t in trajectories if t.steps and (t.outcome is None or t.outcome >= config.min_outcome)]
    if not kept:
        raise DataError(f"none of {len(trajectories)} trajectories has steps and an outcome >= {config.min_outcome}")
    if config.base == "tiny":
        words = read_jsonl(config.vocabulary_from, Trajectory) if config.vocabulary_from else []
        tokenizer = tiny_tokenizer((_as_text(t) for t in [*kept, *words]), config.vocabulary)
        model = tiny_model(tokenizer, width=config.width, layers=config.layers, seed=config.seed)
        teach_copying(model, config.copy_updates, seed=config.seed)
    else:
        folder = locate(config.base)
        dtype = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"{config.base}: no model can be loaded: {str(error).splitlines()[0]}") from error
    policy = TransformersPolicy(model, tokenizer, PolicyConfig("sft", layout=config.layout, system=config.system))
    rows: list[dict[str, list[int]]] = []
    cut = 0
    for trajectory in kept:
        tools = trajectory.meta.get("tools") or ()
        rendered = render(trajectory, tokenizer, policy.layout(tools), max_tokens=config.max_tokens)
        cut += rendered.first
        labels = [-100] * len(rendered.ids)
        for start, stop in rendered.spans:
            labels[start:stop] = rendered.ids[start:stop]
        rows.append({"input_ids": rendered.ids, "labels": labels})
    learned = sum(label != -100 for row in rows for label in row["labels"])
    print(f"{len(kept)} of {len(trajectories)} trajectories, {learned} tokens to learn; {cut} oldest steps left out")

    class PolicyTokens(SFTTrainer):
        """The same loss, without the logits of tokens that are not learned: they are most, and cost most."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if return_outputs or self.accelerator.num_processes > 1:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            labels = inputs.pop("labels")[:, 1:]
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model
            hidden = backbone_of(inner)(**inputs, use_cache=False).last_hidden_state[:, :-1][labels != -100]
            logits = inner.get_output_embeddings()(hidden).float()
            loss = torch.nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum")
            return loss / (num_items_in_batch if num_items_in_batch is not None else len(hidden))

    class Bar(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.bar = progress(state.max_steps, "warm start", "update")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.bar.update()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.bar.close()

    peft_config = None
    if config.lora_rank is not None:
        from peft import LoraConfig

        peft_config = LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear")
    micro = min(config.micro_batch, config.batch)
    checkpointing: Any = {"gradient_checkpointing": True} if config.gradient_checkpointing else {}
    trainer = (PolicyTokens if plain_head(model) else SFTTrainer)(
        model=model,
        args=TrainerConfig(
            output_dir=str(Path(config.out) / "trainer"),
            num_train_epochs=config.epochs,
            max_steps=config.max_updates or -1,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=max(1, config.batch // micro),
            learning_rate=config.lr,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            adam_beta2=0.98,
            **checkpointing,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            seed=config.seed,
            dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="group_by_length",
            max_length=None,
            save_strategy="no",
            report_to=[],
            logging_steps=10,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[Bar()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(config.out)
    tokenizer.save_pretrained(config.out)
    return Path(config.out)


def _as_text(trajectory: Trajectory) -> str:
    steps = (f"\n\nStep: {step.action}\n\nResult: {step.observation}" for step in trajectory.steps)
    return f"Task: {trajectory.task}" + "".join(steps)
