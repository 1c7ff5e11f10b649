"""The softmax of rows of scores, a register at a time. The compiler would vectorise a loop of
variable length only in part, and the remainder would take as long as the rest."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .exponential import HIGH, LOG2_E, LOW, MIN_X, POLYNOMIAL
from .vector import LANES, call, constant, everywhere, fma, loop

_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_LANES, _NUMBERS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
# 2^23 and half of it: the last bit of a sum with it is one.
_ROUNDING = 12582912.0


@intrinsic
def weigh_row(
    typing: Any, scores: Any, row: Any, first: Any, last: Any, end: Any, highest: Any, totals: Any
) -> Any:
    """Turn a row's scores from ``first`` to ``last`` into weights, and its others before ``end``
    into zeros. Returns the factor for sums with the weights of earlier tokens.

    scores [*, N] fp32, where N is a multiple of ``LANES``; highest and totals [*] fp32 are kept:
    the highest score so far, to which the weights are relative, and the sum of the weights. NaN is
    preserved.
    """
    at = types.intp
    signature = types.float32(scores, at, at, at, at, highest, totals)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, first, last, end, _, _ = args
        matrix, m_array, sums = (
            context.make_array(signature.args[at])(context, builder, args[at]) for at in (0, 5, 6)
        )
        start = builder.mul(row, builder.extract_value(matrix.shape, 1))
        begin, stop = _down(builder, first), _up(builder, last)
        highest_at, total_at = (builder.gep(each.data, [row]) for each in (m_array, sums))
        before = builder.load(highest_at)
        low, high = (everywhere(builder, builder.trunc(each, _WORD)) for each in (first, last))

        def place(at: Any) -> Any:
            element = builder.gep(matrix.data, [builder.add(start, at)])
            return builder.bitcast(element, _LANES.as_pointer())

        def visible(at: Any) -> Any:
            lanes = ir.Constant(_NUMBERS, list(range(LANES)))
            numbers = builder.add(lanes, everywhere(builder, builder.trunc(at, _WORD)))
            after = builder.icmp_signed(">=", numbers, low)
            return builder.and_(after, builder.icmp_signed("<", numbers, high))

        def find(at: Any, largest: list[Any]) -> list[Any]:
            values = builder.select(visible(at), _load(builder, place(at)), largest[0])
            higher = builder.fcmp_ordered(">", values, largest[0])
            return [builder.select(higher, values, largest[0])]

        def weigh(at: Any, total: list[Any]) -> list[Any]:
            weights = _exponential(builder, builder.fsub(_load(builder, place(at)), tops))
            weights = builder.select(visible(at), weights, nothing)
            builder.store(weights, place(at)).align = 4
            return [builder.fadd(total[0], weights)]

        def clear(at: Any, sums: list[Any]) -> list[Any]:
            builder.store(nothing, place(at)).align = 4
            return sums

        nothing = constant(_LANES, 0.0)
        [largest] = loop(builder, begin, stop, LANES, [everywhere(builder, before)], find)
        top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _FLOAT, largest)
        tops = everywhere(builder, top)
        grows = builder.fcmp_ordered(">", top, before)
        factors = _exponential(builder, builder.fsub(everywhere(builder, before), tops))
        factor = builder.extract_element(factors, _WORD(0))
        factor = builder.select(grows, factor, ir.Constant(_FLOAT, 1.0))
        [total] = loop(builder, begin, stop, LANES, [nothing], weigh)
        loop(builder, _LONG(0), begin, LANES, [], clear)
        loop(builder, stop, end, LANES, [], clear)
        scaled_total = builder.fmul(builder.load(total_at), factor)
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        added = call(builder, name, _FLOAT, scaled_total, total, fastmath=("reassoc",))
        builder.store(added, total_at)
        builder.store(top, highest_at)
        return factor

    return signature, generate


def _down(builder: Any, number: Any) -> Any:
    return builder.and_(number, _LONG(-LANES))


def _up(builder: Any, number: Any) -> Any:
    return _down(builder, builder.add(number, _LONG(LANES - 1)))


def _load(builder: Any, place: Any) -> Any:
    value = builder.load(place)
    value.align = 4
    return value


def _exponential(builder: Any, x: Any) -> Any:
    """``exponential.exp`` of a register of numbers that are not positive."""

    def fused(left: Any, right: Any, added: Any) -> Any:
        parts = (
            each if isinstance(each, ir.Value) else constant(_LANES, float(each))
            for each in (left, right, added)
        )
        return builder.call(multiply_add, list(parts))

    multiply_add, min_x = fma(builder), constant(_LANES, float(MIN_X))
    x = builder.select(builder.fcmp_ordered("<", x, min_x), min_x, x)
    shifted = fused(x, LOG2_E, _ROUNDING)
    n = builder.fsub(shifted, constant(_LANES, _ROUNDING))
    r = fused(n, -LOW, fused(n, -HIGH, x))
    p = fused(POLYNOMIAL[0], r, POLYNOMIAL[1])
    for coefficient in POLYNOMIAL[2:]:
        p = fused(p, r, coefficient)
    value = fused(builder.fmul(r, r), p, builder.fadd(r, constant(_LANES, 1.0)))
    # The last bits of the shifted number are n, which becomes an exponent.
    exponent = builder.add(builder.bitcast(shifted, _NUMBERS), constant(_NUMBERS, 127))
    power = builder.bitcast(builder.shl(exponent, constant(_NUMBERS, 23)), _LANES)
    return builder.fmul(value, power)
