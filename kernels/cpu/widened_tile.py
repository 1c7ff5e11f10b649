"""Tiles of products in fp32 of weights in e4m3 and bf16, for CPUs that do not multiply bf16.

A block is widened once for all rows of a tile, to memory that stays in the L1 cache. Activations
are not rounded.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .block_layouts import BLOCK, LANES, LINE, WORDS, Layout
from .byte_tile import (
    BYTES,
    FLOAT,
    FLOATS,
    HALF,
    HALF_WORDS,
    LINE_WORDS,
    LONG,
    SHORT,
    TILES,
    Emitter,
    Tile,
    all_of,
)
from .jit import WIDE
from .vector import loop

# Rows whose sums fit the registers beside a weight and an activation.
_ROWS = TILES[-1] if WIDE else 6
# Inputs whose products are added before they are scaled: with one row, the sums of the next ones
# need not wait for them.
_PART = BLOCK // 2
_UNROLLED = 4
# The inputs of two lines of bf16: halves of words are the first and third of four neighbours, and
# the second and fourth.
_PAIRED = (0, 2, 1, 3)
# e4m3 as fp16, whose exponents are larger by 8 and which has its numbers without an exponent. A
# product with these, as fp32, would take some CPUs a hundred clocks.
_SIGN, _MAGNITUDE, _FACTOR = 0x8000, 0x7F << 7, 2.0**8
# A lane of the first half, and one of the second, because words have room for two fp16 numbers.
_MIXED = [
    lane for pair in zip(range(LANES // 2), range(LANES // 2, LANES), strict=True) for lane in pair
]
_SHORTS, _HALVES = ir.VectorType(SHORT, 2 * LANES), ir.VectorType(HALF, LANES)


class WidenedTile(Tile):
    """Emits the sums of some rows of a tile of fp32, which has the place of ``x_scales``."""

    @classmethod
    def max_rows(cls, layout: Layout) -> int:
        return TILES[-1]

    def sum(self, blocks: Any) -> list[Any]:
        self._numbers = self.emit.scratch(FLOATS, BLOCK)
        sums, places = self.sum_unpacked(blocks, _ROWS), range(LANES)
        if self.layout.scales == "none":
            return sums
        return [self.emit.ordered(each, [*places[::2], *places[1::2]]) for each in sums]

    def unpack(self, at: Any) -> None:
        builder, emit, layout = self.builder, self.emit, self.layout
        self.prefetch_lines(at)
        base = builder.add(self.codes_at, builder.mul(at, LONG(layout.code_bytes)))
        plain = layout.scales == "none"
        step = layout.code_bytes // WORDS

        def add(word: Any, nans: list[Any]) -> list[Any]:
            """Four inputs."""
            word_at = builder.add(base, builder.mul(word, LONG(step)))
            lines = [
                emit.load(self.weight, word_at, LINE_WORDS, more, LINE)
                for more in range(0, step, LINE)
            ]
            widen = _widened_pairs if plain else _widened_codes
            numbers = [each for line in lines for each in widen(emit, line)]
            to = builder.mul(word, LONG(4 * LINE))
            for place, number in zip(_PAIRED, numbers, strict=True):
                emit.store(number, self._numbers, to, LINE * place)
            return [builder.or_(each, _nans_of(builder, lines[0])) for each in nans]

        started = [] if plain else [all_of(BYTES, 0)]
        for nans in loop(builder, LONG(0), LONG(WORDS), 1, started, add):
            # All bits of a scale of codes for NaN are set.
            words = builder.bitcast(nans, LINE_WORDS)
            found = builder.icmp_unsigned("!=", words, all_of(LINE_WORDS, 0))
            scale = builder.fmul(self.load_scales(at)[0][0], all_of(FLOATS, _FACTOR))
            bits = builder.bitcast(scale, LINE_WORDS)
            bits = builder.or_(bits, builder.sext(found, LINE_WORDS))
            self._block_scales = emit.ordered(builder.bitcast(bits, FLOATS), _MIXED)

    def add_block(self, at: Any, sums: list[Any]) -> list[Any]:
        """See ``Tile``."""
        builder, emit = self.builder, self.emit
        x_at = builder.mul(self.number(at), LONG(4 * BLOCK))

        def add(place: Any, products: list[Any]) -> list[Any]:
            own_at = builder.mul(place, LONG(LINE))
            own_x_at = builder.add(x_at, builder.mul(place, LONG(4)))
            for more in range(_UNROLLED):
                number = emit.load(self._numbers, own_at, FLOATS, LINE * more, LINE)
                following = []
                for row, total in zip(self.rows, products, strict=True):
                    offset = 4 * (BLOCK * row + more)
                    x = emit.load(self.x_scales, own_x_at, FLOAT, offset, 4)
                    following.append(emit.fma(emit.everywhere(x), number, total))
                products = following
            return products

        plain = self.layout.scales == "none"
        for first in range(0, BLOCK, _PART):
            started = sums if plain else [all_of(FLOATS, 0.0)] * len(sums)
            products = loop(builder, LONG(first), LONG(first + _PART), _UNROLLED, started, add)
            pairs = zip(products, sums, strict=True)
            sums = (
                products
                if plain
                else [emit.fma(own, self._block_scales, sum) for own, sum in pairs]
            )
        return sums


def _widened_pairs(emit: Emitter, line: Any) -> list[Any]:
    """The halves of a line's words, from bf16 to fp32."""
    builder = emit.builder
    low = builder.shl(line, all_of(LINE_WORDS, 16))
    high = builder.and_(line, all_of(LINE_WORDS, 0xFFFF0000))
    return [builder.bitcast(each, FLOATS) for each in (low, high)]


def _widened_codes(emit: Emitter, line: Any) -> list[Any]:
    """The bytes of a line's words, in the order ``_PAIRED``, from e4m3 to fp32, divided by
    ``_FACTOR``. Lanes are in the order ``_MIXED``."""
    builder = emit.builder
    shorts = builder.bitcast(line, _SHORTS)
    numbers = []
    for own in (builder.shl(shorts, all_of(_SHORTS, 8)), shorts):
        moved = builder.ashr(own, all_of(_SHORTS, 1))
        bits = builder.and_(moved, all_of(_SHORTS, _SIGN | _MAGNITUDE))
        left, right = emit.split(builder.bitcast(bits, LINE_WORDS))
        low, high, sixteen = (all_of(HALF_WORDS, each) for each in (0xFFFF, 0xFFFF0000, 16))
        for halves in (
            builder.or_(builder.and_(left, low), builder.shl(right, sixteen)),
            builder.or_(builder.lshr(left, sixteen), builder.and_(right, high)),
        ):
            numbers.append(builder.fpext(builder.bitcast(halves, _HALVES), FLOATS))
    return numbers


def _nans_of(builder: Any, line: Any) -> Any:
    """Bytes whose bits are set where a line has a code for NaN."""
    codes = builder.bitcast(line, BYTES)
    # Without signs.
    is_nan = builder.icmp_unsigned("==", builder.add(codes, codes), all_of(BYTES, 0xFE))
    return builder.sext(is_nan, BYTES)
