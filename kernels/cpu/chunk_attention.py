"""Attention of the rows of a chunk over the paged cache, without materialising their scores.

Shapes as in ``operators.py``. Blocks of tokens are attended one after the other, with the running
maximum and sum of each row (Dao et al. 2022, "FlashAttention"). Both products of a block are
``multiply_tile``'s, on panels of K and V that all query heads of a KV head share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numba import prange

from ..attention_metadata import AttentionParams, SequenceMetadata
from ..reference.attention import paged_attention
from ..scaled import CachedKV
from .cached_kv import CachedArrays, cached_arrays, no_cached
from .callees import Callee, call_callee, callee_of
from .decode_attention import NO_SINKS, NO_WINDOW, cap_scores, constants
from .jit import WIDE, array, kernel
from .score_weights import weigh_row
from .vector import LANES, multiply_tile, narrow, widen, widen_scaled

# Rows and panels whose sums stay in registers. AVX-512 has room for more rows, but the general
# registers, for the rows' addresses, run out.
_ROWS, _WIDTH = (8, 2) if WIDE else (6, 1)
# Rows of a task: their common part of a panel stays in the L1 cache.
_SHARE = 4 * _ROWS
# Tokens of a block, whose K and V fit the L2 cache.
_TOKENS = 256


def chunk_attention(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    sequences: Sequence[SequenceMetadata],
    params: AttentionParams,
    out: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like the reference's ``paged_attention``, which computes windows that include later
    tokens."""
    if not (params.causal or params.window is None):
        return paged_attention(
            q_THD, keys_KND, values_KND, sequences, params, out=out, sinks_H=sinks_H
        )
    out = q_THD.new_empty(q_THD.shape) if out is None else out  # contiguous, even if q is not
    q, keys, values = array(q_THD), cached_arrays(keys_KND), cached_arrays(values_KND)
    panels = keys[0][:0, 0, 0] if keys_KND.dtype.itemsize > 1 else np.empty(0, np.float32)
    out_array, numbers = array(out), constants(params, sinks_H)
    callees = (
        _piece_packing(keys[0].dtype, panels.dtype),
        _share_attention(q.dtype, panels.dtype),
    )
    for sequence in sequences:
        _attend(
            *callees,
            q[sequence.rows],
            keys,
            values,
            panels,
            np.asarray(sequence.block_table, np.int32),
            sequence.block_size,
            sequence.start,
            *numbers,
            params.causal,
            out_array[sequence.rows],
        )
    return out


@cache
def _piece_packing(cached: np.dtype, packed: np.dtype) -> Callee:
    """``_pack``'s work for a panel of a head, for these dtypes."""
    kv, panels = no_cached(cached), np.empty((0, 0, 0, 0, 0), packed)
    return callee_of(_pack_piece, kv, kv, np.empty(0, np.int32), 0, 0, 0, panels, panels, 0, 0)


@cache
def _share_attention(activations: np.dtype, packed: np.dtype) -> Callee:
    """``_attend``'s work for some rows of a head, for these dtypes."""
    q, panels = np.empty((0, 0, 0), activations), np.empty((0, 0, 0, 0), packed)
    numbers = NO_WINDOW, np.float32(0), np.float32(0)
    return callee_of(_attend_share, q, 0, 0, panels, panels, 0, 0, *numbers, NO_SINKS, True, q)


