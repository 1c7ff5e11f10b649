"""Codes of a quantised weight in the order in which tensor cores take them (``tiles.py``).

H, the times that a thread reads 16 bytes of a chunk: 1 for codes of 4 bits, 2 for those of a byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd

import torch
import torch.nn.functional as F

from ..block_codes import ChosenRows, choose_rows
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
from .packed_rows import records, taken_apart
from .tiles import CHUNK, SPAN, TILE, picked

# Chunks after the last one of all, which warps without work of their own read too.
SPARE = 8
# Bits, and the least of the codes, where these do not use all of the 4 or 8 that they take.
_NARROW = {Q2_K: (2, 0), Q5_0: (5, -16), Q5_1: (5, 0), Q5_K: (5, 0), Q6_K: (6, -32)}
# Floats with a sign, two bits of an exponent and one of a mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Where a word has sign, exponent and mantissa of each of its first four codes: a shift or rotation
# leaves all of three, and two shifts those of the last one, in the bits of bfloat16. Those of the
# other four are 16 bits away.
_E2M1_BITS = ((15, 8, 7, 6), (21, 14, 13, 12), (9, 2, 1, 0), (11, 4, 3, 10))
_DOUBLED = tuple(2 * each for each in _E2M1)
# Weights that are brought into order at a time.
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """``factor * (scale * (number - zero) + minimum)``, where codes are numbers less the least one.

    ``words`` are int32 [tiles, chunks, H, 32 threads, 4]. Of 4 bits, a word has eight codes in the
    order of [second input, upper, h], where h is 1 for output g + 8, and upper for the inputs from
    2t + 8 on; of bytes, four in the order of [second input, h]. So a shift and a mask leave two
    codes in the mantissas of two numbers. Those of e2m1 have their bits at other places;
    those of a table are in the order of [upper, h, second input], as four at a time are looked
    up. ``scales``, and ``minimums``, have two fp16, for outputs g and g + 8: int32 [tiles, chunks
    or groups, 8, groups of a chunk]. Of four groups of a chunk, those of the first 16 of each 32
    inputs come first: a thread needs either these or the others. Scales that fp16 does not hold
    are relative to a power of two of their output, ``factors``, fp32 [O]. Rows of a codebook have
    records (``packed_rows.py``) in ``words``, int32 [tiles, chunks, words of a record], which also
    have the finer scales.
    """

    words: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    factors: torch.Tensor
    inputs: int
    # Inputs that share a scale: 16, 32 or a multiple of 64.
    group: int
    # What codes stand for: "int", "e4m3", "e2m1", "levels" of a table, or "rows" of a codebook.
    numbers: str
    bits: int = 0
    zero: int = 0
    levels: tuple[float, ...] | None = None
    # The format whose codebook it is.
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
        chosen = torch.arange(self.outputs, device=device)[outputs]
        tile, h, g = chosen // TILE, chosen % TILE // 8, chosen % 8
        factors, groups = self.factors[chosen][:, None], -(-self.inputs // self.group)

        def of_groups(pairs: torch.Tensor) -> torch.Tensor:
            halves = pairs[tile, :, g].view(torch.float16).unflatten(-1, (-1, 2))
            found = picked(halves, h)
            if self.group == 16:
                found = _turned(found)
            return found.flatten(1)[:, :groups].float() * factors

        scales = of_groups(self.scales)
        if self.book is not None:
            codes, odd = taken_apart(self.book, self.words[tile], g, h)
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
            codes = picked(codes.transpose(-1, -2), h)
        elif self.halves:
            # [..., second, upper, h]
            codes = (
                torch.stack([words & 15, words >> 4], dim=-1).flatten(2).unflatten(2, (*steps, 2))
            )
            codes = picked(codes, h).transpose(-1, -2)
        else:
            codes = picked(words.flatten(2).unflatten(2, (*steps, 2)), h)
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
    """True for formats of which ``pack`` takes weights."""
    return not isinstance(format, GroupFormat) or gcd(format.values, CHUNK) >= 16


def pack(weight: QuantizedWeight) -> PackedCodes:
    """The codes in order, for keeping. Needs a little of the weight's size meanwhile."""
    step = max(TILE, _PIECE // weight.inputs // TILE * TILE)
    pieces = (weight.part(slice(at, at + step)) for at in range(0, weight.outputs, step))
    if weight.format in CODEBOOK_FORMATS:
        return _joined([_ordered_rows(_chosen_rows(piece)) for piece in pieces])
    return _joined([_ordered(weight.format, grouped_codes(piece)) for piece in pieces])


def _chosen_rows(weight: QuantizedWeight) -> ChosenRows:
    return choose_rows(weight.format, weight.blocks.unflatten(1, (-1, weight.format.nbytes)))


def pack_codes(format: BlockFormat, codes: GroupedCodes | ChosenRows) -> PackedCodes:
    """As ``pack``, of the codes of a format."""
    if isinstance(codes, ChosenRows):
        return _joined([_ordered_rows(codes)])
    return _joined([_ordered(format, codes)])


def stack_packed(parts: Iterable[PackedCodes], count: int) -> PackedCodes:
    """Weights of the same format and shape, one behind the other."""
    each = iter(parts)
    part = next(each)
    held = part.words.new_zeros(count * part.words.numel() + SPARE * part.words[0, 0].numel())
    words = held[: count * part.words.numel()].view(count, *part.words.shape)
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
    """The same, in memory that goes on after it."""
    held = data.new_zeros(data.numel() + spare)
    held[: data.numel()] = data.flatten()
    return held[: data.numel()].view(data.shape)


def _range(format: BlockFormat, codes: GroupedCodes) -> tuple[int, int]:
    """Bits of the codes that are multiplied as integers, and the least one."""
    if format in _NARROW:
        return _NARROW[format]
    if isinstance(format, GroupFormat) and format.bits < 8:
        return format.bits, 0
    return (4, 0) if codes.halves else (8, -128)


def _turned(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., 4] of groups of 16 by span and half, as by half and span, or the other way."""
    return scales.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)


def _ordered(format: BlockFormat, codes: GroupedCodes) -> PackedCodes:
    bits, least = _range(format, codes)
    group = codes.group if codes.group % CHUNK == 0 else gcd(codes.group, CHUNK)
    scales, minimums, zero = codes.scales, codes.minimums, codes.zero - least
    factors = torch.ones(codes.outputs, device=scales.device)
    if minimums is not None and minimums.dtype != torch.float16:
        # The minimum of the middle code is smaller, and so is what rounding it adds.
        middle = 1 << bits - 1
        minimums = minimums.float() + scales.float() * (middle - zero)
        zero = middle
    kept = [scales] if minimums is None else [scales, minimums]
    if any(each.dtype != torch.float16 for each in kept):
        kept = [each.float() for each in kept]
        largest = torch.stack([each.abs().amax(1) for each in kept]).amax(0)
        factors = torch.exp2(torch.frexp(largest).exponent.float())
        kept = [each / factors[:, None] for each in kept]
    pairs = [_pairs(each, codes.group, group, codes.inputs) for each in kept]
    numbers = "int"
    if codes.codes.dtype == FP8:
        numbers, zero = "e4m3", 0
    elif codes.levels in (_E2M1, _DOUBLED):
        numbers = "e2m1"
        factors = factors * (2 if codes.levels == _DOUBLED else 1)
    elif codes.levels is not None:
        numbers = "levels"
    return PackedCodes(
        words=_words(_unsigned(codes, least), codes.halves, numbers),
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


def _ordered_rows(found: ChosenRows) -> PackedCodes:
    """The scale of all of a block is kept as others are, relative to the largest of its output, so
    that fp16 also has its products with odd scales."""
    scales, group = found.scale.flatten(1).float(), found.format.values
    factors = torch.exp2(torch.frexp(scales.abs().amax(1)).exponent.float())
    return PackedCodes(
        words=records(found),
        scales=_pairs(scales / factors[:, None], group, group, scales.shape[1] * group),
        minimums=None,
        factors=factors * CODEBOOKS[found.format].part,
        inputs=scales.shape[1] * group,
        group=group,
        numbers="rows",
        book=found.format,
    )


def _unsigned(codes: GroupedCodes, least: int) -> torch.Tensor:
    """uint8 [O, I]: codes less the least one, or the bytes of floats."""
    if codes.halves:
        return torch.cat([codes.codes & 15, codes.codes >> 4], dim=-1).flatten(1)
    if codes.codes.dtype == FP8:
        return codes.codes.view(torch.uint8)
    return codes.codes.view(torch.uint8) - least % 256


def _words(codes: torch.Tensor, halves: bool, numbers: str) -> torch.Tensor:
    codes = F.pad(codes, (0, -codes.shape[1] % CHUNK, 0, -codes.shape[0] % TILE))
    # [tiles, h, g, chunks, span, t, step, upper, second]
    codes = codes.view(-1, 2, 8, codes.shape[1] // CHUNK, CHUNK // SPAN, 4, SPAN // 16, 2, 2)
    if halves:
        # [tiles, chunks, g, t, span, step, and the order of a word]
        order = (7, 1, 8) if numbers == "levels" else (8, 7, 1)
        codes = codes.permute(0, 3, 2, 5, 4, 6, *order)
        held = codes[..., 0] | codes[..., 1] << 4
        words = held.reshape(*held.shape[:2], 1, 32, 16).view(torch.int32)
        return _moved_bits(words) if numbers == "e2m1" else words
    # [tiles, chunks, span, step, g, t, upper, second, h]
    codes = codes.permute(0, 3, 4, 6, 2, 5, 7, 8, 1)
    # Of four steps, a thread reads two at once.
    held = codes.reshape(*codes.shape[:2], 2, 2, 32, 8).transpose(3, 4)
    return held.reshape(*held.shape[:3], 32, 16).view(torch.int32)


def _moved_bits(words: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Words of codes of 4 bits with their bits where ``_E2M1_BITS`` has them, or back in order."""
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
