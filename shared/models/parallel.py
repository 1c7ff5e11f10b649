"""Tensor parallelism as the model sees it: who it is, a sum over ranks, a gather to the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels.operators import Operators, TorchOperators


@dataclass(slots=True)
class Collectives:
    """How many collectives a rank has begun and ended."""

    begun: int = 0
    ended: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around each of them: one that raises never ends."""
        self.begun += 1
        yield
        self.ended += 1


@dataclass(frozen=True)
class TensorParallel:
    """One rank of several. ``group`` is a torch.distributed group (``None``: the default one)."""

    rank: int = 0
    size: int = 1
    group: Any = None
    collectives: Collectives = field(default_factory=Collectives, compare=False)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            with self.collectives.one():
                torch.distributed.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor on rank 0, nothing on the others; all have the same shape."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self.collectives.one():
            torch.distributed.gather(x, parts, group=self.group, group_dst=0)
        return parts or []

    def share(self, total: int) -> range:
        """This rank's part of ``total`` rows; the last ranks' may be shorter, or empty."""
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))


@dataclass(frozen=True)
class WeightPlacement:
    """Where parameters live, in which type, which part of them, and what computes with them."""

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    operators: Operators = field(default_factory=TorchOperators)

    @property
    def activations(self) -> torch.dtype:
        """The type of what flows between the products."""
        return self.operators.activation_dtype(self.dtype, self.device)

    def empty(self, *shape: int) -> torch.Tensor:
        """An unfilled weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def gain(self, size: int) -> torch.Tensor:
        """An unfilled gain of a norm."""
        return torch.empty(size, dtype=self.activations, device=self.device)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes: ``target`` receives ``full[first:end]`` along ``dim``.

    ``shape`` is the full tensor's.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    first: int
    end: int


def whole(target: torch.Tensor) -> WeightSlot:
    """A parameter that every rank holds in full."""
    return WeightSlot(target, tuple(target.shape), 0, 0, target.shape[0])
