"""One pass over many token sequences that reads each distinct prefix once, without padding.

The sequences become a tree (a radix trie over token ids). All its tokens stand in one row; a token's position is its
depth, and it attends to the path above it alone: to the tokens before it in its own sequence, and to nothing else. So a
token's hidden state is what it would be if its sequence were read alone, siblings share what they have in common, and
unrelated sequences lie side by side with no padding. Between passes the keys and values of a path can be kept, so that
what is read later goes on where it stopped (as vLLM's and SGLang's prefix caches do when generating).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "prm_tree"
LAYERS = {"full_attention", "sliding_attention", "attention"}


@dataclass(eq=False)
class Node:
    """A run of tokens without a branch. `kv` holds its keys and values, (1, heads, tokens, width), a layer each."""

    ids: list[int]
    parent: Node | None
    depth: int
    children: dict[int, Node] = field(default_factory=dict)
    logits: Tensor | None = None  # (tokens,) once it has been read
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    keep: bool = False
    start: int = 0  # its column in the pass that reads it

    def path(self) -> list[Node]:
        """The nodes above it, from the root on."""
        above: list[Node] = []
        node = self.parent
        while node is not None:
            above.append(node)
            node = node.parent
        return above[-2::-1]  # without the root, which holds no token


@dataclass
class _Plan:
    """What the attention of one pass needs: the nodes to read, each with the nodes above it."""

    nodes: list[tuple[Node, list[Node]]]
    masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)

    def mask(self, tokens: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(tokens, keys): the last token sees the last key. None where all of them see all of them."""
        window = window if window is not None and window < keys else None
        if tokens == 1 and window is None:
            return None
        key = (tokens, keys, window)
        if key not in self.masks:
            at = torch.arange(keys - tokens, keys, device=device)[:, None]
            past = torch.arange(keys, device=device)[None]
            seen = past <= at
            self.masks[key] = seen if window is None else seen & (past > at - window)
        return self.masks[key]


_PLAN: ContextVar[_Plan | None] = ContextVar("prm_tree_plan", default=None)


class SharedReader:
    """Reads token sequences through a causal backbone, each distinct prefix once.

    Args:
        backbone: a transformers model without its head, whose attention goes through transformers' attention interface.
        readout: from hidden states (tokens, width) to logits (tokens,).
        keep_tokens: keep keys and values of all that was read, up to so many tokens, for later calls; when there are
            more, all is forgotten. 0 keeps only what the next pass of the same call goes on from.

    Attributes:
        read_tokens: how many tokens went through the backbone so far.
    """

    def __init__(self, backbone: Any, readout: Callable[[Tensor], Tensor], keep_tokens: int = 0) -> None:
        self.backbone, self.readout, self.keep_tokens = backbone, readout, keep_tokens
        self.read_tokens = 0
        self.forget()

    def forget(self) -> None:
        """Drop what is kept; needed after the weights have changed."""
        self._root = Node([], None, 0)
        self._kept = 0

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[list[int]], *, pass_tokens: int) -> list[Tensor]:
        """Logits of each sequence at all its tokens, float32 on the CPU, in order.

        Args:
            sequences: token ids, each at least one.
            pass_tokens: the most new tokens in one pass; a sequence with more goes alone.
        """
        out: list[Tensor] = [torch.empty(0)] * len(sequences)
        waiting: list[int] = []
        fresh: dict[Node, None] = {}
        new = 0
        for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
            missing = len(sequences[i]) - self._known(sequences[i])
            if fresh and new + missing > pass_tokens:
                self._finish(fresh, waiting, sequences, out, goes_on=sequences[i])
                waiting, fresh, new = [], {}, 0
                missing = len(sequences[i]) - self._known(sequences[i])
            self._insert(sequences[i], fresh)
            new += missing
            waiting.append(i)
        if waiting:
            self._finish(fresh, waiting, sequences, out)
        if self._kept > self.keep_tokens:
            self.forget()
        return out

    def _finish(
        self,
        fresh: dict[Node, None],
        waiting: list[int],
        sequences: Sequence[list[int]],
        out: list[Tensor],
        goes_on: Sequence[int] = (),
    ) -> None:
        """Read the fresh nodes, take the logits of the waiting sequences, and drop what is not needed any more."""
        if not self.keep_tokens:
            # In sorted order, what the next sequence shares with any earlier one lies on its own path.
            path = self._walk(goes_on)
            for node in path:
                node.keep = True
        if fresh:
            self._read(list(fresh))
        for i in waiting:
            found = [node.logits for node in self._walk(sequences[i])]
            out[i] = torch.cat([x for x in found if x is not None])[: len(sequences[i])]
        if not self.keep_tokens:
            node = self._root
            for below in path:
                node.children = {below.ids[0]: below}
                node = below
            node.children = {}

    def _read(self, nodes: list[Node]) -> None:
        ids: list[int] = []
        places: list[int] = []
        for node in nodes:
            node.start = len(ids)
            node.keep = node.keep or bool(self.keep_tokens)
            ids += node.ids
            places += range(node.depth, node.depth + len(node.ids))
        device = self.backbone.get_input_embeddings().weight.device
        plan = _Plan([(node, node.path()) for node in nodes])
        with _through(self.backbone, plan):
            hidden = self.backbone(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([places], device=device),
                use_cache=False,
            ).last_hidden_state[0]
        logits = self.readout(hidden).cpu()
        for node in nodes:
            node.logits = logits[node.start : node.start + len(node.ids)].clone()
        self.read_tokens += len(ids)
        self._kept += len(ids)

    # --- the tree ---

    def _known(self, ids: Sequence[int]) -> int:
        """How many of the first ids are in the tree."""
        node, at = self._root, 0
        while at < len(ids) and (below := node.children.get(ids[at])) is not None:
            same = _common(below.ids, ids, at)
            at += same
            if same < len(below.ids):
                break
            node = below
        return at

    def _insert(self, ids: Sequence[int], fresh: dict[Node, None]) -> None:
        node, at = self._root, 0
        while at < len(ids):
            below = node.children.get(ids[at])
            if below is None:
                below = Node(list(ids[at:]), node, at)
                node.children[ids[at]] = below
                fresh[below] = None
                return
            same = _common(below.ids, ids, at)
            if same < len(below.ids) and at + same < len(ids):
                _split(below, same, fresh)
            node = below
            at += same

    def _walk(self, ids: Sequence[int]) -> list[Node]:
        """The nodes that begin `ids`; the last may go on beyond what they share, and is split there where it does not
        end with `ids`."""
        node, at, found = self._root, 0, []
        while at < len(ids) and (below := node.children.get(ids[at])) is not None:
            found.append(below)
            same = _common(below.ids, ids, at)
            at += same
            if same < len(below.ids):
                break
            node = below
        return found


