"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import torch

from ....kernels.attention_metadata import AttentionConfig, AttentionParams
from ....kernels.signatures import CosSin, LayerKV
from ..batch import ForwardBatch
from ..parallel import WeightPlacement, WeightSlot
from ..spec import AttentionSpec
from .linear import ColumnParallel, RowParallel
from .norm import HeadNorm


class Attention:
    """This rank's heads of one layer's attention, in two halves: up to K and V in the cache, and
    the rest."""

    def __init__(
        self, place: WeightPlacement, spec: AttentionSpec, hidden: int, eps: float
    ) -> None:
        tp, dim = place.tp, spec.head_dim
        query = tp.shard(spec.num_heads)
        kv = spec.kv.heads_of(tp.rank, tp.size)
        query_rows = range(query.start * dim, query.stop * dim)
        kv_shard = (spec.num_kv_heads * dim, range(kv.start * dim, kv.stop * dim))
        shards = {"q": (spec.num_heads * dim, query_rows), "k": kv_shard, "v": kv_shard}
        self.qkv = ColumnParallel(place, hidden, shards, spec.qkv_bias)
        self.o = RowParallel(place, "o", (spec.num_heads * dim, query_rows), hidden, spec.o_bias)
        self.norm = HeadNorm(place, len(query), len(kv), dim) if spec.qk_norm else None
        self.operators = place.operators
        self.activations = place.activations
        self.eps = eps
        self.heads = len(query)
        self.kv_heads = len(kv)
        self.dim = dim
        scale = spec.scale or dim**-0.5
        self.params = AttentionParams(scale, spec.sliding_window, spec.soft_cap)
        # Until a kernel for all decoding rows has been prepared.
        self.batched_decode = False

    def project(
        self, x: torch.Tensor, batch: ForwardBatch, cos_sin: CosSin, cache: LayerKV
    ) -> torch.Tensor:
        """Write the rows' K and V to the cache; return their queries, [T, H, D]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)
        weight = None if self.norm is None else self.norm.weight
        return self.operators.rope_and_cache_kv(
            qkv, weight, self.eps, cos_sin, cache, batch.attention.slots
        )

    def attend(self, q: torch.Tensor, batch: ForwardBatch, cache: LayerKV) -> torch.Tensor:
        """Attention and the output projection."""
        keys, values = cache
        metadata = batch.attention if self.batched_decode else batch.attention.one_by_one()
        attended = self.operators.paged_attention(q, keys, values, metadata, self.params)
        return self.o(attended.view(q.shape[0], -1))

    def config(self, cache: LayerKV, block_size: int) -> AttentionConfig:
        """The kind of attention over this cache, for which kernels are compiled."""
        keys = cache[0]
        return AttentionConfig(
            device=keys.device,
            dtype=self.activations,
            cache_dtype=keys.dtype,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            block_size=block_size,
            params=self.params,
        )

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots = self.qkv.weight_slots() | self.o.weight_slots()
        return slots if self.norm is None else slots | self.norm.weight_slots()

    def finish_loading(self) -> None:
        """Pack the weights, once they are loaded."""
        self.qkv.finish_loading()
        self.o.finish_loading()
        if self.norm is not None:
            self.norm.finish_loading()
