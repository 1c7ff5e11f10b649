"""What kernels for bytes compute, in torch: the oracle of products and of whole models."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem.kernels.cpu.block_layouts import layout_of
from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight
from tandem.kernels.reference.quantized_linear import DecodedLinear
from tandem.kernels.signatures import QuantizedLinear

BLOCK = 32


def rounded_for(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """Rows in fp64 as they are rounded before a weight."""
    from tandem.kernels.cpu.byte_products import FloatTile, tile_of  # imports numba

    layout = layout_of(weight.format)
    assert layout is not None
    if layout.floats:
        return (x.bfloat16() if tile_of(layout) is FloatTile else x).double()
    return rounded(x)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows in fp64 as 32 int8 codes, and an fp32 scale."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    peak = blocks.abs().amax(-1, keepdim=True)
    factor = torch.where(peak > 0, torch.full_like(peak, 127) / peak, 0)
    scale = peak * torch.tensor(1 / 127)
    return ((blocks * factor).round().double() * scale.double()).flatten(-2)


class RoundedLinear(DecodedLinear):
    """The product of rounded rows, in fp64."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._values = weight.values().double()
        self._added = None if bias is None else bias.double()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(rounded_for(self._weight, x), self._values, self._added).to(x.dtype)


class RoundedOperators(Operators):
    """The reference, but for activations that are rounded before weights that have panels."""

    def prepare_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        from tandem.kernels.cpu.operators import has_panels  # imports numba

        if has_panels(weight):
            return RoundedLinear(weight, bias)
        return super().prepare_quantized(weight, bias, dtype)
