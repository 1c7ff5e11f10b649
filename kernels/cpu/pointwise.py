"""Norms, activations, and rotary embedding with the write to the cache.

With torch, each of these would be five to twenty operators. For few rows, calling an operator takes
longer than its work; for many rows, each would read memory again.

Shapes as in ``operators.py``; activations have one dtype, the cache another. Sums are fp32.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import prange

from .cached_kv import CachedArrays, no_cached, write_row
from .callees import Callee, call_callee, callee_of
from .exponential import exp
from .jit import kernel
from .vector import narrow, widen

# Up to this many rows, dividing them among threads takes longer than their work.
_FEW = 4


@kernel(parallel=True)
def rms_norm(x_TC: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """Normalise each row."""
    if len(x_TC) <= _FEW:
        for t in range(len(x_TC)):
            _norm_row(x_TC[t], weight, eps, out[t])
    else:
        for t in prange(len(x_TC)):
            _norm_row(x_TC[t], weight, eps, out[t])


@kernel(parallel=True)
def add_rms_norm(
    x_TC: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    eps: float,
    out: np.ndarray,
    total: np.ndarray,
) -> None:
    """``total = x + residual``, and ``out``, the normalised total."""
    if len(x_TC) <= _FEW:
        for t in range(len(x_TC)):
            _add_norm_row(x_TC[t], residual[t], weight, eps, out[t], total[t])
    else:
        for t in prange(len(x_TC)):
            _add_norm_row(x_TC[t], residual[t], weight, eps, out[t], total[t])


@kernel()
def _add_norm_row(
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    eps: float,
    out: np.ndarray,
    total: np.ndarray,
) -> None:
    for c in range(len(x)):
        total[c] = narrow(widen(x[c]) + widen(residual[c]), total[c])
    _norm_row(total, weight, eps, out)


@kernel()
def _norm_row(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    squares = np.float32(0)
    for c in range(len(x)):
        value = widen(x[c])
        squares += value * value
    scale = np.float32(1 / np.sqrt(squares / len(x) + eps))
    for c in range(len(x)):
        out[c] = narrow(widen(x[c]) * scale * widen(weight[c]), out[c])


@kernel(parallel=True)
def silu_and_mul(x: np.ndarray, out: np.ndarray) -> None:
    """``silu(gate) * up`` of [T, gate | up]."""
    if len(out) <= _FEW:
        for t in range(len(out)):
            _silu_row(x[t], out[t])
    else:
        for t in prange(len(out)):
            _silu_row(x[t], out[t])


@kernel()
def _silu_row(x: np.ndarray, out: np.ndarray) -> None:
    width = len(out)
    gates, ups = x[:width], x[width:]
    for c in range(width):
        gate = widen(gates[c])
        out[c] = narrow(gate / (np.float32(1) + exp(-gate)) * widen(ups[c]), out[c])


@kernel(parallel=True)
def rope_and_cache_kv(
    rope_row: Callee,
    qkv_TXD: np.ndarray,
    norm_weight_RD: np.ndarray,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    keys: CachedArrays,
    values: CachedArrays,
    slots_T: np.ndarray,
    q_THD: np.ndarray,
) -> None:
    """See ``Operators.rope_and_cache_kv``; an empty ``norm_weight`` means no norm."""
    if len(q_THD) <= _FEW:
        for t in range(len(q_THD)):
            turn, slot = (cos[t, 0], sin[t, 0]), np.int64(slots_T[t])
            row = (qkv_TXD[t], norm_weight_RD, eps, turn, keys, values, slot, q_THD[t])
            call_callee(rope_row, row)
    else:
        for t in prange(len(q_THD)):
            turn, slot = (cos[t, 0], sin[t, 0]), np.int64(slots_T[t])
            row = (qkv_TXD[t], norm_weight_RD, eps, turn, keys, values, slot, q_THD[t])
            call_callee(rope_row, row)


@cache
def row_rope(activations: np.dtype, angles: np.dtype, cached: np.dtype) -> Callee:
    """``rope_and_cache_kv``'s work for a row, for these dtypes."""
    rows, turn = np.empty((0, 0), activations), np.empty(0, angles)
    kv, slot = no_cached(cached), 0
    return callee_of(_rope_row, rows, rows, 0.0, (turn, turn), kv, kv, slot, rows)


@kernel()
def _rope_row(
    x_XD: np.ndarray,
    norm_weight_RD: np.ndarray,
    eps: float,
    turn: tuple[np.ndarray, np.ndarray],
    keys: CachedArrays,
    values: CachedArrays,
    slot: int,
    q_HD: np.ndarray,
) -> None:
    cos, sin = turn
    heads, dim = q_HD.shape
    kv_heads = len(keys[0])
    wide, rotated = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for h in range(heads + kv_heads):
        if len(norm_weight_RD):
            _norm_row(x_XD[h], norm_weight_RD[h], eps, wide)
        else:
            for d in range(dim):
                wide[d] = widen(x_XD[h, d])
        if h < heads:
            _rotate(wide, cos, sin, q_HD[h])
        else:
            _rotate(wide, cos, sin, rotated)
            write_row(rotated, keys, h - heads, slot)
    for k in range(kv_heads):
        source = x_XD[heads + kv_heads + k]
        for d in range(dim):
            wide[d] = widen(source[d])
        write_row(wide, values, k, slot)


@kernel()
def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    dim = len(cos)
    half = dim // 2
    for d in range(half):
        first, second = x[d], x[half + d]
        out[d] = narrow(first * cos[d] + second * sin[d], out[d])
        out[half + d] = narrow(second * cos[half + d] + first * sin[half + d], out[half + d])
    for d in range(dim, len(x)):
        out[d] = narrow(x[d], out[d])
