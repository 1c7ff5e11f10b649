"""Trial of the Triton copies of frames, before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ..reference.cache import IndexedFrames
from ..row_sums import WORD, row_sums
from ..signatures import FrameCells
from .trials import passes
from .triton_frames import Layers, TritonFrames, Widths, widths_of


def works(layers: Layers, block_size: int) -> bool:
    """True if the copies of such layers compile and are correct on their device; logs the reason if
    not."""
    device = layers[0][0].device
    if device.type == "cpu":
        return False
    try:
        kinds = frozenset(widths_of(components) for components in layers)
    except ValueError as error:
        return passes(lambda reason=str(error): reason, _OTHERWISE)  # type: ignore[misc]
    return _works(kinds, block_size, device)


_OTHERWISE = "torch copies KV for the handoff, because of Triton"


@cache
def _works(kinds: frozenset[Widths], block_size: int, device: torch.device) -> bool:
    return passes(lambda: first_difference(sorted(kinds), block_size, device), _OTHERWISE)


def first_difference(kinds: Sequence[Widths], block_size: int, device: torch.device) -> str:
    """The first difference between Triton's copies and torch's of layers of these kinds; empty if
    there is none."""
    random = torch.Generator().manual_seed(0)
    count = 6
    slots = count * block_size
    layers, targets, others = (
        [
            [
                torch.randint(
                    0, 256, (3, slots, WORD * width), generator=random, dtype=torch.uint8
                ).to(device)
                for width in kind
            ]
            for kind in kinds
            for _ in range(2)
        ]
        for _ in range(3)
    )
    blocks = torch.randperm(count, generator=random).int().to(device)
    copies, expected = TritonFrames(layers, block_size), IndexedFrames(layers, block_size)
    scattered, expected_back = (
        TritonFrames(targets, block_size),
        IndexedFrames(others, block_size),
    )
    for mine, theirs in zip(targets, others, strict=True):
        for target, other in zip(mine, theirs, strict=True):
            other.copy_(target)
    # With components that begin at whole vectors, and without.
    for tokens, heads in ((2 * block_size + 3, range(1, 2)), (2 * block_size + 4, range(1, 3))):
        for index, kind in enumerate(kinds):
            first = block_size // 2 + 1
            layers_of_kind = range(2 * index, 2 * index + 2)
            cells = FrameCells(layers_of_kind, heads, blocks, first, first + tokens)
            size = len(layers_of_kind) * len(heads) * tokens * sum(kind) * WORD
            frame = torch.zeros(size, dtype=torch.uint8, device=device)
            sums, copied = copies.pack(cells, frame), torch.zeros_like(frame)
            sums_back = scattered.scatter(cells, frame)
            if device.type == "meta":  # nothing is computed there
                continue
            expected.pack(cells, copied)
            expected_back.scatter(cells, copied)
            assert sums is not None and sums_back is not None
            if not torch.equal(frame, copied):
                return "packed frames differ"
            if not torch.equal(sums, row_sums(copied)) or not torch.equal(sums, sums_back):
                return "sums differ"
    if device.type == "meta" or _equal(targets, others):
        return ""
    return "scattered tokens differ"


def _equal(these: Layers, those: Layers) -> bool:
    return all(
        torch.equal(*pair)
        for layers in zip(these, those, strict=True)
        for pair in zip(*layers, strict=True)
    )
