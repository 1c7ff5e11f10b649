"""Tensor parallelism: a rank's shards, and the collectives of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...kernels.block_formats import BlockFormat
from ...kernels.operators import Operators


@dataclass(slots=True)
class Collectives:
    """Counts of collectives that a rank has started and finished."""

    started: int = 0
    finished: int = 0

    def copy(self) -> Collectives:
        """The counts until now."""
        return Collectives(self.started, self.finished)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one collective; one that raises does not finish."""
        self.started += 1
        yield
        self.finished += 1


@dataclass(frozen=True)
class TensorParallel:
    """One rank of several. ``group`` is a torch.distributed group (``None``: the default one).

    ``control`` is a separate group of the same ranks' CPUs, so that a rank that left a step in the
    middle of the model's collectives is not mistaken for one that computes.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    control: Any = None
    collectives: Collectives = field(default_factory=Collectives, compare=False)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            with self.collectives.one():
                torch.distributed.all_reduce(x, group=self.group)
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` by rank 0's, in the device's stream."""
        if self.size > 1:
            with self.collectives.one():
                torch.distributed.broadcast(x, group=self.group, group_src=0)

    def agree(self, values: list[int]) -> list[int]:
        """The sums over all ranks, on their CPUs."""
        if self.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(sums, group=self.control)
        return [int(value) for value in sums.tolist()]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of equal shape, on rank 0; nothing on the others."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self.collectives.one():
            torch.distributed.gather(x, parts, group=self.group, group_dst=0)
        return parts or []

    def shard(self, total: int) -> range:
        """This rank's range of ``total`` rows; it may be shorter or empty on the last ranks."""
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))

    def shard_of_inputs(self, total: int, format: BlockFormat | None) -> range:
        """This rank's range of a weight's inputs: whole blocks, if there is one for each rank."""
        blocks, rest = divmod(total, 1 if format is None else format.values)
        if format is None or rest or blocks < self.size:
            return self.shard(total)
        first, end = (number * blocks // self.size for number in (self.rank, self.rank + 1))
        return range(first * format.values, end * format.values)


# The block format of a weight by name; ``None`` if it is not quantised.
FormatOf = Callable[[str], BlockFormat | None]


def all_dense(name: str) -> None:
    """The ``FormatOf`` of a checkpoint without quantised weights."""


# The order of inputs in the blocks of a weight by name; ``None`` for the model's own.
OrderOf = Callable[[str], torch.Tensor | None]


def all_in_order(name: str) -> None:
    """The ``OrderOf`` of a checkpoint with inputs in order."""


@dataclass(frozen=True)
class WeightPlacement:
    """The device, dtype and rank of parameters, and the operators that compute with them.

    ``prefix`` begins the parameters' names.
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    operators: Operators = field(default_factory=Operators)
    format_of: FormatOf = all_dense
    order_of: OrderOf = all_in_order
    prefix: str = ""

    def at(self, name: str) -> WeightPlacement:
        """The placement of a child part."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def name(self, leaf: str) -> str:
        """The full name of a parameter."""
        return self.prefix + leaf

    @property
    def activations(self) -> torch.dtype:
        """The dtype of activations."""
        return self.operators.activation_dtype(self.dtype, self.device)

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_norm(self, size: int) -> torch.Tensor:
        """An uninitialised weight of a norm, in the activations' dtype."""
        return torch.empty(size, dtype=self.activations, device=self.device)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one tensor of a checkpoint: ``target`` receives ``full[first:end]`` along
    ``dim``. ``shape`` is the full tensor's. With a ``format``, the target has the bytes of blocks
    instead of numbers, and ``first`` and ``end`` are multiples of a block."""

    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    first: int
    end: int
    format: BlockFormat | None = None


def replicated_slot(target: torch.Tensor) -> WeightSlot:
    """The slot of a parameter that is replicated on every rank."""
    return WeightSlot(target, tuple(target.shape), 0, 0, target.shape[0])
