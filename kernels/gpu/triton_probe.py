"""A Triton kernel that shows whether any can be used.

out [1]   ->   1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import direct


def probe(device: torch.device) -> int:
    """The number that the kernel writes, which is 1."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _probe[(1,)](out)
    return int(out.item())


@direct
@triton.jit
def _probe(out: tl.tensor) -> None:
    tl.store(out, 1)
