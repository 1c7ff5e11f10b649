"""LLVM intrinsics that numba lacks: half types, words at any byte, and tiles of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Outputs whose weights are neighbours: one register of AVX-512, two of AVX2, four of NEON.
LANES = 16

# Inputs of one iteration of the innermost loop.
_UNROLLED = 4

_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_FLOAT, LANES)


@intrinsic
def widen(typing: Any, bits: Any) -> Any:
    """The fp32 value of an element of an array that ``jit.array`` made."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widened(builder, args[0], bits)

    return types.float32(bits), generate


@intrinsic
def narrow(typing: Any, value: Any, like: Any) -> Any:
    """An fp32 value, rounded to the nearest, as an element of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _narrowed(builder, args[0], like)

    return like(types.float32, like), generate


@intrinsic
def narrow_scaled(typing: Any, value: Any, scale: Any, like: Any) -> Any:
    """Like ``narrow``, of ``value / scale`` if elements are 8-bit codes. Others have no scale, and
    a division takes time."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_code = like in (types.int8, types.uint8)
        value = builder.fdiv(*args[:2]) if is_code else args[0]
        return _narrowed(builder, value, like)

    return like(types.float32, types.float32, like), generate


@intrinsic
def widen_scaled(typing: Any, bits: Any, scale: Any, like: Any) -> Any:
    """An element as the type of ``like``: its own, or fp32 for an 8-bit code, which is multiplied
    by ``scale``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if bits == like:
            return args[0]
        assert like == types.float32, like
        return builder.fmul(widened(builder, args[0], bits), args[1])

    return like(bits, types.float32, like), generate


@intrinsic
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to elements of the type of an array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    kind = types.CPointer(like.dtype)  # type: ignore[attr-defined]
    return kind(types.intp, like), generate


@intrinsic
def take_words(typing: Any, data: Any, at: Any, stride: Any, into: Any, row: Any) -> Any:
    """``into[row]``, of [*, LANES] uint32, is set to the words of four bytes that begin at byte
    ``at`` of an uint8 array and at each ``stride`` after it."""
    signature = types.void(data, types.intp, types.intp, into, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (
            context.make_array(kind)(context, builder, args[index]).data
            for kind, index in ((data, 0), (into, 3))
        )
        lanes, place = ir.VectorType(_WORD, LANES), args[1]
        words = ir.Constant(lanes, ir.Undefined)
        for lane in range(LANES):
            word = builder.load(builder.bitcast(builder.gep(source, [place]), _WORD.as_pointer()))
            word.align = 1
            words = builder.insert_element(words, word, _WORD(lane))
            place = builder.add(place, args[2])
        to = builder.gep(target, [builder.mul(args[4], _LONG(LANES))])
        builder.store(words, builder.bitcast(to, lanes.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def put_pairs(typing: Any, data: Any, at: Any, stride: Any, into: Any, place: Any) -> Any:
    """LANES rows of as many pairs of shorts become rows of those of all lanes: from byte ``at`` of
    an uint8 array, and each ``stride`` after it, to ``into[place]`` of [*, LANES, LANES] uint32.

    Pairs are of the first and third of four neighbours, and of the second and fourth.
    """
    signature = types.void(data, types.intp, types.intp, into, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (
            context.make_array(kind)(context, builder, args[index]).data
            for kind, index in ((data, 0), (into, 3))
        )
        lanes, shorts = ir.VectorType(_WORD, LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
        order = [four + number for four in range(0, 2 * LANES, 4) for number in (0, 2, 1, 3)]
        at, rows = args[1], []
        for _ in range(LANES):
            row = builder.load(builder.bitcast(builder.gep(source, [at]), shorts.as_pointer()))
            row.align = 1
            rows.append(builder.bitcast(_shuffle(builder, row, row, order), lanes))
            at = builder.add(at, args[2])
        _transpose(builder, rows)
        to = builder.mul(args[4], _LONG(LANES * LANES))
        for number, row in enumerate(rows):
            line = builder.gep(target, [builder.add(to, _LONG(LANES * number))])
            builder.store(row, builder.bitcast(line, lanes.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


def _transpose(builder: Any, rows: list[Any]) -> None:
    """Transpose a square of registers in place: squares of twice the side exchange quarters."""
    lanes = range(len(rows))
    for side in (2**power for power in range(len(rows).bit_length() - 1)):
        for first in lanes:
            if first & side:
                continue
            second = first + side
            upper = [lane + len(rows) - side if lane & side else lane for lane in lanes]
            lower = [lane + len(rows) if lane & side else lane + side for lane in lanes]
            pair = rows[first], rows[second]
            rows[first], rows[second] = (_shuffle(builder, *pair, each) for each in (upper, lower))


def _shuffle(builder: Any, left: Any, right: Any, places: Sequence[int]) -> Any:
    """Elements of two vectors, one after the other."""
    kind = ir.VectorType(_WORD, len(places))
    return builder.shuffle_vector(left, right, ir.Constant(kind, list(places)))


@intrinsic
def put_moved_bits(
    typing: Any,
    words: Any,
    fields: Any,
    first: Any,
    end: Any,
    constant: Any,
    into: Any,
    at: Any,
) -> Any:
    """``into[at:at + LANES]``, in the flattened array of unsigned integers, is set to the constant
    xor all ``(words[word] >> right << left) & mask``, the fields from ``first`` to ``end``.

    words [*, LANES] uint32, fields [*, 4] uint32: word, right, left, mask.
    """
    place = (types.intp,) * 2
    signature = types.void(words, fields, *place, types.uint32, into, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, table, target = (
            context.make_array(kind)(context, builder, args[index]).data
            for kind, index in ((words, 0), (fields, 1), (into, 5))
        )
        lanes = ir.VectorType(_WORD, LANES)
        started, before = everywhere(builder, args[4]), builder.block
        test, body, after = (builder.append_basic_block(n) for n in ("test", "body", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        field, total = builder.phi(_LONG), builder.phi(lanes)
        builder.cbranch(builder.icmp_signed("<", field, args[3]), body, after)
        builder.position_at_end(body)
        row = builder.mul(field, _LONG(4))
        word, right, left, mask = (
            builder.load(builder.gep(table, [builder.add(row, _LONG(n))])) for n in range(4)
        )
        place_ = builder.mul(builder.zext(word, _LONG), _LONG(LANES))
        word_bits = builder.load(builder.bitcast(builder.gep(source, [place_]), lanes.as_pointer()))
        word_bits.align = 4
        moved = builder.lshr(word_bits, everywhere(builder, right))
        moved = builder.shl(moved, everywhere(builder, left))
        added = builder.xor(total, builder.and_(moved, everywhere(builder, mask)))
        field.add_incoming(args[2], before)
        field.add_incoming(builder.add(field, _LONG(1)), body)
        total.add_incoming(started, before)
        total.add_incoming(added, body)
        builder.branch(test)
        builder.position_at_end(after)
        kind = ir.VectorType(target.type.pointee, LANES)
        stored = builder.trunc(total, kind) if into.dtype.bitwidth < 32 else total
        pointer = builder.bitcast(builder.gep(target, [args[6]]), kind.as_pointer())
        builder.store(stored, pointer).align = into.dtype.bitwidth // 8
        return context.get_dummy_value()

    return signature, generate


def widened(builder: Any, bits: Any, kind: Any) -> Any:
    """A scalar or a vector of ``kind`` in fp32; see ``jit.array`` for 16-bit types."""
    if kind == types.float32:
        return bits
    if kind == types.int8:
        return builder.sitofp(bits, _like(bits, _FLOAT))
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, _like(bits, ir.HalfType())), _like(bits, _FLOAT))
    if kind == types.uint8:
        return _widened_fp8(builder, bits)
    assert kind == types.uint16, kind
    wide = builder.zext(bits, _like(bits, _WORD))
    return builder.bitcast(builder.shl(wide, constant(wide.type, 16)), _like(bits, _FLOAT))


def _widened_fp8(builder: Any, bits: Any) -> Any:
    """See ``fp8.py``; the largest code is NaN."""
    words, floats = _like(bits, _WORD), _like(bits, _FLOAT)
    moved = builder.shl(builder.sext(bits, words), constant(words, 20))
    moved = builder.and_(moved, constant(words, ~(0b1111 << 27) & 0xFFFFFFFF))
    value = builder.fmul(builder.bitcast(moved, floats), constant(floats, 2.0**120))
    size = builder.and_(bits, constant(bits.type, 0x7F))
    is_nan = builder.icmp_unsigned("==", size, constant(bits.type, 0x7F))
    return builder.select(is_nan, constant(floats, float("nan")), value)


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    if kind == types.float32:
        return value
    if kind == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    if kind == types.int8:
        nearest = call(builder, "llvm.rint.f32", _FLOAT, value)
        return call(builder, "llvm.fptosi.sat.i8.f32", ir.IntType(8), nearest)
    if kind == types.uint8:
        return _narrowed_fp8(builder, value)
    assert kind == types.uint16, kind
    # Add half of the last place, minus one bit if that place is even: ties go to even.
    bits = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _WORD(0x7FFF))), _WORD(16))
    quiet = builder.or_(builder.lshr(bits, _WORD(16)), _WORD(0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), ir.IntType(16))


def _narrowed_fp8(builder: Any, value: Any) -> Any:
    """e4m3, whose values beyond the largest are clamped."""
    bits, byte = builder.bitcast(value, _WORD), ir.IntType(8)
    size = builder.and_(bits, _WORD(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", size, _WORD(0x7F800000))
    size = call(builder, "llvm.umin.i32", _WORD, size, _WORD(0x43E00000))  # 448
    # Half of the last place, less one bit where that is even; the exponents' biases differ by 120.
    odd = builder.and_(builder.lshr(size, _WORD(20)), _WORD(1))
    rounded = builder.add(size, builder.add(odd, _WORD(0x7FFFF)))
    normal = builder.sub(builder.lshr(rounded, _WORD(20)), _WORD(120 << 3))
    # A float of 2^14 ends with units of 2^-9, as numbers below 2^-6 do in e4m3.
    summed = builder.fadd(builder.bitcast(size, _FLOAT), _FLOAT(2.0**14))
    small = builder.sub(builder.bitcast(summed, _WORD), _WORD(0x46800000))
    below = builder.icmp_unsigned("<", size, _WORD(0x3C800000))
    code = builder.select(below, small, normal)
    code = builder.select(is_nan, _WORD(0x7F), code)
    sign = builder.and_(builder.lshr(bits, _WORD(24)), _WORD(0x80))
    return builder.trunc(builder.or_(sign, code), byte)


def _like(value: Any, scalar: Any) -> Any:
    """A scalar type, or its vector type if ``value`` is a vector."""
    return ir.VectorType(scalar, LANES) if isinstance(value.type, ir.VectorType) else scalar


def constant(kind: Any, number: float) -> Any:
    """A number of a scalar type, or a vector type with it in each lane."""
    many = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [number] * LANES if many else number)


def fma(builder: Any) -> Any:
    """LLVM's fused multiply-add of vectors."""
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_LANES, [_LANES] * 3), f"llvm.fma.v{LANES}f32"
    )


