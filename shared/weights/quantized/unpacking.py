"""Conversion of the tensors of a quantisation method to blocks, row by row.

n rows, I inputs, G groups of the method.
"""

from __future__ import annotations

import torch

from ....kernels.block_codes import stream
from ....kernels.block_formats import BlockFormat

# The order of outputs in a word of AWQ.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def in_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, I] of words [n, W], in order from the lowest bit on."""
    # contiguous() keeps any stride of a single column.
    count, width = words.shape
    return stream(words.flatten().view(torch.uint8).view(count, width * words.element_size()), bits)


def gptq_zeros(words: torch.Tensor, bits: int, *, less_one: bool) -> torch.Tensor:
    """GPTQ's zeros [G, O] of words [G, W]. The first format stores them ``less_one``.

    GPTQModel subtracts and adds the ones on whole words, so that a zero of 0 borrows from the next
    code; codes of 3 bits, some of which span two words, are handled one by one.
    """
    if not less_one:
        return in_words(words, bits)
    if 32 % bits:
        return in_words(words, bits) + 1 & (1 << bits) - 1
    return in_words(words + sum(1 << place for place in range(0, 32, bits)), bits)


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """AWQ's codes of 4 bits [n, 8 W] of words [n, W]."""
    codes: torch.Tensor = in_words(words, 4).unflatten(-1, (-1, 8))
    places = torch.tensor(_AWQ_ORDER).argsort()
    return codes[..., places].flatten(-2)


def pack(
    format: BlockFormat,
    codes: torch.Tensor,
    bits: int,
    group: int,
    scales: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blocks [n, bytes] from codes [n, I], and scales and offsets [n, G] for ``group`` inputs each,
    in the dtypes of the blocks."""
    codes = codes.contiguous().view(torch.uint8).unflatten(1, (-1, format.values))
    count = codes.shape[1]
    groups = torch.arange(count) * format.values // group
    fields = [
        each.index_select(1, groups)[..., None].view(torch.uint8)
        for each in (scales, offsets)
        if each is not None
    ]
    return torch.cat([*fields, _pack_codes(codes, bits)], dim=-1).flatten(1)


def _pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes
    if bits == 4:
        low, high = codes.chunk(2, dim=-1)
        return low | high << 4
    places = torch.arange(bits, dtype=torch.uint8)
    single: torch.Tensor = (codes[..., None] >> places & 1).flatten(-2).unflatten(-1, (-1, 8))
    return (single << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def of_rows(scales: torch.Tensor, first: int, end: int, height: int) -> torch.Tensor:
    """The scales of rows ``first`` to ``end``, where ``height`` rows share theirs. ``scales``
    begins at the group of ``first``."""
    return scales[torch.arange(first, end) // height - first // height]


def of_flat(
    absmax: torch.Tensor, size: int, first: int, end: int, inputs: int, run: int
) -> torch.Tensor:
    """Scales [n, I / run], where ``size`` neighbours in the flattened weight share one."""
    rows = torch.arange(first, end)[:, None] * inputs
    return absmax[(rows + torch.arange(0, inputs, run)) // size]
