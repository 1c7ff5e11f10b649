"""Codes of a quantised weight in the order of the tensor cores (``tiles.py``).

H, the number of 16-byte reads of a thread for a chunk: 1 for 4-bit codes, 2 for bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd

import torch
import torch.nn.functional as F

from ..block_codes import CodebookRows, read_rows
from ..block_formats import (
    CODEBOOK_FORMATS,
    CODEBOOKS,
    Q2_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    BlockFormat,
    GroupFormat,
)
from ..fp8 import FP8
from ..grouped_codes import GroupedCodes
from ..quantized import QuantizedWeight, grouped_codes
from .packed_rows import records, unpack_rows
from .tiles import CHUNK, SPAN, TILE, select_half

# Padding chunks at the end, which warps without work read.
SPARE = 8
# Bits and lowest code of formats that use fewer than their 4 or 8 bits.
_NARROW = {Q2_K: (2, 0), Q5_0: (5, -16), Q5_1: (5, 0), Q5_K: (5, 0), Q6_K: (6, -32)}
# The values of e2m1: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The positions in a word of sign, exponent and mantissa of its first four codes: one shift or
# rotation moves each of the first three, two shifts move the last one, into the bits of bfloat16.
# The other four codes are 16 bits further.
_E2M1_BITS = ((15, 8, 7, 6), (21, 14, 13, 12), (9, 2, 1, 0), (11, 4, 3, 10))
_DOUBLED = tuple(2 * each for each in _E2M1)
# Weights that are reordered at a time.
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """``factor * (scale * (number - zero) + minimum)``, where codes are numbers minus the lowest
    one.

    ``words`` are int32 [tiles, chunks, H, 32 threads, 4]. A word has eight 4-bit codes in the order
    [second input, upper, h], where h is 1 for output g + 8 and upper is 1 for inputs from 2t + 8
    on, or four bytes in the order [second input, h]. So a shift and a mask move two codes into the
    mantissas of two numbers. The bits of e2m1 codes are at other positions, and indices of a table
    are in the order [upper, h, second input], since four are looked up at a time. ``scales`` and
    ``minimums`` have pairs of fp16 for outputs g and g + 8: int32 [tiles, chunks or groups, 8,
    groups of a chunk]. With four groups in a chunk, those of the first 16 of each 32 inputs come
    first, since a thread needs either these or the others. Scales beyond fp16's range are relative
    to a power of two of their output, ``factors``, fp32 [O]. For codebooks, ``words`` has records
    (``packed_rows.py``), int32 [tiles, chunks, words of a record], which include the finer scales.
    """

    words: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    factors: torch.Tensor
    inputs: int
    # Inputs that share a scale: 16, 32 or a multiple of 64.
    group: int
    # The type of codes: "int", "e4m3", "e2m1", "levels" of a table, or "rows" of a codebook.
    numbers: str
    bits: int = 0
    zero: int = 0
    levels: tuple[float, ...] | None = None
    # The format of the codebook, if any.
    book: BlockFormat | None = None

    @property
    def outputs(self) -> int:
        return len(self.factors)

    @property
    def halves(self) -> bool:
        """True if bytes have two codes."""
        return self.numbers != "rows" and self.words.shape[2] == 1

    @property
    def chunks(self) -> int:
        return self.words.shape[1]

    def part(self, outputs: slice | torch.Tensor) -> GroupedCodes:
        """Some of the outputs, with codes in order."""
        device = self.words.device
        indices = torch.arange(self.outputs, device=device)[outputs]
        tile, h, g = indices // TILE, indices % TILE // 8, indices % 8
        factors, groups = self.factors[indices][:, None], -(-self.inputs // self.group)

        def of_groups(pairs: torch.Tensor) -> torch.Tensor:
            halves = pairs[tile, :, g].view(torch.float16).unflatten(-1, (-1, 2))
            own = select_half(halves, h)
            if self.group == 16:
                own = _turned(own)
            return own.flatten(1)[:, :groups].float() * factors

        scales = of_groups(self.scales)
        if self.book is not None:
            codes, odd = unpack_rows(self.book, self.words[tile], g, h)
            group = CODEBOOKS[self.book].group
            scales = scales.repeat_interleave(self.group // group, dim=1) * odd
            return GroupedCodes(codes, scales, None, group)
        threads = g[:, None] * 4 + torch.arange(4, device=device)
        # [outputs, t, chunks, H, bytes]
        words = self.words[tile[:, None], :, :, threads]
        if self.numbers == "e2m1":
            words = _moved_bits(words, back=True)
        words = words.view(torch.uint8)
        steps = (-1, CHUNK // SPAN, SPAN // 16, 2, 2)
        if self.numbers == "levels":
            # [..., upper, h, second]
            codes = (
                torch.stack([words & 15, words >> 4], dim=-1).flatten(2).unflatten(2, (*steps, 2))
            )
            codes = select_half(codes.transpose(-1, -2), h)
        elif self.halves:
            # [..., second, upper, h]
            codes = (
                torch.stack([words & 15, words >> 4], dim=-1).flatten(2).unflatten(2, (*steps, 2))
            )
            codes = select_half(codes, h).transpose(-1, -2)
        else:
            codes = select_half(words.flatten(2).unflatten(2, (*steps, 2)), h)
        # [outputs, chunks, span, t, step, upper, second]
        codes = codes.permute(0, 2, 3, 1, 4, 5, 6).flatten(1)[:, : self.inputs]
        minimums = None if self.minimums is None else of_groups(self.minimums)
        if self.numbers == "e4m3":
            return GroupedCodes(codes.contiguous().view(FP8), scales, None, self.group)
        if self.numbers == "int":
            signed, zero = (codes ^ 128).view(torch.int8), self.zero - 128
            return GroupedCodes(signed, scales, minimums, self.group, zero)
        levels = _E2M1 if self.numbers == "e2m1" else self.levels
        return GroupedCodes(codes.view(torch.int8), scales, None, self.group, levels=levels)


def takes(format: BlockFormat) -> bool:
    """True for formats that ``pack`` supports."""
    return not isinstance(format, GroupFormat) or gcd(format.values, CHUNK) >= 16


def pack(weight: QuantizedWeight) -> PackedCodes:
    """Pack a weight piece by piece, which needs little extra memory."""
    step = max(TILE, _PIECE // weight.inputs // TILE * TILE)
    pieces = (weight.part(slice(at, at + step)) for at in range(0, weight.outputs, step))
    if weight.format in CODEBOOK_FORMATS:
        return _joined([_ordered_rows(_codebook_rows(piece)) for piece in pieces])
    return _joined([_ordered(weight.format, grouped_codes(piece)) for piece in pieces])


def _codebook_rows(weight: QuantizedWeight) -> CodebookRows:
    return read_rows(weight.format, weight.blocks.unflatten(1, (-1, weight.format.nbytes)))


def pack_codes(format: BlockFormat, codes: GroupedCodes | CodebookRows) -> PackedCodes:
    """Like ``pack``, for unpacked codes of a format."""
    if isinstance(codes, CodebookRows):
        return _joined([_ordered_rows(codes)])
    return _joined([_ordered(format, codes)])


def stack_packed(parts: Iterable[PackedCodes], count: int) -> PackedCodes:
    """Weights of the same format and shape, one behind the other."""
    each = iter(parts)
    part = next(each)
    memory = part.words.new_zeros(count * part.words.numel() + SPARE * part.words[0, 0].numel())
    words = memory[: count * part.words.numel()].view(count, *part.words.shape)
    scales, factors = (like.new_empty(count, *like.shape) for like in (part.scales, part.factors))
    minimums = None if part.minimums is None else torch.empty_like(scales)
    for index, part in enumerate(chain([part], each)):  # noqa: B020
        words[index], scales[index], factors[index] = part.words, part.scales, part.factors
        if minimums is not None and part.minimums is not None:
            minimums[index] = part.minimums
    return replace(
        part,
        words=words.flatten(0, 1),
        scales=scales.flatten(0, 1),
        minimums=None if minimums is None else minimums.flatten(0, 1),
        factors=factors.flatten(0, 1),
    )


def _joined(parts: list[PackedCodes]) -> PackedCodes:
    words = torch.cat([part.words for part in parts])
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return replace(
        parts[0],
        words=_with_spare(words, SPARE * words[0, 0].numel()),
        scales=torch.cat([part.scales for part in parts]),
        minimums=torch.cat(minimums) if minimums else None,
        factors=torch.cat([part.factors for part in parts]),
    )


def _with_spare(data: torch.Tensor, spare: int) -> torch.Tensor:
    """A copy that is followed by ``spare`` zeros in memory."""
    memory = data.new_zeros(data.numel() + spare)
    memory[: data.numel()] = data.flatten()
    return memory[: data.numel()].view(data.shape)


def _range(format: BlockFormat, codes: GroupedCodes) -> tuple[int, int]:
    """Bits and lowest value of codes that are multiplied as integers."""
    if format in _NARROW:
        return _NARROW[format]
    if isinstance(format, GroupFormat) and format.bits < 8:
        return format.bits, 0
    return (4, 0) if codes.halves else (8, -128)


def _turned(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., 4] of groups of 16, from [span, half] order to [half, span] or back."""
    return scales.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)


