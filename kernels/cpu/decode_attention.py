"""Decode attention over the paged cache, read in place, for all decoding rows of a step.

Shapes as in ``operators.py``. A KV head of one row, with its query heads, is one unit of work.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from ..attention_metadata import AttentionParams, DecodeMetadata
from .exponential import exp
from .jit import array, kernel
from .vector import LANES, narrow, widen

NO_WINDOW = 1 << 62
NO_SINKS = np.empty(0, np.float32)


def decode_attention(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    decodes: DecodeMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Fill the decoding rows of ``out``."""
    _attend(
        array(q_THD),
        array(keys_KND),
        array(values_KND),
        decodes.table.numpy(),
        decodes.block_size,
        NO_WINDOW if params.window is None else params.window,
        params.scale,
        params.soft_cap or 0.0,
        NO_SINKS if sinks_H is None else array(sinks_H),
        array(out_THD),
    )


@kernel(parallel=True)
def _attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    rows: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
    soft_cap: float,
    sinks: np.ndarray,
    out: np.ndarray,
) -> None:
    """Without a soft cap it is zero, and without sinks there is none of them."""
    heads = keys.shape[0]
    group = q.shape[1] // heads
    for task in prange(len(rows) * heads):
        entry, head = rows[task // heads], task % heads
        row, end, table = entry[0], entry[1], entry[2:]
        first = max(0, end - window)
        weights = np.empty((group, end - first), np.float32)
        queries = np.empty((group, q.shape[2]), np.float32)
        for g in range(group):
            for d in range(q.shape[2]):
                queries[g, d] = widen(q[row, head * group + g, d]) * np.float32(scale)
        _score(queries, keys[head], table, block_size, first, weights)
        if soft_cap > 0:
            for g in range(group):
                cap_scores(weights[g], np.float32(soft_cap))
        _softmax(weights, sinks[head * group : (head + 1) * group])
        _sum(weights, values[head], table, block_size, first, queries)
        for g in range(group):
            into = out[row, head * group + g]
            for d in range(len(into)):
                into[d] = narrow(queries[g, d], into[d])


@kernel()
def _score(
    q: np.ndarray,
    keys: np.ndarray,
    table: np.ndarray,
    block_size: int,
    first: int,
    scores: np.ndarray,
) -> None:
    for token in range(first, first + scores.shape[1]):
        key = keys[table[token // block_size] * block_size + token % block_size]
        for g in range(q.shape[0]):
            query, total = q[g], np.float32(0)
            for d in range(len(key)):
                total += query[d] * widen(key[d])
            scores[g, token - first] = total


@kernel()
def cap_scores(scores: np.ndarray, cap: np.float32) -> None:
    """``cap * tanh(score / cap)``. What is no number stays none, which ``exp`` does not heed."""
    twice = np.float32(2) / cap
    for t in range(len(scores)):
        score = scores[t]
        capped = cap - np.float32(2) * cap / (exp(score * twice) + np.float32(1))
        scores[t] = capped + (score - score)


@kernel()
def _softmax(scores: np.ndarray, sinks: np.ndarray) -> None:
    lanes = np.empty(LANES, np.float32)
    for g in range(scores.shape[0]):
        row = scores[g]
        least = sinks[g] if len(sinks) else np.float32(-np.inf)
        highest = maximum_of(row, least, lanes)
        total = exp(least - highest) if len(sinks) else np.float32(0)
        for t in range(len(row)):
            row[t] = exp(row[t] - highest)
            total += row[t]
        scale = np.float32(1) / total
        for t in range(len(row)):
            row[t] *= scale


@kernel()
def _sum(
    weights: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    block_size: int,
    first: int,
    out: np.ndarray,
) -> None:
    out[:] = 0
    for token in range(first, first + weights.shape[1]):
        value = values[table[token // block_size] * block_size + token % block_size]
        for g in range(out.shape[0]):
            into, weight = out[g], weights[g, token - first]
            for d in range(len(value)):
                into[d] += weight * widen(value[d])


@kernel()
def maximum_of(row: np.ndarray, before: np.float32, lanes: np.ndarray) -> np.float32:
    """The maximum of the row and ``before``, lane by lane: a running maximum that must preserve NaN
    is not vectorised."""
    lanes[:] = before
    whole = len(row) // LANES * LANES
    for t in range(0, whole, LANES):
        part = row[t : t + LANES]
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], part[lane])
    highest = before
    for lane in range(LANES):
        highest = max(highest, lanes[lane])
    for t in range(whole, len(row)):
        highest = max(highest, row[t])
    return highest
