"""Triton's kernels as operators use them. Triton is imported with the first of them, since a GPU
may be served without it. Some kernels return ``None`` for tensors that they do not take.
"""

from __future__ import annotations

import torch

from ..activations import Activation
from ..attention_metadata import AttentionParams, ChunkMetadata, DecodeMetadata
from ..scaled import CachedKV
from ..signatures import CosSin, LayerKV, Routing
from .packed_codes import PackedCodes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """``norm.rms_norm``."""
    from .norm import rms_norm, takes

    return rms_norm(x, weight, eps) if takes(x) else None


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``norm.add_rms_norm``."""
    from .norm import add_rms_norm, takes

    supported = takes(x) and takes(residual)
    return add_rms_norm(x, residual, weight, eps) if supported else None


def act_and_mul(x: torch.Tensor, activation: Activation) -> torch.Tensor | None:
    """``activation.act_and_mul``."""
    from .activation import act_and_mul, takes

    return act_and_mul(x, activation) if takes(x) else None


def rope_and_cache_kv(
    qkv_TXD: torch.Tensor,
    norm_weight_RD: torch.Tensor | None,
    eps: float,
    cos_sin: CosSin,
    cache: LayerKV,
    slots_T: torch.Tensor,
) -> torch.Tensor | None:
    """``rope_store.rope_and_cache_kv``."""
    from .rope_store import rope_and_cache_kv, takes

    if not takes(qkv_TXD, cos_sin):
        return None
    return rope_and_cache_kv(qkv_TXD, norm_weight_RD, eps, cos_sin, cache, slots_T)


def rope_queries(
    q_THD: torch.Tensor, norm_weight_HD: torch.Tensor | None, eps: float, cos_sin: CosSin
) -> torch.Tensor | None:
    """``rope_store.rope_queries``."""
    from .rope_store import rope_queries, takes

    if not takes(q_THD, cos_sin):
        return None
    return rope_queries(q_THD, norm_weight_HD, eps, cos_sin)


def paged_decode(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    decodes: DecodeMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """``paged_decode.paged_decode``."""
    from .paged_decode import paged_decode

    paged_decode(q_THD, keys_KND, values_KND, decodes, params, out_THD, sinks_H)


def chunk_attention(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    chunks: ChunkMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """``chunk_attention.chunk_attention``."""
    from .chunk_attention import chunk_attention

    chunk_attention(q_THD, keys_KND, values_KND, chunks, params, out_THD, sinks_H)


def latent_attention(
    q_THD: torch.Tensor,
    latents: CachedKV,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    decodes: DecodeMetadata | None,
    chunks: ChunkMetadata | None,
    scale: float,
    out_THV: torch.Tensor,
) -> None:
    """Fill the decoding rows of ``out`` and those of chunks; other rows are undefined."""
    from .latent_chunks import latent_chunks
    from .latent_decode import latent_decode

    wide_HTC = torch.bmm(q_THD[..., : k_up_HNC.shape[1]].transpose(0, 1), k_up_HNC)
    # Sums take the place of the queries, of which each program reads those that it replaces.
    if decodes is not None:
        latent_decode(q_THD, wide_HTC, latents, decodes, scale, wide_HTC)
    if chunks is not None:
        latent_chunks(q_THD, wide_HTC, latents, chunks, scale, wide_HTC)
    torch.bmm(wide_HTC, v_up_HVC.mT, out=out_THV.transpose(0, 1))


def rope_and_cache_latent(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: CosSin,
    latents: CachedKV,
    slots_T: torch.Tensor,
) -> torch.Tensor | None:
    """``latent_store.rope_and_cache_latent``."""
    from .latent_store import rope_and_cache_latent, takes

    if not takes(q_THD, kv_TC):
        return None
    return rope_and_cache_latent(q_THD, kv_TC, norm_weight, eps, cos_sin, latents, slots_T)


def choose_experts(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """``routing.choose_experts``."""
    from .routing import choose_experts

    return choose_experts(logits_TE, routing)


def route(
    x_TC: torch.Tensor, weight_EC: torch.Tensor, bias_E: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices of the experts of each row, both [T, K]."""
    from .router import multiply_router
    from .routing import choose_experts

    return choose_experts(multiply_router(x_TC.contiguous(), weight_EC), routing, bias_E)


def multiply(x: torch.Tensor, weight: PackedCodes) -> torch.Tensor:
    """``quantized_linear.multiply``."""
    from .quantized_linear import multiply

    return multiply(x, weight)
