"""Unpacks blocks [O, B, bytes of a block] of each format into codes, scales and minimums.

O outputs, B blocks of an output, S groups of neighbouring inputs that share a scale, G inputs of a
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from . import block_formats as formats
from .block_formats import CODEBOOKS, SCALE_BYTES, BlockFormat, GroupFormat
from .grouped_codes import GroupedCodes

# The values of 4-bit codes.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
# The values of e2m1 (sign, two bits of exponent, one of mantissa), doubled.
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# The quantiles of a normal distribution.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
    *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
)
FP4 = (*_FP4, *(-each for each in _FP4))
E2M1 = tuple(each / 2 for each in FLOATS)
_LEVELS: dict[str, tuple[float, ...]] = {
    "nf4": NF4,
    "fp4": FP4,
    "e2m1": E2M1,
}


def unpack_blocks(format: BlockFormat, blocks: torch.Tensor) -> GroupedCodes:
    """Unpack blocks."""
    if isinstance(format, GroupFormat):
        return _group(format, blocks)
    if format in _BOOKS:
        return read_rows(format, blocks).to_codes()
    return _READERS[format](blocks)


def _group(format: GroupFormat, blocks: torch.Tensor) -> GroupedCodes:
    """Unpack blocks of a scale, an offset and codes."""
    own = SCALE_BYTES[format.scale], format.offset_bytes
    scale, offset, codes = _fields(blocks, *own, format.nbytes - sum(own))
    scales = _as(_SCALES[format.scale], scale)
    wide = format.bits == 8 and format.codes == "int" and format.offset != "none"
    # Unsigned 8-bit codes are stored minus 128.
    shift, minimums, zeros = (128 if wide else 0), None, None
    if format.offset == "zero":
        zeros = (_as(torch.int16, offset) - shift).flatten(1)
        minimums = scales.float() * -zeros[..., None]
    elif format.offset == "minimum":
        minimums = _as(_SCALES[format.scale], offset)
    zero = 0
    if format.offset == "none" and format.codes == "int" and format.bits < 8:
        zero = 1 << format.bits - 1
    elif format.offset == "minimum":
        zero = -shift
    if format.codes == "e4m3":
        flat = codes.contiguous().view(torch.float8_e4m3fn).flatten(1)
        return GroupedCodes(flat, scales.flatten(1), None, format.values)
    if format.bits == 4:
        grouped = _halves(codes, scales, minimums, zero=zero, levels=_LEVELS.get(format.codes))
    else:
        whole = stream(codes, format.bits) if format.bits < 8 else codes.contiguous()
        whole = whole ^ 128 if wide else whole
        grouped = _codes(whole, scales, minimums, group=format.values, zero=zero)
    return replace(grouped, zeros=zeros)


def stream(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` bits, in order from the lowest bit of the first byte."""
    if 8 % bits == 0:
        places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return (packed[..., None] >> places & (1 << bits) - 1).flatten(-2)
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    single = (packed[..., None] >> places & 1).flatten(-2).unflatten(-1, (-1, bits))
    return (single << places[:bits]).sum(-1, dtype=torch.uint8)


def _q8_0(blocks: torch.Tensor) -> GroupedCodes:
    scale, codes = _fields(blocks, 2, 32)
    return _codes(codes.view(torch.int8), _half(scale), group=32)


def _q4_0(blocks: torch.Tensor) -> GroupedCodes:
    scale, codes = _fields(blocks, 2, 16)
    return _halves(codes, _half(scale), zero=8)


def _q4_1(blocks: torch.Tensor) -> GroupedCodes:
    scale, minimum, codes = _fields(blocks, 2, 2, 16)
    return _halves(codes, _half(scale), _half(minimum))


def _q5_0(blocks: torch.Tensor) -> GroupedCodes:
    scale, fifth, codes = _fields(blocks, 2, 4, 16)
    return _codes(_five_bits(codes, fifth) - 16, _half(scale), group=32)


def _q5_1(blocks: torch.Tensor) -> GroupedCodes:
    scale, minimum, fifth, codes = _fields(blocks, 2, 2, 4, 16)
    return _codes(_five_bits(codes, fifth), _half(scale), _half(minimum), group=32)


def _five_bits(codes: torch.Tensor, fifth: torch.Tensor) -> torch.Tensor:
    return (_planes(codes, 4) | _in_order(fifth, 1) << 4).view(torch.int8)


def _q2_k(blocks: torch.Tensor) -> GroupedCodes:
    scales, codes, scale, minimum = _fields(blocks, 16, 64, 2, 2)
    return _codes(
        _planes(codes.unflatten(-1, (2, 32)), 2),
        _half(scale).float() * (scales & 15),
        -(_half(minimum).float() * (scales >> 4)),
        group=16,
    )


