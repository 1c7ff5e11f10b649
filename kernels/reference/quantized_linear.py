"""``x @ w.T + b`` for a quantised weight, of which some outputs at a time are brought to fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..quantized import GroupedCodes, QuantizedWeight, dequantize
from ..signatures import Linear

# Weights that are brought to fp32 at a time: 4 MB.
_PIECE = 1 << 20
# The same on a GPU: 64 MB.
_DECODED = 1 << 24


def multiply_decoded(
    x: torch.Tensor, weight: GroupedCodes, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product with a weight whose codes are kept apart, in x's dtype."""
    outputs, inputs = len(weight.codes), weight.scales.shape[1] * weight.group
    step = max(1, _DECODED // inputs)
    out = x.new_empty(x.shape[0], outputs)
    for first in range(0, outputs, step):
        rows = slice(first, first + step)
        part_bias = None if bias is None else bias[rows].to(x.dtype)
        out[:, rows] = F.linear(x, weight.part(rows).values().to(x.dtype), part_bias)
    return out


def prepare_quantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> Linear:
    """The product with a weight, whose bytes are kept as they are. Sums are fp32, whatever the
    activations' ``dtype``."""
    outputs = len(weight.blocks)
    step = max(1, _PIECE // weight.inputs)
    wide_bias = None if bias is None else bias.float()

    def run(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        out = x.new_empty(x.shape[0], outputs)
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            part = dequantize(QuantizedWeight(weight.format, weight.blocks[rows]))
            part_bias = None if wide_bias is None else wide_bias[rows]
            out[:, rows] = F.linear(wide, part, part_bias)
        return out

    return run
