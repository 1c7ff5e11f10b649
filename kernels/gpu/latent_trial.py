"""Latent attention by Triton, and trials of its kernels before they are used.

Shapes as in ``latent_decode.py``.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from ..attention_metadata import DecodeMetadata, LatentConfig, SequenceMetadata, decode_metadata
from ..errors import KernelUnavailableError
from ..operators import Operators
from ..reference.latent import absorbed_attention
from ..scaled import INT8, CachedKV, ScaledKV, TensorScaledKV, quantize
from ..signatures import CosSin
from . import trials

log = logging.getLogger("tandem.kernels")

# Codes of one byte are read in words.
_WORD = 4


def decode_latents(
    q_THD: torch.Tensor,
    latents: CachedKV,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    decodes: DecodeMetadata,
    scale: float,
    out_THV: torch.Tensor,
) -> None:
    """Fill the decoding rows of ``out``; other rows are undefined."""
    from .latent_decode import latent_decode

    wide_HTC = torch.bmm(q_THD[..., : k_up_HNC.shape[1]].transpose(0, 1), k_up_HNC)
    sums_HTC = torch.empty_like(wide_HTC)
    latent_decode(q_THD, wide_HTC, latents, decodes, scale, sums_HTC)
    torch.bmm(sums_HTC, v_up_HVC.mT, out=out_THV.transpose(0, 1))


def store_latents(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: CosSin,
    latents: CachedKV,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """``rope_and_cache_latent``, importing Triton on demand."""
    from .latent_store import rope_and_cache_latent

    return rope_and_cache_latent(q_THD, kv_TC, norm_weight, eps, cos_sin, latents, slots_T)


def decodes(config: LatentConfig, *, required: bool = False) -> bool:
    """True if the decode kernel compiles and is correct on this device.

    Raises ``KernelUnavailableError`` if it is ``required`` on a GPU but does not work.
    """
    if config.device.type == "cpu":
        return False
    reason = decode_problem(config)
    if reason and required:
        raise KernelUnavailableError(reason)
    if reason:
        log.warning("sequences decode one by one, because of Triton: %s", reason)
    return not reason


@cache
def decode_problem(config: LatentConfig) -> str:
    """The reason why the decode kernel cannot be used on this GPU; empty if it can."""
    if odd := config.cache_dtype.itemsize == 1 and _odd_size(config):
        return f"latents of one byte need sizes that are a multiple of {_WORD}, not {odd}"
    return trials.problem(lambda: trials.too_far(decode_error(config), limit(config)))


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


def _odd_size(config: LatentConfig) -> int:
    """A size that is not a multiple of a word; 0 if there is none."""
    sizes = config.latent_dim, config.rope_dim
    return next((size for size in sizes if size % _WORD), 0)


def limit(config: LatentConfig) -> float:
    """The allowed rounding error of results of magnitude 1."""
    return 1e-3 if config.dtype == config.cache_dtype == torch.float32 else 0.05


def decode_error(config: LatentConfig) -> float:
    """The largest difference from the reference, for rows with one split and with several, and for
    padding."""
    from .latent_decode import MIN_SPLIT

    lengths = 1, 19, 2 * MIN_SPLIT + 100
    size, device, random = config.block_size, config.device, torch.Generator().manual_seed(0)
    blocks = list(range(-(-max(lengths) // size)))[::-1]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device)

    width, heads = config.latent_dim, config.heads
    latents = _cached(numbers(1, len(blocks) * size, width + config.rope_dim), config.cache_dtype)
    q_THD = numbers(len(lengths), heads, config.nope_dim + config.rope_dim).to(config.dtype)
    up_HXC = numbers(heads, config.nope_dim + config.value_dim, width).to(config.dtype)
    k_up, v_up = (up_HXC / width**0.5).split([config.nope_dim, config.value_dim], dim=1)
    sequences = [
        SequenceMetadata(slice(row, row + 1), length - 1, blocks, size)
        for row, length in enumerate(lengths)
    ]
    rows = decode_metadata(sequences, device)
    assert rows is not None
    scale = q_THD.shape[2] ** -0.5
    out = q_THD.new_empty(len(lengths), heads, config.value_dim)
    decode_latents(q_THD, latents, k_up, v_up, rows, scale, out)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = absorbed_attention(q_THD, latents, k_up, v_up, sequences, scale)
    return _largest_difference(out, expected)


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
        _cached(torch.zeros(1, 9, width + rope_dim, device=device), config.cache_dtype)
        for _ in range(2)
    )
    shape = rows, config.heads, q_dim
    stored = store_latents(q.clone().view(shape), kv, weight, 1e-6, cos_sin, ours, slots)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = Operators().rope_and_cache_latent(
        q.view(shape), kv, weight, 1e-6, cos_sin, (theirs,), slots
    )
    # A number between two codes of a byte may become either, of which e4m3 has eight to the power
    # of two.
    share = 0.25 if config.cache_dtype.itemsize == 1 else 1.0
    cached = share * _largest_difference(_decoded(ours), _decoded(theirs))
    return max(_largest_difference(stored, expected), cached)


def _largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """In relation to results, if they are larger than one."""
    actual, expected = actual.float(), expected.float()
    error = (actual - expected).abs() / expected.abs().clamp(min=1)
    return float(error.nan_to_num(torch.inf).max())


def _cached(x: torch.Tensor, dtype: torch.dtype) -> CachedKV:
    return ScaledKV(*quantize(x)) if dtype == INT8 else x.to(dtype)


def _decoded(cached: CachedKV) -> torch.Tensor:
    if isinstance(cached, ScaledKV | TensorScaledKV):
        return cached.dequantized()
    return cached.float()
