"""Two policies behind `prm.env.Policy`: a local transformers model, and any OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from prm.config import option
from prm.env import Action, History, load_attribute
from prm.errors import ModelError, PrmError, UsageError
from prm.render import Layout, chat_layout, plain_layout, prompt, text_layout, tools_key


@dataclass(frozen=True)
class PolicyConfig:
    policy: str = option(..., "a checkpoint, openai:MODEL, or module:attribute")
    base_url: str | None = option(None, "the endpoint's address, for openai:MODEL")
    layout: str = option("auto", "how a checkpoint reads an episode", choices=("auto", "chat", "plain", "text"))
    system: str | None = option(None, "system prompt, for the chat layout and endpoints")
    temperature: float = option(1.0, "sampling temperature; 0 is greedy")
    top_p: float = option(1.0, "nucleus sampling")
    max_action_tokens: int = option(64, "the most tokens of one action")
    max_context_tokens: int | None = option(None, "the most tokens of an episode (default: what the model allows)")
    stop: tuple[str, ...] = option((), "texts that end an action, kept in it (the text layout's steps)")
    concurrency: int = option(16, "calls in flight, for openai:MODEL")
    dtype: str = option("auto", "weights of a checkpoint", choices=("auto", "float32", "bfloat16"))

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature must be >= 0, got {self.temperature}")
        if self.max_action_tokens < 1 or self.concurrency < 1:
            least = f"{self.max_action_tokens} and {self.concurrency}"
            raise UsageError(f"max_action_tokens and concurrency must be at least 1, got {least}")


def load_policy(config: PolicyConfig) -> Any:
    """The policy that the command line names. Raises UsageError or ModelError when there is none."""
    name = config.policy
    if name.startswith("openai:"):
        return EndpointPolicy(name.removeprefix("openai:"), config)
    if Path(name).exists() or ":" not in name:
        return TransformersPolicy.load(name, config)
    found = load_attribute(name)
    try:
        policy = found() if isinstance(found, type) or not hasattr(found, "act") else found
    except TypeError as error:
        raise UsageError(f"{name}: cannot be made without arguments: {error}") from None
    except Exception as error:
        raise UsageError(f"{name}: cannot be made: {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, "act", None)):
        raise UsageError(f"{name}: a {type(policy).__name__} has no act(histories)")
    return policy


class TransformersPolicy:
    """A causal language model as a policy.

    `act` samples each action until the layout's end of turn, with one forward pass a token for the whole batch and a
    cache kept across turns. The sampled ids are kept as they are; later turns are appended to them.

    Args:
        model: a causal language model; in evaluation mode while it acts.
        tokenizer: its tokenizer.
        config: sampling options; `policy` is only its name here.
    """

    def __init__(self, model: Any, tokenizer: Any, config: PolicyConfig) -> None:
        from rl.generate import Generator

        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.name, self.temperature = config.policy, config.temperature
        kind = config.layout
        self.kind = ("chat" if getattr(tokenizer, "chat_template", None) else "plain") if kind == "auto" else kind
        limit = getattr(model.config, "max_position_embeddings", None)
        self.max_context = config.max_context_tokens or limit or 1 << 30
        self._layouts: dict[str, Layout] = {}
        ends = {self.layout().end_turn[-1:] or (tokenizer.eos_token_id,), (tokenizer.eos_token_id,)}
        stop_ids = [i for end in ends for i in end if i is not None]
        self.generator = Generator(model, stop_ids, tokenizer.pad_token_id or 0)
        self.sampled_tokens = 0

    @classmethod
    def load(cls, path: str, config: PolicyConfig) -> TransformersPolicy:
        """Load a checkpoint: full, or a LoRA adapter beside its tokenizer."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from prm.checkpoint import locate, quiet

        folder, missing = locate(path), []
        dtype = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        try:
            with quiet():
                if (folder / "adapter_config.json").exists():
                    from peft import AutoPeftModelForCausalLM, PeftConfig

                    if (task := PeftConfig.from_pretrained(str(folder)).task_type) not in (None, "CAUSAL_LM"):
                        raise ModelError(f"{path}: no language model: an adapter for {task}")

                    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=dtype)
                else:
                    kind: Any = AutoModelForCausalLM
                    model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
                    missing = sorted(info["missing_keys"])
                tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: no policy can be loaded: {str(error).splitlines()[0]}") from error
        if missing:
            raise ModelError(f"{path}: no language model: the checkpoint lacks {', '.join(missing[:3])}")
        if torch.cuda.is_available():
            model = model.to("cuda")
        return cls(model, tokenizer, config)

    def layout(self, tools: Sequence[Any] = ()) -> Layout:
        """The layout for an environment with these tools."""
        key = tools_key(tools)
        if key not in self._layouts:
            if self.kind == "chat":
                made = chat_layout(self.tokenizer, system=self.config.system, tools=[dict(t) for t in tools])
            elif self.kind == "plain":
                made = plain_layout(self.tokenizer, end_turn=True)
            else:
                made = text_layout(self.tokenizer)
            self._layouts[key] = made
        return self._layouts[key]

    def act(self, histories: Sequence[History]) -> list[Action]:
        """One action a history. A history that leaves no room in the context gets an empty action, finish "length"."""
        rows, prompts = [], []
        for i, history in enumerate(histories):
            ids = prompt(history, self.tokenizer, self.layout(history.tools))
            if len(ids) + self.config.max_action_tokens <= self.max_context:
                rows.append(i)
                prompts.append(ids)
        actions = [Action("", (), (), "length")] * len(histories)
        if not rows:
            return actions
        was_training = self.model.training
        self.model.eval()
        sampled = self.generator(
            prompts,
            max_tokens=self.config.max_action_tokens,
            temperature=self.temperature,
            top_p=self.config.top_p,
            randoms=[draw_random(histories[i]) for i in rows],
            stops=self._stops if self.config.stop else None,
        )
        self.model.train(was_training)
        for i, one in zip(rows, sampled, strict=True):
            text = self.tokenizer.decode(
                [t for t in one.ids if t not in self.generator.stop_ids], clean_up_tokenization_spaces=False
            )
            actions[i] = Action(text, tuple(one.ids), tuple(one.logprobs), one.finish)
            self.sampled_tokens += len(one.ids)
        return actions

    def _stops(self, ids: list[int]) -> bool:
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self.config.stop)


