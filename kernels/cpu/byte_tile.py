"""LLVM intrinsics for products of bytes: activations to int8, and tiles for AVX-512 VNNI, with VBMI
if weights have codebooks. Those for other CPUs are in ``narrow_tile.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .block_layouts import BLOCK, LANES, LINE, SUPER, WORDS, Layout
from .vector import call, loop

# Rows of the compiled tiles. Padding rows of a tile are computed but not written.
TILES = (1, 2, 4, 6, 8, 12, 16)
# Bytes by which weights are prefetched ahead.
_AHEAD = 4096
# LLVM's constant for the L2 cache. Prefetches to the L1 cache would occupy its few fill buffers and
# delay loads: one row would take a fifth longer.
_TO_L2 = 2

# LLVM's types, and vectors of them that fill a register.
BYTE, SHORT, WORD, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()
LINE_WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)
HALF_WORDS = ir.VectorType(WORD, LANES // 2)
BYTES, _BITS = ir.VectorType(BYTE, LINE), ir.VectorType(ir.IntType(1), LINE)
# The largest code of an activation.
_LARGEST = 127


@intrinsic
def quantise_block(typing: Any, x: Any, at: Any, codes: Any, scales: Any, place: Any) -> Any:
    """Write a block of activations as int8 codes with one scale to ``place``. Returns the scale and
    the sums of the codes of both halves.

    Magnitudes are compared as integers, so that a NaN or an infinity becomes the scale, and every
    product with the block is NaN.
    """
    result = types.Tuple((types.float32, types.int32, types.int32))  # type: ignore[attr-defined]
    signature = result(x, types.intp, codes, scales, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder)
        source, target, scale_at = (
            memory(context, builder, signature, args, index) for index in (0, 2, 3)
        )
        begin = builder.mul(args[1], LONG(4))
        halves = [emit.load(source, begin, FLOATS, 64 * half) for half in range(2)]
        sizes = [
            builder.and_(builder.bitcast(half, LINE_WORDS), all_of(LINE_WORDS, 0x7FFFFFFF))
            for half in halves
        ]
        larger = emit.call("llvm.umax.v16i32", LINE_WORDS, *sizes)
        largest = emit.call("llvm.vector.reduce.umax.v16i32", WORD, larger)
        magnitude = builder.bitcast(largest, FLOAT)
        scale = builder.fmul(magnitude, ir.Constant(FLOAT, 1 / _LARGEST))
        inverse = builder.fdiv(ir.Constant(FLOAT, _LARGEST), magnitude)
        none = builder.icmp_unsigned("==", largest, WORD(0))
        factor = emit.everywhere(builder.select(none, ir.Constant(FLOAT, 0.0), inverse))
        sums = []
        for half, numbers in enumerate(halves):
            # Rounds to nearest; NaN becomes the lowest integer, whose lowest byte is 0.
            parts = emit.split(builder.fmul(numbers, factor))
            convert = "llvm.x86.avx.cvt.ps2dq.256"
            rounded = emit.join([emit.call(convert, HALF_WORDS, each) for each in parts])
            narrow = builder.trunc(rounded, ir.VectorType(BYTE, LANES))
            emit.store(narrow, target, builder.mul(args[4], LONG(BLOCK)), LANES * half)
            wide = builder.sext(narrow, LINE_WORDS)
            sums.append(emit.call("llvm.vector.reduce.add.v16i32", WORD, wide))
        emit.store(scale, scale_at, builder.mul(args[4], LONG(4)))
        return context.make_tuple(builder, signature.return_type, (scale, *sums))

    return signature, generate


@cache
def tile_product(layout: Layout, kind: type[Tile]) -> Callable[..., None]:
    """The intrinsic that multiplies a tile with a panel of a layout, in the loop that ``kind``
    emits.

    ``out = x @ panel + bias`` for a tile of ``rows``, one of ``TILES``.

    Arrays are addresses; ``bias`` and ``out`` are those of the panel's first output. x is, for each
    tile, [blocks, rows, 32] int8 ``codes``, with fp32 ``scales``, and ``offsets`` of the sums of
    each group; or bf16 ``codes`` alone (``float_tile.py``), or fp32 in place of the ``scales``
    (``widened_tile.py``). ``place`` rows are before this tile. Of it, ``count`` rows and ``lanes``
    outputs are written. The sums stay in registers, or in the L1 cache, and each is in order of
    inputs for any tile, so a row's product does not depend on its neighbours.
    """
    max_rows = kind.max_rows(layout)
    repeats = max_rows < TILES[-1]
    # The rows that a tile's sums are computed for at a time.
    counts = sorted({min(max_rows, size - at) for size in TILES for at in range(0, size, max_rows)})

    @intrinsic
    def multiply_tile(
        typing: Any,
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
        signature = types.void(*(types.intp,) * 14)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses = [
                builder.inttoptr(args[at], BYTE.as_pointer()) for at in (1, 4, 5, 6, 7, 10)
            ]
            weight, bias, codes, scales, offsets, out = addresses
            panels, panel, place, blocks = (args[at] for at in (2, 3, 8, 9))
            out_step, count, lanes = args[11:]
            emit = Emitter(builder)
            added = emit.load(bias, LONG(0), FLOATS)
            start, end = builder.block, builder.append_basic_block("end")
            head = builder.append_basic_block("head")
            builder.branch(head)
            builder.position_at_end(head)
            first = builder.phi(LONG)
            first.add_incoming(LONG(0), start)
            left = builder.sub(args[0], first)
            some = builder.select(
                builder.icmp_signed("<", left, LONG(max_rows)), left, LONG(max_rows)
            )
            bodies = [builder.append_basic_block(f"rows{rows}") for rows in counts]
            cases = builder.switch(some, bodies[-1])
            for rows, block in zip(counts, bodies, strict=True):
                cases.add_case(LONG(rows), block)
                builder.position_at_end(block)
                tile = kind(emit, layout, range(rows), args[0] if repeats else LONG(rows))
                tile.find_weight(weight, panels, panel, blocks)
                tile.find_rows(
                    codes, scales, offsets, builder.add(builder.mul(place, blocks), first)
                )
                totals = [builder.fadd(total, added) for total in tile.sum(blocks)]
                _store(emit, totals, out, out_step, first, count, lanes)
                following = builder.add(first, LONG(rows))
                if repeats and rows == max_rows:
                    first.add_incoming(following, builder.block)
                    more = builder.icmp_signed("<", following, args[0])
                    builder.cbranch(more, head, end)
                else:
                    builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return signature, generate

    return multiply_tile


def _store(
    emit: Emitter, totals: list[Any], out: Any, out_step: Any, first: Any, count: Any, lanes: Any
) -> None:
    """Write the sums of rows from the ``first`` on: those before ``count``, and of them ``lanes``
    outputs."""
    builder = emit.builder
    rows = [builder.add(first, LONG(row)) for row in range(len(totals))]
    places = [builder.mul(builder.mul(row, out_step), LONG(4)) for row in rows]
    # Masked stores are slow on AMD's CPUs before AVX-512.
    whole = builder.and_(
        builder.icmp_signed("<", rows[-1], count),
        builder.icmp_signed(">=", lanes, LONG(LANES)),
    )
    with builder.if_else(whole) as (then, otherwise):
        with then:
            for total, at in zip(totals, places, strict=True):
                emit.store(total, out, at)
        with otherwise:
            numbers = ir.Constant(LINE_WORDS, list(range(LANES)))
            for row, total, at in zip(rows, totals, places, strict=True):
                exists = builder.icmp_signed("<", row, count)
                lane_count = builder.trunc(builder.select(exists, lanes, LONG(0)), WORD)
                mask = builder.icmp_signed("<", numbers, emit.everywhere(lane_count))
                emit.store_masked(total, out, at, mask)


@intrinsic
def call_address(typing: Any, address: Any, arguments: Any) -> Any:
    """Call a function of integers, which returns nothing (``jit.compile_address``)."""
    numbers = types.UniTuple(types.intp, len(arguments))  # type: ignore[attr-defined]
    signature = types.void(types.intp, numbers)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(ir.VoidType(), [LONG] * len(values))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return signature, generate


def memory(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    """An array's memory."""
    array = context.make_array(signature.args[index])(context, builder, args[index])
    return builder.bitcast(array.data, BYTE.as_pointer())


