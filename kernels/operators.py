"""What the models compute with, and torch's own operators as the first that do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from . import decode_rows
from .decode_rows import DecodeKernel, DecodeRows, DecodeShape, PagedAttention
from .reference import attention as reference
from .reference import linear
from .reference.attention import SequenceContext
from .reference.linear import Product


class Operators(Protocol):
    """Shapes as in ``reference/attention.py``, which says what each of them is."""

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """What to keep activations in, with weights of ``dtype``."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """``x @ weight.T + bias``, prepared once for this weight."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of both, normed, and the sum itself."""

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of [T, gate | up]."""

    def turn_and_cache(
        self,
        qkv_TXD: torch.Tensor,
        gains: torch.Tensor | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, ...],
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """Queries [T, H, D]; keys and values go to the cache."""

    def attends_together(self, shape: DecodeShape) -> bool:
        """Whether ``paged_attention`` of this kind wants ``decodes``. Asked before the first step:
        what is to be compiled or tried for it is done here."""

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        contexts: Sequence[SequenceContext],
        window: int | None,
        decodes: DecodeRows | None = None,
    ) -> torch.Tensor:
        """Each row attends to its own sequence, up to itself, those of ``decodes`` together;
        [T, H, D]."""


class TorchOperators:
    """On any device; on a GPU decoding rows attend in one launch, where Triton is there.

    ``decode``: "triton" raises ``UnusableError`` where it is not, "torch" never uses it, "auto" is
    content with either.
    """

    def __init__(self, decode: str = "auto") -> None:
        self._decode = decode

    activation_dtype = staticmethod(linear.activation_dtype)
    product = staticmethod(linear.product)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    turn_and_cache = staticmethod(reference.turn_and_cache)
    decode_kernel: DecodeKernel = staticmethod(decode_rows.triton_kernel)
    other_rows: PagedAttention = staticmethod(reference.paged_attention)

    def attends_together(self, shape: DecodeShape) -> bool:
        """See ``Operators``."""
        if self._decode == "torch":
            return False
        return decode_rows.works(shape, required=self._decode == "triton")

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        contexts: Sequence[SequenceContext],
        window: int | None,
        decodes: DecodeRows | None = None,
    ) -> torch.Tensor:
        """See ``Operators``."""
        told = q_THD, keys_KND, values_KND, contexts, window, decodes
        return decode_rows.paged_attention(*told, self.decode_kernel, self.other_rows)