def _ordered(format: BlockFormat, codes: GroupedCodes) -> PackedCodes:
    bits, lowest = _range(format, codes)
    group = codes.group if codes.group % CHUNK == 0 else gcd(codes.group, CHUNK)
    scales, minimums, zero = codes.scales, codes.minimums, codes.zero - lowest
    factors = torch.ones(codes.outputs, device=scales.device)
    if minimums is not None and minimums.dtype != torch.float16:
        # The minimum of the middle code is smaller, and so is what rounding it adds.
        middle = 1 << bits - 1
        minimums = minimums.float() + scales.float() * (middle - zero)
        zero = middle
    parts = [scales] if minimums is None else [scales, minimums]
    if any(each.dtype != torch.float16 for each in parts):
        parts = [each.float() for each in parts]
        largest = torch.stack([each.abs().amax(1) for each in parts]).amax(0)
        factors = torch.exp2(torch.frexp(largest).exponent.float())
        parts = [each / factors[:, None] for each in parts]
    pairs = [_pairs(each, codes.group, group, codes.inputs) for each in parts]
    numbers = "int"
    if codes.codes.dtype == FP8:
        numbers, zero = "e4m3", 0
    elif codes.levels in (_E2M1, _DOUBLED):
        numbers = "e2m1"
        factors = factors * (2 if codes.levels == _DOUBLED else 1)
    elif codes.levels is not None:
        numbers = "levels"
    return PackedCodes(
        words=_words(_unsigned(codes, lowest), codes.halves, numbers),
        scales=pairs[0],
        minimums=pairs[1] if minimums is not None else None,
        factors=factors,
        inputs=codes.inputs,
        group=group,
        numbers=numbers,
        bits=bits,
        zero=zero,
        levels=codes.levels if numbers == "levels" else None,
    )


