"""The operators with compiled kernels, and with torch's products where those are faster."""

from __future__ import annotations

from functools import cache

import torch

from ..decode_rows import DecodeShape, decode_rows
from ..operators import TorchOperators
from ..reference import attention as reference
from ..reference import linear
from ..reference.attention import SequenceContext
from ..reference.linear import Product
from . import chunk, pointwise
from .attention import attend
from .jit import WIDE, array, castable
from .product import PACKED, Panels


class CompiledOperators(TorchOperators):
    """For a CPU: activations are fp32 or, with AVX-512, of the weights' type if it multiplies that.

    What has no kernel here, an fp8 cache and latent attention, takes torch's operators.
    """

    decode_kernel = staticmethod(attend)
    other_rows = staticmethod(chunk.attend)

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """See ``Operators``. Compiles what takes activations of this type."""
        activations = dtype if _blocked(dtype) else torch.float32
        _compile_pointwise(activations)
        return activations

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """See ``Operators``. Any number of rows."""
        if _blocked(weight.dtype):
            return linear.product(weight, bias)
        _compile_product(weight.dtype)
        panels = Panels(weight)
        if bias is None:
            return panels
        wide = bias.float()
        return lambda x: panels(x).add_(wide)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operators``."""
        if x.dim() != 2:
            return reference.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        pointwise.rms_norm(array(x), array(weight), eps, array(out))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Operators``."""
        out, total = x.new_empty(x.shape), x.new_empty(x.shape)
        told = array(x), array(residual), array(weight)
        pointwise.add_rms_norm(*told, eps, array(out), array(total))
        return out, total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Operators``."""
        out = x.new_empty(len(x), x.shape[1] // 2)
        pointwise.silu_and_mul(array(x), array(out))
        return out

    def turn_and_cache(
        self,
        qkv_TXD: torch.Tensor,
        gains: torch.Tensor | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, ...],
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Operators``."""
        keys, values = cache
        rows, heads, dim = qkv_TXD.shape
        if not castable(keys.dtype):
            return reference.turn_and_cache(qkv_TXD, gains, eps, angles, cache, slots_T)
        q = qkv_TXD.new_empty(rows, heads - 2 * keys.shape[0], dim)
        pointwise.turn_and_cache(
            array(qkv_TXD),
            array(qkv_TXD.new_empty(0, 0) if gains is None else gains),
            eps,
            array(angles[0]),
            array(angles[1]),
            array(keys),
            array(values),
            array(slots_T),
            array(q),
        )
        return q

    def attends_together(self, shape: DecodeShape) -> bool:
        """See ``Operators``. Compiles what turns, caches and attends."""
        if not castable(shape.cache_dtype):
            return False
        angle, slots = torch.ones(1, 1, 2), torch.zeros(1, dtype=torch.int64)
        keys, values = torch.zeros(2, 1, 1, 2, dtype=shape.cache_dtype)
        ones = torch.ones(1, 3, 2, dtype=shape.dtype)
        q = self.turn_and_cache(ones, ones[0, :2], 1e-6, (angle, angle), (keys, values), slots)
        contexts = [SequenceContext(slice(0, 1), 0, [0], 1)]
        for rows in (None, decode_rows(contexts, q.device)):
            self.paged_attention(q, keys, values, contexts, None, rows)
        return True


@cache
def _blocked(dtype: torch.dtype) -> bool:
    """Whether oneDNN has the faster products: with AVX-512, at any number of rows."""
    return WIDE and linear.multiplies(dtype)


@cache
def _compile_product(dtype: torch.dtype) -> None:
    panels = Panels(torch.zeros(1, 1, dtype=dtype))
    for rows in (1, PACKED):
        panels(torch.zeros(rows, 1))


@cache
def _compile_pointwise(dtype: torch.dtype) -> None:
    operators, x = CompiledOperators(), torch.ones(1, 2, dtype=dtype)
    operators.add_rms_norm(operators.rms_norm(x, x[0], 1e-6), x, x[0], 1e-6)
    operators.silu_and_mul(x)
