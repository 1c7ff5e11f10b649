"""Attention of a mixed batch: all decoding rows in one call of a kernel, chunks one by one.

On a GPU, launching kernels for each sequence and layer takes longer than all of their attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeVar

import torch

from .attention_metadata import (
    AttentionMetadata,
    AttentionParams,
    DecodeMetadata,
    SequenceMetadata,
)
from .scaled import CachedKV

log = logging.getLogger("tandem.kernels")

# The forms of KV that a kernel reads.
KV = TypeVar("KV", bound=CachedKV)
KV_contra = TypeVar("KV_contra", bound=CachedKV, contravariant=True)
# Arguments: queries, keys, values, rows, params, out, whose decoding rows are filled.
DecodeKernel = Callable[[torch.Tensor, KV, KV, DecodeMetadata, AttentionParams, torch.Tensor], None]


class SequenceAttention(Protocol[KV_contra]):
    """Attention sequence by sequence, such as ``reference.attention.paged_attention``."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        keys_KND: KV_contra,
        values_KND: KV_contra,
        sequences: Sequence[SequenceMetadata],
        params: AttentionParams,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@cache
def log_fallback(backend: str, kind: str) -> None:
    """Log once that ``backend`` leaves a kind of attention to the reference."""
    log.info(
        "%s have no kernel for attention %s: torch computes it sequence by sequence",
        backend,
        kind,
    )


def batched_attention(
    q_THD: torch.Tensor,
    keys_KND: KV,
    values_KND: KV,
    metadata: AttentionMetadata,
    params: AttentionParams,
    decode_kernel: DecodeKernel[KV],
    attention: SequenceAttention[KV],
) -> torch.Tensor:
    """``decode_kernel`` for the rows of ``metadata.decodes``, ``attention`` for the others."""
    decodes, sequences = metadata.decodes, metadata.sequences
    if decodes is None:
        return attention(q_THD, keys_KND, values_KND, sequences, params)
    out = q_THD.new_empty(q_THD.shape)  # contiguous, even if q is not
    decode_kernel(q_THD, keys_KND, values_KND, decodes, params, out)
    chunks = [sequence for sequence in sequences if sequence.num_rows > 1]
    if not chunks:
        return out
    return attention(q_THD, keys_KND, values_KND, chunks, params, out=out)