def _common(run: list[int], ids: Sequence[int], at: int) -> int:
    """How many tokens of a run agree with ids[at:]."""
    n = min(len(run), len(ids) - at)
    if list(ids[at : at + n]) == run[:n]:
        return n
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if list(ids[at + low : at + middle]) == run[low:middle]:
            low = middle
        else:
            high = middle
    return low + (run[low] == ids[at + low])


def _split(node: Node, at: int, fresh: dict[Node, None]) -> None:
    """Cut a node in two; it keeps its first `at` tokens, a new one below it takes the rest."""
    rest = Node(node.ids[at:], node, node.depth + at, node.children, keep=node.keep)
    for below in rest.children.values():
        below.parent = rest
    if node.logits is None:
        fresh[rest] = None
    else:
        node.logits, rest.logits = node.logits[:at], node.logits[at:]
        for layer, (keys, values) in node.kv.items():
            rest.kv[layer] = keys[:, :, at:], values[:, :, at:]
            node.kv[layer] = keys[:, :, :at], values[:, :, :at]
    node.ids, node.children = node.ids[:at], {rest.ids[0]: rest}


# --- attention --------------------------------------------------------------------------------------------------------


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention along the paths of the tree: (1, heads, tokens, width) in, (1, tokens, heads, width) out."""
    plan = _PLAN.get()
    if plan is None or softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with soft caps or sinks is not read as a tree")
    layer = module.layer_idx
    out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    groups = query.shape[1] // key.shape[1]
    for node, above in plan.nodes:
        own = slice(node.start, node.start + len(node.ids))
        keys, values = key[:, :, own], value[:, :, own]
        if node.keep:
            node.kv[layer] = keys.clone(), values.clone()
        if above:
            runs = [
                (key[:, :, a.start : a.start + len(a.ids)], value[:, :, a.start : a.start + len(a.ids)])
                if a.logits is None
                else a.kv[layer]
                for a in above
            ]
            keys = torch.cat([*(k for k, _ in runs), keys], 2)
            values = torch.cat([*(v for _, v in runs), values], 2)
        if groups > 1 and query.device.type != "cpu":
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        n, m = len(node.ids), keys.shape[2]
        plain = not above and (sliding_window is None or sliding_window >= m)
        out[:, :, own] = F.scaled_dot_product_attention(
            query[:, :, own],
            keys,
            values,
            attn_mask=None if plain else plan.mask(n, m, sliding_window, query.device),
            is_causal=plain and n > 1,
            scale=scaling,
            enable_gqa=keys.shape[1] != query.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def _through(backbone: Any, plan: _Plan) -> Iterator[None]:
    """The backbone with its attention exchanged for `_attend`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    before = backbone.config._attn_implementation
    token = _PLAN.set(plan)
    backbone.config._attn_implementation = NAME
    try:
        yield
    finally:
        backbone.config._attn_implementation = before
        _PLAN.reset(token)


def readable(backbone: Any, readout: Callable[[Tensor], Tensor]) -> bool:
    """Whether a backbone gives in a tree what it gives alone: tried on it, as models differ in how they attend."""
    config = backbone.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - LAYERS or getattr(config, "attention_chunk_size", None):
        return False
    rows = backbone.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    base = torch.randint(rows, (40,), generator=draw).tolist()
    other = torch.randint(rows, (20,), generator=draw).tolist()
    sequences = [base, base[:12] + other, base[:12] + other[:9] + base[:5], other]
    device = backbone.get_input_embeddings().weight.device
    with torch.inference_mode():
        alone = [readout(backbone(input_ids=torch.tensor([s], device=device)).last_hidden_state[0]) for s in sequences]
        try:
            shared = SharedReader(backbone, readout)(sequences, pass_tokens=1 << 20)
        except Exception:
            # A model without the attention interface, or with other arguments, raises whatever it raises.
            return False
    expected, found = torch.cat(alone).cpu(), torch.cat(shared)
    near = 1e-4 if next(backbone.parameters()).dtype == torch.float32 else 5e-2
    return bool((expected - found).abs().max() <= near * max(1.0, float(expected.abs().max())))
