"""LLVM intrinsics for products of bytes with AVX-512 VNNI: activations to int8, and tiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .block_layouts import BLOCK, LANES, LAYOUTS, LINE, SUPER, WORDS, Layout

# Rows of the tiles that are compiled. Rows that only fill a tile are computed, and not written.
TILES = (1, 2, 4, 6, 8, 12, 16)
# Weights are requested so many bytes before they are multiplied.
_AHEAD = 1024

_BYTE, _SHORT, _WORD, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT, _HALF, _BIT = ir.FloatType(), ir.HalfType(), ir.IntType(1)
_WORDS, _FLOATS = ir.VectorType(_WORD, LANES), ir.VectorType(_FLOAT, LANES)
_BYTES = ir.VectorType(_BYTE, LINE)
# Of the largest code of an activation.
_LARGEST = 127


@intrinsic
def quantise_block(typing: Any, x: Any, at: Any, codes: Any, scales: Any, place: Any) -> Any:
    """A block of activations as int8 codes with one scale, written to ``place``. Returns the scale
    and the sums of the codes of both halves.

    The largest magnitude is that of the bits as integers: if there is a NaN or an infinity, it is
    the scale, and every product with the block is NaN.
    """
    found = types.Tuple((types.float32, types.int32, types.int32))  # type: ignore[attr-defined]
    signature = found(x, types.intp, codes, scales, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = _Emitter(builder)
        source, target, scale_at = (
            _bytes(context, builder, signature, args, index) for index in (0, 2, 3)
        )
        begin = builder.mul(args[1], _LONG(4))
        halves = [emit.load(source, begin, _FLOATS, 64 * half) for half in range(2)]
        sizes = [
            builder.and_(builder.bitcast(half, _WORDS), _all(_WORDS, 0x7FFFFFFF)) for half in halves
        ]
        larger = emit.call("llvm.umax.v16i32", _WORDS, *sizes)
        largest = emit.call("llvm.vector.reduce.umax.v16i32", _WORD, larger)
        most = builder.bitcast(largest, _FLOAT)
        scale = builder.fmul(most, ir.Constant(_FLOAT, 1 / _LARGEST))
        inverse = builder.fdiv(ir.Constant(_FLOAT, _LARGEST), most)
        none = builder.icmp_unsigned("==", largest, _WORD(0))
        factor = emit.everywhere(builder.select(none, ir.Constant(_FLOAT, 0.0), inverse))
        sums = []
        for half, numbers in enumerate(halves):
            # Rounds to the nearest; what is no number becomes the least integer, whose byte is 0.
            rounded = emit.call(
                "llvm.x86.avx512.mask.cvtps2dq.512",
                _WORDS,
                builder.fmul(numbers, factor),
                _all(_WORDS, 0),
                _SHORT(-1),
                _WORD(4),
            )
            narrow = builder.trunc(rounded, ir.VectorType(_BYTE, LANES))
            emit.store(narrow, target, builder.mul(args[4], _LONG(BLOCK)), LANES * half)
            wide = builder.sext(narrow, _WORDS)
            sums.append(emit.call("llvm.vector.reduce.add.v16i32", _WORD, wide))
        emit.store(scale, scale_at, builder.mul(args[4], _LONG(4)))
        return context.make_tuple(builder, signature.return_type, (scale, *sums))

    return signature, generate


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Any,
    kind: Any,
    rows: Any,
    weight: Any,
    panels: Any,
    panel: Any,
    bias: Any,
    codes: Any,
    scales: Any,
    offsets: Any,
    place: Any,
    blocks: Any,
    out: Any,
    out_step: Any,
    count: Any,
    lanes: Any,
) -> Any:
    """``out = x @ panel + bias`` for a tile of ``rows``, which are one of ``TILES``, and a panel of
    the literal ``kind``, a place in ``LAYOUTS``.

    Arrays are addresses; ``bias`` and ``out`` are those of the panel's first output. x is, for each
    tile, [blocks, rows, 32] int8 ``codes``, with fp32 ``scales``, and ``offsets`` of the sums of
    each group; ``place`` rows are before this tile. Of it, ``count`` rows and ``lanes`` outputs are
    written. The sums stay in registers, and each is taken in the order of its inputs, whatever the
    tile: a row's product does not depend on its neighbours.
    """
    if not isinstance(kind, types.IntegerLiteral):
        return None
    layout = list(LAYOUTS.values())[kind.literal_value]
    signature = types.void(kind, *(types.intp,) * 14)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses = [builder.inttoptr(args[at], _BYTE.as_pointer()) for at in (2, 5, 6, 7, 8, 11)]
        weight, bias, codes, scales, offsets, out = addresses
        panels, panel, place, blocks = (args[at] for at in (3, 4, 9, 10))
        out_step, count, lanes = args[12:]
        emit = _Emitter(builder)
        added = emit.load(bias, _LONG(0), _FLOATS)
        numbers = ir.Constant(_WORDS, list(range(LANES)))
        end = builder.append_basic_block("end")
        sizes = [builder.append_basic_block(f"rows{size}") for size in TILES]
        chosen = builder.switch(args[1], sizes[-1])
        for size, block in zip(TILES, sizes, strict=True):
            chosen.add_case(_LONG(size), block)
            builder.position_at_end(block)
            tile = _Tile(emit, layout, size)
            tile.find_weight(weight, panels, panel, blocks)
            tile.find_rows(codes, scales, offsets, builder.mul(place, blocks))
            for row, total in enumerate(tile.sum(blocks)):
                exists = builder.icmp_signed("<", _LONG(row), count)
                most = builder.trunc(builder.select(exists, lanes, _LONG(0)), _WORD)
                mask = builder.icmp_signed("<", numbers, emit.everywhere(most))
                at = builder.mul(builder.mul(_LONG(row), out_step), _LONG(4))
                emit.store_masked(builder.fadd(total, added), out, at, mask)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def call_address(typing: Any, address: Any, arguments: Any) -> Any:
    """Call a function of integers, which returns nothing (``jit.compile_address``)."""
    numbers = types.UniTuple(types.intp, len(arguments))  # type: ignore[attr-defined]
    signature = types.void(types.intp, numbers)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(ir.VoidType(), [_LONG] * len(values))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return signature, generate


def _bytes(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    """An array's memory."""
    array = context.make_array(signature.args[index])(context, builder, args[index])
    return builder.bitcast(array.data, _BYTE.as_pointer())


