"""Attention of a mixed batch: all decoding rows in one call of a kernel, and all chunks in another.

On a GPU, launching kernels for each sequence and layer takes longer than all of their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from .attention_metadata import (
    AttentionMetadata,
    AttentionParams,
    ChunkMetadata,
    DecodeMetadata,
    SequenceMetadata,
)
from .scaled import CachedKV

# The forms of KV that a kernel reads.
KV = TypeVar("KV", bound=CachedKV)
KV_contra = TypeVar("KV_contra", bound=CachedKV, contravariant=True)
# Arguments: queries, keys, values, rows, params, out, whose decoding rows are filled.
DecodeKernel = Callable[[torch.Tensor, KV, KV, DecodeMetadata, AttentionParams, torch.Tensor], None]
# The same for chunks, whose rows are filled; rows between two chunks may be overwritten.
ChunkKernel = Callable[[torch.Tensor, KV, KV, ChunkMetadata, AttentionParams, torch.Tensor], None]


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


def batched_attention(
    q_THD: torch.Tensor,
    keys_KND: KV,
    values_KND: KV,
    metadata: AttentionMetadata,
    params: AttentionParams,
    decode_kernel: DecodeKernel[KV],
    attention: SequenceAttention[KV],
    chunk_kernel: ChunkKernel[KV] | None = None,
) -> torch.Tensor:
    """``decode_kernel`` for the rows of ``metadata.decodes``, ``chunk_kernel`` for those of
    ``metadata.chunks``, before it, and ``attention`` for the others."""
    decodes, chunks, sequences = metadata.decodes, metadata.chunks, metadata.sequences
    if decodes is None and chunks is None:
        return attention(q_THD, keys_KND, values_KND, sequences, params)
    out = q_THD.new_empty(*q_THD.shape)  # contiguous, even if q is not
    if chunks is not None:
        assert chunk_kernel is not None
        chunk_kernel(q_THD, keys_KND, values_KND, chunks, params, out)
    if decodes is not None:
        decode_kernel(q_THD, keys_KND, values_KND, decodes, params, out)
    others = [
        sequence for sequence in sequences if (chunks if sequence.num_rows > 1 else decodes) is None
    ]
    if not others:
        return out
    return attention(q_THD, keys_KND, values_KND, others, params, out=out)
