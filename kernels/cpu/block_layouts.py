"""Weights in panels of ``LANES`` outputs, for products of bytes.

A code is less than 2^8 and means ``scale * (code - zero) + minimum``; with ``levels``, it is first
replaced by a number from a table, and floats (e4m3, bf16) are numbers themselves. 32 neighbouring
inputs are a block, 4 of them a word. A panel has the words of its outputs side by side, 64 bytes:
one AVX-512 register. The lowest 8 bits of a codebook's row index are a byte of a line; each higher
bit is in its own mask, for the four rows of a line.

A weight is one array of bytes, a section after the other:

    codes    [panels, blocks, bits of a code, LANES, 4], or pairs of bf16 [..., 16, LANES, 2]
    scales   [panels, blocks or fewer, groups of a block, scale and minimum, LANES]
    supers   [panels, blocks / 8, scale and minimum, LANES], fp16
    zeros    [panels, blocks or fewer, groups of a block, LANES], or masks [panels, blocks, LANES]
    levels   [bytes of a level, 4, 16], and the book [2, rows]

Codes are divided into planes of neighbouring bits, which need no more space than the file's. A byte
of a plane of n bits has the codes of 8 / n words: word j of the plane those of words j, j + n, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from typing import Literal

import torch

from ..block_codes import E2M1, FLOATS, FP4, IQ4, NF4, codebook, read_rows
from ..block_formats import BF16, CODEBOOKS, BlockFormat, Codebook, GroupFormat, Scale
from ..grouped_codes import GroupedCodes
from ..quantized import QuantizedWeight

# Outputs of a panel.
LANES = 16

BLOCK = 32
WORDS = BLOCK // 4
# Blocks that share the factors of their scales.
SUPER = 8
LINE = 64
# Weights packed at a time.
_PIECE = 1 << 20

# A scale is a number; an int8 or the lower half of a byte, to be multiplied by the fp16 factor of
# its super-block; or MXFP4's exponent. A minimum is of the same kind, or the byte's upper half. Odd
# numbers up to 31, with factors too, are halves of a byte of both groups.
ScaleKind = Literal["fp16", "bf16", "fp32", "int8", "halves", "odd", "exponent", "none"]
_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "halves": torch.uint8,
    "odd": torch.uint8,
    "exponent": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a format's panels, for which kernels are compiled."""

    # Width and position of each plane's bits.
    planes: tuple[tuple[int, int], ...]
    zero: int = 0
    minimums: bool = False
    # True if each group has its own zero, an int8 that is added to ``zero``.
    zeros: bool = False
    # Inputs that share a scale.
    group: int = BLOCK
    scales: ScaleKind = "fp16"
    # The numbers of codes, and the unit of which they are multiples in products.
    levels: tuple[float, ...] = ()
    unit: float = 1.0
    # Offsets of the fp16 factors of scales and minimums in a block of the file.
    supers: tuple[int, ...] = ()
    # Codes are e4m3, or bf16 if they have 16 bits.
    floats: bool = False
    # Rows of the codebook, and numbers of a row; these have signs, or are moved together.
    book: int = 0
    row_size: int = 8
    moves: bool = False

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return max(1, BLOCK // self.group)

    @property
    def sharing(self) -> int:
        """Blocks that have the same scale."""
        return max(1, self.group // BLOCK)

    @property
    def adds(self) -> bool:
        """True if the sums of activations are multiplied by a number of each group."""
        return self.minimums or self.zeros

    @property
    def level_bytes(self) -> int:
        """Bytes of a multiple of the levels' unit, little-endian."""
        return (2 if self.zero > 1 << 7 else 1) if self.levels else 0

    @property
    def row_lines(self) -> int:
        """Lines of a panel's row numbers of a block."""
        return WORDS // self.row_size if self.book else 0

    @property
    def masks(self) -> int:
        """Single bits of row numbers, for each of their lines, and of moves."""
        return self.row_lines * (self.book.bit_length() - 9) + self.moves if self.book else 0

    @property
    def lines(self) -> int:
        """Lines of a panel's codes of a block, or of its row numbers and signs."""
        signs = not self.moves
        return self.row_lines + signs if self.book else sum(width for width, _ in self.planes)

    @property
    def code_bytes(self) -> int:
        """Bytes of a panel's codes of a block."""
        return LINE * self.lines

    @property
    def mask_bytes(self) -> int:
        """Bytes of a panel's masks of a block, each of which has four bits of a lane."""
        return LANES * -(-self.masks // 2)

    @property
    def numbers(self) -> int:
        """Scale, and minimum of the same type, of a group."""
        return 2 if self.minimums and self.scales != "halves" else 1

    @property
    def number_bytes(self) -> int:
        """Bytes of a panel's scales of one group."""
        if self.scales == "none":
            return 0
        return LANES * _DTYPES[self.scales].itemsize // (2 if self.scales == "odd" else 1)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a panel's scales and minimums of one group."""
        return self.number_bytes * self.numbers

    @property
    def super_bytes(self) -> int:
        """Bytes of a panel's factors of a super-block."""
        return LANES * 2 * len(self.supers)

    def sections(self, panels: int, blocks: int) -> tuple[int, int, int, int, int]:
        """The offsets of scales, supers, zeros or masks, and levels, and the weight's total
        bytes."""
        scales = panels * blocks * self.code_bytes
        supers = scales + panels * (blocks // self.sharing) * self.groups * self.scale_bytes
        zeros = supers + panels * (blocks // SUPER) * self.super_bytes
        levels = zeros + panels * (blocks // self.sharing) * self.groups * LANES * self.zeros
        levels += panels * blocks * self.mask_bytes
        end = levels + LINE * self.level_bytes + 2 * self.book
        return scales, supers, zeros, levels, -(-end // LINE) * LINE


_PLANES = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
    16: ((16, 0),),
}
_NIBBLES, _FIVE = _PLANES[4], _PLANES[5]
# GGUF's formats by their names. Some take more bytes here than in the file: scales of 6 bits are
# bytes (Q3_K 3.6 %, Q4_K 2.8 %, Q5_K 2.3 %, IQ4_XS 1.5 %), those of 8 bits are fp16 (NVFP4 11 %),
# and digits to the base of three have 2 bits each (TQ1_0 22 %).
LAYOUTS = {
    "Q8_0": Layout(_PLANES[8], zero=128),
    "Q4_0": Layout(_NIBBLES, zero=8),
    "Q4_1": Layout(_NIBBLES, minimums=True),
    "Q5_0": Layout(_FIVE, zero=16),
    "Q5_1": Layout(_FIVE, minimums=True),
    "Q2_K": Layout(_PLANES[2], minimums=True, group=16, scales="halves", supers=(80, 82)),
    "Q3_K": Layout(_PLANES[3], zero=4, group=16, scales="int8", supers=(108,)),
    "Q4_K": Layout(_NIBBLES, minimums=True, scales="int8", supers=(0, 2)),
    "Q5_K": Layout(_FIVE, minimums=True, scales="int8", supers=(0, 2)),
    "Q6_K": Layout(_PLANES[6], zero=32, group=16, scales="int8", supers=(208,)),
    "IQ4_NL": Layout(_NIBBLES, zero=128, levels=IQ4),
    "IQ4_XS": Layout(_NIBBLES, zero=128, levels=IQ4, scales="int8", supers=(0,)),
    "MXFP4": Layout(_NIBBLES, zero=128, levels=FLOATS, scales="exponent"),
    "NVFP4": Layout(_NIBBLES, zero=128, group=16, levels=FLOATS),
    "TQ1_0": Layout(_PLANES[2], zero=1, group=256),
    "TQ2_0": Layout(_PLANES[2], zero=1, group=256),
    "Q2_0": Layout(_PLANES[2], zero=1, group=64),
    "Q1_0": Layout(((1, 1),), zero=1, group=128),
    BF16.name: Layout(_PLANES[16], scales="none", floats=True),
}
# The numbers in codebooks. The levels of a number with either sign, or moved in either direction.
_TWOS, _THREES, _ODDS = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)
_MOVED = (-7, 1, 9, 0, -9, -1, 7, 0)


def _book(book: Codebook, numbers: tuple[int, ...]) -> Layout:
    padded = (*numbers, 0) if len(numbers) == len(_TWOS) else numbers
    levels = (*padded, *(-each for each in padded)) or _MOVED
    return Layout(
        (),
        zero=-min(levels),
        group=book.group,
        scales="odd" if book.group < BLOCK else "int8",
        supers=(0,),
        levels=tuple(each * book.part for each in levels),
        unit=book.part,
        book=book.rows,
        row_size=book.row_size,
        moves=book.moves,
    )


# Every sign and move has a bit, and scales of 3 or 4 bits have 8, or 4 in groups of 16: IQ1_S and
# IQ1_M take 16 and 4 % more than in the file, IQ2 12, 11 and 0 %, IQ3 8 and 4 %.
_NUMBERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("IQ1_S", "IQ1_M"), ()),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), _TWOS),
    "IQ3_XXS": _THREES,
    "IQ3_S": _ODDS,
}
LAYOUTS |= {kind.name: _book(book, _NUMBERS[kind.name]) for kind, book in CODEBOOKS.items()}
_SCALES: dict[Scale, ScaleKind] = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
# Floats of 4 bits are multiples of a half, and bitsandbytes' of 1 / 192. Those of nf4 are no
# multiples of anything: they are rounded to 16 bits.
_LEVELS = {
    "e2m1": (E2M1, 1 / 2, 1 << 7),
    "fp4": (FP4, 1 / 192, 1 << 15),
    "nf4": (NF4, 1 / ((1 << 15) - 1), 1 << 15),
}


@cache
def layout_of(format: BlockFormat) -> Layout | None:
    """The layout of a format's panels, if it has any."""
    if not isinstance(format, GroupFormat):
        return LAYOUTS.get(format.name)
    group, bits = format.values, format.bits
    if bits not in _PLANES or (group % BLOCK and group != BLOCK // 2):
        return None
    scales = _SCALES[format.scale]
    if format.codes == "e4m3":
        # Tiles of floats have one scale for a block.
        floats = Layout(_PLANES[8], group=group, scales=scales, floats=True)
        return floats if group % BLOCK == 0 else None
    if format.codes != "int":
        levels, unit, zero = _LEVELS[format.codes]
        return Layout(
            _PLANES[bits], zero=zero, group=group, scales=scales, levels=levels, unit=unit
        )
    signed = {"none": 1 << bits - 1, "zero": 128 if bits == 8 else 0, "minimum": 0}
    return Layout(
        _PLANES[bits],
        zero=signed[format.offset],
        minimums=format.offset == "minimum",
        zeros=format.offset == "zero",
        group=group,
        scales=scales,
    )


def has_layout(weight: QuantizedWeight) -> bool:
    """True if a weight can be packed into panels."""
    return layout_of(weight.format) is not None and weight.inputs % BLOCK == 0


class Panels:
    """One weight in preallocated memory."""

    def __init__(self, layout: Layout, data: torch.Tensor, outputs: int, inputs: int) -> None:
        self.layout = layout
        self._outputs = outputs
        self._count, blocks = -(-outputs // LANES), inputs // BLOCK
        scales, supers, zeros, levels, _ = layout.sections(self._count, blocks)
        self.codes = data[:scales].view(torch.int32).view(self._count, blocks, -1, LANES)
        shape = self._count, blocks // layout.sharing, layout.groups
        each = (*shape[:2], 1) if layout.scales == "odd" else shape
        self.scales = data[scales:supers]
        if layout.scales != "none":
            self.scales = self.scales.view(_DTYPES[layout.scales]).view(*each, -1, LANES)
        self.supers = data[supers:zeros].view(torch.float16)
        if layout.supers:
            self.supers = self.supers.view(self._count, blocks // SUPER, -1, LANES)
        self._zeros = self._masks = data[zeros:levels]
        if layout.zeros:
            self._zeros = self._zeros.view(torch.int8).view(*shape, LANES)
        if layout.masks:
            wide = torch.uint8 if layout.mask_bytes == LANES else torch.int16
            self._masks = self._masks.view(wide).view(self._count, blocks, LANES)
        self._levels = data[levels : levels + LINE * layout.level_bytes]
        book = levels + LINE * layout.level_bytes
        self._book = data[book : book + 2 * layout.book].view(2, layout.book)

    def sections(self) -> list[torch.Tensor]:
        """Codes, scales, supers, and zeros or masks, as unsigned integers [panels, entries, LANES];
        a layout without the last has no entries of them."""
        kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
        extra = self._masks if self.layout.masks else self._zeros
        return [
            each.view(kinds[each.element_size()])
            .flatten()
            .view(self._count, each.numel() // (self._count * LANES), LANES)
            for each in (self.codes, self.scales, self.supers, extra)
        ]

    def fill(self, weight: QuantizedWeight, *, codes: bool = True, scales: bool = True) -> None:
        """Pack a weight, or only its codes or scales, with torch: the reference of
        ``block_packing.pack``. Outputs that pad the last panel are zero."""
        if self.layout.levels:
            self._levels[:] = _table(self.layout)
        if self.layout.book:
            self._book[:] = _book_table(weight.format)
        if not codes and not scales:
            return
        step = max(1, _PIECE // (LANES * weight.inputs))
        for first in range(0, self._count, step):
            blocks = weight.blocks[first * LANES : (first + step) * LANES]
            missing = -len(blocks) % LANES
            blocks = torch.nn.functional.pad(blocks, (0, 0, 0, missing))
            part, where = QuantizedWeight(weight.format, blocks), slice(first, first + step)
            if weight.format == BF16:
                words = _middle_swapped(blocks.view(torch.int16)).view(torch.int32)
                self.codes[where] = _across(words.unflatten(1, (-1, BLOCK // 2)))
                continue
            if self.layout.book:
                self._fill_rows(where, part)
                continue
            grouped = part.to_codes()
            if codes:
                self.codes[where] = _across(self._words(grouped))
            if scales:
                self._fill_scales(where, part, grouped)

    def _fill_scales(self, where: slice, weight: QuantizedWeight, grouped: GroupedCodes) -> None:
        layout = self.layout
        blocks = weight.blocks.view(len(weight.blocks), -1, weight.format.nbytes)
        # The first of each run of groups with the same scale.
        scales = grouped.scales[:, :: layout.group // grouped.group]
        scales = scales.unflatten(1, (-1, layout.groups))
        minimums = grouped.minimums if layout.minimums else None
        if layout.zeros:
            assert grouped.zeros is not None
            self._zeros[where] = _across(grouped.zeros.view(scales.shape).to(torch.int8))
        if layout.supers:
            pairs = [blocks[..., at : at + 2].contiguous() for at in layout.supers]
            supers = torch.cat([pair.view(torch.float16) for pair in pairs], dim=-1)
            supers[..., 1:].neg_()  # minimums are subtracted
            self.supers[where] = _across(supers)
            scales = _quotients(grouped.scales, supers[..., 0]).unflatten(1, (-1, layout.groups))
            if minimums is not None:
                minimums = _quotients(minimums, supers[..., 1])
        if layout.scales == "exponent":
            scales = blocks[..., :1]
        parts = [scales]
        if minimums is not None:
            parts.append(minimums.view_as(scales))
        if layout.scales == "halves":
            parts = [parts[0].byte() | parts[1].byte() << 4]
        self.scales[where] = _across(torch.stack(parts, dim=-1))

    def _fill_rows(self, where: slice, weight: QuantizedWeight) -> None:
        layout, outputs = self.layout, weight.outputs
        blocks = weight.blocks.unflatten(1, (-1, weight.format.nbytes))
        source = read_rows(weight.format, blocks)
        rows = source.rows.reshape(outputs, -1, layout.row_lines, 4)
        words = (rows & 0xFF).byte()
        high = range(8, layout.book.bit_length() - 1)
        single = [rows[:, :, line] >> bit & 1 for line in range(layout.row_lines) for bit in high]
        if source.signs is not None:
            words = torch.cat([words, source.signs.reshape(outputs, -1, 1, 4)], dim=2)
        if source.down is not None:
            single.append(source.down.reshape(outputs, -1, 4))
        self.codes[where] = _across(words.view(torch.int32).squeeze(-1))
        if single:
            bits = torch.cat(single, dim=-1).int() << torch.arange(4 * layout.masks)
            self._masks[where] = _across(bits.sum(-1).to(self._masks.dtype))
        self.supers[where] = _across(source.scale)
        scales = source.scales.reshape(outputs, -1, layout.groups, 1).byte()
        if layout.scales == "odd":
            halves = scales >> 1
            scales = halves[:, :, :1] | halves[:, :, 1:] << 4
        self.scales[where] = _across(scales.view(_DTYPES[layout.scales]))

    def _words(self, grouped: GroupedCodes) -> torch.Tensor:
        """Planes of codes, [O, B, bits] words of 4 bytes."""
        layout, codes = self.layout, grouped.codes
        outputs = len(codes)
        if grouped.halves:
            if layout.planes == _NIBBLES and grouped.group == BLOCK:
                return codes.view(outputs, -1, BLOCK // 2).view(torch.int32)
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        codes = codes.view(torch.uint8).view(outputs, -1, WORDS, 4)
        if not layout.levels and (added := layout.zero - grouped.zero):
            codes = codes + added
        parts = []
        for width, position in layout.planes:
            bits = codes >> position if position else codes
            if len(layout.planes) > 1:
                bits = bits & (1 << width) - 1
            bits = bits.unflatten(2, (-1, width))
            plane = bits[:, :, 0]
            for k in range(1, WORDS // width):
                plane = plane | bits[:, :, k] << width * k
            parts.append(plane)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return whole.contiguous().view(torch.int32).squeeze(-1)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs in fp32, as from ``dequantize``."""
        layout = self.layout
        panels, lanes = outputs // LANES, outputs % LANES
        if layout.scales == "none":
            pairs = self.codes[panels, :, :, lanes].flatten(1).view(torch.bfloat16)
            return _middle_swapped(pairs).float()
        words = self.codes[panels, :, :, lanes].contiguous().view(torch.uint8)
        words = words.view(len(outputs), words.shape[1], -1, 4)
        codes = self._look_up(words, panels, lanes) if layout.book else self._in_order(words)
        middle = 128 if layout.planes == _PLANES[8] else layout.zero
        if layout.floats:
            codes = codes.view(torch.float8_e4m3fn)
        else:
            codes = (codes if layout.levels else codes - middle).view(torch.int8)
        scales, minimums = self.row_scales(outputs)
        zeros = self._zeros[panels, ..., lanes].flatten(1) if layout.zeros else None
        return GroupedCodes(
            codes,
            scales,
            minimums,
            layout.group,
            0 if layout.levels or layout.floats else layout.zero - middle,
            layout.levels or None,
            zeros,
        ).values()

    def row_scales(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scales and minimums of some outputs in fp32, [O, groups]."""
        layout = self.layout
        entries = self.scales[outputs // LANES, ..., outputs % LANES]
        if layout.scales == "halves":
            entries = torch.cat([entries & 15, entries >> 4], dim=-1)
        if layout.scales == "odd":
            entries = 2 * torch.cat([entries & 15, entries >> 4], dim=2) + 1
        if layout.scales == "exponent":
            wide = entries.int()
            scales = torch.where(wide < 2, 0x00200000 << wide, (wide - 1) << 23).view(torch.float32)
        else:
            scales = entries.float()
        if layout.supers:
            supers = self.supers[outputs // LANES, ..., outputs % LANES].float()
            scales = scales * supers.repeat_interleave(SUPER, dim=1)[:, :, None]
        return scales[..., 0].flatten(1), scales[..., 1].flatten(1) if layout.minimums else None

    def _in_order(self, words: torch.Tensor) -> torch.Tensor:
        """The codes of words of planes, [O, I]."""
        parts, first = [], 0
        for width, position in self.layout.planes:
            plane, first = words[:, :, first : first + width], first + width
            if width < 8:
                bits = [plane >> width * k & (1 << width) - 1 for k in range(WORDS // width)]
                plane = torch.cat(bits, dim=2) << position
            parts.append(plane)
        return reduce(torch.bitwise_or, parts).flatten(1)

    def _look_up(
        self, words: torch.Tensor, panels: torch.Tensor, lanes: torch.Tensor
    ) -> torch.Tensor:
        """The codes of row numbers and signs, [O, I]."""
        layout = self.layout
        single = torch.empty(*words.shape[:2], 0, 4, dtype=torch.uint8)
        if layout.masks:
            masks = self._masks[panels, :, lanes].int()[..., None]
            single = (masks >> torch.arange(4 * layout.masks) & 1).byte().unflatten(-1, (-1, 4))
        rows, extra = words[:, :, : layout.row_lines].int(), layout.book.bit_length() - 9
        for line in range(layout.row_lines):
            for bit in range(extra):
                rows[:, :, line] |= single[:, :, line * extra + bit].int() << 8 + bit
        pairs = self._book.T[rows.flatten(2)]  # [O, B, rows, 2]
        width = 16 // layout.row_size
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        numbers = (pairs[..., None] >> shifts & (1 << width) - 1).flatten(2)
        if layout.moves:
            signs = single[:, :, -1].repeat_interleave(8, dim=-1)
        else:
            bits = torch.arange(8, dtype=torch.uint8)
            signs = (words[:, :, -1, :, None] >> bits & 1).flatten(2)
        return (numbers | signs << (len(layout.levels).bit_length() - 2)).flatten(1)


@cache
def _book_table(format: BlockFormat) -> torch.Tensor:
    """Two bytes of each row: the places of its numbers among them, a few bits each. Those of eight
    numbers are in order; the first byte of four has the first two."""
    rows = codebook(format, torch.device("cpu"))
    places = torch.unique(rows, return_inverse=True)[1].byte()
    width = 16 // rows.shape[1]
    halves = places.view(len(rows), 2, -1)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (halves << shifts).sum(-1, dtype=torch.uint8).T


def _table(layout: Layout) -> torch.Tensor:
    """The levels' multiples of their unit, byte by byte, each in every quarter of a line."""
    exact = torch.tensor(layout.levels, dtype=torch.float64) / layout.unit
    multiples = exact.round().int() + layout.zero
    places = [multiples >> 8 * place & 0xFF for place in range(layout.level_bytes)]
    return torch.cat([place.byte().repeat(LINE // len(place)) for place in places])


def _middle_swapped(numbers: torch.Tensor) -> torch.Tensor:
    """[O, I] with the second and third of each four neighbours swapped."""
    return numbers.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1)


def _across(parts: torch.Tensor) -> torch.Tensor:
    """[O, ...] as [panels, ..., LANES]."""
    return parts.unflatten(0, (-1, LANES)).movedim(1, -1)


def _quotients(products: torch.Tensor, supers: torch.Tensor) -> torch.Tensor:
    """The integers [O, S] by which the factors [O, super-blocks] were multiplied; their products
    are exact in fp32."""
    each = products.unflatten(1, (supers.shape[1], -1))
    return (each / supers.float()[..., None]).nan_to_num(0, 0, 0).flatten(1)
