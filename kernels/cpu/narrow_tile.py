"""Tiles of products for CPUs whose vector registers have 32 bytes, and sixteen of them: AVX2, with
or without AVX-VNNI.

A block's codes do not fit the registers beside the sums of some rows. So four rows take their
products with one word of a panel after the other, and codes are unpacked when they are multiplied.
Rows of codebooks, which take longer, are unpacked to memory once for all rows of a tile.
Sums of integers are exact, and those of floats in the order of ``byte_tile.Tile``: a product has
the same bits with any instructions.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir

from .block_layouts import BLOCK, LANES, LINE, WORDS, Layout
from .byte_tile import (
    BYTE,
    BYTES,
    HALF_WORDS,
    LINE_WORDS,
    LONG,
    SHORT,
    TILES,
    WORD,
    Tile,
    all_of,
)
from .vector import loop

# For ``InlineAsm``.
llvmlite.binding.initialize_native_asmparser()

_ROWS = 4
_BYTES, _SHORTS = ir.VectorType(BYTE, LINE // 2), ir.VectorType(SHORT, LANES)
# The largest sum of products with unsigned codes of one bit: two in each of the shorts.
_PAIR = 2 * 127
_LARGEST_SHORT = (1 << 15) - 1
# Bits of a part of a code: more would leave shorts with fewer products.
_PART = 4
# A code of eight bits with this zero is a signed number with its highest bit changed.
_SIGN = 1 << 7
# Rows of a codebook that an iteration looks up.
_UNROLLED = 4


def _in_order(builder: Any, sums: list[list[Any]]) -> list[list[Any]]:
    """The rows' sums, in halves, with which LLVM computes only what follows.

    It would rather take all products of a row at once, and for that store the unpacked codes of a
    block, or its lines.
    """
    flat = [each for halves in sums for each in halves]
    kinds, numbers = [each.type for each in flat], range(len(flat))
    function = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    constraints = ",".join([*("=x" for _ in numbers), *map(str, numbers), "~{memory}"])
    same = builder.call(ir.InlineAsm(function, "", constraints, side_effect=True), flat)
    results = [builder.extract_value(same, number) for number in numbers]
    return [results[at : at + 2] for at in numbers[::2]]


class NarrowTile(Tile):
    """Emits products with AVX-VNNI."""

    @classmethod
    def max_rows(cls, layout: Layout) -> int:
        return TILES[-1] if layout.book else _ROWS

    def sum(self, blocks: Any) -> list[Any]:
        if not self.layout.book:
            return super().sum(blocks)
        self._words = self.emit.scratch(BYTES, WORDS)
        self._row_bytes = self.emit.scratch(LINE_WORDS, BLOCK // self.layout.row_size)
        return self.sum_unpacked(blocks, _ROWS)

    def unpack(self, at: Any) -> None:
        """Write the multiples of a block's levels, of rows of a codebook."""
        self.prefetch_lines(at)
        self._look_up_rows(at)
        for word in range(WORDS):
            codes = self.emit.split(self.builder.bitcast(self._book_word(word), BYTES))
            multiples = self.emit.join([self.look_up(self.levels[0], part) for part in codes])
            self.emit.store(multiples, self._words, LONG(LINE * word))

    def add_block(self, at: Any, sums: list[Any]) -> list[Any]:
        if not self.layout.book:
            self.prefetch_lines(at)
        groups = self.layout.groups
        scales: list[Any] = []
        added: list[Any] = []
        for group in range(groups):
            products = self.products(at, group)
            if not scales:
                scales, added = self.load_scales(at)
            own = added[group] if added else None
            sums = [
                self.add_scaled(at, row, group, self.emit.join(each), scales[group], own, total)
                for row, each, total in zip(self.rows, products, sums, strict=True)
            ]
        return sums

    def products(self, at: Any, group: int) -> list[list[Any]]:
        """The sums of products of a group of a block for each row, in halves of a panel."""
        totals = [self.emit.split(self.start(at, row, group)) for row in self.rows]
        for place, table in enumerate(self.tables or [None]):
            partial = totals if place == 0 else self._zeros(HALF_WORDS)
            for word in self.words_of(group):
                lines = self.load_lines(at)
                codes = self.codes_of(lines, word)
                parts = self.emit.split(self.builder.bitcast(codes, BYTES))
                if table is not None:
                    parts = [self.look_up(table, part) for part in parts]
                partial = self.each(at, word, parts, self._dot, partial)
            if place:
                eight = all_of(HALF_WORDS, 8 * place)
                partial = [
                    [
                        self.builder.add(total, self.builder.shl(more, eight))
                        for total, more in zip(*pair, strict=True)
                    ]
                    for pair in zip(totals, partial, strict=True)
                ]
            totals = partial
        return totals

    def words_of(self, group: int) -> list[int]:
        """The words of a group; those with codes in the same lines follow each other."""
        each = WORDS // self.layout.groups
        width = WORDS if self.layout.book else self.layout.planes[0][0]
        return sorted(range(group * each, (group + 1) * each), key=lambda word: word % width)

    @property
    def tables(self) -> list[Any]:
        """What codes are looked up in when they are multiplied."""
        return [] if self.layout.book else self.levels

    def load_lines(self, at: Any) -> list[Any]:
        if not self.layout.book:
            return super().load_lines(at)
        places = range(0, WORDS * LINE, LINE)
        return [
            self.emit.load(self._words, LONG(place), LINE_WORDS, align=LINE) for place in places
        ]

    def codes_of(self, lines: list[Any], word: int) -> Any:
        return lines[word] if self.layout.book else super().codes_of(lines, word)

    def look_up(self, table: Any, part: Any) -> Any:
        """Bytes of a table of 16 for half a panel's codes."""
        half = self.emit.split(table)[0]
        return self.emit.call("llvm.x86.avx2.pshuf.b", _BYTES, half, part)

    def each(self, at: Any, word: int, parts: list[Any], add: Any, sums: list[Any]) -> list[Any]:
        """The rows' sums with ``add(sum, codes, x)`` for each half of a panel."""
        following = []
        for row, halves in zip(self.rows, sums, strict=True):
            x = self.load_x(at, row, word, LANES // 2)
            pairs = zip(halves, parts, strict=True)
            following.append([add(total, part, x) for total, part in pairs])
        return _in_order(self.builder, following)

    def _look_up_rows(self, at: Any) -> None:
        """Write the two bytes of each row of a block, for each lane."""
        builder, emit, layout = self.builder, self.emit, self.layout
        lines = super().load_lines(at)
        masks = self.load_masks(at) if layout.masks else None
        extra = layout.book.bit_length() - 9
        for number in range(BLOCK // layout.row_size):
            line, place = divmod(number, 4)
            row = self.moved_bits(lines[line], 8 * place, 0, 0xFF)
            for bit in range(extra):
                single = 4 * (line * extra + bit) + place
                row = builder.or_(row, self.moved_bits(masks, single, 8 + bit, 1))
            emit.store(row, self._row_bytes, LONG(LINE * number))

        def look_up(lane: Any, _: list[Any]) -> list[Any]:
            for more in range(_UNROLLED):
                row_at = builder.mul(lane, LONG(4))
                row = builder.zext(emit.load(self._row_bytes, row_at, WORD, 4 * more, 4), LONG)
                first = builder.add(self.book_at, row)
                for half in range(2):
                    own = emit.load(self.weight, first, BYTE, half * layout.book)
                    emit.store(own, self._row_bytes, row_at, 4 * more + half)
            return []

        lanes = LONG(LANES * BLOCK // layout.row_size)
        loop(builder, LONG(0), lanes, _UNROLLED, [], look_up)
        self._signs = masks if layout.moves else lines[-1]

    def _book_word(self, word: int) -> Any:
        """The codes of four neighbours: their bits of a row's bytes, and their signs."""
        builder, layout = self.builder, self.layout
        row, place = divmod(4 * word, layout.row_size)
        width, sign_at = 16 // layout.row_size, len(layout.levels).bit_length() - 2
        both = self.emit.load(self._row_bytes, LONG(LINE * row), LINE_WORDS, align=LINE)
        numbers = self.moved_bits(both, width * place, 0, (1 << 4 * width) - 1)
        codes = self._spread(numbers, width, 0, (1 << sign_at) - 1)
        if layout.moves:
            top = builder.shl(self._signs, all_of(LINE_WORDS, 31 - 4 * (layout.masks - 1) - row))
            signs = builder.ashr(top, all_of(LINE_WORDS, 31))
            signs = builder.and_(signs, all_of(LINE_WORDS, 0x01010101 << sign_at))
        else:
            signs = self.moved_bits(self._signs, 4 * word, sign_at, 0xF)
            signs = self._spread(signs, 1, sign_at, 1)
        return builder.or_(codes, signs)

    def _spread(self, bits: Any, width: int, position: int, mask: int) -> Any:
        """Four neighbouring numbers of a ``width`` at a position, each in a byte, in a mask."""
        builder, step = self.builder, 8 - width
        bits = builder.or_(bits, builder.shl(bits, all_of(LINE_WORDS, 2 * step)))
        if width == 4:
            bits = builder.and_(bits, all_of(LINE_WORDS, 0x00FF00FF))
        bits = builder.or_(bits, builder.shl(bits, all_of(LINE_WORDS, step)))
        return builder.and_(bits, all_of(LINE_WORDS, 0x01010101 * mask << position))

    def _zeros(self, kind: Any) -> list[list[Any]]:
        return [[all_of(kind, 0)] * 2 for _ in self.rows]

    def _dot(self, total: Any, part: Any, x: Any) -> Any:
        codes = self.builder.bitcast(part, HALF_WORDS)
        return self.emit.call("llvm.x86.avx512.vpdpbusd.256", HALF_WORDS, total, codes, x)


class ShortTile(NarrowTile):
    """Emits products with AVX2 alone, which adds products of bytes in shorts of 16 bits.

    As many are added there as cannot exceed them. Codes of eight bits are two of four, or signed
    numbers if their zero is 128.
    """

    def products(self, at: Any, group: int) -> list[list[Any]]:
        layout = self.layout
        if layout.planes == ((8, 0),) and layout.zero == _SIGN and not layout.adds:
            return self._signed_products(at, group)
        totals = [self.emit.split(self.start(at, row, group)) for row in self.rows]
        words = self.words_of(group)
        for shift, largest, table in self._parts():
            run = min(len(words), _LARGEST_SHORT // (_PAIR * largest))
            for first in range(0, len(words), run):
                shorts = self._zeros(_SHORTS)
                for word in words[first : first + run]:
                    lines = self.load_lines(at)
                    parts = self._codes(lines, word, shift, table)
                    shorts = self.each(at, word, parts, self._add_products, shorts)
                factor = all_of(_SHORTS, 1 << shift)
                totals = [
                    [
                        self._add_shorts(total, short, factor)
                        for total, short in zip(*pair, strict=True)
                    ]
                    for pair in zip(totals, shorts, strict=True)
                ]
        return totals

    def _signed_products(self, at: Any, group: int) -> list[list[Any]]:
        """The products of signed codes. Their signs go to the activations, and a short has room for
        two products with magnitudes."""
        totals = self._zeros(HALF_WORDS)
        for word in self.words_of(group):
            line = self.builder.bitcast(self.load_lines(at)[word], BYTES)
            parts = self.emit.split(self.builder.xor(line, all_of(BYTES, _SIGN)))
            totals = self.each(at, word, parts, self._add_signed, totals)
        return totals

    def _add_signed(self, total: Any, part: Any, x: Any) -> Any:
        no_poison = ir.Constant(ir.IntType(1), 0)
        sizes = self.emit.call("llvm.abs.v32i8", _BYTES, part, no_poison)
        x = self.builder.bitcast(x, _BYTES)
        signed = self.emit.call("llvm.x86.avx2.psign.b", _BYTES, x, part)
        pairs = self.emit.call("llvm.x86.avx2.pmadd.ub.sw", _SHORTS, sizes, signed)
        return self._add_shorts(total, pairs, all_of(_SHORTS, 1))

    def _parts(self) -> list[tuple[int, int, Any]]:
        """Position and largest number of the parts of a code, or of a level with the table of
        it."""
        halves, largest = (0, _PART), (1 << _PART) - 1
        if self.layout.book:
            return [(0, 2 * self.layout.zero, None)]
        if self.levels:
            return [
                (8 * place + half, largest, self._table(table, half))
                for place, table in enumerate(self.levels)
                for half in halves
            ]
        bits = max(width + position for width, position in self.layout.planes)
        if bits == 8:
            return [(half, largest, None) for half in halves]
        return [(0, (1 << bits) - 1, None)]

    def _table(self, table: Any, shift: int) -> Any:
        moved = self.builder.lshr(table, all_of(BYTES, shift))
        return self.builder.and_(moved, all_of(BYTES, (1 << _PART) - 1))

    def _codes(self, lines: list[Any], word: int, shift: int, table: Any) -> list[Any]:
        """A part of a word's codes, in halves of a panel."""
        split = not self.layout.book and self.layout.planes[0][0] == 8
        codes = (
            self.bits(lines[word], _PART, shift // _PART, 0)
            if split
            else self.codes_of(lines, word)
        )
        parts = self.emit.split(self.builder.bitcast(codes, BYTES))
        return parts if table is None else [self.look_up(table, part) for part in parts]

    def _add_products(self, total: Any, part: Any, x: Any) -> Any:
        pairs = self.emit.call(
            "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, part, self.builder.bitcast(x, _BYTES)
        )
        return self.builder.add(total, pairs)

    def _add_shorts(self, total: Any, shorts: Any, factor: Any) -> Any:
        sums = self.emit.call("llvm.x86.avx2.pmadd.wd", HALF_WORDS, shorts, factor)
        return self.builder.add(total, sums)