def _q3_k(blocks: torch.Tensor) -> GroupedCodes:
    third, codes, low, high, scale = _fields(blocks, 32, 64, 8, 4, 2)
    scales = (_planes(low, 4) | _planes(high, 2) << 4).view(torch.int8) - 32
    codes = _planes(codes.unflatten(-1, (2, 32)), 2) | _planes(third, 1) << 2
    return _codes(codes, _half(scale).float() * scales, group=16, zero=4)


def _q4_k(blocks: torch.Tensor) -> GroupedCodes:
    scale, minimum, packed, codes = _fields(blocks, 2, 2, 12, 128)
    scales, minimums = _six_bits(packed)
    return _codes(
        _planes(codes.unflatten(-1, (4, 32)), 4),
        _half(scale).float() * scales,
        -(_half(minimum).float() * minimums),
        group=32,
    )


def _q5_k(blocks: torch.Tensor) -> GroupedCodes:
    scale, minimum, packed, fifth, codes = _fields(blocks, 2, 2, 12, 32, 128)
    scales, minimums = _six_bits(packed)
    codes = _planes(codes.unflatten(-1, (4, 32)), 4) | _planes(fifth, 1) << 4
    return _codes(
        codes.view(torch.int8),
        _half(scale).float() * scales,
        -(_half(minimum).float() * minimums),
        group=32,
    )


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8 scales and 8 minimums. The first four of each are whole bytes, whose two highest bits
    belong to the other four."""
    scales, minimums, others = _fields(packed, 4, 4, 4)
    return (
        torch.cat([scales & 63, others & 15 | scales >> 6 << 4], dim=-1),
        torch.cat([minimums & 63, others >> 4 | minimums >> 6 << 4], dim=-1),
    )


def _q6_k(blocks: torch.Tensor) -> GroupedCodes:
    low, high, scales, scale = _fields(blocks, 128, 64, 16, 2)
    codes = _planes(low.unflatten(-1, (2, 64)), 4) | _planes(high.unflatten(-1, (2, 32)), 2) << 4
    return _codes(
        codes.view(torch.int8) - 32, _half(scale).float() * scales.view(torch.int8), group=16
    )


def _iq4_nl(blocks: torch.Tensor) -> GroupedCodes:
    scale, codes = _fields(blocks, 2, 16)
    return _halves(codes, _half(scale), levels=IQ4)


def _iq4_xs(blocks: torch.Tensor) -> GroupedCodes:
    scale, high, low, codes = _fields(blocks, 2, 2, 4, 128)
    scales = (_in_order(low, 4) | _in_order(high, 2) << 4).view(torch.int8) - 32
    return _halves(codes.unflatten(-1, (8, 16)), _half(scale).float() * scales, levels=IQ4)


def _mxfp4(blocks: torch.Tensor) -> GroupedCodes:
    exponent, codes = _fields(blocks, 1, 16)
    # Half a power of two, since the numbers are doubled: fp32 bits, the lowest two denormal.
    wide = exponent.int()
    bits = torch.where(wide < 2, 0x00200000 << wide, (wide - 1) << 23)
    return _halves(codes, bits.view(torch.float32), levels=FLOATS)


def _nvfp4(blocks: torch.Tensor) -> GroupedCodes:
    scales, codes = _fields(blocks, 4, 32)
    wide = _half_floats(blocks.device).index_select(0, scales.flatten().int()).view(scales.shape)
    return _halves(codes.unflatten(-1, (4, 8)), wide, levels=FLOATS)


@cache
def _half_floats(device: torch.device) -> torch.Tensor:
    """Half of each unsigned 8-bit float, since the numbers are doubled."""
    scales = torch.arange(256, dtype=torch.uint8, device=device)
    exponent, mantissa = scales >> 3 & 15, (scales & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent.int() - 8)
    wide = torch.where(exponent == 0, mantissa * 2.0**-10, normal)
    return torch.where(scales == 127, 0.0, wide)


def _q1_0(blocks: torch.Tensor) -> GroupedCodes:
    scale, codes = _fields(blocks, 2, 16)
    # Two groups share a scale, so that Q2_0's kernel works for Q1_0 too.
    scales = _half(scale).repeat_interleave(2, dim=-1)
    return _codes(_in_order(codes, 1) << 1, scales, group=64, zero=1)


def _q2_0(blocks: torch.Tensor) -> GroupedCodes:
    scale, codes = _fields(blocks, 2, 16)
    return _codes(_in_order(codes, 2), _half(scale), group=64, zero=1)


def _tq1_0(blocks: torch.Tensor) -> GroupedCodes:
    fives, more, fours, scale = _fields(blocks, 32, 16, 4, 2)
    codes = torch.cat([*_digits(fives, 5), *_digits(more, 5), *_digits(fours, 4)], dim=-1)
    return _codes(codes, _half(scale), group=256, zero=1)


def _digits(packed: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """The first base-3 digits of all bytes, then the second ones, and so on. Each byte is a
    fraction in base 3."""
    for _ in range(count):
        yield (packed.short() * 3 >> 8).byte()
        packed = packed * 3


def _tq2_0(blocks: torch.Tensor) -> GroupedCodes:
    codes, scale = _fields(blocks, 64, 2)
    return _codes(_planes(codes.unflatten(-1, (2, 32)), 2), _half(scale), group=256, zero=1)


@dataclass(frozen=True, slots=True)
class CodebookRows:
    """Blocks whose codes are indices of ``rows`` in a codebook: int [O, B, rows].

    A code is a number of its row, either with a sign (``signs`` [O, B, G] has 8 in a byte), or
    moved by an eighth: down where ``down`` [O, B, rows] is 1, else up. It is multiplied by the
    codebook's ``part``, a ``scale`` [O, B, 1], and an odd scale of ``scales`` [O, B, groups].
    """

    format: BlockFormat
    rows: torch.Tensor
    signs: torch.Tensor | None
    down: torch.Tensor | None
    scale: torch.Tensor
    scales: torch.Tensor

    def to_codes(self) -> GroupedCodes:
        """The codes; in eighths if they are moved, which makes them integers."""
        table = codebook(self.format, self.rows.device)
        codes = table.index_select(0, self.rows.flatten().int())
        codes = codes.unflatten(0, self.rows.shape).flatten(2)
        if self.signs is not None:
            codes = codes * (1 - 2 * _in_order(self.signs, 1).view(torch.int8))
        if self.down is not None:
            moved = (1 - 2 * self.down)[..., None].to(torch.int8)
            codes = (8 * codes.unflatten(-1, (-1, 8)) + moved).flatten(-2)
        book = CODEBOOKS[self.format]
        scales = self.scale.float() * self.scales * book.part
        return _codes(codes, scales, group=book.group)


def read_rows(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    """Unpack the codebook indices of blocks."""
    return _BOOKS[format](format, blocks)


def _iq2_xxs(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    scale, words = _fields(blocks, 2, 64)
    rows, rest = words.unflatten(-1, (8, 8)).split([4, 4], dim=-1)
    signs, scales = _signs_and_scale(rest.flatten(-2))
    return CodebookRows(format, rows.flatten(-2), signs, None, _half(scale), scales)


def _iq2_xs(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    scale, words, scales = _fields(blocks, 2, 64, 8)
    words, odd = _words(words), _odd(_in_order(scales, 4))
    signs = _with_parity(words >> 9)
    return CodebookRows(format, words & 511, signs, None, _half(scale), odd)


def _iq2_s(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    scale, low, signs, high, scales = _fields(blocks, 2, 32, 32, 8, 8)
    rows, odd = low.int() | _in_order(high, 2).int() << 8, _odd(_in_order(scales, 4))
    return CodebookRows(format, rows, signs, None, _half(scale), odd)


def _iq3_xxs(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    scale, rows, rest = _fields(blocks, 2, 64, 32)
    signs, scales = _signs_and_scale(rest)
    return CodebookRows(format, rows, signs, None, _half(scale), scales)


def _iq3_s(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    scale, low, high, signs, scales = _fields(blocks, 2, 64, 8, 32, 4)
    rows, odd = low.int() | _in_order(high, 1).int() << 8, _odd(_in_order(scales, 4))
    return CodebookRows(format, rows, signs, None, _half(scale), odd)


def _iq1_s(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    scale, low, words = _fields(blocks, 2, 32, 16)
    words = _words(words)
    shifts = torch.arange(0, 12, 3, dtype=torch.int32, device=blocks.device)
    high = (words[..., None] >> shifts & 7).flatten(-2)
    down, odd = (words >> 15).repeat_interleave(4, dim=-1), _odd(words >> 12 & 7)
    return CodebookRows(format, low.int() | high << 8, None, down, _half(scale), odd)


def _iq1_m(format: BlockFormat, blocks: torch.Tensor) -> CodebookRows:
    low, high, packed = _fields(blocks, 32, 16, 8)
    words, high = _words(packed), _in_order(high, 4).int()
    shifts = torch.arange(0, 12, 3, dtype=torch.int32, device=blocks.device)
    # Each word has four bits of the block's scale, the lowest first, above four 3-bit scales.
    fours = words >> 12 << torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
    scale = fours.sum(-1, keepdim=True).short().view(torch.float16)
    odd = _odd(words[..., None] >> shifts & 7).flatten(-2)
    rows = low.int() | (high & 7) << 8
    return CodebookRows(format, rows, None, high >> 3, scale, odd)


def _odd(numbers: torch.Tensor) -> torch.Tensor:
    return 2 * numbers + 1


_READERS: dict[BlockFormat, Callable[[torch.Tensor], GroupedCodes]] = {
    formats.Q8_0: _q8_0,
    formats.Q4_0: _q4_0,
    formats.Q4_1: _q4_1,
    formats.Q5_0: _q5_0,
    formats.Q5_1: _q5_1,
    formats.Q2_K: _q2_k,
    formats.Q3_K: _q3_k,
    formats.Q4_K: _q4_k,
    formats.Q5_K: _q5_k,
    formats.Q6_K: _q6_k,
    formats.IQ4_NL: _iq4_nl,
    formats.IQ4_XS: _iq4_xs,
    formats.MXFP4: _mxfp4,
    formats.NVFP4: _nvfp4,
    formats.Q1_0: _q1_0,
    formats.Q2_0: _q2_0,
    formats.TQ1_0: _tq1_0,
    formats.TQ2_0: _tq2_0,
}
_BOOKS: dict[BlockFormat, Callable[[BlockFormat, torch.Tensor], CodebookRows]] = {
    formats.IQ1_S: _iq1_s,
    formats.IQ1_M: _iq1_m,
    formats.IQ2_XXS: _iq2_xxs,
    formats.IQ2_XS: _iq2_xs,
    formats.IQ2_S: _iq2_s,
    formats.IQ3_XXS: _iq3_xxs,
    formats.IQ3_S: _iq3_s,
}


def _codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None = None,
    *,
    group: int,
    zero: int = 0,
) -> GroupedCodes:
    """Codes [O, B, values of a block] with a scale for each ``group``."""
    flat = None if minimums is None else minimums.flatten(1)
    return GroupedCodes(codes.flatten(1).view(torch.int8), scales.flatten(1), flat, group, zero)


def _halves(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None = None,
    *,
    zero: int = 0,
    levels: tuple[float, ...] | None = None,
) -> GroupedCodes:
    """Bytes [O, B, bytes of a group], or [O, B, groups of a block, bytes of a group], with two
    codes each."""
    packed = codes.contiguous().flatten(1, -2)
    flat = None if minimums is None else minimums.flatten(1)
    return GroupedCodes(packed, scales.flatten(1), flat, 2 * packed.shape[-1], zero, levels)


def _fields(packed: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    return packed.split(list(sizes), dim=-1)


def _half(pair: torch.Tensor) -> torch.Tensor:
    """The fp16 number in two bytes."""
    return _as(torch.float16, pair)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Unsigned numbers of 16 bits."""
    return _as(torch.int16, packed).int() & 0xFFFF


