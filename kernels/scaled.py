"""KV in eight bits with scales: in int8 one for each head and token, in fp8 the checkpoint's.

K and V have outliers in few dimensions, and their magnitude differs between tokens, so with one
scale for a whole layer, int8 would round most tokens to zero. e4m3 rounds small values as finely as
large ones, and its one scale only moves a layer's range into that of the format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fp8 import castable

INT8 = torch.int8
LARGEST = 127.0
# A vector of zeros has this scale.
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, eq=False)
class _CodedKV:
    """Values [heads, slots, dim] in eight bits."""

    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device


@dataclass(frozen=True, slots=True, eq=False)
class ScaledKV(_CodedKV):
    """One component of a layer's cache: ``values`` [heads, slots, dim] in int8, to be multiplied by
    ``scales`` [heads, slots, 1]."""

    scales: torch.Tensor

    def write(self, x: torch.Tensor) -> None:
        """Quantise ``x`` [heads, slots, dim] into all slots."""
        values, scales = quantize(x)
        self.values.copy_(values)
        self.scales.copy_(scales)

    def dequantized(self) -> torch.Tensor:
        """All values, in float32."""
        return dequantize(self.values, self.scales)


@dataclass(frozen=True, slots=True, eq=False)
class TensorScaledKV(_CodedKV):
    """One component of a layer's cache: ``values`` [heads, slots, dim] in fp8, to be multiplied by
    ``scale``."""

    scale: float

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as values, clamped to the range of the format."""
        return castable(x.float() / self.scale, self.dtype).to(self.dtype)

    def decoded(self, values: torch.Tensor) -> torch.Tensor:
        """Some of the values, dequantised to float32."""
        return castable(values, torch.float32).float() * self.scale

    def write(self, x: torch.Tensor) -> None:
        """Quantise ``x`` [heads, slots, dim] into all slots."""
        self.values.copy_(self.encoded(x))

    def dequantized(self) -> torch.Tensor:
        """All values, in float32."""
        return self.decoded(self.values)


# A component of a layer's cache, for kernels.
CachedKV = torch.Tensor | ScaledKV | TensorScaledKV


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in int8, and the scale of each vector [..., 1] in float32."""
    x = x.float()
    scales = (x.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST)
    return (x / scales).round_().clamp_(-LARGEST, LARGEST).to(INT8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of ``quantize``, in float32."""
    return values.float() * scales
