"""The paged cache as Triton kernels read it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from ..attention_metadata import AttentionParams
from ..fp8 import FP8, indexable
from ..scaled import CachedKV, ScaledKV, TensorScaledKV
from .code_numbers import INTERPRETED, fours, two

LOG2_E = tl.constexpr(1.4426950408889634)
_FP8_MAX = tl.constexpr(torch.finfo(FP8).max)
_FP8_NORMAL = tl.constexpr(torch.finfo(FP8).tiny)


def converts_fp8() -> bool:
    """True if the GPU to compile for converts e4m3 to fp16: NVIDIA GPUs since sm_89, in two
    instructions for four values."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 89


def parts(cached: CachedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and their scales. Without scales, the values twice; the second is never read."""
    if isinstance(cached, ScaledKV):
        return cached.values, cached.scales
    values = indexable(cached.values if isinstance(cached, TensorScaledKV) else cached)
    return values, values


def whole_scale(cached: CachedKV) -> float:
    """The one scale of all values."""
    return cached.scale if isinstance(cached, TensorScaledKV) else 1.0


def factors(params: AttentionParams, key_scale: float) -> tuple[float, float]:
    """The factor of products and the soft cap, for exponentials to base 2.

    ``cap * tanh(score / cap)`` is ``cap - 2 * cap / (exp(2 * score / cap) + 1)``.
    """
    scale = params.scale * key_scale * LOG2_E.value
    if params.soft_cap is None:
        return scale, 0.0
    return 2 * scale / params.soft_cap, params.soft_cap * LOG2_E.value


@triton.jit
def half_queries(q: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Convert bfloat16 queries to float16, whose range is smaller: each row is divided by its
    largest value, which is the second result."""
    wide = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
    return (wide / largest[:, None]).to(tl.float16), largest


@triton.jit
def widened(code: tl.tensor) -> tl.tensor:
    """Widen e4m3 through the bits of a float16 256 times smaller."""
    code = code.to(tl.uint16)
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), wide)


@triton.jit
def from_int8(words: tl.tensor) -> tl.tensor:
    """Convert the four int8 codes of each word to float16, [tokens, words] to [tokens, 4 words], by
    the bits of 1024 plus a code from 0 to 255: a GPU converts integers at a quarter of its rate.
    Words, because Triton would bring int8 into the tensor cores' order byte by byte."""
    codes = words ^ -0x7F7F7F80
    if INTERPRETED:
        magic = tl.full(codes.shape, 0x64646464, tl.int32)
        lower = fours(codes, magic, tl.full(codes.shape, 0x4140, tl.int32))
        upper = fours(codes, magic, tl.full(codes.shape, 0x4342, tl.int32))
    else:
        lower, upper = tl.inline_asm_elementwise(
            """prmt.b32 $0, $2, 0x64646464, 0x4140;
               prmt.b32 $1, $2, 0x64646464, 0x4342;""",
            "=&r,=r,r",
            [codes],
            (tl.int32, tl.int32),
            True,
            1,
        )
    pairs = tl.join(two(lower, tl.float16), two(upper, tl.float16)) - 1152.0
    return pairs.permute(0, 1, 3, 2).reshape(codes.shape[0], 4 * codes.shape[1])


@triton.jit
def from_fp8(words: tl.tensor) -> tl.tensor:
    """Convert the four e4m3 codes of each word to float16, [tokens, words] to [tokens, 4 words].
    Words, because Triton would bring e4m3 into the tensor cores' order byte by byte."""
    if INTERPRETED:
        first, second = widened(words & 255), widened((words >> 8) & 255)
        third, fourth = widened((words >> 16) & 255), widened((words >> 24) & 255)
        lower, upper = tl.join(first, second), tl.join(third, fourth)
    else:
        lower, upper = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
                 mov.b32 {low, high}, $2;
                 cvt.rn.f16x2.e4m3x2 $0, low;
                 cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r",
            [words],
            (tl.int32, tl.int32),
            True,
            1,
        )
        lower, upper = two(lower, tl.float16), two(upper, tl.float16)
    pairs = tl.join(lower, upper).to(tl.float16)
    return pairs.permute(0, 1, 3, 2).reshape(words.shape[0], 4 * words.shape[1])


# The next two, for latents, which both products read, are not pure as far as Triton knows: it would
# repeat them for each product, in the order of its operands, for which codes have to be gathered
# byte by byte.


@triton.jit
def half_from_fp8(codes: tl.tensor) -> tl.tensor:
    """Convert e4m3 to float16, four codes at a time."""
    if INTERPRETED:
        return widened(codes).to(tl.float16)
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
             mov.b32 {low, high}, $2;
             cvt.rn.f16x2.e4m3x2 $0, low;
             cvt.rn.f16x2.e4m3x2 $1, high; }""",
        "=r,=r,r",
        [codes],
        tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def half_from_int8(codes: tl.tensor) -> tl.tensor:
    """Convert int8 to float16, four codes at a time, by the bits of 1024 plus a code from 0 to 255:
    a GPU converts integers at a quarter of its rate."""
    if INTERPRETED:
        return codes.to(tl.float16)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 codes, magic, offset;
             mov.b32 magic, 0x64646464;
             mov.b32 offset, 0x64806480;
             xor.b32 codes, $2, 0x80808080;
             prmt.b32 $0, codes, magic, 0x4140;
             prmt.b32 $1, codes, magic, 0x4342;
             sub.f16x2 $0, $0, offset;
             sub.f16x2 $1, $1, offset; }""",
        "=r,=r,r",
        [codes],
        tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def to_fp8(x: tl.tensor) -> tl.tensor:
    """The bits of e4m3, rounded to the nearest, ties to even, and clamped to its range."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.abs(x)
    clamped = tl.where(size > _FP8_MAX, _FP8_MAX, size)
    bits = clamped.to(tl.int32, bitcast=True)
    # e4m3 has 20 bits of mantissa less, and an exponent that is 120 less.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below, the unit is 2^-9, as that of numbers from 2^14 on in fp32.
    small = (clamped + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < _FP8_NORMAL, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """Numbers up to 127, rounded to the nearest, ties to even: the lowest bits of a sum so large
    that its unit is one."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
