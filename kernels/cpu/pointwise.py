"""What lies between the products, for few rows: there a call of one of torch's operators takes
longer than its work, and each of these would be five to twenty calls.

Shapes as in ``reference.py``, all fp32 but the cache.
"""

from __future__ import annotations

import numpy as np

from .exponential import exp
from .jit import kernel
from .vector import narrow


@kernel()
def rms_norm(x_TC: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """Each row by itself."""
    for t in range(x_TC.shape[0]):
        _norm_row(x_TC[t], weight, eps, out[t])


@kernel()
def add_rms_norm(
    x_TC: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    eps: float,
    out: np.ndarray,
    total: np.ndarray,
) -> None:
    """The sum of both, and that normed."""
    for t in range(x_TC.shape[0]):
        for c in range(x_TC.shape[1]):
            total[t, c] = x_TC[t, c] + residual[t, c]
        _norm_row(total[t], weight, eps, out[t])


@kernel()
def _norm_row(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    squares = np.float32(0)
    for c in range(len(x)):
        squares += x[c] * x[c]
    scale = np.float32(1 / np.sqrt(squares / len(x) + eps))
    for c in range(len(x)):
        out[c] = x[c] * scale * weight[c]


@kernel()
def silu_and_mul(x: np.ndarray, out: np.ndarray) -> None:
    """``silu(gate) * up`` of [T, gate | up]."""
    rows, width = out.shape
    for t in range(rows):
        gate, up, into = x[t, :width], x[t, width:], out[t]
        for c in range(width):
            into[c] = gate[c] / (np.float32(1) + exp(-gate[c])) * up[c]


@kernel()
def turn_and_cache(
    qkv_TXD: np.ndarray,
    gains_RD: np.ndarray,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    keys_KND: np.ndarray,
    values_KND: np.ndarray,
    slots_T: np.ndarray,
    q_THD: np.ndarray,
) -> None:
    """``reference.turn_and_cache``; there are no gains if the array is empty."""
    rows, heads, dim = q_THD.shape
    kv_heads = keys_KND.shape[0]
    turned = np.empty(dim, np.float32)
    for t in range(rows):
        x, slot = qkv_TXD[t], slots_T[t]
        for h in range(heads + kv_heads):
            source = x[h]
            if len(gains_RD):
                _norm_row(source, gains_RD[h], eps, turned)
                source = turned
            if h < heads:
                _turn(source, cos[t, 0], sin[t, 0], q_THD[t, h])
            else:
                _turn(source, cos[t, 0], sin[t, 0], keys_KND[h - heads, slot])
        for k in range(kv_heads):
            source, into = x[heads + kv_heads + k], values_KND[k, slot]
            for d in range(dim):
                into[d] = narrow(source[d], into[d])


@kernel()
def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    half = len(x) // 2
    for d in range(half):
        first, second = x[d], x[half + d]
        out[d] = narrow(first * cos[d] + second * sin[d], out[d])
        out[half + d] = narrow(second * cos[half + d] + first * sin[half + d], out[half + d])
