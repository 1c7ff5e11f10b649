"""Rows of codebooks in the order in which tensor cores take their numbers.

A thread has a row of 8 numbers, or two of 4, for each of its outputs in each span. A chunk of a
tile is a record of bytes:

    rows     [words, threads, 4]: the lowest 8 bits of their numbers, by span, step and h
    signs    [threads, 4], unless a row is moved: those of its 16 pairs of neighbours, by span,
             step, upper and h, are at bits 15 - pair and 31 - pair
    high     [threads, 1 or 2], if there are any: the bits above 8 of all rows, then the moves by
             span and h
    scales   [8 of g, groups of a span, 2 of h]: halves of the odd ones, four bits for each span

where threads are [4 of t, 8 of g].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..block_codes import CodebookRows, codebook
from ..block_formats import CODEBOOKS, BlockFormat, Codebook
from .tiles import CHUNK, SPAN, TILE, select_half

_SPANS = CHUNK // SPAN
_THREADS = 32


def field_bytes(book: Codebook) -> tuple[int, int, int, int]:
    """The bytes of a record's rows, signs, high bits and scales."""
    rows = CHUNK // book.row_size * TILE
    signs = 0 if book.moves else CHUNK // 8 * TILE
    high = -(-(_runs(book) * (book.bits - 8) + 4 * book.moves) // 8) * _THREADS
    return rows, signs, high, TILE * SPAN // book.group


def _runs(book: Codebook) -> int:
    """Rows that a thread has of a chunk."""
    return CHUNK * TILE // book.row_size // _THREADS


def records(codes: CodebookRows) -> torch.Tensor:
    """int32 [tiles, chunks, words of a record]."""
    book = CODEBOOKS[codes.format]
    # [tiles, chunks, t, g, rows of a thread]
    rows = _by_threads(codes.rows.flatten(1), 8 // book.row_size).flatten(4).int()
    low = (rows & 255).byte().flatten(2, 3).unflatten(-1, (-1, 4))
    fields = [low.transpose(2, 3)]
    if codes.signs is not None:
        bits = codes.signs.flatten(1)[..., None] >> _places(8, codes.signs) & 1
        # [tiles, chunks, t, g, span, step and upper, second, h]
        pairs = _by_threads(bits.flatten(1), 8).unflatten(5, (-1, 2))
        fields.append(_packed(pairs.movedim(6, 4).flatten(5).flip(5).flatten(4)))
    above = book.bits - 8
    if above:
        bits = (rows >> 8)[..., None] >> _places(above, rows) & 1
        single = [bits.flatten(4)]
        if codes.down is not None:
            single.append(_by_threads(codes.down.flatten(1), 1).flatten(4))
        bits = torch.cat(single, dim=-1).byte()
        fields.append(_packed(F.pad(bits, (0, -bits.shape[-1] % 8))))
    halves = _by_outputs(codes.scales.flatten(1).byte() >> 1, SPAN // book.group)
    # [tiles, chunks, g, groups of a span, h]
    halves = halves.permute(0, 3, 2, 5, 1, 4)
    fields.append(halves[..., 0] | halves[..., 1] << 4)
    return torch.cat([each.flatten(2) for each in fields], dim=2).contiguous().view(torch.int32)


def unpack_rows(
    format: BlockFormat, words: torch.Tensor, g: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [O, I] and odd scales [O, groups] of the outputs g + 8 h of records [O, chunks,
    words]."""
    book = CODEBOOKS[format]
    each = torch.arange(len(words), device=words.device)
    sizes = list(field_bytes(book))
    low, signs, high, halves = words.contiguous().view(torch.uint8).split(sizes, dim=2)
    # The part of each thread, [O, chunks, t, ...].
    low = low.unflatten(2, (-1, 4, 8, 4))[each, :, :, :, g].permute(0, 1, 3, 2, 4)
    rows = low.int().flatten(3)
    above = book.bits - 8
    bits = _bits(high.unflatten(2, (4, 8, -1))[each, :, :, g]) if above else rows
    if above:
        of_rows = bits[..., : above * rows.shape[3]].unflatten(3, (-1, above)).int()
        rows = rows | ((of_rows << _places(above, rows)).sum(-1, dtype=torch.int32) << 8)
    codes = codebook(format, words.device)[_in_order(rows, h)].flatten(1)
    if book.moves:
        down = _in_order(bits[..., above * rows.shape[3] :][..., :4], h)
        moved = 1 - 2 * down.to(torch.int8)
        codes = (8 * codes.unflatten(1, (-1, 8)) + moved[..., None]).flatten(1)
    else:
        sign_bits = _bits(signs.unflatten(2, (4, 8, -1))[each, :, :, g])
        pairs = sign_bits.unflatten(3, (2, 16)).flip(4).unflatten(4, (_SPANS, 4, 2))
        # [O, chunks, t, span, step and upper, second, h]
        negative = _in_order(pairs.movedim(3, 5).flatten(3), h)
        codes = codes * (1 - 2 * negative.to(torch.int8))
    halves = select_half(halves.unflatten(2, (8, -1, 2))[each, :, g], h)
    # [O, chunks, span, groups of a span]
    halves = torch.stack([halves & 15, halves >> 4], dim=2)
    return codes, 2 * halves.flatten(1) + 1


def _by_outputs(each: torch.Tensor, count: int) -> torch.Tensor:
    """Values with ``count`` per span, [O, ...], as [tiles, h, g, chunks, span, count]."""
    each = F.pad(each, (0, 0, 0, -len(each) % TILE))
    return each.view(-1, 2, 8, each.shape[1] // (_SPANS * count), _SPANS, count)


def _by_threads(each: torch.Tensor, count: int) -> torch.Tensor:
    """Values with ``count`` per 8 inputs, [O, ...], as [tiles, chunks, t, g, span, count, h]."""
    return _by_outputs(each, 4 * count).unflatten(5, (4, count)).permute(0, 3, 5, 2, 4, 6, 1)


def _in_order(each: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """[O, chunks, t, values of a thread by span and h], as [O, ...]."""
    mine = select_half(each.unflatten(3, (_SPANS, -1, 2)), h)
    return mine.transpose(2, 3).flatten(1)


def _places(bits: int, beside: torch.Tensor) -> torch.Tensor:
    return torch.arange(bits, dtype=beside.dtype, device=beside.device)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Bytes of bits, the lowest first."""
    return (bits.byte().unflatten(-1, (-1, 8)) << _places(8, bits.byte())).sum(
        -1, dtype=torch.uint8
    )


def _bits(packed: torch.Tensor) -> torch.Tensor:
    return (packed[..., None] >> _places(8, packed) & 1).flatten(-2)
