"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import torch

from ...kernels.decode_rows import DecodeShape
from .batch import ForwardBatch
from .linear import ColumnParallel, RowParallel
from .norm import HeadNorm
from .parallel import WeightPlacement, WeightSlot
from .spec import AttentionSpec

Angles = tuple[torch.Tensor, torch.Tensor]
# What a layer has in the cache, a tensor for each side of its ``KVSpec``.
LayerKV = tuple[torch.Tensor, ...]


class Attention:
    """This rank's heads of one layer's attention, in two halves: what ends with K and V in the
    cache, and the rest."""

    def __init__(
        self, place: WeightPlacement, spec: AttentionSpec, hidden: int, eps: float
    ) -> None:
        tp, dim = place.tp, spec.head_dim
        query = tp.share(spec.num_heads)
        kv = spec.kv.heads_of(tp.rank, tp.size)
        query_rows = range(query.start * dim, query.stop * dim)
        kv_part = (spec.num_kv_heads * dim, range(kv.start * dim, kv.stop * dim))
        parts = {"q": (spec.num_heads * dim, query_rows), "k": kv_part, "v": kv_part}
        self.qkv = ColumnParallel(place, hidden, parts, spec.qkv_bias)
        self.o = RowParallel(place, "o", spec.num_heads * dim, query_rows, hidden, spec.o_bias)
        self.norm = HeadNorm(place, len(query), len(kv), dim) if spec.qk_norm else None
        self.operators = place.operators
        self.activations = place.activations
        self.eps = eps
        self.heads = len(query)
        self.kv_heads = len(kv)
        self.dim = dim
        self.window = spec.sliding_window

    def project(
        self, x: torch.Tensor, batch: ForwardBatch, angles: Angles, cache: LayerKV
    ) -> torch.Tensor:
        """Write the rows' K and V into the cache; return their queries, [T, H, D]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)
        gains = None if self.norm is None else self.norm.gains
        return self.operators.turn_and_cache(qkv, gains, self.eps, angles, cache, batch.slots)

    def attend(self, q: torch.Tensor, batch: ForwardBatch, cache: LayerKV) -> torch.Tensor:
        """Attention and the output projection."""
        keys, values = cache
        told = batch.contexts, self.window, batch.decodes
        attended = self.operators.paged_attention(q, keys, values, *told)
        return self.o(attended.view(q.shape[0], -1))

    def decode_shape(self, cache: LayerKV, block_size: int) -> DecodeShape:
        """What attends to this cache, in the type of activations."""
        keys = cache[0]
        heads = self.heads, self.kv_heads
        return DecodeShape(
            keys.device, self.activations, keys.dtype, *heads, self.dim, self.window, block_size
        )

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots = self.qkv.slots(prefix) | self.o.slots(prefix)
        return slots if self.norm is None else slots | self.norm.slots(prefix)

    def finish(self) -> None:
        """Called once the parameters are filled."""
        self.qkv.finish()
        self.o.finish()
        if self.norm is not None:
            self.norm.finish()
