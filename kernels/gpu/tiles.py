"""The order of a weight for tensor cores.

A tile is 16 outputs, and a chunk 64 of their inputs, which a warp decodes at once. In
``mma.m16n8k16``, thread t of quad g multiplies the outputs g and g + 8 with the inputs 2t, 2t + 1,
2t + 8 and 2t + 9 of 16. Sums do not depend on the order of inputs, so thread t gets 8 neighbouring
inputs of 32, a span, and also reads their activations as whole words. Each of two ``mma`` steps
takes four of these 8: two lower and two upper neighbours.

h is 1 for output g + 8, upper for the inputs from 2t + 8 on, and second for odd ones.
"""

from __future__ import annotations

import torch

TILE = 16
CHUNK = 64
# Neighbouring inputs that the threads of a quad share.
SPAN = 32


def select_half(pairs: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The element of each pair that belongs to the output's half ``h`` of the tile."""
    index = h.view(-1, *(1,) * (pairs.ndim - 1)).expand(*pairs.shape[:-1], 1)
    return pairs.gather(-1, index)[..., 0]