class EndpointPolicy:
    """A model behind an OpenAI-compatible endpoint as a policy.

    With the layouts "chat" and "auto" an episode is a chat: the task is a user turn, actions are assistant turns, tool
    results go back as tool turns. With "text" the task and the steps so far are sent, byte for byte, to the plain
    completions route, which continues them; a chat route cannot do that and is not asked to. There a stop text is not
    sent, as endpoints drop the text that they stop at: the reply is cut after it here, and what follows was sampled for
    nothing, so `max_action_tokens` should be little more than a step takes.

    A call that still fails after the client's retries is an action with finish "error".

    Args:
        model: the name that the endpoint knows.
        config: address and sampling options.
        client: an `openai.OpenAI`; by default one for `config.base_url`.
    """

    def __init__(self, model: str, config: PolicyConfig, client: Any = None) -> None:
        if client is None:
            from openai import OpenAI

            if not config.base_url and not os.environ.get("OPENAI_API_KEY"):
                raise UsageError("openai:MODEL needs --base-url or the environment variable OPENAI_API_KEY")
            client = OpenAI(base_url=config.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=600)
        if config.layout == "plain":
            raise UsageError("an endpoint has the layouts chat and text")
        if config.stop and config.layout != "text":
            raise UsageError("--stop ends the steps of a text: with an endpoint it needs --layout text")
        self.client, self.model, self.config = client, model, config
        self.name, self.temperature = f"openai:{model}", config.temperature
        self.errors: list[str] = []
        self.sampled_tokens = 0

    def act(self, histories: Sequence[History]) -> list[Action]:
        """One action a history, by as many calls side by side as `concurrency` allows."""
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            return list(pool.map(self._act, histories))

    def _act(self, history: History) -> Action:
        from openai import OpenAIError

        config = self.config
        sampling: dict[str, Any] = {
            "model": self.model,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_action_tokens,
            "seed": draw_random(history).getrandbits(31),
        }
        try:
            if config.layout == "text":
                said = zip(history.actions, history.observations, strict=True)
                text = history.task + "".join(action.text + observation for action, observation in said)
                reply = self.client.completions.create(prompt=text, **sampling)
            else:
                if history.tools:
                    sampling["tools"] = [dict(tool) for tool in history.tools]
                reply = self.client.chat.completions.create(messages=self._messages(history), **sampling)
        except OpenAIError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return Action("", finish="error")
        except ValueError as error:
            self.errors.append(f"the reply is not JSON: {error}")
            return Action("", finish="error")
        try:
            choice = reply.choices[0]
            text = choice.text if config.layout == "text" else _action_text(choice.message)
            if not isinstance(text, str):
                raise TypeError(f"expected a text, got {text!r:.40}")
        except (AttributeError, IndexError, TypeError, PrmError) as error:
            self.errors.append(f"the reply holds no choice that can be read ({error}): {reply!r:.80}")
            return Action("", finish="error")
        self.sampled_tokens += getattr(reply.usage, "completion_tokens", None) or 0
        finish = {"length": "length", "content_filter": "error"}.get(choice.finish_reason or "stop", "stop")
        ends = [text.index(stop) + len(stop) for stop in config.stop if stop in text]
        if ends and finish != "error":
            text, finish = text[: min(ends)], "stop"
        return Action(text, finish=finish)

    def _messages(self, history: History) -> list[dict[str, Any]]:
        from prm.chat import to_messages
        from prm.records import Trajectory

        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return system + to_messages(Trajectory(history.task, history.steps))


def draw_random(history: History) -> Random:
    """The generator of the next draw: the same seed and step give the same draws, whoever shares the batch."""
    key = f"{history.seed}:{len(history.actions)}"
    return Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))


def _action_text(message: Any) -> str:
    """An assistant message as the text of an action, tool calls as the model would have written them."""
    from prm.chat import action_text

    return action_text(message.model_dump())
