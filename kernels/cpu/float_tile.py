"""LLVM intrinsics for products of weights in bf16 and e4m3 on CPUs with AVX512-BF16: activations to
bf16, and tiles. Those for other CPUs are in ``widened_tile.py``.

bf16 can represent every e4m3 number. The second and third of four neighbouring activations are
swapped, because codes become pairs by shifts of whole words.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .block_layouts import BLOCK, LANES, LINE
from .byte_tile import BYTES, FLOATS, LINE_WORDS, LONG, SHORT, WORD, Emitter, Tile, all_of, memory

_HALF_LINE = LANES // 2
# bf16's exponents are larger than e4m3's by 120, and its mantissas are four bits further up.
_BIAS, _SHIFT = 120 << 7, 4
_MAGNITUDE, _SIGN = 0x7F << _SHIFT, 0x8000
# Numbers without an exponent, below 2^-6, in bf16: 0 to 7 times 2^-9.
_SMALL = (0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60)
_FIRST_NORMAL = 8 << _SHIFT
_NAN = 0x7FC0
_NUMBERS = (*_SMALL, *range(_BIAS + _FIRST_NORMAL, _BIAS + _MAGNITUDE, 1 << _SHIFT), _NAN)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS, _SHORTS = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(SHORT, 2 * LANES)


@intrinsic
def round_block(typing: Any, x: Any, at: Any, codes: Any, place: Any) -> Any:
    """A block of activations, rounded to the nearest bf16 and written to ``place``."""
    signature = types.void(x, types.intp, codes, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder)
        source, target = (memory(context, builder, signature, args, index) for index in (0, 2))
        begin, to = builder.mul(args[1], LONG(4)), builder.mul(args[3], LONG(LINE))
        for half in range(2):
            numbers = emit.load(source, begin, FLOATS, LINE * half)
            bits = builder.bitcast(numbers, LINE_WORDS)
            high = builder.lshr(bits, all_of(LINE_WORDS, 16))
            # Add half of the last place, minus one bit if that place is even.
            odd = builder.and_(high, all_of(LINE_WORDS, 1))
            biased = builder.add(bits, builder.add(odd, all_of(LINE_WORDS, 0x7FFF)))
            quiet = builder.or_(high, all_of(LINE_WORDS, 0x40))
            wrong = builder.fcmp_unordered("uno", numbers, numbers)
            rounded = builder.select(wrong, quiet, builder.lshr(biased, all_of(LINE_WORDS, 16)))
            first, third = (_every_other_pair(builder, rounded, which) for which in (0, 2))
            pairs = builder.or_(first, builder.shl(third, all_of(third.type, 16)))
            emit.store(pairs, target, to, LINE // 2 * half)
        return context.get_dummy_value()

    return signature, generate


def _every_other_pair(builder: Any, numbers: Any, first: int) -> Any:
    """The first two of each four numbers, or the last two."""
    places = [4 * word + first + number for word in range(LANES // 4) for number in range(2)]
    mask = ir.Constant(ir.VectorType(WORD, _HALF_LINE), places)
    return builder.shuffle_vector(numbers, ir.Constant(numbers.type, ir.Undefined), mask)


class FloatTile(Tile):
    """Emits the sums of some rows of a tile of bf16."""

    def add_block(self, at: Any, sums: list[Any]) -> list[Any]:
        """See ``Tile``. Half a block's codes are in registers at a time."""
        builder, emit = self.builder, self.emit
        lines = self.load_lines(at)
        self.prefetch_lines(at)
        plain = self.layout.scales == "none"
        scale = None if plain else self.load_scales(at)[0][0]
        x_at = builder.mul(self.number(at), LONG(2 * BLOCK))
        totals = sums
        for half in range(2):
            some = lines[half * len(lines) // 2 : (half + 1) * len(lines) // 2]
            pairs = some if plain else [pair for line in some for pair in self._pairs(line)]
            following = []
            for row, total in zip(self.rows, totals, strict=True):
                products: Any = total if plain else all_of(FLOATS, 0.0)
                for place, pair in enumerate(pairs):
                    more = 2 * BLOCK * row + BLOCK * half + 4 * place
                    x = emit.everywhere(emit.load(self.codes, x_at, WORD, more, 4))
                    products = self._add_pairs(products, pair, x)
                following.append(products if plain else emit.fma(products, scale, total))
            totals = following
        return totals

    def _pairs(self, line: Any) -> list[Any]:
        """The first and third codes of each word as bf16, and the second and fourth: one
        instruction looks up 7 bits in 128 bytes."""
        builder = self.builder
        codes = builder.bitcast(line, BYTES)
        low, high = (
            self.emit.call(
                "llvm.x86.avx512.vpermi2var.qi.512",
                BYTES,
                ir.Constant(BYTES, [each >> shift & 0xFF for each in _NUMBERS[:LINE]]),
                codes,
                ir.Constant(BYTES, [each >> shift & 0xFF for each in _NUMBERS[LINE:]]),
            )
            for shift in (0, 8)
        )
        high = builder.or_(high, builder.and_(codes, all_of(BYTES, 0x80)))
        eight = all_of(_SHORTS, 8)
        low, high = builder.bitcast(low, _SHORTS), builder.bitcast(high, _SHORTS)
        first = builder.or_(builder.and_(low, all_of(_SHORTS, 0xFF)), builder.shl(high, eight))
        second = builder.or_(builder.lshr(low, eight), builder.and_(high, all_of(_SHORTS, 0xFF00)))
        return [builder.bitcast(pair, LINE_WORDS) for pair in (first, second)]

    def _add_pairs(self, total: Any, pair: Any, x: Any) -> Any:
        both = [self.builder.bitcast(each, _PAIRS) for each in (pair, x)]
        return self.emit.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *both)
