"""The operators with compiled kernels where those are faster: in products, and at few rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from .. import reference
from ..decode_rows import DecodeShape, decode_rows
from ..linear import Product
from ..operators import TorchOperators
from ..reference import Context
from . import pointwise
from .attention import attend
from .jit import array, castable
from .product import PACKED, Panels

# With more rows, torch's operators are no slower, and use all threads.
_FEW = 32
_NO_GAINS = np.empty((0, 0), np.float32)


class CompiledOperators(TorchOperators):
    """For a CPU: activations and sums are fp32, whatever the weights and the cache are in.

    What has no kernel here, an fp8 cache and latent attention, takes torch's operators.
    """

    decode_kernel = staticmethod(attend)

    def __init__(self) -> None:
        x = torch.ones(1, 2)
        self.add_rms_norm(self.rms_norm(x, x[0], 1e-6), x, x[0], 1e-6)
        self.silu_and_mul(x)

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """See ``Operators``."""
        return torch.float32

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """See ``Operators``. Any number of rows."""
        _compile_product(weight.dtype)
        panels = Panels(weight)
        if bias is None:
            return panels
        wide = bias.float()
        return lambda x: panels(x).add_(wide)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operators``."""
        if x.dim() != 2 or len(x) > _FEW:
            return reference.rms_norm(x, weight, eps)
        out = np.empty(x.shape, np.float32)
        pointwise.rms_norm(array(x), array(weight), eps, out)
        return torch.from_numpy(out)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Operators``."""
        if len(x) > _FEW:
            return reference.add_rms_norm(x, residual, weight, eps)
        out, total = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
        pointwise.add_rms_norm(array(x), array(residual), array(weight), eps, out, total)
        return torch.from_numpy(out), torch.from_numpy(total)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Operators``."""
        if len(x) > _FEW:
            return reference.silu_and_mul(x)
        out = np.empty((len(x), x.shape[1] // 2), np.float32)
        pointwise.silu_and_mul(array(x), out)
        return torch.from_numpy(out)

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
        if rows > _FEW or not castable(keys.dtype):
            return reference.turn_and_cache(qkv_TXD, gains, eps, angles, cache, slots_T)
        q = np.empty((rows, heads - 2 * keys.shape[0], dim), np.float32)
        pointwise.turn_and_cache(
            array(qkv_TXD),
            _NO_GAINS if gains is None else array(gains),
            eps,
            array(angles[0]),
            array(angles[1]),
            array(keys),
            array(values),
            array(slots_T),
            q,
        )
        return torch.from_numpy(q)

    def attends_together(self, shape: DecodeShape) -> bool:
        """See ``Operators``. Compiles what turns, caches and attends."""
        if not castable(shape.cache_dtype):
            return False
        angle, slots = torch.ones(1, 1, 2), torch.zeros(1, dtype=torch.int64)
        keys, values = torch.zeros(2, 1, 1, 2, dtype=shape.cache_dtype)
        gains = torch.ones(2, 2)
        q = self.turn_and_cache(
            torch.ones(1, 3, 2), gains, 1e-6, (angle, angle), (keys, values), slots
        )
        contexts = [Context(slice(0, 1), 0, [0], 1)]
        rows = decode_rows(contexts, q.device)
        self.paged_attention(q, keys, values, contexts, None, rows)
        return True


@cache
def _compile_product(dtype: torch.dtype) -> None:
    panels = Panels(torch.zeros(1, 1, dtype=dtype))
    for rows in (1, PACKED):
        panels(torch.zeros(rows, 1))
