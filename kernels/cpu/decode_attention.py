"""Decode attention over the paged cache, read in place, for all decoding rows of a step.

Shapes as in ``operators.py``. A KV head of one row, with its query heads, is one unit of work.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange

from ..attention_metadata import AttentionParams, DecodeMetadata
from ..scaled import CachedKV
from .cached_kv import CachedArrays, cached_arrays, no_cached
from .callees import Callee, call_callee, callee_of
from .exponential import exp
from .jit import WIDE, array, kernel
from .score_weights import weigh_row
from .token_tiles import score_tokens, sum_tokens
from .vector import LANES, narrow, widen

# The window, the scale, the soft cap, and the sinks.
AttentionConstants = tuple[int, float, float, np.ndarray]
NO_WINDOW = 1 << 62
NO_SINKS = np.empty(0, np.float32)
# Query heads and tokens of a tile, whose sums stay in registers, and tokens of a tile of one head.
_HEADS, _TOKENS, _SINGLE = (2, 8, 16) if WIDE else (1, 4, 4)


def decode_attention(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    decodes: DecodeMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Fill the decoding rows of ``out``."""
    q, keys = array(q_THD), cached_arrays(keys_KND)
    attend(
        head_attention(q.dtype, keys[0].dtype),
        q,
        keys,
        cached_arrays(values_KND),
        array(decodes.rows),
        array(decodes.tables),
        decodes.block_size,
        *constants(params, sinks_H),
        array(out_THD),
    )


@cache
def head_attention(activations: np.dtype, cached: np.dtype) -> Callee:
    """``attend``'s work for a head, for these dtypes."""
    q, kv, ids = np.empty((0, 0, 0), activations), no_cached(cached), np.empty((0, 0), np.int32)
    return callee_of(_attend_head, q, kv, kv, ids, ids, 0, 0, NO_WINDOW, 0.0, 0.0, NO_SINKS, q)


def constants(params: AttentionParams, sinks_H: torch.Tensor | None) -> AttentionConstants:
    """The arguments of ``attend`` that a layer's steps have in common."""
    return (
        NO_WINDOW if params.window is None else params.window,
        params.scale,
        params.soft_cap or 0.0,
        NO_SINKS if sinks_H is None else array(sinks_H),
    )


@kernel(parallel=True)
def attend(
    attend_head: Callee,
    q: np.ndarray,
    keys: CachedArrays,
    values: CachedArrays,
    rows: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
    soft_cap: float,
    sinks: np.ndarray,
    out: np.ndarray,
) -> None:
    """``soft_cap`` 0 means none; ``sinks`` may be empty."""
    for number in prange(len(rows) * len(keys[0])):
        task = np.int64(number)  # prange is unsigned, and functions would be compiled for both
        arguments = (
            *(q, keys, values, rows, tables, task),
            *(block_size, window, scale, soft_cap, sinks, out),
        )
        call_callee(attend_head, arguments)