def _bits_of(selection: Iterable[int]) -> Any:
    """A mask of some bytes of each word."""
    return ir.Constant(_BITS, [byte in selection for byte in range(4)] * LANES)


def all_of(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * kind.count)


class Emitter:
    """Instructions that tiles and activations share. Offsets are bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: Any, *args: Any) -> Any:
        return call(self.builder, name, result, *args)

    def fma(self, left: Any, right: Any, added: Any) -> Any:
        return self.call("llvm.fma.v16f32", FLOATS, left, right, added)

    def _at(self, base: Any, offset: Any, kind: Any, more: int) -> Any:
        builder = self.builder
        place = builder.gep(base, [builder.add(offset, LONG(more)) if more else offset])
        return builder.bitcast(place, kind.as_pointer())

    def load(self, base: Any, offset: Any, kind: Any, more: int = 0, align: int = 1) -> Any:
        value = self.builder.load(self._at(base, offset, kind, more))
        value.align = align
        return value

    def store(self, value: Any, base: Any, offset: Any, more: int = 0) -> None:
        self.builder.store(value, self._at(base, offset, value.type, more)).align = 1

    def store_masked(self, value: Any, base: Any, offset: Any, mask: Any) -> None:
        at = self._at(base, offset, value.type, 0)
        self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), value, at, WORD(4), mask)

    def scratch(self, kind: Any, count: int) -> Any:
        """Memory of the function for some vectors."""
        memory = cgutils.alloca_once(self.builder, kind, count)
        memory.align = LINE
        return self.builder.bitcast(memory, BYTE.as_pointer())

    def prefetch(self, base: Any, offset: Any, more: int) -> None:
        at = self._at(base, offset, BYTE, more)
        self.call("llvm.prefetch.p0", ir.VoidType(), at, WORD(0), WORD(_TO_L2), WORD(1))

    def everywhere(self, scalar: Any, lanes: int = LANES) -> Any:
        """A vector with the scalar in each lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, scalar, WORD(0))
        return self.builder.shuffle_vector(one, undefined, all_of(ir.VectorType(WORD, lanes), 0))

    def split(self, value: Any) -> list[Any]:
        """The halves of a vector."""
        half = value.type.count // 2
        return [self._elements([value, value], range(at, at + half)) for at in (0, half)]

    def join(self, halves: list[Any]) -> Any:
        """A vector of two halves."""
        return self._elements(halves, range(2 * halves[0].type.count))

    def ordered(self, value: Any, places: Sequence[int]) -> Any:
        """The elements of a vector in another order."""
        return self._elements([value, value], places)

    def _elements(self, vectors: list[Any], places: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(WORD, len(places)), list(places))
        return self.builder.shuffle_vector(*vectors, mask)

    def halves(self, base: Any, offset: Any, more: int = 0) -> Any:
        """16 fp16 numbers in fp32."""
        value = self.load(base, offset, ir.VectorType(SHORT, LANES), more)
        return self.builder.fpext(self.builder.bitcast(value, ir.VectorType(HALF, LANES)), FLOATS)

    def small(self, base: Any, offset: Any, more: int, *, signed: bool) -> Any:
        """16 bytes as words."""
        value = self.load(base, offset, ir.VectorType(BYTE, LANES), more)
        return (self.builder.sext if signed else self.builder.zext)(value, LINE_WORDS)