@kernel(parallel=True)
def _pack(
    pack_piece: Callee,
    keys: CachedArrays,
    values: CachedArrays,
    table: np.ndarray,
    block_size: int,
    first: int,
    end: int,
    keys_packed: np.ndarray,
    values_packed: np.ndarray,
) -> None:
    """Pack the tokens from ``first`` on: K [heads, blocks, tokens / LANES, D, LANES] and V [heads,
    blocks, D / LANES, tokens, LANES]; codes as the numbers that they stand for."""
    heads, blocks, panels, _, lanes = keys_packed.shape
    # Only the panels that a tile may read are written.
    count = (end - first + lanes - 1) // lanes
    count = min(blocks * panels, (count + _WIDTH - 1) // _WIDTH * _WIDTH)
    for piece in prange(heads * count):
        head, panel = np.int64(piece) // count, np.int64(piece) % count  # as in decode_attention.py
        arguments = (
            *(keys, values, table, block_size, first, end),
            *(keys_packed, values_packed, head, panel),
        )
        call_callee(pack_piece, arguments)


@kernel()
def _pack_piece(
    keys: CachedArrays,
    values: CachedArrays,
    table: np.ndarray,
    block_size: int,
    first: int,
    end: int,
    keys_packed: np.ndarray,
    values_packed: np.ndarray,
    head: int,
    panel_of_all: int,
) -> None:
    """Pack the tokens of a panel of K."""
    key_codes, key_scales, key_scale = keys
    value_codes, value_scales, value_scale = values
    _, _, panels, dim, lanes = keys_packed.shape
    block, key_panel = panel_of_all // panels, panel_of_all % panels
    for lane in range(lanes):
        t = key_panel * lanes + lane
        token = first + panel_of_all * lanes + lane
        key_into = keys_packed[head, block, key_panel]
        if token < end:
            slot = table[token // block_size] * block_size + token % block_size
            key, value = key_codes[head, slot], value_codes[head, slot]
            of_key, of_value = np.float32(key_scale), np.float32(value_scale)
            if len(key_scales):
                of_key, of_value = key_scales[head, slot], value_scales[head, slot]
            for d in range(dim):
                key_into[d, lane] = widen_scaled(key[d], of_key, key_into[d, lane])
            for panel in range((dim + lanes - 1) // lanes):
                begin = panel * lanes
                part, into = value[begin : begin + lanes], values_packed[head, block, panel, t]
                for d in range(len(part)):
                    into[d] = widen_scaled(part[d], of_value, into[d])
        else:
            for d in range(dim):
                key_into[d, lane] = 0


@kernel(parallel=True)
def _attend(
    pack_piece: Callee,
    attend_share: Callee,
    q: np.ndarray,
    keys: CachedArrays,
    values: CachedArrays,
    panels: np.ndarray,
    table: np.ndarray,
    block_size: int,
    start: int,
    window: int,
    scale: float,
    soft_cap: float,
    sinks: np.ndarray,
    causal: bool,
    out: np.ndarray,
) -> None:
    """A sequence's rows, the first of which is at ``start``. ``panels`` has the dtype of those of
    K and V. Without a soft cap it is zero, and without sinks there is none of them."""
    heads, _, dim = keys[0].shape
    group = q.shape[1] // heads
    first, end = max(0, start - window + 1), start + len(q)
    blocks = (end - first + _TOKENS - 1) // _TOKENS
    wide = (dim + _WIDTH * LANES - 1) // (_WIDTH * LANES) * _WIDTH
    key_panels = np.empty((heads, blocks, _TOKENS // LANES, dim, LANES), panels.dtype)
    value_panels = np.empty((heads, blocks, wide, _TOKENS, LANES), panels.dtype)
    _pack(pack_piece, keys, values, table, block_size, first, end, key_panels, value_panels)
    shares = (len(q) * group + _SHARE - 1) // _SHARE
    for piece in prange(heads * shares):
        head, turn = (
            np.int64(piece) // shares,
            np.int64(piece) % shares,
        )  # as in decode_attention.py
        # Later rows attend to more tokens, so each thread gets equally many early and late rows.
        share = turn // 2 if turn % 2 == 0 else shares - 1 - turn // 2
        arguments = (
            *(q, head * group, group, key_panels[head], value_panels[head]),
            *(share * _SHARE, start - first, window),
            *(np.float32(scale), np.float32(soft_cap), sinks, causal, out),
        )
        call_callee(attend_share, arguments)


@kernel()
def _attend_share(
    q_THD: np.ndarray,
    head: int,
    group: int,
    keys: np.ndarray,
    values: np.ndarray,
    begin: int,
    start: int,
    window: int,
    scale: np.float32,
    soft_cap: np.float32,
    sinks: np.ndarray,
    causal: bool,
    out_THD: np.ndarray,
) -> None:
    """Attend for up to ``_SHARE`` rows from ``begin`` on, of the query heads of one KV head, which
    are ``group`` from ``head`` on, and where those of a token are neighbours. ``start`` is the
    first token's position within the panels."""
    dim = q_THD.shape[2]
    rows = min(_SHARE, len(q_THD) * group - begin)
    x = np.zeros((_SHARE, dim), np.float32)
    for r in range(rows):
        source = q_THD[(begin + r) // group, head + (begin + r) % group]
        for d in range(dim):
            x[r, d] = widen(source[d]) * scale
    scores = np.empty((_SHARE, _TOKENS), np.float32)
    m_i = np.full(_SHARE, -np.inf, np.float32)
    l_i = np.zeros(_SHARE, np.float32)
    if len(sinks):  # a token before the first one, without a value
        for r in range(rows):
            m_i[r], l_i[r] = sinks[head + (begin + r) % group], 1
    acc = np.zeros((_SHARE, values.shape[1] * LANES), np.float32)
    added = np.empty_like(acc)
    whole = start + len(q_THD)
    end = start + (begin + rows - 1) // group + 1 if causal else whole
    for block in range(max(0, start + begin // group - window + 1) // _TOKENS, len(keys)):
        base = block * _TOKENS
        tokens = min(_TOKENS, end - base)
        if tokens <= 0:
            break
        for panel in range(0, (tokens + LANES - 1) // LANES, _WIDTH):
            for r in range(0, rows, _ROWS):
                if panel * LANES < _visible(begin, r, rows, group, start, whole, causal) - base:
                    multiply_tile(_ROWS, _WIDTH, 0, keys[block], panel, x, r, scores, 0, dim)
        for r in range(rows):
            visible = (start + (begin + r) // group + 1 if causal else whole) - base
            last = max(0, min(tokens, visible))
            first = min(last, max(0, visible - window))  # a later row's window may begin behind
            if soft_cap > 0 and last > first:
                cap_scores(scores[r, first:last], soft_cap)
            factor = weigh_row(scores, r, first, last, tokens, m_i, l_i)
            if factor != 1:
                for d in range(acc.shape[1]):
                    acc[r, d] *= factor
        for panel in range(0, values.shape[1], _WIDTH):
            for r in range(0, rows, _ROWS):
                visible = _visible(begin, r, rows, group, start, whole, causal) - base
                count = max(0, min(tokens, visible))
                multiply_tile(_ROWS, _WIDTH, 0, values[block], panel, scores, r, added, 0, count)
        for r in range(rows):
            for d in range(dim):
                acc[r, d] += added[r, d]
    for r in range(rows):
        into = out_THD[(begin + r) // group, head + (begin + r) % group]
        for d in range(dim):
            into[d] = narrow(acc[r, d] / l_i[r], into[d])


@kernel()
def _visible(
    begin: int, row: int, rows: int, group: int, start: int, whole: int, causal: bool
) -> int:
    """The number of tokens visible to the last row of a tile."""
    last = begin + min(row + _ROWS, rows) - 1
    return start + last // group + 1 if causal else whole
