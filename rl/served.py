"""Sampling at a server while training here: each update's adapter is saved, and the server loads it.

For vLLM, started with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, on the same base and able to read the
run's folder. Token ids go in and come out, nothing is encoded again. The log-probabilities of what was sampled are
computed here, so that the ratio is 1 before the first update whatever the server's arithmetic; how far its own are
from these is kept as `gap`.
"""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from prm.env import Action, History
from prm.errors import UsageError
from prm.render import prompt
from rl.policies import TransformersPolicy, draw_random
from rl.roles import Batch, Roles


class ServedPolicy(TransformersPolicy):
    """A local policy that is sampled at a server.

    Args:
        local: the policy as it is trained here; its model must be a LoRA once training starts.
        url: the server's address.
        folder: where adapters are saved for the server to load; the last two are kept.

    Raises:
        UsageError: the server is away, refuses an adapter, or gives no token ids.
    """

    def __init__(self, local: TransformersPolicy, url: str, folder: Path) -> None:
        super().__init__(local.model, local.tokenizer, local.config)
        self.url, self.folder = url.rstrip("/"), folder
        self.served = ""
        self.gap = 0.0
        self._roles: Roles | None = None

    def refresh(self, update: int, roles: Roles, *, first: bool = True) -> None:
        """Have the server sample from the weights as they are now; `first`: this process saves and tells it."""
        if not roles.lora:
            raise UsageError("--serve-url refreshes the server's weights by an adapter: train with --lora-rank")
        self._roles, before = roles, self.served
        name = f"update-{update}"
        if first:
            where = (self.folder / name).resolve()
            roles.save_policy(where, self.tokenizer)
            self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(where)})
            if before and before != name:
                self._post("/v1/unload_lora_adapter", {"lora_name": before})
                shutil.rmtree(self.folder / before, ignore_errors=True)
        self.served = name

    def act(self, histories: Sequence[History]) -> list[Action]:
        """One action a history, as many calls side by side as `concurrency` allows; before a refresh, sampled here."""
        if self._roles is None:
            return super().act(histories)
        prompts = [prompt(h, self.tokenizer, self.layout(h.tools)) for h in histories]
        fits = [i for i, ids in enumerate(prompts) if len(ids) + self.config.max_action_tokens <= self.max_context]
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            sampled = list(pool.map(lambda i: self._sample(prompts[i], histories[i]), fits))
        actions = [Action("", (), (), "length")] * len(histories)
        if not fits:
            return actions
        rows = [prompts[i] + ids for i, (ids, _, _) in zip(fits, sampled, strict=True)]
        places = [range(len(prompts[i]), len(row)) for i, row in zip(fits, rows, strict=True)]
        batch = Batch.of(rows, places, self._roles.device)
        with torch.no_grad():
            own = self._roles.logprobs(batch)[0].cpu().split([len(ids) for ids, _, _ in sampled])
        gaps = []
        for i, (ids, theirs, finish), ours in zip(fits, sampled, own, strict=True):
            text = self.tokenizer.decode(
                [t for t in ids if t not in self.generator.stop_ids], clean_up_tokenization_spaces=False
            )
            actions[i] = Action(text, tuple(ids), tuple(ours.tolist()), finish)
            gaps += [abs(a - b) for a, b in zip(theirs, ours.tolist(), strict=True)]
            self.sampled_tokens += len(ids)
        self.gap = max(gaps, default=0.0)
        return actions

    def _sample(self, ids: list[int], history: History) -> tuple[list[int], list[float], str]:
        """(token ids, the server's log-probabilities, finish) of one draw."""
        body = {
            "model": self.served,
            "prompt": ids,
            "max_tokens": self.config.max_action_tokens,
            "temperature": self.temperature,
            "top_p": self.config.top_p,
            "seed": draw_random(history).getrandbits(31),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": sorted(self.generator.stop_ids),
        }
        (choice,) = self._post("/v1/completions", body)["choices"]
        found, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(found, list) or not isinstance(logprobs, list) or len(found) != len(logprobs) or not found:
            raise UsageError(f"{self.url}: gives no token_ids with log-probabilities; PPO trains on sampled ids")
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        if finish == "stop" and found[-1] not in self.generator.stop_ids:
            raise UsageError(f"{self.url}: the token that ended the action is not among its token_ids")
        return [int(i) for i in found], [float(x) for x in logprobs], finish

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                data = reply.read()
        except urllib.error.HTTPError as error:
            raise UsageError(f"{self.url}{route}: {error.code}: {error.read()[:200]!r}") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.url}{route}: {error}") from None
        try:
            return json.loads(data)
        except ValueError:
            return data
