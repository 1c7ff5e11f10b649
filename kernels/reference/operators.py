"""Reference operators: plain torch, on any device."""

from __future__ import annotations

import torch

from ..attention_metadata import AttentionConfig, AttentionMetadata, AttentionParams
from ..operators import Activation, BlockCopies, CosSin, Experts, LayerKV, Linear, SlotCopies
from ..scaled import CachedKV
from . import activation, attention, latent, linear, norm, quantized_linear
from .cache import IndexedCopies, write_cache, write_kv
from .experts import LoopedExperts
from .numpy_copies import NumpyBlockCopies
from .rope import apply_rotary


def rope_and_cache_kv(
    qkv_TXD: torch.Tensor,
    norm_weight_RD: torch.Tensor | None,
    eps: float,
    cos_sin: CosSin,
    cache: LayerKV,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """See ``Operators``."""
    keys, values = cache
    kv_heads = keys.shape[0]
    qk, v = qkv_TXD.split([qkv_TXD.shape[1] - kv_heads, kv_heads], dim=1)
    if norm_weight_RD is not None:
        qk = norm.head_rms_norm(qk, norm_weight_RD, eps)
    qk = apply_rotary(qk, cos_sin)
    q, k = qk.split([qk.shape[1] - kv_heads, kv_heads], dim=1)
    write_kv(keys, values, slots_T, k, v)
    return q


class ReferenceOperators:
    """The oracle for other backends, and what they fall back to. See ``Operators``."""

    activation_dtype = staticmethod(linear.activation_dtype)
    prepare_linear = staticmethod(linear.prepare_linear)
    prepare_quantized = staticmethod(quantized_linear.prepare_quantized)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    act_and_mul = staticmethod(activation.act_and_mul)
    rope_and_cache_kv = staticmethod(rope_and_cache_kv)

    def prepare_block_copies(self) -> BlockCopies:
        """See ``Operators``."""
        return NumpyBlockCopies()

    def prepare_slot_copies(self, row_bytes: frozenset[int], device: torch.device) -> SlotCopies:
        """See ``Operators``."""
        return IndexedCopies()

    def prepare_experts(
        self, gate_up: list[torch.Tensor], down: list[torch.Tensor], activation: Activation
    ) -> Experts:
        """See ``Operators``."""
        return LoopedExperts(
            self._prepare_all(gate_up), self._prepare_all(down), self.act_and_mul, activation
        )

    def _prepare_all(self, weights: list[torch.Tensor]) -> list[Linear]:
        weights.reverse()
        return [self.prepare_linear(weights.pop(), None) for _ in range(len(weights))]

    def rope_and_cache_latent(
        self,
        q_THD: torch.Tensor,
        kv_TC: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Operators``. Rotates the queries in place."""
        (latents,) = cache
        latent_dim = norm_weight.shape[0]
        latent, k_rope = kv_TC.split([latent_dim, kv_TC.shape[-1] - latent_dim], dim=-1)
        q_rope = q_THD[..., q_THD.shape[-1] - k_rope.shape[-1] :]
        rotated = apply_rotary(torch.cat([q_rope, k_rope[:, None]], dim=1), cos_sin)
        q_rope.copy_(rotated[:, :-1])
        normed = self.rms_norm(latent, norm_weight, eps)
        cached = torch.cat([normed, rotated[:, -1]], dim=-1)
        write_cache(latents, slots_T, cached[:, None])
        return q_THD

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        """See ``Operators``. Sequences are always attended one by one."""
        return False

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``Operators``."""
        return attention.paged_attention(q_THD, keys_KND, values_KND, metadata.sequences, params)

    def latent_attention(
        self,
        q_THD: torch.Tensor,
        latents: CachedKV,
        k_up_HNC: torch.Tensor,
        v_up_HVC: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """See ``Operators``."""
        return latent.latent_attention(
            q_THD, latents, k_up_HNC, v_up_HVC, metadata.sequences, scale
        )
