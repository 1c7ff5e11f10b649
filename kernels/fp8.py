"""Casts to and from e4m3, which torch leaves undone in part.

To it, torch saturates in some versions and gives NaN in others. From it, on a CPU, torch takes one
value after the other: 70 million a second on a Zen 3 core, where these bit operations do 1,500.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(FP8).max

# e4m3 is seeeemmm. As a float32, its exponent and mantissa lie 20 bits further up, its sign at the
# top, and the exponents differ in their bias, 7 and 127.
_SHIFT = 20
_SIGN_EXPONENT_MANTISSA = ~(0b1111 << 27)
_BIAS = 2.0**120


def castable(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in a form that torch casts to ``dtype`` rightly and fast; itself if neither is fp8.

    What e4m3 cannot hold becomes its largest value; NaN stays NaN.
    """
    if x.dtype == dtype or FP8 not in (x.dtype, dtype):
        return x
    if dtype == FP8:
        return x.clamp(-_MAX, _MAX)
    return _widened(x) if x.device.type == "cpu" else x


def indexable(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: not every device and version of torch copies fp8 by index."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _widened(x: torch.Tensor) -> torch.Tensor:
    """As float32."""
    # The largest code is NaN, whose bits mean 480 in a wider format. (any() is ten times slower.)
    if x.numel() and int((x.view(torch.uint8) & 0x7F).max()) == 0x7F:
        return x.float()
    # int8, so that the sign is copied into every bit above it.
    bits = x.view(torch.int8).to(torch.int32)
    bits <<= _SHIFT
    bits &= _SIGN_EXPONENT_MANTISSA
    return bits.view(torch.float32).mul_(_BIAS)