class Tile:
    """Emits the sums of some rows of a tile, with AVX-512 VNNI."""

    @classmethod
    def max_rows(cls, layout: Layout) -> int:
        """The number of rows whose sums fit the registers beside a block's codes, which take twice
        as many with two bytes for each level."""
        return TILES[-1] // 2 if layout.level_bytes > 1 else TILES[-1]

    def __init__(self, emit: Emitter, layout: Layout, rows: range, size: Any) -> None:
        """``rows`` of the ``size`` that follow each other in x."""
        self.emit = emit
        self.builder = emit.builder
        self.layout = layout
        self.rows = rows
        self.size = size

    def find_weight(self, weight: Any, panels: Any, panel: Any, blocks: Any) -> None:
        """Find the panel's part of each section (``Layout.sections``)."""
        builder, layout = self.builder, self.layout
        self.weight = weight
        before = builder.mul(panel, blocks)
        all_blocks = builder.mul(panels, blocks)
        self.codes_at = builder.mul(before, LONG(layout.code_bytes))
        scales = builder.mul(all_blocks, LONG(layout.code_bytes))
        record = LONG(layout.groups * layout.scale_bytes)
        sharing = LONG(layout.sharing)
        self.scales_at = builder.add(scales, builder.mul(builder.udiv(before, sharing), record))
        supers = builder.add(scales, builder.mul(builder.udiv(all_blocks, sharing), record))
        step = LONG(layout.super_bytes)
        self.supers_at = builder.add(supers, builder.mul(builder.udiv(before, LONG(SUPER)), step))
        all_supers = builder.mul(builder.udiv(all_blocks, LONG(SUPER)), step)
        levels = zeros = builder.add(supers, all_supers)
        own = builder.mul(builder.udiv(before, sharing), LONG(LANES * layout.groups))
        self.zeros_at = builder.add(zeros, own)
        masks = LONG(layout.mask_bytes)
        self.masks_at = builder.add(zeros, builder.mul(before, masks))
        self.levels: list[Any] = []
        if layout.levels:
            levels = builder.add(levels, builder.mul(all_blocks, masks))
            self.levels = [
                self.emit.load(weight, levels, BYTES, LINE * place)
                for place in range(layout.level_bytes)
            ]
            self.book_at = builder.add(levels, LONG(LINE * layout.level_bytes))

    def find_rows(self, codes: Any, scales: Any, offsets: Any, first: Any) -> None:
        """Find the tile's rows, which begin ``first`` blocks of rows into the arrays."""
        self.codes, self.x_scales, self.x_offsets = codes, scales, offsets
        self.first = first

    def sum(self, blocks: Any) -> list[Any]:
        """The sums of all blocks, row by row."""
        started = [all_of(FLOATS, 0.0)] * len(self.rows)
        return loop(self.builder, LONG(0), blocks, 1, started, self.add_block)

    def sum_unpacked(self, blocks: Any, most: int) -> list[Any]:
        """Like ``sum``, of blocks that ``unpack`` writes to memory, each once for all rows. At most
        ``most`` rows are added at a time, and between them sums are in memory."""
        builder, size, first = self.builder, len(self.rows), self.first
        most = -(-size // -(-size // most))  # of groups of about the same size
        totals = self.emit.scratch(FLOATS, size)
        for row in range(size):
            self.emit.store(all_of(FLOATS, 0.0), totals, LONG(LINE * row))

        def add_block(at: Any, _: list[Any]) -> list[Any]:
            self.unpack(at)
            whole = size // most * most
            for begin, end, count in ((0, whole, most), (whole, size, size - whole)):
                if count and begin < end:
                    self.rows = range(count)
                    loop(builder, LONG(begin), LONG(end), count, [], partial(add_rows, at))
            return []

        def add_rows(at: Any, row: Any, _: list[Any]) -> list[Any]:
            self.first = builder.add(first, row)
            places = [builder.mul(builder.add(row, LONG(more)), LONG(LINE)) for more in self.rows]
            sums = [self.emit.load(totals, place, FLOATS, align=LINE) for place in places]
            for place, total in zip(places, self.add_block(at, sums), strict=True):
                self.emit.store(total, totals, place)
            return []

        loop(builder, LONG(0), blocks, 1, [], add_block)
        return [self.emit.load(totals, LONG(LINE * row), FLOATS) for row in range(size)]

    def unpack(self, at: Any) -> None:
        """Write a block to memory, if the tile adds it from there."""
        raise NotImplementedError

    def add_block(self, at: Any, sums: list[Any]) -> list[Any]:
        """Add the products of a block to the rows' sums."""
        lines = self.load_lines(at)
        self.prefetch_lines(at)
        codes = (
            self._book_codes(at, lines)
            if self.layout.book
            else [self.codes_of(lines, word) for word in range(WORDS)]
        )
        words = [self._multiples(codes, place) for place in range(len(self.levels))] or [codes]
        scales, added = self.load_scales(at)
        return [
            self._add(at, row, words, scales, added, total)
            for row, total in zip(self.rows, sums, strict=True)
        ]

    def load_lines(self, at: Any) -> list[Any]:
        """The bytes of a block's codes."""
        builder, emit, layout = self.builder, self.emit, self.layout
        base = builder.add(self.codes_at, builder.mul(at, LONG(layout.code_bytes)))
        lines = range(0, LINE * layout.lines, LINE)
        return [emit.load(self.weight, base, LINE_WORDS, more, align=LINE) for more in lines]

    def prefetch_lines(self, at: Any) -> None:
        """Prefetch the codes of a later block."""
        builder, layout = self.builder, self.layout
        base = builder.add(self.codes_at, builder.mul(at, LONG(layout.code_bytes)))
        for more in range(0, LINE * layout.lines, LINE):
            self.emit.prefetch(self.weight, base, more + _AHEAD)

    def codes_of(self, lines: list[Any], word: int) -> Any:
        """The codes of a word of a block."""
        first, codes = 0, None
        for width, position in self.layout.planes:
            bits = self.bits(lines[first + word % width], width, word // width, position)
            codes = bits if codes is None else self.builder.or_(codes, bits)
            first += width
        return codes

    def bits(self, line: Any, width: int, place: int, position: int) -> Any:
        """Codes ``place`` of the bytes of a plane, moved to ``position``."""
        if width == 8:
            return line
        return self.moved_bits(line, width * place, position, ((1 << width) - 1) * 0x01010101)

    def moved_bits(self, bits: Any, position: int, to: int, mask: int) -> Any:
        """The bits of each lane in a mask at a position, moved to another one."""
        builder, kind = self.builder, bits.type
        if position > to:
            bits = builder.lshr(bits, all_of(kind, position - to))
        elif position < to:
            bits = builder.shl(bits, all_of(kind, to - position))
        return builder.and_(bits, all_of(kind, mask << to))

    def _book_codes(self, at: Any, raw: list[Any]) -> list[Any]:
        """Like ``codes_of`` for all words, for rows of a codebook. Bits are moved into place byte
        by byte: a row's number to four bytes of a word."""
        builder, layout = self.builder, self.layout
        lines = [builder.bitcast(line, BYTES) for line in raw]
        masks = self._masks(at)
        extra = (len(masks) - layout.moves) // layout.row_lines
        rows = [
            self._rows(line, masks[extra * place : extra * (place + 1)])
            for place, line in enumerate(lines[: layout.row_lines])
        ]
        signs = builder.sext(masks[-1], BYTES) if layout.moves else lines[-1]
        width, sign_at = 16 // layout.row_size, len(layout.levels).bit_length() - 2
        words = []
        for word in range(WORDS):
            first = 4 * word
            line, place = divmod(first // layout.row_size, 4)
            sources: dict[int, dict[int, int]] = {}
            for byte in range(4):
                half, number = divmod((first + byte) % layout.row_size, layout.row_size // 2)
                sources.setdefault(half, {})[byte] = 8 * place + width * number
            moved = [
                (self._moved(rows[line][half], offsets), offsets)
                for half, offsets in sources.items()
            ]
            bits = moved[0][0]
            for each, offsets in moved[1:]:
                bits = builder.select(_bits_of(offsets), each, bits)
            own = {byte: first + byte - sign_at for byte in range(4)}
            sign = self._moved(signs, own)
            value = builder.or_(
                builder.and_(bits, all_of(BYTES, (1 << sign_at) - 1)),
                builder.and_(sign, all_of(BYTES, 1 << sign_at)),
            )
            words.append(builder.bitcast(value, LINE_WORDS))
        return words

    def _masks(self, at: Any) -> list[Any]:
        """The single bits of a block's row numbers and moves."""
        builder, layout = self.builder, self.layout
        if not layout.masks:
            return []
        wide = self.load_masks(at)
        single = [
            self._moved(builder.bitcast(wide, BYTES), {byte: 4 * mask + byte for byte in range(4)})
            for mask in range(layout.masks)
        ]
        return [
            builder.icmp_unsigned("!=", builder.and_(bits, all_of(BYTES, 1)), all_of(BYTES, 0))
            for bits in single
        ]

    def load_masks(self, at: Any) -> Any:
        """The bits of a block's masks, for each lane."""
        builder, nbytes = self.builder, self.layout.mask_bytes
        base = builder.add(self.masks_at, builder.mul(at, LONG(nbytes)))
        kind = ir.VectorType(ir.IntType(8 * nbytes // LANES), LANES)
        return builder.zext(self.emit.load(self.weight, base, kind), LINE_WORDS)

    def _rows(self, line: Any, masks: list[Any]) -> list[Any]:
        """The two bytes of each row for a line of row indices: one instruction looks up seven bits,
        and each further bit selects between two halves of the remaining candidates."""
        builder, emit, layout = self.builder, self.emit, self.layout
        masks = [builder.icmp_signed("<", line, all_of(BYTES, 0)), *masks]
        rows = []
        for half in range(2):
            table = [
                emit.load(self.weight, self.book_at, BYTES, half * layout.book + more, align=LINE)
                for more in range(0, layout.book, LINE)
            ]
            candidates = [
                emit.call("llvm.x86.avx512.vpermi2var.qi.512", BYTES, low, line, high)
                for low, high in zip(table[::2], table[1::2], strict=True)
            ]
            for mask in masks:
                pairs = zip(candidates[::2], candidates[1::2], strict=True)
                candidates = [builder.select(mask, high, low) for low, high in pairs]
            rows += candidates
        return rows

    def _moved(self, source: Any, offsets: dict[int, int]) -> Any:
        """The bits of each lane from an offset on, in some bytes of it."""
        control = [
            (offsets.get(byte, 0) + 32 * lane) % 64 for lane in range(2) for byte in range(4)
        ]
        return self.emit.call(
            "llvm.x86.avx512.pmultishift.qb.512",
            BYTES,
            ir.Constant(BYTES, control * (LINE // len(control))),
            source,
        )

    def _multiples(self, codes: list[Any], place: int) -> list[Any]:
        """A byte of the levels' multiples of their unit."""
        builder, emit, table = self.builder, self.emit, self.levels[place]
        products = [
            emit.call("llvm.x86.avx512.pshuf.b.512", BYTES, table, builder.bitcast(word, BYTES))
            for word in codes
        ]
        return [builder.bitcast(each, LINE_WORDS) for each in products]

    def load_scales(self, at: Any) -> tuple[list[Any], list[Any]]:
        """Scales of a block's groups, and what is added for each activation, in fp32."""
        builder, layout = self.builder, self.layout
        shared = builder.udiv(at, LONG(layout.sharing))
        record = LONG(layout.groups * layout.scale_bytes)
        base = builder.add(self.scales_at, builder.mul(shared, record))
        pair: tuple[list[Any], list[Any]] = [], []
        for group in range(layout.groups):
            for number in range(2 if layout.minimums else 1):
                pair[number].append(self._scale(base, group * layout.scale_bytes, number))
        if layout.supers:
            step = builder.mul(builder.udiv(at, LONG(SUPER)), LONG(layout.super_bytes))
            supers = builder.add(self.supers_at, step)
            for number, each in enumerate(pair):
                if each:
                    factor = self.emit.halves(self.weight, supers, number * LANES * 2)
                    each[:] = [builder.fmul(one, factor) for one in each]
        scales, added = pair
        if layout.zeros:
            step = builder.mul(shared, LONG(LANES * layout.groups))
            zeros = builder.add(self.zeros_at, step)
            added = [
                builder.fmul(self._zero(zeros, LANES * group), scale)
                for group, scale in enumerate(scales)
            ]
        if layout.unit != 1:
            scales = [builder.fmul(each, all_of(FLOATS, layout.unit)) for each in scales]
        return scales, added

    def _zero(self, base: Any, more: int) -> Any:
        """Minus a group's zero."""
        builder = self.builder
        own = self.emit.small(self.weight, base, more, signed=True)
        whole = builder.sub(all_of(LINE_WORDS, -self.layout.zero), own)
        return builder.sitofp(whole, FLOATS)

    def _scale(self, base: Any, more: int, number: int) -> Any:
        """A group's scale, or with ``number`` its minimum, without their factor."""
        builder, emit, weight = self.builder, self.emit, self.weight
        kind = self.layout.scales
        own = more + number * self.layout.number_bytes
        if kind == "fp16":
            return emit.halves(weight, base, own)
        if kind == "fp32":
            return emit.load(weight, base, FLOATS, own)
        if kind == "bf16":
            bits = emit.load(weight, base, ir.VectorType(SHORT, LANES), own)
            wide = builder.shl(builder.zext(bits, LINE_WORDS), all_of(LINE_WORDS, 16))
            return builder.bitcast(wide, FLOATS)
        if kind == "int8":
            whole = emit.small(weight, base, own, signed=True)
            return builder.sitofp(whole, FLOATS)
        if kind == "odd":
            both = emit.small(weight, base, 0, signed=False)
            half = (
                builder.lshr(both, all_of(LINE_WORDS, 4))
                if more
                else builder.and_(both, all_of(LINE_WORDS, 15))
            )
            doubled = builder.shl(half, all_of(LINE_WORDS, 1))
            return builder.sitofp(builder.or_(doubled, all_of(LINE_WORDS, 1)), FLOATS)
        wide = emit.small(weight, base, more, signed=False)
        if kind == "halves":
            half = (
                builder.lshr(wide, all_of(LINE_WORDS, 4))
                if number
                else builder.and_(wide, all_of(LINE_WORDS, 15))
            )
            return builder.sitofp(half, FLOATS)
        # A power of two; the lowest two are denormal.
        normal = builder.shl(builder.sub(wide, all_of(LINE_WORDS, 1)), all_of(LINE_WORDS, 23))
        denormal = builder.shl(all_of(LINE_WORDS, 0x00200000), wide)
        is_denormal = builder.icmp_unsigned("<", wide, all_of(LINE_WORDS, 2))
        return builder.bitcast(builder.select(is_denormal, denormal, normal), FLOATS)

    def _add(
        self,
        at: Any,
        row: int,
        words: list[list[Any]],
        scales: list[Any],
        added: list[Any],
        total: Any,
    ) -> Any:
        """Add the products of a block to a row's sums. ``words`` are those of each byte of levels,
        or of the codes."""
        builder, emit, groups = self.builder, self.emit, self.layout.groups
        each = WORDS // groups
        for group in range(groups):
            products = self.start(at, row, group)
            xs = [self.load_x(at, row, word) for word in range(group * each, (group + 1) * each)]
            for place, bytes_of in enumerate(words):
                partial = products if place == 0 else all_of(LINE_WORDS, 0)
                for word, x in zip(bytes_of[group * each :], xs, strict=False):
                    partial = emit.call(
                        "llvm.x86.avx512.vpdpbusd.512", LINE_WORDS, partial, word, x
                    )
                if place:
                    partial = builder.add(
                        products, builder.shl(partial, all_of(LINE_WORDS, 8 * place))
                    )
                products = partial
            own = added[group] if added else None
            total = self.add_scaled(at, row, group, products, scales[group], own, total)
        return total

    def load_x(self, at: Any, row: int, word: int, lanes: int = LANES) -> Any:
        """Four activations of a row, in each lane."""
        x_at = self.builder.mul(self.number(at), LONG(BLOCK))
        x = self.emit.load(self.codes, x_at, WORD, BLOCK * row + 4 * word, 4)
        return self.emit.everywhere(x, lanes)

    def start(self, at: Any, row: int, group: int) -> Any:
        """What the products of a row are added to: minus the zero for each activation."""
        if not self.layout.zero or self.layout.adds:
            return all_of(LINE_WORDS, 0)
        return self.emit.everywhere(self._load_offset(at, row, group, WORD))

    def add_scaled(
        self, at: Any, row: int, group: int, products: Any, scale: Any, added: Any, total: Any
    ) -> Any:
        """Add the products of a group to a row's sums."""
        builder, emit = self.builder, self.emit
        scale_at = builder.mul(self.number(at), LONG(4))
        x_scale = emit.everywhere(emit.load(self.x_scales, scale_at, FLOAT, 4 * row, 4))
        factor = builder.fmul(scale, x_scale)
        total = emit.fma(builder.sitofp(products, FLOATS), factor, total)
        if added is not None:
            offset = emit.everywhere(self._load_offset(at, row, group, FLOAT))
            total = emit.fma(added, offset, total)
        return total

    def _load_offset(self, at: Any, row: int, group: int, kind: Any) -> Any:
        groups = self.layout.groups
        offset_at = self.builder.mul(self.number(at), LONG(4 * groups))
        return self.emit.load(self.x_offsets, offset_at, kind, 4 * (row * groups + group), 4)

    def number(self, at: Any) -> Any:
        """The number of the tile's first row of a block among all blocks of rows."""
        return self.builder.add(self.first, self.builder.mul(at, self.size))
