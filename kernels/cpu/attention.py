"""Decode attention over the paged cache, read where it lies, for all sequences of a step at once.

Shapes as in ``reference.py``. A step's decoding sequences are numbered; of each, a KV head with its
query heads is one piece of work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange

from ..reference import Context
from .exponential import exp
from .jit import array, kernel
from .vector import widen

_NO_WINDOW = 1 << 62


class Decoding:
    """Which rows of a step are a sequence's only one, and where their contexts lie."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        decoding = [context for context in contexts if context.count == 1]
        self.others = [context for context in contexts if context.count != 1]
        self.rows = np.array([context.rows.start for context in decoding], dtype=np.int64)
        self._ends = np.array([context.end for context in decoding], dtype=np.int64)
        lengths = np.array([len(context.blocks) for context in decoding], dtype=np.int64)
        self._firsts = np.cumsum(lengths) - lengths
        tables = [block for context in decoding for block in context.blocks]
        self._tables = np.array(tables, dtype=np.int64)
        self._block_size = decoding[0].block_size if decoding else 1

    def attend(
        self,
        q_THD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        window: int | None,
        scale: float | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Fill these rows of ``out``."""
        _decode(
            array(q_THD),
            array(keys_KND),
            array(values_KND),
            self.rows,
            self._tables,
            self._firsts,
            self._ends,
            self._block_size,
            _NO_WINDOW if window is None else window,
            q_THD.shape[-1] ** -0.5 if scale is None else scale,
            out_THD.numpy(),
        )


@kernel(parallel=True)
def _decode(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    rows: np.ndarray,
    tables: np.ndarray,
    firsts: np.ndarray,
    ends: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
    out: np.ndarray,
) -> None:
    heads = keys.shape[0]
    group = q.shape[1] // heads
    for task in prange(len(rows) * heads):
        sequence, head = task // heads, task % heads
        row, end = rows[sequence], ends[sequence]
        table = tables[firsts[sequence] :]
        mine = slice(head * group, (head + 1) * group)
        first = max(0, end - window)
        weights = np.empty((group, end - first), np.float32)
        _score(q[row, mine], keys[head], table, block_size, first, np.float32(scale), weights)
        _softmax(weights)
        _sum(weights, values[head], table, block_size, first, out[row, mine])


@kernel()
def _score(
    q: np.ndarray,
    keys: np.ndarray,
    table: np.ndarray,
    block_size: int,
    first: int,
    scale: np.float32,
    scores: np.ndarray,
) -> None:
    for token in range(first, first + scores.shape[1]):
        key = keys[table[token // block_size] * block_size + token % block_size]
        for g in range(q.shape[0]):
            query, total = q[g], np.float32(0)
            for d in range(len(key)):
                total += query[d] * widen(key[d])
            scores[g, token - first] = total * scale


@kernel()
def _softmax(scores: np.ndarray) -> None:
    for g in range(scores.shape[0]):
        row = scores[g]
        highest = np.float32(-np.inf)
        for t in range(len(row)):
            highest = max(highest, row[t])
        total = np.float32(0)
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
