"""KV in eight bits with scales: in int8 one for each head and token, in fp8 one of the checkpoint.

K and V of a token have outliers in few dimensions and sizes that differ from token to token, so one
scale for a whole layer would round most tokens of int8 away. e4m3 rounds small values as finely as
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
    """One component of a layer's cache: ``values`` [heads, slots, dim] in int8, which ``scales``
    [heads, slots, 1] are to be multiplied with."""

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
    """One component of a layer's cache: ``values`` [heads, slots, dim] in fp8, all of which
    ``scale`` is to be multiplied with."""

    scale: float

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as values, which are clamped to the largest of the format."""
        return castable(x.float() / self.scale, self.dtype).to(self.dtype)

    def decoded(self, values: torch.Tensor) -> torch.Tensor:
        """What some of the values stand for, in float32."""
        return castable(values, torch.float32).float() * self.scale

    def write(self, x: torch.Tensor) -> None:
        """Quantise ``x`` [heads, slots, dim] into all slots."""
        self.values.copy_(self.encoded(x))

    def dequantized(self) -> torch.Tensor:
        """All values, in float32."""
        return self.decoded(self.values)


# A component of a layer's cache, as kernels read and write it.
CachedKV = torch.Tensor | ScaledKV | TensorScaledKV


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in int8, and the scale of each vector [..., 1] in float32."""
    x = x.float()
    scales = (x.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST)
    return (x / scales).round_().clamp_(-LARGEST, LARGEST).to(INT8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of ``quantize``, in float32."""
    return values.float() * scales
