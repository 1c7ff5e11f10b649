"""What kernels for bytes compute, in torch: the oracle of products and of whole models."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight, dequantize
from tandem.kernels.signatures import Linear

BLOCK = 32


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows in fp64 as they are rounded: 32 int8 codes, and an fp32 scale."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    factor = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    scale = most * torch.tensor(1 / 127)
    return ((blocks * factor).round().double() * scale.double()).flatten(-2)


class RoundedOperators(Operators):
    """The reference, but for activations that are rounded before quantised weights."""

    def prepare_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear:
        values = dequantize(weight).double()
        wide = None if bias is None else bias.double()
        return lambda x: F.linear(rounded(x), values, wide).to(x.dtype)
