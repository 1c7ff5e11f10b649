"""``exp`` in fp32, which can be inlined and vectorised in innermost loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import kernel

MIN_X, _MAX_X = np.float32(-87.0), np.float32(89.0)
LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts; the first has few enough digits that its multiples are exact.
HIGH, LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Cephes' expf (Moshier 1989): exp(r) = 1 + r + r^2 p(r) for |r| <= ln 2 / 2.
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
POLYNOMIAL = _P0, _P1, _P2, _P3, _P4, _P5


@kernel()
def exp(x: Any) -> Any:
    """Accurate to two units in the last place; at least ``exp(-87)``, and infinity from 88.4 on."""
    x = min(max(x, MIN_X), _MAX_X)
    n = np.floor(x * LOG2_E + np.float32(0.5))
    r = x - n * HIGH - n * LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1)) * power