def _ordered_rows(rows: CodebookRows) -> PackedCodes:
    """Block scales are relative to the largest one of their output, so that products with odd
    scales also fit fp16."""
    scales, group = rows.scale.flatten(1).float(), rows.format.values
    factors = torch.exp2(torch.frexp(scales.abs().amax(1)).exponent.float())
    return PackedCodes(
        words=records(rows),
        scales=_pairs(scales / factors[:, None], group, group, scales.shape[1] * group),
        minimums=None,
        factors=factors * CODEBOOKS[rows.format].part,
        inputs=scales.shape[1] * group,
        group=group,
        numbers="rows",
        book=rows.format,
    )


def _unsigned(codes: GroupedCodes, lowest: int) -> torch.Tensor:
    """uint8 [O, I]: codes minus the lowest one, or the bytes of floats."""
    if codes.halves:
        return torch.cat([codes.codes & 15, codes.codes >> 4], dim=-1).flatten(1)
    if codes.codes.dtype == FP8:
        return codes.codes.view(torch.uint8)
    return codes.codes.view(torch.uint8) - lowest % 256


def _words(codes: torch.Tensor, halves: bool, numbers: str) -> torch.Tensor:
    codes = F.pad(codes, (0, -codes.shape[1] % CHUNK, 0, -codes.shape[0] % TILE))
    # [tiles, h, g, chunks, span, t, step, upper, second]
    codes = codes.view(-1, 2, 8, codes.shape[1] // CHUNK, CHUNK // SPAN, 4, SPAN // 16, 2, 2)
    if halves:
        # [tiles, chunks, g, t, span, step, and the order of a word]
        order = (7, 1, 8) if numbers == "levels" else (8, 7, 1)
        codes = codes.permute(0, 3, 2, 5, 4, 6, *order)
        packed = codes[..., 0] | codes[..., 1] << 4
        words = packed.reshape(*packed.shape[:2], 1, 32, 16).view(torch.int32)
        return _moved_bits(words) if numbers == "e2m1" else words
    # [tiles, chunks, span, step, g, t, upper, second, h]
    codes = codes.permute(0, 3, 4, 6, 2, 5, 7, 8, 1)
    # Of four steps, a thread reads two at once.
    packed = codes.reshape(*codes.shape[:2], 2, 2, 32, 8).transpose(3, 4)
    return packed.reshape(*packed.shape[:3], 32, 16).view(torch.int32)


def _moved_bits(words: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Move the bits of words of e2m1 codes to the positions in ``_E2M1_BITS``, or back."""
    masks: dict[int, int] = {}
    for code, bits in enumerate(_E2M1_BITS):
        for number, to in enumerate(bits):
            for high in (0, 16):
                pair = 4 * code + 3 - number + high, (to + high) % 32
                start, end = pair[::-1] if back else pair
                masks[end - start] = masks.get(end - start, 0) | 1 << end
    moved = torch.zeros_like(words)
    for shift, mask in masks.items():
        part = words << shift if shift >= 0 else words >> -shift
        moved |= part & (mask - (1 << 32) if mask >> 31 else mask)
    return moved


def _pairs(scales: torch.Tensor, from_group: int, group: int, inputs: int) -> torch.Tensor:
    """int32 [tiles, chunks or groups, 8, groups of a chunk]: fp16 for outputs g and g + 8."""
    scales = scales.half().repeat_interleave(from_group // group, dim=1)
    of_chunk = max(1, CHUNK // group)
    scales = F.pad(scales, (0, -scales.shape[1] % of_chunk, 0, -len(scales) % TILE))
    # [tiles, h, g, chunks, groups of a chunk]
    scales = scales.view(-1, 2, 8, scales.shape[1] // of_chunk, of_chunk)
    scales = _turned(scales) if group == 16 else scales
    return scales.permute(0, 3, 2, 4, 1).contiguous().view(torch.int32)[..., 0]
