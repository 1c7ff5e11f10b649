"""The rows that each expert of a mixture computes, in blocks for programs of a kernel.

Everything is found on the device, and shapes depend on numbers of rows alone: nothing waits for the
host. So there are as many blocks as there can be at most, and those without rows come last.

T rows, K experts of each, S = T K rows of all experts in the experts' order, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

# The most rows of x for each of a block's, below which blocks are shorter: experts have few rows.
_USUAL = 2


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """``blocks`` are int32 [B, 3]: an expert, the first of its rows, and how many there are, at
    most ``rows``. ``sources`` are the rows of x, int32 [S], and ``numbers`` those of their
    products; ``owners`` are their experts, int64 [S], and ``places`` [T, K] where a row's are."""

    rows: int
    experts: int
    chosen: int
    blocks: torch.Tensor
    sources: torch.Tensor
    numbers: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor

    def of_products(self) -> RowBlocks:
        """The same blocks over rows that are in the experts' order already."""
        return replace(self, sources=self.numbers)


def rows_of_a_block(rows: int, chosen: int, experts: int, sizes: Iterable[int]) -> int:
    """Which of the sizes that there are kernels for."""
    wanted = min(rows, _USUAL * -(-rows * chosen // experts))
    *_, largest = sizes = sorted(sizes)
    return next((size for size in sizes if wanted <= size), largest)


def block_count(choices: int, experts: int, size: int) -> int:
    """The most blocks that so many rows of all experts can need."""
    return min(choices, experts) + choices // size


def row_blocks(chosen: torch.Tensor, experts: int, sizes: Iterable[int]) -> RowBlocks:
    """Sort the choices [T, K] by expert; no row chooses one twice. In torch, in many launches: what
    ``row_plan`` is compared with."""
    rows, each = chosen.shape
    size = rows_of_a_block(rows, each, experts, sizes)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    needed = (counts + size - 1) // size
    ends = needed.cumsum(0)
    number = torch.arange(block_count(len(flat), experts, size), device=flat.device)
    expert = torch.searchsorted(ends, number, right=True).clamp_(max=experts - 1)
    within = (number - (ends - needed)[expert]) * size
    first = (counts.cumsum(0) - counts)[expert] + within
    there = (counts[expert] - within).clamp_(0, size)
    first = torch.where(there > 0, first, 0)
    own = torch.arange(len(flat), device=flat.device)
    return RowBlocks(
        rows=size,
        experts=experts,
        chosen=each,
        blocks=torch.stack([expert, first, there], dim=1).int(),
        sources=(order // each).int(),
        numbers=own.int(),
        owners=flat[order],
        places=torch.empty_like(order).scatter_(0, order, own).view(rows, each),
    )