def _all(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * kind.count)


class _Emitter:
    """Instructions that tiles and activations share. Offsets are bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [each.type for each in args])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), args
        )

    def fma(self, left: Any, right: Any, added: Any) -> Any:
        return self.call("llvm.fma.v16f32", _FLOATS, left, right, added)

    def _at(self, base: Any, offset: Any, kind: Any, more: int) -> Any:
        builder = self.builder
        place = builder.gep(base, [builder.add(offset, _LONG(more)) if more else offset])
        return builder.bitcast(place, kind.as_pointer())

    def load(self, base: Any, offset: Any, kind: Any, more: int = 0, align: int = 1) -> Any:
        loaded = self.builder.load(self._at(base, offset, kind, more))
        loaded.align = align
        return loaded

    def store(self, value: Any, base: Any, offset: Any, more: int = 0) -> None:
        self.builder.store(value, self._at(base, offset, value.type, more)).align = 1

    def store_masked(self, value: Any, base: Any, offset: Any, mask: Any) -> None:
        at = self._at(base, offset, value.type, 0)
        self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), value, at, _WORD(4), mask)

    def prefetch(self, base: Any, offset: Any, more: int) -> None:
        at = self._at(base, offset, _BYTE, more)
        self.call("llvm.prefetch.p0", ir.VoidType(), at, _WORD(0), _WORD(3), _WORD(1))

    def everywhere(self, scalar: Any) -> Any:
        """A vector with the scalar in each lane."""
        kind = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(undefined, scalar, _WORD(0))
        return self.builder.shuffle_vector(one, undefined, _all(_WORDS, 0))

    def halves(self, base: Any, offset: Any, more: int = 0) -> Any:
        """16 fp16 numbers in fp32."""
        loaded = self.load(base, offset, ir.VectorType(_SHORT, LANES), more)
        return self.builder.fpext(
            self.builder.bitcast(loaded, ir.VectorType(_HALF, LANES)), _FLOATS
        )

    def small(self, base: Any, offset: Any, more: int, *, signed: bool) -> Any:
        """16 bytes as words."""
        loaded = self.load(base, offset, ir.VectorType(_BYTE, LANES), more)
        return (self.builder.sext if signed else self.builder.zext)(loaded, _WORDS)


class _Tile:
    """Emits the sums of a tile."""

    def __init__(self, emit: _Emitter, layout: Layout, rows: int) -> None:
        self.emit = emit
        self.builder = emit.builder
        self.layout = layout
        self.rows = rows

    def find_weight(self, weight: Any, panels: Any, panel: Any, blocks: Any) -> None:
        """Find the panel's part of each section (``Layout.sections``)."""
        builder, layout = self.builder, self.layout
        self.weight = weight
        before = builder.mul(panel, blocks)
        all_blocks = builder.mul(panels, blocks)
        self.codes_at = builder.mul(before, _LONG(layout.code_bytes))
        scales = builder.mul(all_blocks, _LONG(layout.code_bytes))
        record = _LONG(layout.groups * layout.scale_bytes)
        sharing = _LONG(layout.sharing)
        self.scales_at = builder.add(scales, builder.mul(builder.udiv(before, sharing), record))
        supers = builder.add(scales, builder.mul(builder.udiv(all_blocks, sharing), record))
        step = _LONG(layout.super_bytes)
        self.supers_at = builder.add(supers, builder.mul(builder.udiv(before, _LONG(SUPER)), step))
        if layout.levels:
            levels = builder.add(supers, builder.mul(builder.udiv(all_blocks, _LONG(SUPER)), step))
            self.levels = self.emit.load(weight, levels, _BYTES)

    def find_rows(self, codes: Any, scales: Any, offsets: Any, first: Any) -> None:
        """Find the tile's rows, before which are so many blocks of rows."""
        self.codes, self.x_scales, self.x_offsets = codes, scales, offsets
        self.first = first

    def sum(self, blocks: Any) -> list[Any]:
        """The sums of all blocks, row by row."""
        builder = self.builder
        before = builder.block
        test, body, after = (builder.append_basic_block(n) for n in ("test", "body", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        at = builder.phi(_LONG)
        sums = [builder.phi(_FLOATS) for _ in range(self.rows)]
        builder.cbranch(builder.icmp_signed("<", at, blocks), body, after)
        builder.position_at_end(body)
        words = self._words(at)
        scales, minimums = self._scales(at)
        added = [self._add(at, row, words, scales, minimums, sums[row]) for row in range(self.rows)]
        following = [builder.add(at, _LONG(1)), *added]
        begun = [_LONG(0), *[_all(_FLOATS, 0.0)] * self.rows]
        for phi, early, late in zip((at, *sums), begun, following, strict=True):
            phi.add_incoming(early, before)
            phi.add_incoming(late, builder.block)
        builder.branch(test)
        builder.position_at_end(after)
        return sums

    def _words(self, at: Any) -> list[Any]:
        """The codes of a block, a register for each word."""
        builder, emit, layout = self.builder, self.emit, self.layout
        base = builder.add(self.codes_at, builder.mul(at, _LONG(layout.code_bytes)))
        lines = range(0, layout.code_bytes, LINE)
        raw = [emit.load(self.weight, base, _WORDS, more, align=LINE) for more in lines]
        for more in lines:
            emit.prefetch(self.weight, base, more + _AHEAD)
        words: list[Any] = [None] * WORDS
        for width, position in layout.planes:
            plane, raw = raw[:width], raw[width:]
            for word in range(WORDS):
                bits = self._bits(plane[word % width], width, word // width, position)
                words[word] = bits if words[word] is None else builder.or_(words[word], bits)
        if layout.levels:
            words = [self._level(word) for word in words]
        return words

    def _bits(self, line: Any, width: int, place: int, position: int) -> Any:
        """Codes ``place`` of the bytes of a plane, moved to ``position``."""
        if width == 8:
            return line
        builder, right = self.builder, width * place - position
        if right > 0:
            line = builder.lshr(line, _all(_WORDS, right))
        elif right < 0:
            line = builder.shl(line, _all(_WORDS, -right))
        mask = ((1 << width) - 1) << position
        return builder.and_(line, _all(_WORDS, mask * 0x01010101))

    def _level(self, word: Any) -> Any:
        indices = self.builder.bitcast(word, _BYTES)
        found = self.emit.call("llvm.x86.avx512.pshuf.b.512", _BYTES, self.levels, indices)
        return self.builder.bitcast(found, _WORDS)

    def _scales(self, at: Any) -> tuple[list[Any], list[Any]]:
        """Scales and minimums of a block's groups, in fp32."""
        builder, layout = self.builder, self.layout
        shared = builder.udiv(at, _LONG(layout.sharing))
        record = _LONG(layout.groups * layout.scale_bytes)
        base = builder.add(self.scales_at, builder.mul(shared, record))
        found: tuple[list[Any], list[Any]] = [], []
        for group in range(layout.groups):
            for number in range(2 if layout.minimums else 1):
                found[number].append(self._scale(base, group * layout.scale_bytes, number))
        if layout.supers:
            step = builder.mul(builder.udiv(at, _LONG(SUPER)), _LONG(layout.super_bytes))
            supers = builder.add(self.supers_at, step)
            for number, each in enumerate(found):
                if each:
                    factor = self.emit.halves(self.weight, supers, number * LANES * 2)
                    each[:] = [builder.fmul(one, factor) for one in each]
        return found

    def _scale(self, base: Any, more: int, number: int) -> Any:
        """A group's scale, or with ``number`` its minimum, without their factor."""
        builder, emit, weight = self.builder, self.emit, self.weight
        kind = self.layout.scales
        if kind == "fp16":
            return emit.halves(weight, base, more + number * LANES * 2)
        if kind == "int8":
            whole = emit.small(weight, base, more + number * LANES, signed=True)
            return builder.sitofp(whole, _FLOATS)
        wide = emit.small(weight, base, more, signed=False)
        if kind == "halves":
            half = (
                builder.lshr(wide, _all(_WORDS, 4))
                if number
                else builder.and_(wide, _all(_WORDS, 15))
            )
            return builder.sitofp(half, _FLOATS)
        # A power of two, of which the least two are denormal.
        normal = builder.shl(builder.sub(wide, _all(_WORDS, 1)), _all(_WORDS, 23))
        denormal = builder.shl(_all(_WORDS, 0x00200000), wide)
        least = builder.icmp_unsigned("<", wide, _all(_WORDS, 2))
        return builder.bitcast(builder.select(least, denormal, normal), _FLOATS)

    def _add(
        self,
        at: Any,
        row: int,
        words: list[Any],
        scales: list[Any],
        minimums: list[Any],
        total: Any,
    ) -> Any:
        """Add the products of a block to a row's sums."""
        builder, emit, groups = self.builder, self.emit, self.layout.groups
        number = builder.add(self.first, builder.mul(at, _LONG(self.rows)))
        x_at = builder.mul(number, _LONG(BLOCK))
        scale_at = builder.mul(number, _LONG(4))
        offset_at = builder.mul(number, _LONG(4 * groups))
        x_scale = emit.everywhere(emit.load(self.x_scales, scale_at, _FLOAT, 4 * row, 4))
        for group in range(groups):
            more = 4 * (row * groups + group)
            if self.layout.zero:
                offset = emit.load(self.x_offsets, offset_at, _WORD, more, 4)
                products = emit.everywhere(offset)
            else:
                products = _all(_WORDS, 0)
            each = WORDS // groups
            for word in range(group * each, (group + 1) * each):
                x = emit.load(self.codes, x_at, _WORD, BLOCK * row + 4 * word, 4)
                products = emit.call(
                    "llvm.x86.avx512.vpdpbusd.512",
                    _WORDS,
                    products,
                    words[word],
                    emit.everywhere(x),
                )
            factor = builder.fmul(scales[group], x_scale)
            total = emit.fma(builder.sitofp(products, _FLOATS), factor, total)
            if minimums:
                offset = emit.load(self.x_offsets, offset_at, _FLOAT, more, 4)
                total = emit.fma(minimums[group], emit.everywhere(offset), total)
        return total
