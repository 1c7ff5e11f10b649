"""Quantisation of numbers [O, I] to the bytes of blocks [O, bytes of a row].

Scales are chosen as in llama.cpp's quantiser without an importance matrix: the candidates with the
lowest weighted error. Q8_0 and Q4_0 give the same bytes as llama.cpp.

N blocks, S groups of a block, n values of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from . import block_formats as formats
from .block_formats import BlockFormat, GroupFormat

_LARGEST_E4M3 = 448.0
# The number of partial sums, which fixes the order of additions for compiled searches too.
SUMS = 4
# Numbers encoded at a time: candidates take several times their memory.
_PIECE = 1 << 18


class WithMinimum(Protocol):
    """Scales and (negated) minimums [N, S] of groups [N, S, n], for codes from 0 to ``max_code``.
    ``importance`` weighs squared errors, or with ``absolute`` their magnitudes. Candidates divide
    the range by ``max_code + first + step / 10``, for ``step`` from 0 to ``steps``."""

    def __call__(
        self,
        x: torch.Tensor,
        importance: torch.Tensor,
        max_code: int,
        first: float,
        steps: int,
        *,
        absolute: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Searches:
    """The searches for scales, which take nearly all of the time: in torch, or compiled for CPUs
    (``cpu/scale_search.py``) with identical results.

    ``symmetric`` and ``one_by_one`` return scales [N, S] for codes from -``max_code`` to
    ``max_code`` - 1, weighted by squared values; the second improves the codes one by one.
    """

    with_minimum: WithMinimum
    symmetric: Callable[[torch.Tensor, int], torch.Tensor]
    one_by_one: Callable[[torch.Tensor, int], torch.Tensor]


def encode(
    format: BlockFormat,
    weight: torch.Tensor,
    into: torch.Tensor | None = None,
    searches: Searches | None = None,
) -> torch.Tensor:
    """Quantise numbers, in rows of whole blocks, to ``into`` or new memory."""
    searches = searches or _TORCH
    rows, inputs = weight.shape
    if into is None:
        into = weight.new_empty(rows, format.bytes_of(inputs), dtype=torch.uint8)
    step = max(1, _PIECE // max(1, inputs))
    for first in range(0, rows, step):
        part = weight[first : first + step]
        blocks = part.float().reshape(-1, format.values)
        into[first : first + step] = encoder(format)(blocks, searches).view(len(part), -1)
    return into


def encoder(format: BlockFormat) -> Callable[[torch.Tensor, Searches], torch.Tensor]:
    """The bytes of blocks [N, values of a block] in fp32."""
    if isinstance(format, GroupFormat):
        assert format.codes == "e4m3" and format.scale == "F32", format
        return _e4m3
    return _ENCODERS[format]


def _e4m3(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST_E4M3
    codes = (blocks * _inverse(scales)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    return torch.cat(
        [scales.view(torch.uint8), codes.to(torch.float8_e4m3fn).view(torch.uint8)], dim=1
    )


def _q8_0(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    scales = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scales)
    # Halves are rounded away from zero.
    codes = scaled.sign() * (scaled.abs() + 0.5).floor()
    return torch.cat([_half(scales), codes.to(torch.int8).view(torch.uint8)], dim=1)


def _q4_0(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    codes = (blocks * _inverse(scales) + 8.5).trunc().clamp(0, 15).byte()
    return torch.cat([_half(scales), codes[:, :16] | codes[:, 16:] << 4], dim=1)


def _q2_k(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    groups = blocks.unflatten(1, (16, 16))
    scales, minimums = searches.with_minimum(groups, groups.abs(), 3, -0.5, 15, absolute=True)
    d, scale_codes = _shared(scales, 15)
    dmin, min_codes = _shared(minimums, 15)
    codes = _codes(groups, d * scale_codes, dmin * min_codes, 3)
    packed = (scale_codes | min_codes << 4).byte()
    return torch.cat([packed, _planes(codes, 2), _half(d), _half(dmin)], dim=1)


def _q3_k(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    groups = blocks.unflatten(1, (16, 16))
    scales = searches.one_by_one(groups, 4)
    d, own = _signed(scales, 32)
    codes = _codes(groups, d * own, None, 3, low=-4) + 4
    flat = codes.flatten(1)
    third = _bytes((flat > 3).byte().unflatten(1, (8, 32)), 1)
    shifted = (own + 32).byte()
    low = shifted[:, :8] & 15 | (shifted[:, 8:] & 15) << 4
    high = _bytes((shifted >> 4).unflatten(1, (4, 4)), 2)
    return torch.cat([third, _planes(codes & 3, 2), low, high, _half(d)], dim=1)


def _q4_k(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    fields, codes = _four_or_five(blocks, searches, 15, -1.0, 20)
    return torch.cat([*fields, _planes(codes, 4)], dim=1)


def _q5_k(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    fields, codes = _four_or_five(blocks, searches, 31, -0.5, 15)
    fifth = _bytes((codes >> 4).byte(), 1)
    return torch.cat([*fields, fifth, _planes(codes & 15, 4)], dim=1)


def _four_or_five(
    blocks: torch.Tensor, searches: Searches, max_code: int, first: float, steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The scales' fields, and codes [N, 8, 32]."""
    groups = blocks.unflatten(1, (8, 32))
    importance = (sum_of(groups.square()) / 32).sqrt() + groups.abs()
    scales, minimums = searches.with_minimum(
        groups, importance, max_code, first, steps, absolute=False
    )
    d, scale_codes = _shared(scales, 63)
    dmin, min_codes = _shared(minimums, 63)
    codes = _codes(groups, d * scale_codes, dmin * min_codes, max_code)
    scale_codes, min_codes = scale_codes.byte(), min_codes.byte()
    packed = torch.cat(
        [
            scale_codes[:, :4] | scale_codes[:, 4:] >> 4 << 6,
            min_codes[:, :4] | min_codes[:, 4:] >> 4 << 6,
            scale_codes[:, 4:] & 15 | (min_codes[:, 4:] & 15) << 4,
        ],
        dim=1,
    )
    return [_half(d), _half(dmin), packed], codes


