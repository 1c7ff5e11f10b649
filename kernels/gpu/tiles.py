"""The order in which tensor cores take the weights of a product.

A tile is 16 outputs, and a chunk 64 of their inputs, which a warp decodes at once. ``mma.m16n8k16``
multiplies in thread t of quad g the outputs g and g + 8 with the inputs 2t, 2t + 1, 2t + 8 and
2t + 9 of 16. Sums do not depend on which inputs are called so: thread t has 8 neighbouring ones of
32, a span, so that it also reads their activations as whole words. Of these 8, ``mma`` takes four
in each of two steps: two neighbours, the lower or the upper ones.

h is 1 for output g + 8, upper for the inputs from 2t + 8 on, and second for odd ones.
"""

from __future__ import annotations

import torch

TILE = 16
CHUNK = 64
# Neighbouring inputs that the threads of a quad divide among them.
SPAN = 32


def picked(pairs: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Of each pair of an output, the one of its half of the tile."""
    index = h.view(-1, *(1,) * (pairs.ndim - 1)).expand(*pairs.shape[:-1], 1)
    return pairs.gather(-1, index)[..., 0]
