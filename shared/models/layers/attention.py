"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import torch

from ....kernels.attention_metadata import AttentionConfig, AttentionParams
from ....kernels.scaled import TensorScaledKV
from ....kernels.signatures import CosSin, Memories, RopeConfig
from ..batch import ForwardBatch
from ..parallel import WeightPlacement, WeightSlot
from ..spec import AttentionSpec, QKNorm, QueryScale
from .linear import ColumnParallel, RowParallel
from .norm import HeadLayerNorm, HeadNorm, ProjectionNorm
from .part import Part


class Attention(Part):
    """This rank's heads of one layer's attention: ``project`` writes K and V to the cache,
    ``attend`` does the rest."""

    def __init__(
        self, place: WeightPlacement, spec: AttentionSpec, hidden: int, eps: float
    ) -> None:
        tp, dim = place.tp, spec.head_dim
        query = tp.shard(spec.num_heads)
        kv = range(0) if spec.kv_of is not None else spec.kv.heads_of(tp.rank, tp.size)
        query_rows = range(query.start * dim, query.stop * dim)
        kv_shard = (spec.num_kv_heads * dim, range(kv.start * dim, kv.stop * dim))
        shards = {"q": (spec.num_heads * dim, query_rows)}
        if kv:
            shards["k"] = kv_shard
        if kv and not spec.values_are_keys:
            shards["v"] = kv_shard
        self.qkv = ColumnParallel(place, hidden, shards, spec.qkv_bias)
        self.o = RowParallel(place, "o", (spec.num_heads * dim, query_rows), hidden, spec.o_bias)
        # A norm before the rotation as a separate operator, or one fused with the rotation or after
        # it.
        self.first_norm: ProjectionNorm | HeadLayerNorm | None = None
        self.head_norm: HeadNorm | None = None
        heads, kv_heads = (spec.num_heads, query), (spec.num_kv_heads, kv)
        match spec.qk_norm:
            case QKNorm.PROJECTION:
                self.first_norm = ProjectionNorm(place, heads, kv_heads, dim)
            case QKNorm.LAYER:
                self.first_norm = HeadLayerNorm(place, heads, kv_heads, dim)
            case QKNorm.HEAD | QKNorm.ROTATED_HEAD:
                self.head_norm = HeadNorm(place, len(query), len(kv), dim)
        self.sinks = Sinks(place, spec.num_heads, query) if spec.sinks else None
        self.value_ones = place.empty_norm(dim).fill_(1.0) if spec.v_norm else None
        self.operators = place.operators
        self.activations = place.activations
        self.spec = spec
        self.eps = eps
        self.heads = len(query)
        self.kv_heads = len(kv)
        self.dim = dim
        scale = spec.scale or dim**-0.5
        self.params = AttentionParams(
            scale, spec.sliding_window, spec.soft_cap, spec.sinks, spec.causal
        )
        # True if there is only the rotation between the product and the cache.
        self.only_rotates = (
            self.kv_heads > 0
            and self.first_norm is None
            and self.value_ones is None
            and not spec.values_are_keys
            and spec.qk_norm is not QKNorm.ROTATED_HEAD
            and spec.query_scale is None
        )
        # Set once a kernel for all decoding rows, or all chunks, has been prepared.
        self.batched_decode = self.batched_chunks = False

    def project(
        self, x: torch.Tensor, batch: ForwardBatch, cos_sin: CosSin, memories: Memories
    ) -> torch.Tensor:
        """Write the rows' K and V to the cache; return their queries, [T, H, D]."""
        spec, operators = self.spec, self.operators
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)
        if spec.values_are_keys and self.kv_heads:
            qkv = torch.cat([qkv, qkv[:, self.heads :]], dim=1)
        if self.first_norm is not None:
            qkv = self.first_norm(qkv, self.eps)
        if self.value_ones is not None and self.kv_heads:
            qkv = self._norm_values(qkv, self.value_ones)
        if spec.qk_norm is QKNorm.ROTATED_HEAD:
            qk_heads = self.heads + self.kv_heads
            qk = operators.rope_queries(qkv[:, :qk_heads], None, self.eps, cos_sin)
            qkv = torch.cat([qk, qkv[:, qk_heads:]], dim=1)
            cos_sin = cos_sin[0][..., :0], cos_sin[1][..., :0]
        weight = None if self.head_norm is None else self.head_norm.weight
        if self.kv_heads:
            (cache,), slots = memories, batch.attention.slots
            q = operators.rope_and_cache_kv(qkv, weight, self.eps, cos_sin, cache, slots)
        else:
            q = operators.rope_queries(qkv, weight, self.eps, cos_sin)
        return (
            q if spec.query_scale is None else _scale_queries(q, spec.query_scale, batch.positions)
        )

    def _norm_values(self, qkv: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        qk, v = qkv.split([qkv.shape[1] - self.kv_heads, self.kv_heads], dim=1)
        return torch.cat([qk, self.operators.rms_norm(v, ones, self.eps)], dim=1)

    def attend(self, q: torch.Tensor, batch: ForwardBatch, memories: Memories) -> torch.Tensor:
        """Attention and the output projection."""
        return self.o(self.attend_heads(q, batch, memories))

    def attend_heads(
        self, q: torch.Tensor, batch: ForwardBatch, memories: Memories
    ) -> torch.Tensor:
        """Attention before the output projection, [T, H D]."""
        ((keys, values),) = memories
        metadata = batch.attention.batched_for(
            decodes=self.batched_decode, chunks=self.batched_chunks
        )
        if batch.biases is not None:
            out = self.operators.biased_attention(
                q, keys, values, metadata, self.params, batch.biases
            )
        else:
            sinks = None if self.sinks is None else self.sinks.scores
            out = self.operators.paged_attention(q, keys, values, metadata, self.params, sinks)
        return out.view(q.shape[0], -1)

    def prepare_rope(self, memories: Memories, rotated: int) -> None:
        """Compile the kernels that rotate so many dimensions and write to these caches."""
        ((attended, _),) = memories
        keys = attended if self.kv_heads else None
        config = RopeConfig(
            device=attended.device,
            dtype=self.activations,
            cache_dtype=None if keys is None else keys.dtype,
            has_scale=isinstance(keys, TensorScaledKV),
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            rotated=rotated,
            normed=self.head_norm is not None,
        )
        if self.spec.qk_norm is QKNorm.ROTATED_HEAD:
            qk_heads = self.heads + self.kv_heads
            rotation = config._replace(
                cache_dtype=None, has_scale=False, heads=qk_heads, kv_heads=0, normed=False
            )
            self.operators.prepare_rope(rotation)
            config = config._replace(rotated=0)
        self.operators.prepare_rope(config)

    def config(self, memories: Memories, block_size: int) -> AttentionConfig:
        """The configuration for which kernels over these caches are compiled."""
        ((keys, _),) = memories
        return AttentionConfig(
            device=keys.device,
            dtype=self.activations,
            cache_dtype=keys.dtype,
            heads=self.heads,
            kv_heads=keys.shape[0],
            dim=self.dim,
            block_size=block_size,
            params=self.params,
        )


class Sinks(Part):
    """A score for each head that counts in the softmax but has no value."""

    def __init__(self, place: WeightPlacement, total: int, mine: range) -> None:
        self.scores = torch.empty(len(mine), dtype=torch.float32, device=place.device)
        self.name = place.name("sinks.weight")
        self.slot = WeightSlot(self.scores, (total,), 0, mine.start, mine.stop)

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: self.slot}


def _scale_queries(
    q_THD: torch.Tensor, scale: QueryScale, positions_T: torch.Tensor
) -> torch.Tensor:
    turns = (positions_T // scale.original_max_position).float()
    return (q_THD * (1 + scale.beta * turns.log1p())[:, None, None]).to(q_THD.dtype)
