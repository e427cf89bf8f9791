"""Batched sampling with a key-value cache that lives across the turns of many episodes.

A row whose prompt begins with what a cached row has read reads only the rest, so an episode reads each token once, and
K continuations of one prefix read the prefix once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Sampled:
    """What one row sampled: ids, their log-probabilities at the sampling temperature, "stop" or "length"."""

    ids: list[int]
    logprobs: list[float]
    finish: str


class Generator:
    """Samples from a causal language model, and keeps the cache of the last batch.

    Sampling inverts the cumulative distribution at one uniform number a token, drawn from the row's own `Random`. So a
    row's text depends on its prompt and its generator alone, not on its neighbours (up to floating-point rounding).
    """

    def __init__(self, model: Any, stop_ids: Sequence[int], pad_id: int = 0) -> None:
        self.model, self.stop_ids, self.pad_id = model, frozenset(stop_ids), pad_id
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        parameters = inspect.signature(inner.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.read_tokens = 0
        self.forget()

    def forget(self) -> None:
        """Drop the cache; needed after the weights have changed."""
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._rows: list[list[int]] = []

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        randoms: Sequence[Random] | None = None,
        stops: Any = None,
    ) -> list[Sampled]:
        """Sample one continuation a prompt.

        Args:
            prompts: token ids, each at least one.
            max_tokens: the most tokens a row samples.
            temperature: 0 is greedy (log-probabilities are then those at temperature 1).
            top_p: nucleus; the log-probabilities are of the unfiltered distribution.
            randoms: one generator a row; not needed when greedy.
            stops: `stops(ids) -> bool`, an own rule that ends a row after a token (beside the stop ids).
        """
        if any(not prompt for prompt in prompts):
            raise ValueError("a prompt must have at least one token")
        chunks = self._reuse(prompts)
        device = self.model.device
        width = max(map(len, chunks))
        ids = torch.full((len(chunks), width), self.pad_id)
        fresh = torch.zeros(len(chunks), width, dtype=torch.bool)
        for row, chunk in enumerate(chunks):
            ids[row, width - len(chunk) :] = torch.tensor(chunk)
            fresh[row, width - len(chunk) :] = True
        past = self._mask.sum(1, keepdim=True)
        positions = (past + fresh.cumsum(1) - 1).clamp(min=0)
        self.read_tokens += int(fresh.sum())
        logits = self._forward(ids.to(device), fresh, positions.to(device))
        for known, chunk in zip(self._rows, chunks, strict=True):
            known.extend(chunk)
        count = len(chunks)
        out_ids: list[list[int]] = [[] for _ in range(count)]
        out_logprobs: list[list[float]] = [[] for _ in range(count)]
        finish = ["length"] * count
        running = list(range(count))
        position = positions[:, -1:] + 1
        for _ in range(max_tokens):
            rows = torch.tensor(running)
            token, logprob = _sample(logits[rows.to(device)].float(), temperature, top_p, randoms, running)
            next_ids = torch.full((count, 1), self.pad_id)
            next_ids[rows, 0] = token.cpu()
            alive = []
            for row, one, logp in zip(running, token.tolist(), logprob.tolist(), strict=True):
                out_ids[row].append(one)
                out_logprobs[row].append(logp)
                if one in self.stop_ids or (stops is not None and stops(out_ids[row])):
                    finish[row] = "stop"
                else:
                    alive.append(row)
            if not alive or len(out_ids[alive[0]]) == max_tokens:
                break
            valid = torch.zeros(count, 1, dtype=torch.bool)
            valid[torch.tensor(alive)] = True
            logits = self._forward(next_ids.to(device), valid, position.to(device))
            for row in alive:
                self._rows[row].append(out_ids[row][-1])
            position += valid
            running = alive
        return [Sampled(*row) for row in zip(out_ids, out_logprobs, finish, strict=True)]

    def _forward(self, ids: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
        """Read (rows, width) ids into the cache; the logits (rows, vocabulary) after the last column."""
        self._mask = torch.cat([self._mask, valid], 1)
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask.to(ids.device).long(),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        return output.logits[:, -1]

    def _reuse(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Make the cache hold, for each prompt, the longest cached row that begins it; what is left to read."""
        known = {tuple(row): i for i, row in enumerate(self._rows) if row}
        lengths = sorted({len(row) for row in known}, reverse=True)
        chosen = []
        for prompt in prompts:
            # At least one token must be read anew, to have the logits after it.
            heads = (known.get(tuple(prompt[:n])) for n in lengths if n < len(prompt))
            chosen.append(next((row for row in heads if row is not None), None))
        if self._cache is None or all(row is None for row in chosen):
            self._cache = DynamicCache(config=self.model.config)
            self._mask = torch.zeros(len(prompts), 0, dtype=torch.bool)
            self._rows = [[] for _ in prompts]
            return [list(prompt) for prompt in prompts]
        index = torch.tensor([row or 0 for row in chosen])
        hit = torch.tensor([row is not None for row in chosen])
        mask = self._mask[index] & hit[:, None]
        # Gaps left by padding are closed: the valid columns of each row move to the right end.
        width = int(mask.sum(1).max())
        order = mask.int().sort(stable=True, dim=1).indices[:, self._mask.shape[1] - width :]
        device = self._cache.layers[0].keys.device
        for layer in self._cache.layers:
            where = order.to(device)[:, None, :, None]
            for name in ("keys", "values"):
                old = getattr(layer, name).index_select(0, index.to(device))
                setattr(layer, name, old.gather(2, where.expand(-1, old.shape[1], -1, old.shape[3])))
        self._mask = mask.gather(1, order)
        self._rows = [list(self._rows[row]) if row is not None else [] for row in chosen]
        return [list(prompt[len(row) :]) for prompt, row in zip(prompts, self._rows, strict=True)]


def _sample(
    logits: Tensor, temperature: float, top_p: float, randoms: Sequence[Random] | None, rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(token, log-probability) of each row of (rows, vocabulary) logits."""
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, -1)
    if temperature == 0:
        token = logprobs.argmax(-1)
    else:
        if randoms is None:
            raise ValueError("sampling needs one random generator a row")
        uniform = torch.tensor([[randoms[row].random()] for row in rows], device=logits.device)
        probs = logprobs.exp()
        if top_p < 1:
            ranked, by_rank = probs.sort(-1, descending=True)
            keep = ranked.cumsum(-1) - ranked < top_p
            probs = torch.zeros_like(probs).scatter(-1, by_rank, ranked * keep)
        cumulative = probs.cumsum(-1)
        token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(-1)
        token = token.clamp(max=logits.shape[-1] - 1)
    return token, logprobs.gather(-1, token[:, None]).squeeze(-1)