def _as(dtype: torch.dtype, packed: torch.Tensor) -> torch.Tensor:
    """Neighbouring bytes as wider numbers. The copy aligns them."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def _shifts(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)


def _in_order(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of which neighbours share a byte."""
    return (packed[..., None] >> _shifts(packed, bits) & (1 << bits) - 1).flatten(2)


def _planes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in the lowest bits of all bytes, then those in the next bits, and so on."""
    return (packed[..., None, :] >> _shifts(packed, bits)[:, None] & (1 << bits) - 1).flatten(2)


def _with_parity(seven: torch.Tensor) -> torch.Tensor:
    """Seven bits, and an eighth that makes their parity even."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    odd = (odd ^ odd >> 1) & 1
    return (seven | odd << 7).byte()


def _signs_and_scale(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8 signs as a byte, the eighth from the parity of seven, and an odd scale, from each 4
    bytes."""
    wide = _as(torch.int32, words)
    shifts = torch.arange(0, 28, 7, dtype=torch.int32, device=words.device)
    sevens = (wide[..., None] >> shifts & 127).flatten(-2)
    return _with_parity(sevens), _odd(wide >> 28 & 15)


@cache
def codebook(format: BlockFormat, device: torch.device) -> torch.Tensor:
    """The rows of a codebook, int8 [rows, 4 or 8], from gguf-py."""
    from gguf import quants

    traits = getattr(quants, format.name)
    traits.init_grid()
    rows = torch.from_numpy(traits.grid).to(device, torch.int8)
    return rows.view(rows.shape[-2:])
