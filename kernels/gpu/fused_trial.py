"""Trials of the fused kernels between the products of a layer, before they are used.

Each is launched at the start for every shape and dtype of the model, so that no step compiles one.
"""

from __future__ import annotations

from functools import cache

import torch

from ..activations import Activation
from ..fp8 import FP8
from ..reference import activation as reference_activation
from ..reference import norm as reference_norm
from ..reference.cache import write_kv
from ..reference.norm import head_rms_norm
from ..reference.rope import apply_rotary
from ..scaled import INT8, CachedKV, ScaledKV, TensorScaledKV
from ..signatures import RopeConfig
from . import rope_store
from .activation import act_and_mul
from .norm import MAX_WIDTH, add_rms_norm, rms_norm
from .trials import passes, relative_error, too_far

_ROWS = 3
# The allowed rounding errors, relative to a result's magnitude, or to one below it. Codes differ by
# one where a rounding before the last was the other way.
_LIMITS = {torch.float32: 1e-4, torch.float16: 0.004, torch.bfloat16: 0.03, INT8: 0.05, FP8: 0.14}


@cache
def norm_works(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if both norms of this width compile and are correct on this device; logs the reason if
    not."""
    if device.type == "cpu" or dtype not in _LIMITS:
        return False

    def trial() -> str:
        if width > MAX_WIDTH:
            return f"rows of {width} are wider than {MAX_WIDTH}"
        return _problem(norm_error(width, dtype, device), dtype)

    return passes(trial, "torch computes norms, because of Triton")


@cache
def activation_works(
    activation: Activation, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """True if the kernel of a gated activation works for ``width`` results."""
    if device.type == "cpu" or dtype not in _LIMITS or not width:
        return False
    return passes(
        lambda: _problem(activation_error(activation, width, dtype, device), dtype),
        "torch computes activations, because of Triton",
    )


@cache
def rope_works(config: RopeConfig) -> bool:
    """True if the kernel that rotates heads and writes them to the cache works."""
    if config.device.type == "cpu" or config.dtype not in _LIMITS:
        return False
    return passes(
        lambda: rope_problem(config), "torch rotates heads and caches them, because of Triton"
    )


def norm_error(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference from the reference."""
    x, residual, weights = _random((3, _ROWS, width), dtype, device)
    inputs = x, residual, weights[0], 1e-6
    actual = rms_norm(x, *inputs[2:]), *add_rms_norm(*inputs)
    expected = reference_norm.rms_norm(x, *inputs[2:]), *reference_norm.add_rms_norm(*inputs)
    return max(map(_difference, actual, expected))


def activation_error(
    activation: Activation, width: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest difference from the reference."""
    (x,) = 3 * _random((1, _ROWS, 2 * width), dtype, device)
    expected = reference_activation.act_and_mul(x, activation)
    return _difference(act_and_mul(x, activation), expected)


def rope_problem(config: RopeConfig) -> str:
    """The problem of the queries, or of the keys and values in the cache."""
    device, heads = config.device, config.heads + config.kv_heads
    (qkv,) = _random((1, _ROWS, heads + config.kv_heads, config.dim), config.dtype, device)
    (weight,) = _random((1, heads, config.dim), config.dtype, device)
    (angles,) = _random((1, _ROWS, 1, config.rotated // 2), torch.float32, device)
    signs = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    cos_sin = angles.cos().repeat(1, 1, 2), signs
    norm_weight, eps = weight if config.normed else None, 1e-6
    qk = qkv[:, :heads]
    qk = apply_rotary(qk if norm_weight is None else head_rms_norm(qk, weight, eps), cos_sin)
    if config.cache_dtype is None:
        q = rope_store.rope_queries(qkv, norm_weight, eps, cos_sin)
        return _problem(_difference(q, qk), config.dtype)
    slots = torch.tensor([5, 0, 3], device=device)
    ours, expected = (
        (_empty_cache(config, config.cache_dtype), _empty_cache(config, config.cache_dtype))
        for _ in range(2)
    )
    q = rope_store.rope_and_cache_kv(qkv, norm_weight, eps, cos_sin, ours, slots)
    write_kv(*expected, slots, qk[:, config.heads :], qkv[:, heads:])
    worst = max(
        _difference(_numbers(actual), _numbers(right))
        for actual, right in zip(ours, expected, strict=True)
    )
    precision = max(config.dtype, config.cache_dtype, key=_LIMITS.__getitem__)
    return _problem(_difference(q, qk[:, : config.heads]), config.dtype) or _problem(
        worst, precision
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _empty_cache(config: RopeConfig, dtype: torch.dtype) -> CachedKV:
    values = torch.zeros(config.kv_heads, 7, config.dim, device=config.device).to(dtype)
    if dtype == INT8:
        return ScaledKV(values, torch.zeros(config.kv_heads, 7, 1, device=config.device))
    return TensorScaledKV(values, 0.75) if config.has_scale else values


def _numbers(cached: CachedKV) -> torch.Tensor:
    return cached if isinstance(cached, torch.Tensor) else cached.dequantized()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.device.type == "meta":  # nothing is computed there
        return 0.0
    return relative_error(actual, expected)


def _problem(worst: float, dtype: torch.dtype) -> str:
    return too_far(worst, _LIMITS[dtype])
