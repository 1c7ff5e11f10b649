"""Multi-head latent attention: one latent is cached per token, for all heads.

T rows, H query heads of this rank, dimensions: N of a head without position, R of its rotated part,
V of a value, C of a latent.
"""

from __future__ import annotations

import torch

from ....kernels.attention_metadata import LatentConfig
from ....kernels.signatures import CosSin, Memories
from ..batch import ForwardBatch
from ..parallel import WeightPlacement, WeightSlot
from ..spec import MLASpec
from .linear import ColumnParallel, RowParallel
from .linear_method import Shard
from .norm import RMSNorm
from .part import Part


class LatentAttention(Part):
    """This rank's heads of one layer's attention: ``project`` writes latents to the cache,
    ``attend`` does the rest. Every rank computes and caches the latent."""

    def __init__(self, place: WeightPlacement, spec: MLASpec, hidden: int) -> None:
        heads = place.tp.shard(spec.num_heads)
        q_shard = _shard(spec.num_heads, heads, spec.qk_dim)
        kv_shard = (spec.kv.dim, range(spec.kv.dim))
        if spec.q_lora_rank is None:
            self.queries = None
            shards = {"q": q_shard, "kv_a": kv_shard}
        else:
            self.queries = CompressedQueries(place, spec.q_lora_rank, q_shard, spec.norm_eps)
            shards = {"q_a": (spec.q_lora_rank, range(spec.q_lora_rank)), "kv_a": kv_shard}
        self.down = ColumnParallel(place, hidden, shards, bias=False)
        self.kv_norm = RMSNorm(place.at("kv_a_norm"), spec.kv_lora_rank, spec.norm_eps)
        self.kv_up = LatentExpansion(place, spec, heads)
        values = _shard(spec.num_heads, heads, spec.v_dim)
        self.o = RowParallel(place, "o", values, hidden, bias=False)
        self.operators = place.operators
        self.spec = spec
        self.heads = len(heads)
        self.activations = place.activations
        # Set once a kernel for all decoding rows has been prepared, and one for all chunks.
        self.batched_decode = False
        self.batched_chunks = False

    def project(
        self, x: torch.Tensor, batch: ForwardBatch, cos_sin: CosSin, memories: Memories
    ) -> torch.Tensor:
        """Write the rows' latents to the cache; return their queries, [T, H, N + R]."""
        spec = self.spec
        down = self.down(x)
        q, kv = down.split([down.shape[-1] - spec.kv.dim, spec.kv.dim], dim=-1)
        if self.queries is not None:
            q = self.queries(q)
        q_THD = q.view(x.shape[0], self.heads, spec.qk_dim)
        (cache,), norm, slots = memories, self.kv_norm, batch.attention.slots
        return self.operators.rope_and_cache_latent(
            q_THD, kv, norm.weight, norm.eps, cos_sin, cache, slots
        )

    def attend(self, q: torch.Tensor, batch: ForwardBatch, memories: Memories) -> torch.Tensor:
        """Attention and the output projection."""
        ((latents,),) = memories
        k_up, v_up = self.kv_up.halves
        scale = self.spec.softmax_scale
        metadata = batch.attention.batched_for(
            decodes=self.batched_decode, chunks=self.batched_chunks
        )
        out = self.operators.latent_attention(q, latents, k_up, v_up, metadata, scale)
        return self.o(out.reshape(q.shape[0], -1))

    def config(self, memories: Memories, block_size: int) -> LatentConfig:
        """The configuration for which kernels over these caches are compiled."""
        ((latents,),) = memories
        return LatentConfig(
            device=latents.device,
            dtype=self.activations,
            cache_dtype=latents.dtype,
            heads=self.heads,
            nope_dim=self.spec.nope_dim,
            rope_dim=self.spec.rope_dim,
            latent_dim=self.spec.kv_lora_rank,
            value_dim=self.spec.v_dim,
            block_size=block_size,
        )


class CompressedQueries(Part):
    """Projection from the compressed query to this rank's heads."""

    def __init__(self, place: WeightPlacement, rank: int, shard: Shard, eps: float) -> None:
        self.norm = RMSNorm(place.at("q_a_norm"), rank, eps)
        self.up = ColumnParallel(place, rank, {"q_b": shard}, bias=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x))


class LatentExpansion(Part):
    """The weight that expands a latent to keys and values of this rank's heads. It is not a
    separate linear: attention multiplies with it on the cheaper side."""

    def __init__(self, place: WeightPlacement, spec: MLASpec, heads: range) -> None:
        self.shard = _shard(spec.num_heads, heads, spec.nope_dim + spec.v_dim)
        self.weight = place.empty(len(self.shard[1]), spec.kv_lora_rank)
        self.shape = (len(heads), spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self.name = place.name("kv_b.weight")
        self.nope_dim = spec.nope_dim
        self.dtype = place.activations
        self._halves: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the keys, [H, N, C], and for the values, [H, V, C]; in the activations' dtype."""
        assert self._halves is not None, "finish_loading() comes first"
        return self._halves

    def own_slots(self) -> dict[str, WeightSlot]:
        total, mine = self.shard
        shape = (total, self.weight.shape[1])
        return {self.name: WeightSlot(self.weight, shape, 0, mine.start, mine.stop)}

    def pack(self) -> None:
        """Split and convert the weight."""
        weight = self.weight.to(self.dtype).view(self.shape)
        self._halves = weight[:, : self.nope_dim], weight[:, self.nope_dim :]
        del self.weight


def _shard(total_heads: int, heads: range, width: int) -> Shard:
    """Heads of one width as rows of a matrix."""
    return total_heads * width, range(heads.start * width, heads.stop * width)
