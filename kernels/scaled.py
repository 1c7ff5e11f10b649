"""KV in int8, with a scale for each head and token.

K and V of a token have outliers in few dimensions and sizes that differ from token to token, so one
scale for a whole layer would round most tokens away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT8 = torch.int8
_LARGEST = 127.0
# A vector of zeros has this scale.
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, eq=False)
class ScaledKV:
    """One component of a layer's cache: ``values`` [heads, slots, dim] in int8, which ``scales``
    [heads, slots, 1] are to be multiplied with."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def write(self, x: torch.Tensor) -> None:
        """Quantise ``x`` [heads, slots, dim] into all slots."""
        values, scales = quantize(x)
        self.values.copy_(values)
        self.scales.copy_(scales)

    def dequantized(self) -> torch.Tensor:
        """All values, in float32."""
        return dequantize(self.values, self.scales)


# A component of a layer's cache, as kernels read and write it.
CachedKV = torch.Tensor | ScaledKV


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in int8, and the scale of each vector [..., 1] in float32."""
    x = x.float()
    scales = (x.abs().amax(dim=-1, keepdim=True) / _LARGEST).clamp_(min=_SMALLEST)
    return (x / scales).round_().clamp_(-_LARGEST, _LARGEST).to(INT8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of ``quantize``, in float32."""
    return values.float() * scales
