"""Attention metadata: the rows of each sequence in a step, and where its KV is cached.

Built once a step, read by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .fp8 import indexable


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a layer's attention.

    Scores are multiplied by ``scale``; with ``soft_cap`` c, they are then ``c * tanh(score / c)``.
    ``window`` is the number of newest tokens that a token attends to, including itself; ``None``
    means no limit. With ``sinks``, the softmax of each head has one more score, without a token.
    Unless ``causal``, a token attends to all tokens of its sequence, which are rows of one step, or
    to tokens less than ``window`` away on both sides.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One kind of attention on one rank: what a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """One kind of latent attention on one rank: what kernels are compiled for.

    A query has ``nope_dim`` dimensions without position and ``rope_dim`` rotated ones.
    """

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    heads: int
    nope_dim: int
    rope_dim: int
    latent_dim: int
    value_dim: int
    block_size: int


@dataclass(slots=True)
class SequenceMetadata:
    """One sequence's rows in a step, and its block table.

    ``rows`` are the flattened rows of the step, ``start`` the position of the first one. Token t
    is in slot ``block_table[t // block_size] * block_size + t % block_size``. The context is all
    tokens up to the last row's. Index tensors and masks are built on demand and serve all layers
    of the step.
    """

    rows: slice
    start: int
    block_table: Sequence[int] | np.ndarray
    block_size: int
    _consecutive: bool | None = field(init=False, default=None)
    _indices: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)
    _masks: dict[tuple[int, ...], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.block_table = np.asarray(self.block_table)[: -(-self.end // self.block_size)]

    @property
    def num_rows(self) -> int:
        """Rows of this sequence in the step."""
        return self.rows.stop - self.rows.start

    @property
    def end(self) -> int:
        """Tokens of context, including those of this step."""
        return self.start + self.rows.stop - self.rows.start

    def gather(self, cache_KND: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Tokens first to end, [K, end - first, D]: a view if the blocks are consecutive."""
        blocks = self.block_table
        if self._consecutive is None:
            listed = np.asarray(blocks).tolist()
            self._consecutive = listed == list(range(listed[0], listed[0] + len(listed)))
        if self._consecutive:
            base = int(blocks[0]) * self.block_size
            return cache_KND[:, base + first : base + end]
        low, high = first // self.block_size, -(-end // self.block_size)
        index = self._indices.get((low, high))
        if index is None:
            index = torch.tensor(blocks[low:high], device=cache_KND.device)
            self._indices[low, high] = index
        heads, _, dim = cache_KND.shape
        paged = indexable(cache_KND).view(heads, -1, self.block_size * dim)
        gathered = paged.index_select(1, index).view(cache_KND.dtype)
        offset = low * self.block_size
        return gathered.view(heads, -1, dim)[:, first - offset : end - offset]

    def mask(
        self, start: int, rows: int, first: int, window: int | None, device: torch.device
    ) -> torch.Tensor:
        """[rows, tokens], true where a row attends to a token. Rows begin at ``start``, tokens at
        ``first``."""
        key = (start, rows, first, window or 0)
        mask = self._masks.get(key)
        if mask is None:
            query = torch.arange(start, start + rows, device=device)[:, None]
            token = torch.arange(first, start + rows, device=device)
            mask = token <= query
            if window is not None:
                mask &= token > query - window
            self._masks[key] = mask
        return mask

    def mask_around(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """[rows, tokens], true where a token is less than ``window`` away from a row; ``None`` if
        all are."""
        if window is None or self.end <= window:
            return None
        key = (self.start, self.num_rows, -1, window)
        mask = self._masks.get(key)
        if mask is None:
            token = torch.arange(self.end, device=device)
            mask = (token[self.start :, None] - token).abs() < window
            self._masks[key] = mask
        return mask


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """The decoding rows of a step, for a kernel that handles all of them in one call.

    ``rows``, int32 [R, 3], holds each one's index in the step, the index of its block table in
    ``tables``, int32 [S, blocks], and its sequence's length. Length 0 stands for padding.

    ``derived`` holds what a kernel computes from them on the device, for all layers of the step. So
    a CUDA graph is captured with metadata of its own: only then does it contain the computation.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    max_seq_len: int
    block_size: int
    derived: dict[object, tuple[torch.Tensor, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )


@dataclass(frozen=True, slots=True)
class ChunkMetadata:
    """The chunks of a step, sequences with several rows, for a kernel that handles all of them in
    one call.

    ``chunks``, int32 [C, 4] in row order, holds each one's first row in the step, its number of
    rows, the index of its block table in ``tables``, int32 [S, blocks], and the position of its
    first row. ``derived`` is as that of ``DecodeMetadata``.
    """

    chunks: torch.Tensor
    tables: torch.Tensor
    block_size: int
    derived: dict[object, tuple[torch.Tensor, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's sequences in row order, each row's cache slot, and the decoding rows and the chunks
    if batched."""

    sequences: list[SequenceMetadata]
    slots: torch.Tensor
    decodes: DecodeMetadata | None = None
    chunks: ChunkMetadata | None = None

    def batched_for(self, *, decodes: bool, chunks: bool) -> AttentionMetadata:
        """The same metadata, for attention that has kernels for all decoding rows of a step, or all
        chunks, or neither."""
        if (decodes or self.decodes is None) and (chunks or self.chunks is None):
            return self
        return replace(
            self,
            decodes=self.decodes if decodes else None,
            chunks=self.chunks if chunks else None,
        )


def decode_metadata(
    sequences: Sequence[SequenceMetadata], device: torch.device
) -> DecodeMetadata | None:
    """The sequences with one row; ``None`` if there are none."""
    single = [sequence for sequence in sequences if sequence.num_rows == 1]
    if not single:
        return None
    rows = [(sequence.rows.start, number, sequence.end) for number, sequence in enumerate(single)]
    return DecodeMetadata(
        torch.from_numpy(np.array(rows, np.int32)).to(device),
        _tables(single, device),
        max(sequence.end for sequence in single),
        single[0].block_size,
    )


def chunk_metadata(
    sequences: Sequence[SequenceMetadata], device: torch.device
) -> ChunkMetadata | None:
    """The sequences with several rows; ``None`` if there are none."""
    several = [sequence for sequence in sequences if sequence.num_rows > 1]
    if not several:
        return None
    chunks = [
        (sequence.rows.start, sequence.num_rows, number, sequence.start)
        for number, sequence in enumerate(several)
    ]
    return ChunkMetadata(
        torch.from_numpy(np.array(chunks, np.int32)).to(device),
        _tables(several, device),
        several[0].block_size,
    )


def _tables(sequences: Sequence[SequenceMetadata], device: torch.device) -> torch.Tensor:
    blocks = max(len(sequence.block_table) for sequence in sequences)
    tables = np.zeros((len(sequences), blocks), dtype=np.int32)
    for table, sequence in zip(tables, sequences, strict=True):
        table[: len(sequence.block_table)] = sequence.block_table
    return torch.from_numpy(tables).to(device)
