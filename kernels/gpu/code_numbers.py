"""Triton functions that convert codes of a quantised weight to the activations' dtype.

Conversion is exact: codes are or-ed into the mantissa of a power of two, which is then subtracted,
or looked up in a table. ``packed_codes.py`` defines the order of codes in a word.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def two(bits: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The two numbers in a word. Assembly, since LLVM would compute the halves separately."""
    if INTERPRETED:
        low, high = bits.to(tl.int16), (bits >> 16).to(tl.int16)
    else:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [bits], (tl.int16, tl.int16), True, 1
        )
    return tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))


@triton.jit
def fours(low: tl.tensor, high: tl.tensor, selectors: tl.tensor) -> tl.tensor:
    """Select four bytes of two words by four 4-bit indices, in one instruction."""
    if INTERPRETED:
        result = tl.zeros_like(selectors)
        for place in tl.static_range(4):
            index = selectors >> 4 * place & 7
            word = tl.where(index < 4, low, high)
            result |= (word >> 8 * (index & 3) & 255) << 8 * place
        return result
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selectors], tl.int32, True, 1
    )


@triton.jit
def _placed(
    word: tl.tensor,
    mask: tl.tensor,
    PLACE: tl.constexpr,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Two 4-bit codes as numbers, up to the offset or factor that ``_exact`` removes."""
    if NUMBERS == "e2m1":
        return two(floats_placed(word.to(tl.uint32, bitcast=True), PLACE, DTYPE), DTYPE)
    magic: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
    return two((word >> 4 * PLACE) & mask | magic, DTYPE)


@triton.jit
def floats_placed(word: tl.tensor, PLACE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Two e2m1 codes: signs, exponents and mantissas, moved into place from the positions in
    ``packed_codes._E2M1_BITS``."""
    if tl.bfloat16 == DTYPE:
        if PLACE == 3:
            bits = (word << 4) & 0x81808180 | (word >> 4) & 0x00400040
        elif PLACE == 2:
            bits = (word << 6) & 0x81C081C0
        elif PLACE == 1:
            bits = (word >> 6 | word << 26) & 0x81C081C0
        else:
            bits = word & 0x81C081C0
    elif PLACE == 3:
        bits = (word << 4) & 0x80008000 | (word << 7) & 0x0C000C00 | (word >> 1) & 0x02000200
    elif PLACE == 2:
        bits = (word << 6) & 0x80008000 | (word << 9) & 0x0E000E00
    elif PLACE == 1:
        bits = (word >> 6 | word << 26) & 0x80008000 | (word >> 3) & 0x0E000E00
    else:
        bits = word & 0x80008000 | (word << 3) & 0x0E000E00
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def _select_bytes(table: tl.tensor, index: tl.tensor, half: tl.tensor) -> tl.tensor:
    """Select four of 16 bytes, which are in four words."""
    a, b = tl.load(table), tl.load(table + 1)
    c, d = tl.load(table + 2), tl.load(table + 3)
    lower = fours(_like(a, index), _like(b, index), index)
    return fours(lower, fours(_like(c, index), _like(d, index), index), half)


@triton.jit
def _look_up(
    index: tl.tensor, half: tl.tensor, table: tl.tensor, DTYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The numbers of four codes: the first two, and the other two."""
    low, high = _select_bytes(table, index, half), _select_bytes(table + 4, index, half)
    first, second = tl.full(low.shape, 0x5140, tl.int32), tl.full(low.shape, 0x7362, tl.int32)
    # LLVM can't see through ``fours``, and takes halves of its words for the words themselves.
    return two(fours(low, high, first), DTYPE), two(fours(low, high, second), DTYPE)


@triton.jit
def _like(value: tl.tensor, other: tl.tensor) -> tl.tensor:
    return tl.zeros_like(other) + value


@triton.jit
def _bytes_placed(
    word: tl.tensor,
    mask: tl.tensor,
    H: tl.constexpr,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Like ``_placed``, for codes of a byte."""
    if NUMBERS == "e4m3":
        moved = word << 8 * (1 - H)
        down: tl.constexpr = 4 if tl.bfloat16 == DTYPE else 1
        return two(moved & -0x7FFF8000 | (moved >> down) & mask, DTYPE)
    magic: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
    return two((word >> 8 * H) & mask | magic, DTYPE)


@triton.jit
def _exact(placed: tl.tensor, NUMBERS: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    """Remove the offset or factor of placed codes."""
    DTYPE: tl.constexpr = placed.dtype
    if INTERPRETED and tl.bfloat16 == DTYPE:
        placed = placed.to(tl.float32)  # numpy has no bfloat16
    if NUMBERS == "int":
        magic: tl.constexpr = 128 if tl.bfloat16 == DTYPE else 1024
        return placed - tl.full((), magic + ZERO, placed.dtype)
    if NUMBERS == "e4m3":
        return placed * tl.full((), 2.0**120 if tl.bfloat16 == DTYPE else 2.0**8, placed.dtype)
    if NUMBERS == "e2m1":
        return placed * tl.full((), 2.0**126 if tl.bfloat16 == DTYPE else 2.0**14, placed.dtype)
    return placed


@triton.jit
def numbers(
    word: tl.tensor,
    mask: tl.tensor,
    table: tl.tensor,
    NUMBERS: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    ZERO: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The codes of words as numbers: [..., second, h, upper], or for byte codes [..., second,
    h]."""
    if HALVES:
        if NUMBERS == "levels":
            index = word & 0x77777777
            # Selects between the lower and the upper half of the table.
            half = (word >> 1) & mask | 0x32103210
            a, b = _look_up(index, half, table, DTYPE)
            c, d = _look_up(index >> 16, half >> 16, table, DTYPE)
        else:
            a = _placed(word, mask, 0, NUMBERS, DTYPE)
            b = _placed(word, mask, 1, NUMBERS, DTYPE)
            c = _placed(word, mask, 2, NUMBERS, DTYPE)
            d = _placed(word, mask, 3, NUMBERS, DTYPE)
        codes = _exact(tl.join(tl.join(a, b), tl.join(c, d)), NUMBERS, ZERO)
    else:
        # bfloat16's mantissa has no room for 8 bits.
        PLACED: tl.constexpr = tl.float16 if WHOLE and NUMBERS == "int" else DTYPE
        a = _bytes_placed(word, mask, 0, NUMBERS, PLACED)
        b = _bytes_placed(word, mask, 1, NUMBERS, PLACED)
        codes = _exact(tl.join(a, b), NUMBERS, ZERO)
        if PLACED != DTYPE:
            codes = codes.to(tl.float32)
            codes = codes if INTERPRETED else codes.to(DTYPE)
    return codes
