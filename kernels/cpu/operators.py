"""The operators with compiled kernels where those are faster: in products, and at few rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from .. import reference
from ..linear import Product
from ..operators import TorchOperators
from ..reference import Context
from . import pointwise
from .attention import Decoding
from .jit import array, castable
from .product import PACKED, Panels

# With more rows, torch's operators are no slower, and use all threads.
_FEW = 32
_NO_GAINS = np.empty((0, 0), np.float32)


class CompiledOperators(TorchOperators):
    """For a CPU: activations and sums are fp32, whatever the weights and the cache are in.

    What has no kernel here, an fp8 cache and latent attention, takes torch's operators.
    """

    def __init__(self) -> None:
        self._contexts: Sequence[Context] = ()
        self._decoding = Decoding(())

    def compile(self, cache_dtype: torch.dtype) -> None:
        """All but the products, so that no step waits for it; a product's code is compiled when its
        weight is packed."""
        heads, dim = torch.ones(1, 3, 2), torch.ones(1, 1, 2)
        caches = tuple(torch.zeros(1, 1, 2, dtype=cache_dtype) for _ in range(2))
        slots, gain = torch.zeros(1, dtype=torch.int64), torch.ones(2)
        self.add_rms_norm(self.rms_norm(heads[0], gain, 1e-6), heads[0], gain, 1e-6)
        self.silu_and_mul(heads[0])
        q = self.turn_and_cache(heads, gain.expand(2, 2), 1e-6, (dim, dim), caches, slots)
        self.paged_attention(q, caches[0], caches[1], [Context(slice(0, 1), 0, [0], 1)], None)

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

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        contexts: Sequence[Context],
        window: int | None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """See ``Operators``."""
        if contexts is not self._contexts:  # the first layer of a step
            self._contexts, self._decoding = contexts, Decoding(contexts)
        decoding = self._decoding
        if not len(decoding.rows) or not castable(keys_KND.dtype):
            return reference.paged_attention(q_THD, keys_KND, values_KND, contexts, window, scale)
        out = reference.paged_attention(q_THD, keys_KND, values_KND, decoding.others, window, scale)
        decoding.attend(q_THD, keys_KND, values_KND, window, scale, out)
        return out


@cache
def _compile_product(dtype: torch.dtype) -> None:
    panels = Panels(torch.zeros(1, 1, dtype=dtype))
    for rows in (1, PACKED):
        panels(torch.zeros(rows, 1))
