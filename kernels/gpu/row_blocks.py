"""The rows that each expert of a mixture computes, in blocks for programs of a kernel.

Everything is computed on the device, and shapes depend only on the number of rows, so nothing waits
for the host. There is always the maximum number of blocks; empty ones come last.

T rows, K experts of each, S = T K rows of all experts, in order of experts, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

# Blocks are chosen for experts with up to this many times the average number of rows.
_USUAL = 2


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """``blocks`` are int32 [B, 3]: an expert, the first of its rows, and how many there are, at
    most ``rows``. ``sources`` are the rows of x, int32 [S], and ``numbers`` those of their
    products; ``owners`` are their experts, int64 [S], and ``places`` [T, K] where a row's are."""

    rows: int
    experts: int
    top_k: int
    blocks: torch.Tensor
    sources: torch.Tensor
    numbers: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor

    def of_products(self) -> RowBlocks:
        """The same blocks, for rows that are already in order of experts."""
        return replace(self, sources=self.numbers)


def rows_of_a_block(rows: int, top_k: int, experts: int, sizes: Iterable[int]) -> int:
    """The number of rows of a block: one of the sizes with a kernel."""
    fewest = min(rows, _USUAL * -(-rows * top_k // experts))
    *_, largest = sizes = sorted(sizes)
    return next((size for size in sizes if fewest <= size), largest)


def block_count(choices: int, experts: int, size: int) -> int:
    """The maximum number of blocks for ``choices`` rows of all experts."""
    return min(choices, experts) + choices // size


def row_blocks(expert_ids: torch.Tensor, experts: int, sizes: Iterable[int]) -> RowBlocks:
    """Sort the choices [T, K] by expert; a row has no expert twice. The reference of ``row_plan``,
    in many launches by torch."""
    rows, each = expert_ids.shape
    size = rows_of_a_block(rows, each, experts, sizes)
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    block_counts = (counts + size - 1) // size
    ends = block_counts.cumsum(0)
    number = torch.arange(block_count(len(flat), experts, size), device=flat.device)
    expert = torch.searchsorted(ends, number, right=True).clamp_(max=experts - 1)
    within = (number - (ends - block_counts)[expert]) * size
    first = (counts.cumsum(0) - counts)[expert] + within
    there = (counts[expert] - within).clamp_(0, size)
    first = torch.where(there > 0, first, 0)
    own = torch.arange(len(flat), device=flat.device)
    return RowBlocks(
        rows=size,
        experts=experts,
        top_k=each,
        blocks=torch.stack([expert, first, there], dim=1).int(),
        sources=(order // each).int(),
        numbers=own.int(),
        owners=flat[order],
        places=torch.empty_like(order).scatter_(0, order, own).view(rows, each),
    )
