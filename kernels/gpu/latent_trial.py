"""Trials of the Triton kernels of latent attention, before they are used.

Shapes as in ``latent_decode.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ..attention_metadata import (
    LatentConfig,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)
from ..operators import Operators
from ..reference.latent import absorbed_attention
from ..scaled import CachedKV, ScaledKV, TensorScaledKV
from . import latent_decode, trials
from .chunk_trial import CHUNKS
from .decode_trial import cached_as, limit
from .latent_attention import attend_latents
from .latent_store import rope_and_cache_latent


@cache
def decodes(config: LatentConfig, *, required: bool = False) -> bool:
    """True if the decode kernel compiles and is correct on this device; logs the reason if not.

    Raises ``KernelUnavailableError`` if it is ``required`` on a GPU but does not work.
    """
    if config.device.type == "cpu":
        return False
    return trials.passes(
        lambda: trials.too_far(decode_error(config), limit(config)),
        "sequences decode one by one, because of Triton",
        required=required,
    )


@cache
def takes_chunks(config: LatentConfig) -> bool:
    """True if the kernel for chunks compiles and is correct on this device; logs the reason if
    not."""
    if config.device.type == "cpu":
        return False
    return trials.passes(
        lambda: trials.too_far(chunk_error(config), limit(config)),
        "torch attends for chunks over latents one by one, because of Triton",
    )


@cache
def stores(config: LatentConfig) -> bool:
    """True if the kernel that writes latents compiles and is correct on this device; logs the
    reason if not."""
    if config.device.type == "cpu":
        return False
    return trials.passes(
        lambda: trials.too_far(store_error(config), limit(config)),
        "torch writes latents to the cache, because of Triton",
    )


def decode_error(config: LatentConfig) -> float:
    """The largest difference from the reference, for rows with one split and with several."""
    return _attention_error(config, [(0, 1), (18, 1), (2 * latent_decode.MIN_SPLIT + 99, 1)])


def chunk_error(config: LatentConfig) -> float:
    """The largest difference from the reference, for chunks."""
    return _attention_error(config, CHUNKS)


def _attention_error(config: LatentConfig, spans: Sequence[tuple[int, int]]) -> float:
    """The largest difference from the reference, for sequences with a first position and rows
    each, in relation to the row's largest result, if that is below one: means are small."""
    size, device, random = config.block_size, config.device, torch.Generator().manual_seed(0)
    blocks = list(range(-(-max(start + rows for start, rows in spans) // size)))[::-1]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device)

    width, heads = config.latent_dim, config.heads
    latents = cached_as(numbers(1, len(blocks) * size, width + config.rope_dim), config.cache_dtype)
    up_HXC = numbers(heads, config.nope_dim + config.value_dim, width).to(config.dtype)
    k_up, v_up = (up_HXC / width**0.5).split([config.nope_dim, config.value_dim], dim=1)
    sequences, end = list[SequenceMetadata](), 0
    for start, rows in spans:
        sequences.append(SequenceMetadata(slice(end, end + rows), start, blocks, size))
        end += rows
    q_THD = numbers(end, heads, config.nope_dim + config.rope_dim).to(config.dtype)
    decodes, chunks = decode_metadata(sequences, device), chunk_metadata(sequences, device)
    scale = q_THD.shape[2] ** -0.5
    out = q_THD.new_empty(end, heads, config.value_dim)
    # Rows twice, as two layers of a step: the second finds the counters as the first leaves them.
    for _ in range(1 if decodes is None else 2):
        attend_latents(q_THD, latents, k_up, v_up, decodes, chunks, scale, out)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = absorbed_attention(q_THD, latents, k_up, v_up, sequences, scale)
    scales = trials.row_scales(expected)
    return trials.relative_error(out / scales, expected / scales)


def store_error(config: LatentConfig) -> float:
    """The largest difference from the reference."""
    rows, device, random = 5, config.device, torch.Generator().manual_seed(0)
    rope_dim, width = config.rope_dim, config.latent_dim
    q_dim = config.nope_dim + rope_dim

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device)

    q, kv = (numbers(rows, n).to(config.dtype) for n in (config.heads * q_dim, width + rope_dim))
    weight, angles = numbers(width).to(config.dtype), numbers(rows, 1, rope_dim // 2)
    turned = angles.sin()
    cos_sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-turned, turned], dim=-1)
    slots = torch.randperm(9, generator=random)[:rows].to(device)
    ours, theirs = (
        cached_as(torch.zeros(1, 9, width + rope_dim, device=device), config.cache_dtype)
        for _ in range(2)
    )
    shape = rows, config.heads, q_dim
    stored = rope_and_cache_latent(q.clone().view(shape), kv, weight, 1e-6, cos_sin, ours, slots)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = Operators().rope_and_cache_latent(
        q.view(shape), kv, weight, 1e-6, cos_sin, (theirs,), slots
    )
    # A number between two codes of a byte may become either, of which e4m3 has eight to the power
    # of two.
    share = 0.25 if config.cache_dtype.itemsize == 1 else 1.0
    cached = share * trials.relative_error(_decoded(ours), _decoded(theirs))
    return max(trials.relative_error(stored, expected), cached)


def _decoded(cached: CachedKV) -> torch.Tensor:
    if isinstance(cached, ScaledKV | TensorScaledKV):
        return cached.dequantized()
    return cached.float()
