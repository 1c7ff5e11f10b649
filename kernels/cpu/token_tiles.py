"""LLVM intrinsics for attention of few queries, which read tokens in place in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .vector import LANES, call, constant, everywhere, fma, loop, widened

_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_FLOAT, LANES)
# Bytes of a cache line.
_LINE = 64


@intrinsic(prefer_literal=True)
def score_tokens(
    typing: Any,
    heads: Any,
    count: Any,
    q: Any,
    head: Any,
    keys: Any,
    places: Any,
    token: Any,
    scores: Any,
    values: Any,
) -> Any:
    """``scores[head + h, token + t] = q[head + h] . keys[places[token + t]]`` for literal numbers
    of heads and of tokens, whose product is at most ``LANES``.

    q [*, D] fp32, keys [*, D], places int64: the offset of a token's key in elements. For the first
    head, the tokens' values [*, D] are prefetched, which are read next.
    """
    if not all(isinstance(kind, types.IntegerLiteral) for kind in (heads, count)):
        return None
    at = types.intp
    signature = types.void(heads, count, q, at, keys, places, at, scores, values)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, q_, head_, keys_, places_, token_, scores_, values_ = args
        arrays = (q, q_), (keys, keys_), (places, places_), (scores, scores_), (values, values_)
        views = [context.make_array(kind)(context, builder, value) for kind, value in arrays]
        dim = builder.extract_value(views[0].shape, 1)
        width = builder.extract_value(views[3].shape, 1)
        queries, targets = [], []
        for h in range(heads.literal_value):
            number = builder.add(head_, _LONG(h))
            queries.append(builder.gep(views[0].data, [builder.mul(number, dim)]))
            start = builder.add(builder.mul(number, width), token_)
            targets.append(builder.gep(views[3].data, [start]))
        starts = [
            _load_place(builder, views[2].data, builder.add(token_, _LONG(t)))
            for t in range(count.literal_value)
        ]
        rows, later = ([builder.gep(views[n].data, [start]) for start in starts] for n in (1, 4))
        with builder.if_then(builder.icmp_signed("==", head_, _LONG(0))):
            _request(builder, later, dim)

        def add(at: Any, lanes: Any, sums: list[Any]) -> list[Any]:
            wide = [_load(builder, row, at, lanes, keys.dtype) for row in rows]
            factors = [_load(builder, query, at, lanes, types.float32) for query in queries]
            pairs = ((x, w) for x in factors for w in wide)
            emit = fma(builder)
            return [builder.call(emit, [*p, s]) for p, s in zip(pairs, sums, strict=True)]

        zeros = [constant(_LANES, 0.0)] * (len(queries) * len(rows))
        sums = _over_dim(builder, dim, zeros, add)
        total = _totals(builder, sums)
        for h, into in enumerate(targets):
            mine = [h * len(rows) + t for t in range(len(rows))]
            part = _lanes(builder, total, mine)
            builder.store(part, builder.bitcast(into, part.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def sum_tokens(
    typing: Any,
    heads: Any,
    width: Any,
    weights: Any,
    head: Any,
    values: Any,
    places: Any,
    count: Any,
    first: Any,
    out: Any,
    keys: Any,
    later: Any,
) -> Any:
    """``out[head + h, first + d] = sum(weights[head + h, t] * values[places[t] + first + d])`` over
    ``count`` tokens, for a literal number of heads, and a literal number of registers from
    ``first`` on, of which those beyond the last dimension are neither read nor written.

    weights [*, T] fp32, values [*, D], out [*, D] fp32; places as in ``score_tokens``. For the
    first head, the tokens at ``later`` places in ``keys`` are prefetched.
    """
    if not all(isinstance(kind, types.IntegerLiteral) for kind in (heads, width)):
        return None
    at = types.intp
    signature = types.void(heads, width, weights, at, values, places, at, at, out, keys, later)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, weights_, head_, values_, places_, count_, first_, out_, keys_, later_ = args
        arrays = (
            *((weights, weights_), (values, values_), (places, places_), (out, out_)),
            *((keys, keys_), (later, later_)),
        )
        views = [context.make_array(kind)(context, builder, value) for kind, value in arrays]
        tokens = builder.extract_value(views[0].shape, 1)
        dim = builder.extract_value(views[3].shape, 1)
        starts, into = [], []
        for h in range(heads.literal_value):
            number = builder.add(head_, _LONG(h))
            starts.append(builder.gep(views[0].data, [builder.mul(number, tokens)]))
            start = builder.add(builder.mul(number, dim), first_)
            into.append(builder.gep(views[3].data, [start]))
        # Only one register may reach beyond the last dimension.
        registers = width.literal_value
        lanes = builder.sub(dim, first_) if registers == 1 else None
        steps = [_LONG(LANES * r) for r in range(registers)]
        asks = builder.icmp_signed("==", head_, _LONG(0))

        def add(token: Any, sums: list[Any]) -> list[Any]:
            place = builder.add(_load_place(builder, views[2].data, token), first_)
            row = builder.gep(views[1].data, [place])
            with builder.if_then(asks):
                place = builder.add(_load_place(builder, views[5].data, token), first_)
                _request(builder, [builder.gep(views[4].data, [place])], _LONG(registers * LANES))
            wide = [_load(builder, row, step, lanes, values.dtype) for step in steps]
            factors = [everywhere(builder, builder.load(builder.gep(w, [token]))) for w in starts]
            pairs = ((x, w) for x in factors for w in wide)
            emit = fma(builder)
            return [builder.call(emit, [*p, s]) for p, s in zip(pairs, sums, strict=True)]

        zeros = [constant(_LANES, 0.0)] * (len(starts) * registers)
        sums = loop(builder, _LONG(0), count_, 1, zeros, add)
        places_of = [(row, step) for row in into for step in steps]
        for (row, step), total in zip(places_of, sums, strict=True):
            _store(builder, total, row, step, lanes)
        return context.get_dummy_value()

    return signature, generate


def _load_place(builder: Any, places: Any, token: Any) -> Any:
    return builder.load(builder.gep(places, [token]))


def _request(builder: Any, rows: list[Any], count: Any) -> None:
    """Prefetch ``count`` elements of each row, or a few more, to the L2 cache."""

    def add(at: Any, sums: list[Any]) -> list[Any]:
        for row in rows:
            place = builder.bitcast(builder.gep(row, [at]), ir.IntType(8).as_pointer())
            arguments = (place, _WORD(0), _WORD(2), _WORD(1))
            call(builder, "llvm.prefetch.p0", ir.VoidType(), *arguments)
        return sums

    width = rows[0].type.pointee.width // 8 if isinstance(rows[0].type.pointee, ir.IntType) else 4
    loop(builder, _LONG(0), count, _LINE // width, [], add)


def _over_dim(builder: Any, dim: Any, started: list[Any], add: Any) -> list[Any]:
    """The sums over all dimensions; the last register may be partly filled."""
    whole = builder.and_(dim, _LONG(-LANES))
    sums = loop(builder, _LONG(0), whole, LANES, started, lambda at, sums: add(at, None, sums))
    before = builder.block
    part, after = builder.append_basic_block("part"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", whole, dim), part, after)
    builder.position_at_end(part)
    added = add(whole, builder.sub(dim, whole), sums)
    ended = builder.block
    builder.branch(after)
    builder.position_at_end(after)
    merged = []
    for early, late in zip(sums, added, strict=True):
        phi = builder.phi(_LANES)
        phi.add_incoming(early, before)
        phi.add_incoming(late, ended)
        merged.append(phi)
    return merged


def _mask(builder: Any, lanes: Any) -> Any:
    numbers = ir.Constant(ir.VectorType(_WORD, LANES), list(range(LANES)))
    count = everywhere(builder, builder.trunc(lanes, _WORD))
    return builder.icmp_signed("<", numbers, count)


def _load(builder: Any, row: Any, at: Any, lanes: Any, kind: Any) -> Any:
    """A register of a row in fp32, with zeros from ``lanes`` on unless that is ``None``."""
    place = builder.gep(row, [at])
    vector = ir.VectorType(place.type.pointee, LANES)
    pointer = builder.bitcast(place, vector.as_pointer())
    if lanes is None:
        value = builder.load(pointer)
        value.align = 1
    else:
        name = "f32" if kind == types.float32 else f"i{kind.bitwidth}"
        value = call(
            builder,
            f"llvm.masked.load.v{LANES}{name}.p0",
            vector,
            *(pointer, _WORD(1), _mask(builder, lanes), ir.Constant(vector, None)),
        )
    return widened(builder, value, kind)


def _store(builder: Any, value: Any, row: Any, at: Any, lanes: Any) -> None:
    pointer = builder.bitcast(builder.gep(row, [at]), _LANES.as_pointer())
    if lanes is None:
        builder.store(value, pointer).align = 4
    else:
        name = f"llvm.masked.store.v{LANES}f32.p0"
        arguments = (value, pointer, _WORD(4), _mask(builder, lanes))
        call(builder, name, ir.VoidType(), *arguments)


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """The sum of the lanes of each vector; the number of vectors is a power of two."""
    count = len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_add_neighbours(builder, *pair) for pair in pairs]
    total = vectors[0]
    while total.type.count > count:
        places = range(total.type.count)
        halves = (_lanes(builder, total, places[first::2]) for first in range(2))
        total = builder.fadd(*halves)
    return total


def _add_neighbours(builder: Any, left: Any, right: Any) -> Any:
    """The sums of neighbouring lanes of two vectors, the left vector first."""
    kind = ir.VectorType(_WORD, LANES)
    places = range(2 * LANES)
    halves = (
        builder.shuffle_vector(left, right, ir.Constant(kind, list(places[first::2])))
        for first in range(2)
    )
    return builder.fadd(*halves)


def _lanes(builder: Any, vector: Any, places: Sequence[int]) -> Any:
    """Some lanes of a vector."""
    selection = ir.Constant(ir.VectorType(_WORD, len(places)), list(places))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), selection)
