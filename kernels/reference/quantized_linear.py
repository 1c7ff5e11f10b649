"""``x @ w.T + b`` for a quantised weight, of which some outputs at a time are brought to fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..grouped_codes import GroupedCodes
from ..quantized import QuantizedWeight
from ..signatures import Linear

# Weights that are brought to fp32 at a time: 4 MB.
_PIECE = 1 << 20
# The same on a GPU: 64 MB.
_DECODED = 1 << 24


def multiply_decoded(
    x: torch.Tensor, weight: GroupedCodes | QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product with a weight in x's dtype."""
    step = max(1, _DECODED // weight.inputs)
    out = x.new_empty(x.shape[0], weight.outputs)
    for first in range(0, weight.outputs, step):
        rows = slice(first, first + step)
        part_bias = None if bias is None else bias[rows].to(x.dtype)
        out[:, rows] = F.linear(x, weight.part(rows).values().to(x.dtype), part_bias)
    return out


def prepare_quantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> Linear:
    """The product with a weight, whose bytes are kept as they are. Sums are fp32, whatever the
    activations' ``dtype``."""
    step = max(1, _PIECE // weight.inputs)
    wide_bias = None if bias is None else bias.float()

    def run(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        out = x.new_empty(x.shape[0], weight.outputs)
        for first in range(0, weight.outputs, step):
            rows = slice(first, first + step)
            part_bias = None if wide_bias is None else wide_bias[rows]
            out[:, rows] = F.linear(wide, weight.part(rows).values(), part_bias)
        return out

    return run