@kernel()
def _attend_head(
    q: np.ndarray,
    keys: CachedArrays,
    values: CachedArrays,
    rows: np.ndarray,
    tables: np.ndarray,
    task: int,
    block_size: int,
    window: int,
    scale: float,
    soft_cap: float,
    sinks: np.ndarray,
    out: np.ndarray,
) -> None:
    key_codes, key_scales, key_scale = keys
    value_codes, value_scales, value_scale = values
    heads, _, dim = key_codes.shape
    group = q.shape[1] // heads
    entry, head = rows[task // heads], task % heads
    row, table, end = entry[0], tables[entry[1]], entry[2]
    first = max(0, end - window)
    count = end - first
    filled = -(-count // LANES) * LANES
    places = np.empty((2, filled), np.int64)
    _find(table, end, block_size, window, dim, places[0])
    following = min(task + 1, len(rows) * heads - 1)
    later_row = rows[following // heads]
    _find(tables[later_row[1]], later_row[2], block_size, window, dim, places[1])
    weights = np.empty((group, filled), np.float32)
    queries = np.empty((group, dim), np.float32)
    for g in range(group):
        source, into = q[row, head * group + g], queries[g]
        for d in range(dim):
            into[d] = widen(source[d]) * np.float32(scale * key_scale)
    _score(queries, key_codes[head], places[0], weights, value_codes[head])
    if len(key_scales):
        _scale(weights, count, table, block_size, first, key_scales[head])
    if soft_cap > 0:
        for g in range(group):
            cap_scores(weights[g, :count], np.float32(soft_cap))
    # A sink is a token before the first one, without a value.
    m_i, l_i = np.full(group, -np.inf, np.float32), np.zeros(group, np.float32)
    if len(sinks):
        # One by one: an assignment of arrays compiles the text of an error for other shapes.
        for g in range(group):
            m_i[g], l_i[g] = sinks[head * group + g], 1
    for g in range(group):
        weigh_row(weights, g, 0, count, filled, m_i, l_i)
    if len(value_scales):
        _scale(weights, count, table, block_size, first, value_scales[head])
    later = key_codes[following % heads]
    _sum(weights, value_codes[head], places[0], count, queries, later, places[1])
    for g in range(group):
        source, target = queries[g], out[row, head * group + g]
        for d in range(dim):
            target[d] = narrow(source[d] / l_i[g] * np.float32(value_scale), target[d])


@kernel()
def _find(
    table: np.ndarray, end: int, block_size: int, window: int, dim: int, places: np.ndarray
) -> None:
    """Find the offsets in a head's cache of the tokens that a row attends to; the last one is
    repeated in the remaining ``places``."""
    token = max(0, end - window)
    count = min(end - token, len(places))
    number = 0
    while number < count:
        slot = table[token // block_size] * block_size + token % block_size
        for _ in range(min(block_size - token % block_size, count - number)):
            places[number] = slot * dim
            number, token, slot = number + 1, token + 1, slot + 1
    places[count:] = places[count - 1]


@kernel()
def _scale(
    numbers: np.ndarray,
    count: int,
    table: np.ndarray,
    block_size: int,
    first: int,
    scales: np.ndarray,
) -> None:
    """Multiply the numbers of each visible token, from ``first`` on, by its scale."""
    own = np.empty(count, np.float32)
    for t in range(count):
        token = first + t
        own[t] = scales[table[token // block_size] * block_size + token % block_size]
    for g in range(len(numbers)):
        for t in range(count):
            numbers[g, t] *= own[t]


@kernel()
def _score(
    q: np.ndarray, keys: np.ndarray, places: np.ndarray, scores: np.ndarray, values: np.ndarray
) -> None:
    group = len(q)
    paired = group // _HEADS * _HEADS
    for token in range(0, len(places), LANES):
        for g in range(0, paired, _HEADS):
            for t in range(token, token + LANES, _TOKENS):
                score_tokens(_HEADS, _TOKENS, q, g, keys, places, t, scores, values)
        for g in range(paired, group):
            for t in range(token, token + LANES, _SINGLE):
                score_tokens(1, _SINGLE, q, g, keys, places, t, scores, values)


@kernel()
def cap_scores(scores: np.ndarray, cap: np.float32) -> None:
    """``cap * tanh(score / cap)``. NaN is preserved, which ``exp`` alone would not do."""
    twice = np.float32(2) / cap
    for t in range(len(scores)):
        score = scores[t]
        capped = cap - np.float32(2) * cap / (exp(score * twice) + np.float32(1))
        scores[t] = capped + (score - score)


@kernel()
def _sum(
    weights: np.ndarray,
    values: np.ndarray,
    places: np.ndarray,
    count: int,
    out: np.ndarray,
    keys: np.ndarray,
    later: np.ndarray,
) -> None:
    """Also prefetches the next head's keys at ``later`` places."""
    group, dim = out.shape
    paired, whole = group // _HEADS * _HEADS, dim // (4 * LANES) * 4 * LANES
    for first in range(0, whole, 4 * LANES):
        for g in range(0, paired, _HEADS):
            sum_tokens(_HEADS, 4, weights, g, values, places, count, first, out, keys, later)
        for g in range(paired, group):
            sum_tokens(1, 4, weights, g, values, places, count, first, out, keys, later)
    for first in range(whole, dim, LANES):
        for g in range(group):
            sum_tokens(1, 1, weights, g, values, places, count, first, out, keys, later)