def call(builder: Any, name: str, result: Any, *args: Any, fastmath: Sequence[str] = ()) -> Any:
    """Call one of LLVM's functions."""
    kind = ir.FunctionType(result, [each.type for each in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args, fastmath=fastmath)


def loop(
    builder: Any,
    first: Any,
    end: Any,
    step: int,
    started: list[Any],
    add: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """The sums after ``sums = add(at, sums)`` for ``at`` from ``first`` on, below ``end``."""
    before = builder.block
    test, body, after = (builder.append_basic_block(n) for n in ("test", "body", "after"))
    builder.branch(test)
    builder.position_at_end(test)
    at, *sums = phis = [builder.phi(value.type) for value in (first, *started)]
    builder.cbranch(builder.icmp_signed("<", at, end), body, after)
    builder.position_at_end(body)
    following = [builder.add(at, _LONG(step)), *add(at, sums)]
    for phi, early, late in zip(phis, (first, *started), following, strict=True):
        phi.add_incoming(early, before)
        phi.add_incoming(late, builder.block)
    builder.branch(test)
    builder.position_at_end(after)
    return sums


def everywhere(builder: Any, scalar: Any) -> Any:
    """A vector with the scalar in each lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    one = builder.insert_element(undefined, scalar, _WORD(0))
    return builder.shuffle_vector(one, undefined, first)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Any,
    rows: Any,
    width: Any,
    packed: Any,
    panels: Any,
    panel: Any,
    x: Any,
    row: Any,
    out: Any,
    first: Any,
    count: Any,
) -> Any:
    """``out += x @ panels`` for a literal number of rows from ``row`` on, and the outputs of a
    literal number of panels from ``panel`` on; inputs from ``first`` on, ``count`` of them.

    panels [*, inputs, LANES], x [*, inputs] fp32, out [*, panels * LANES] fp32. If ``packed``, a
    literal too, x has the rows of one tile after the other, each tile as [inputs, rows]. A tile of
    the first inputs is overwritten. The sums stay in registers, and each is in order of inputs for
    any tile, so a row's product does not depend on its neighbours.
    """
    if not all(isinstance(kind, types.IntegerLiteral) for kind in (rows, width, packed)):
        return None
    place = (types.intp,) * 2
    signature = types.void(rows, width, packed, panels, types.intp, x, types.intp, out, *place)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, panels_, panel_, x_, row_, out_, first_, count_ = args
        weights = context.make_array(panels)(context, builder, panels_)
        x_array = context.make_array(x)(context, builder, x_)
        into = context.make_array(out)(context, builder, out_)
        inputs = builder.extract_value(x_array.shape, 1)
        outputs = builder.extract_value(into.shape, 1)
        tile = _Tile(builder, panels.dtype, rows.literal_value if packed.literal_value else 1)
        lanes = _LONG(LANES)
        w_at, x_at, out_at = [], [], []
        for p in range(width.literal_value):
            number = builder.add(panel_, _LONG(p))
            start = builder.add(builder.mul(number, inputs), first_)
            w_at.append(builder.gep(weights.data, [builder.mul(start, lanes)]))
        for r in range(rows.literal_value):
            number = builder.add(row_, _LONG(r))
            x_at.append(builder.gep(x_array.data, [tile.x_start(row_, r, inputs, first_)]))
            for p in range(width.literal_value):
                column = builder.mul(builder.add(panel_, _LONG(p)), lanes)
                start = builder.add(builder.mul(number, outputs), column)
                out_at.append(builder.gep(into.data, [start]))
        fresh = builder.icmp_signed("==", first_, _LONG(0))
        started = [tile.start(at, fresh) for at in out_at]
        for at, total in zip(out_at, tile.sum(w_at, x_at, count_, started), strict=True):
            tile.store(at, total)
        return context.get_dummy_value()

    return signature, generate


class _Tile:
    """Emits the instructions of one tile."""

    def __init__(self, builder: Any, kind: Any, x_step: int) -> None:
        self.builder = builder
        self.kind = kind
        # The distance between inputs in x: the rows of a tile, if these are neighbours.
        self.x_step = x_step
        self.fma = fma(builder)

    def x_start(self, row: Any, r: int, inputs: Any, first: Any) -> Any:
        """The offset in x of input ``first`` of the r-th row after ``row``, the tile's first."""
        builder = self.builder
        if self.x_step == 1:
            return builder.add(builder.mul(builder.add(row, _LONG(r)), inputs), first)
        column = builder.add(builder.mul(first, _LONG(self.x_step)), _LONG(r))
        return builder.add(builder.mul(row, inputs), column)

    def start(self, out: Any, fresh: Any) -> Any:
        return self.builder.select(fresh, ir.Constant(_LANES, [0.0] * LANES), self._load(out))

    def store(self, out: Any, total: Any) -> None:
        stored = self.builder.store(total, self.builder.bitcast(out, _LANES.as_pointer()))
        stored.align = 4

    def sum(
        self, weights: list[Any], x_rows: list[Any], count: Any, started: list[Any]
    ) -> list[Any]:
        """All sums in registers: row by row, panel by panel."""
        builder = self.builder
        bulk = builder.and_(count, _LONG(-_UNROLLED))
        sums = self._loop(weights, x_rows, _LONG(0), bulk, _UNROLLED, started)
        return self._loop(weights, x_rows, bulk, count, 1, sums)

    def _loop(
        self,
        weights: list[Any],
        x_rows: list[Any],
        first: Any,
        end: Any,
        step: int,
        started: list[Any],
    ) -> list[Any]:
        """``step`` inputs at a time, from ``first`` to ``end``."""

        def add(at: Any, sums: list[Any]) -> list[Any]:
            for offset in range(step):
                place = self.builder.add(at, _LONG(offset))
                sums = self._add(weights, x_rows, place, sums)
            return sums

        return loop(self.builder, first, end, step, started, add)

    def _add(self, weights: list[Any], x_rows: list[Any], at: Any, sums: list[Any]) -> list[Any]:
        """Add the products of one input to each sum."""
        builder, column = self.builder, self.builder.mul(at, _LONG(LANES))
        wide = [widened(builder, self._load(builder.gep(w, [column])), self.kind) for w in weights]
        x_at = builder.mul(at, _LONG(self.x_step))
        rows = [everywhere(builder, builder.load(builder.gep(x, [x_at]))) for x in x_rows]
        pairs = ((w, x) for x in rows for w in wide)
        return [builder.call(self.fma, [*p, s]) for p, s in zip(pairs, sums, strict=True)]

    def _load(self, pointer: Any) -> Any:
        lanes = ir.VectorType(pointer.type.pointee, LANES)
        value = self.builder.load(self.builder.bitcast(pointer, lanes.as_pointer()))
        value.align = 2
        return value
