"""``x @ w.T + b`` with the weight packed once into oneDNN's blocked layout where that pays.

    x [rows, in]   w [out, in]   b [out]   ->   [rows, out]

Measured on two Zen 4 cores in bf16: 25 instead of 17 GB/s of weights at one row, 440 instead of
400 GFLOP/s at 512. The ops are the ones that inductor's freezing emits; they are private to torch,
so they are looked up, tried once on a small product, and done without where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]

# Rows that the packed layout is laid out for; any other number works with the same packing.
_PACKED_FOR_ROWS = 32
# Seen on a loaded Zen 3 core: 32 rows are three times, 256 rows six times slower in bf16 than fp32.
_UPCAST_FROM_ROWS = 8
_UPCAST_BLOCK = 512


@cache
def packing_works() -> bool:
    """Whether this build of torch and this CPU have the packed product, and it is right."""
    try:
        weight = torch.arange(64 * 32, dtype=torch.float32).view(64, 32).sin().bfloat16()
        rows = torch.arange(3 * 32, dtype=torch.float32).view(3, 32).cos().bfloat16()
        got = _packed_product(weight, None)(rows)
        return torch.allclose(got.float(), F.linear(rows.float(), weight.float()), atol=0.1)
    except (AttributeError, RuntimeError):
        return False


def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product with this weight. When it packs, it keeps the packed copy only."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return lambda x: F.linear(x, weight, bias)
    if packing_works():
        return _packed_product(weight, bias)
    return lambda x: _upcast_product(x, weight, bias)


def _upcast_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """For CPUs without bf16 instructions, where torch's own bf16 product of many rows is several
    times slower than converting the weight on the way, a block that fits the cache at a time."""
    if x.shape[0] < _UPCAST_FROM_ROWS:
        return F.linear(x, weight, bias)
    wide = x.float()
    out = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, weight.shape[0], _UPCAST_BLOCK):
        rows = slice(first, first + _UPCAST_BLOCK)
        part = F.linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
        out[:, rows] = part
    return out


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, bias, "none", [], "")
