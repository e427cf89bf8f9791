"""Several processes as one: the same work, dealt out in the same pieces, and the gradients summed.

`accelerate launch --num_processes 2 -m prm.cli ppo ...` (or distill) starts them. Each process has all the weights;
episodes and micro-batches are dealt out, so that what is computed, and in which groups, is the same as on one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from prm.errors import UsageError

T = TypeVar("T")


class Ranks:
    """This process among all of them; alone, it does nothing.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def started(cls) -> Ranks:
        """Those that `accelerate launch` or `torchrun` started; one where they did not."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return ALONE
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())  # also makes "cuda" this process's own device
        if state.num_processes != int(os.environ["WORLD_SIZE"]):
            joined = f"{state.num_processes} of them joined"
            raise UsageError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} processes, but {joined}")
        return cls(state.process_index, state.num_processes)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This process's share: every `size`-th one."""
        return list(items[self.rank :: self.size])

    def gather(self, pairs: Iterable[tuple[int, T]]) -> list[T]:
        """What all processes have, (place, item) each, as one list in order of place, on every process."""
        found = list(pairs)
        if self.size > 1:
            parts: list[Any] = [None] * self.size
            torch.distributed.all_gather_object(parts, found)
            found = [pair for part in parts for pair in part]
        return [item for _, item in sorted(found, key=lambda pair: pair[0])]

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of all processes; one that had no share counts as zeros."""
        if self.size > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)

    def add(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        if self.size == 1:
            return list(values)
        parts = self.gather([(self.rank, list(values))])
        return [sum(column) for column in zip(*parts, strict=True)]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the first one's values."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor.detach(), 0)

    def together(self, call: Callable[[], None]) -> None:
        """Run `call` on the first process; the others wait for it, and stop with it when it fails."""
        failure = ""
        if self.first:
            try:
                call()
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
                self.gather([(self.rank, failure)])
                raise
        if said := [text for text in self.gather([(self.rank, failure)]) if text]:
            raise RuntimeError(f"process 0 failed: {said[0]}")


ALONE = Ranks()