def _q6_k(blocks: torch.Tensor, searches: Searches) -> torch.Tensor:
    groups = blocks.unflatten(1, (16, 16))
    d, own = _signed(searches.symmetric(groups, 32), 128)
    codes = _codes(groups, d * own, None, 31, low=-32) + 32
    halves = codes.flatten(1).byte().unflatten(1, (2, 128))
    low = _bytes((halves & 15).unflatten(2, (2, 64)), 4)
    high = _bytes((halves >> 4).unflatten(2, (4, 32)), 2)
    scales = own.to(torch.int8).view(torch.uint8)
    return torch.cat([low.flatten(1), high.flatten(1), scales, _half(d)], dim=1)


def _with_minimum(
    x: torch.Tensor,
    importance: torch.Tensor,
    max_code: int,
    first: float,
    steps: int,
    *,
    absolute: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and (negated) minimums [N, S] of groups [N, S, n], for codes from 0 to
    ``max_code``."""
    lowest = x.amin(-1, keepdim=True).clamp(max=0)
    spread = x.amax(-1, keepdim=True) - lowest
    inverse = _inverse(spread)
    total, sum_x = sum_of(importance), sum_of(importance * x)

    def error(scale: torch.Tensor, minimum: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        off = scale * codes + minimum - x
        return sum_of(importance * (off.abs() if absolute else off.square()))

    scale, minimum = spread / max_code, lowest
    codes = (max_code * inverse * (x - lowest)).round().clamp(0, max_code)
    best = error(scale, minimum, codes)
    for step in range(steps + 1):
        codes = (
            ((first + 0.1 * step + max_code) * inverse * (x - lowest)).round().clamp(0, max_code)
        )
        sum_l = sum_of(importance * codes)
        sum_l2 = sum_of(importance * codes.square())
        sum_xl = sum_of(importance * codes * x)
        determinant = total * sum_l2 - sum_l.square()
        over = _inverse(determinant)
        a, b = (total * sum_xl - sum_x * sum_l) * over, (sum_l2 * sum_x - sum_l * sum_xl) * over
        positive = b > 0
        a, b = torch.where(positive, sum_xl * _inverse(sum_l2), a), b.masked_fill(positive, 0)
        new_error = error(a, b, codes)
        better = (determinant > 0) & (new_error < best)
        scale, minimum = torch.where(better, a, scale), torch.where(better, b, minimum)
        best = torch.where(better, new_error, best)
    return scale[..., 0], -minimum[..., 0]


def _symmetric(x: torch.Tensor, max_code: int) -> torch.Tensor:
    """Scales [N, S] for codes from -``max_code`` to ``max_code`` - 1, where large values count
    more."""
    inverse = _inverse(x.gather(-1, x.abs().argmax(-1, keepdim=True)))
    scale = best = torch.zeros_like(inverse)
    for step in (0, *range(-9, 0), *range(1, 10)):
        codes = (-(max_code + 0.1 * step) * inverse * x).round().clamp(-max_code, max_code - 1)
        sum_lx = sum_of(x.square() * x * codes)
        sum_l2 = sum_of(x.square() * codes.square())
        new_scale = sum_lx * _inverse(sum_l2)
        better = new_scale * sum_lx > best
        scale = torch.where(better, new_scale, scale)
        best = torch.where(better, new_scale * sum_lx, best)
    return scale[..., 0]


def _one_by_one(x: torch.Tensor, max_code: int) -> torch.Tensor:
    """Like ``_symmetric``, but improves the codes one by one."""
    inverse = _inverse(x.gather(-1, x.abs().argmax(-1, keepdim=True)))
    codes = (-max_code * inverse * x).round().clamp(-max_code, max_code - 1)
    weights = x.square()
    sum_lx, sum_l2 = sum_of(weights * x * codes)[..., 0], sum_of(weights * codes.square())[..., 0]
    for _ in range(5):
        for index in range(x.shape[-1]):
            one, weight, code = x[..., index], weights[..., index], codes[..., index]
            less_lx, less_l2 = sum_lx - weight * one * code, sum_l2 - weight * code.square()
            new = (one * less_l2 * _inverse(less_lx)).round().clamp(-max_code, max_code - 1)
            new_lx, new_l2 = less_lx + weight * one * new, less_l2 + weight * new.square()
            better = (less_lx > 0) & (new_l2 > 0)
            better &= new_lx.square() * sum_l2 > sum_lx.square() * new_l2
            codes[..., index] = torch.where(better, new, code)
            sum_lx, sum_l2 = (
                torch.where(better, new_lx, sum_lx),
                torch.where(better, new_l2, sum_l2),
            )
    return sum_lx * _inverse(sum_l2)


def _shared(scales: torch.Tensor, max_code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp16 factor [N, 1] of non-negative scales, and the scales as integers up to
    ``max_code``."""
    largest = scales.amax(1, keepdim=True).clamp(min=0)
    own = (max_code * _inverse(largest) * scales).round().clamp(0, max_code).int()
    return (largest / max_code).half().float(), own


def _signed(scales: torch.Tensor, max_code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like ``_shared``, from -``max_code`` to ``max_code`` - 1; the largest becomes
    -``max_code``."""
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    own = (-max_code * _inverse(largest) * scales).round().clamp(-max_code, max_code - 1).int()
    return (largest / -max_code).half().float(), own


def _codes(
    x: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    max_code: int,
    low: int = 0,
) -> torch.Tensor:
    """The nearest codes to groups [N, S, n], from ``low`` to ``max_code``."""
    shifted = x if minimums is None else x + minimums[..., None]
    return (shifted * _inverse(scales)[..., None]).round().clamp(low, max_code).int()


def _planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes with 32 neighbours in the lowest bits, the next 32 in the next bits, and so on."""
    per_byte = 8 // bits
    parts = codes.flatten(1).byte().unflatten(1, (-1, per_byte, 32))
    return _bytes(parts, bits).flatten(1)


def _bytes(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [..., n] of codes [..., parts of a byte, n]."""
    shifts = torch.arange(parts.shape[-2], dtype=torch.uint8, device=parts.device) * bits
    return (parts << shifts[:, None]).sum(-2, dtype=torch.uint8)


def _half(scales: torch.Tensor) -> torch.Tensor:
    return scales.half().view(torch.uint8)


def sum_of(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a multiple of ``SUMS``, in a fixed order: first over every
    ``SUMS``-th number."""
    first, *others = x.split(SUMS, dim=-1)
    for each in others:
        first = first + each
    halves = first[..., :2] + first[..., 2:]
    return halves[..., :1] + halves[..., 1:]


def _inverse(x: torch.Tensor) -> torch.Tensor:
    """``1 / x``, or 0 where x is 0."""
    return torch.where(x == 0, 0.0, 1 / x)


_TORCH = Searches(_with_minimum, _symmetric, _one_by_one)
_ENCODERS = {
    formats.Q8_0: _q8_0,
    formats.Q4_0: _q4_0,
    formats.Q2_K: _q2_k,
    formats.Q3_K: _q3_k,
    formats.Q4_K: _q4_k,
    formats.Q5_K: _q5_k,
    formats.Q6_K: _q6_k,
}
