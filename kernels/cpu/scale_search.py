"""Compiled searches for scales of quantised weights, bit-identical to ``block_encoding``.

G groups of n values are searched at a time, each a lane: arrays are [n, G], so that loops over
lanes are vectorised while each group's sums keep their order.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from ..block_encoding import SUMS, Searches
from .jit import array, kernel

_LANES = 64
# Repeated here, because the code on disk is versioned by this folder's sources.
_SUMS = 4
assert _SUMS == SUMS
_ZERO, _ONE = np.float32(0), np.float32(1)
# The neutral element of sums: even the sign of a zero is preserved.
_NOTHING = np.float32(-0.0)


def with_minimum(
    x: torch.Tensor,
    importance: torch.Tensor,
    max_code: int,
    first: float,
    steps: int,
    *,
    absolute: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``block_encoding.Searches``."""
    scales, minimums = x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])
    factors = np.array([first + 0.1 * step + max_code for step in range(steps + 1)], np.float32)
    values, weights = _groups(x), _groups(importance)
    into = array(scales).reshape(-1), array(minimums).reshape(-1)
    _with_minimum(values, weights, np.float32(max_code), factors, absolute, *into)
    return scales, minimums


def symmetric(x: torch.Tensor, max_code: int) -> torch.Tensor:
    """See ``block_encoding.Searches``."""
    scales = x.new_empty(x.shape[:-1])
    steps = (0, *range(-9, 0), *range(1, 10))
    factors = np.array([-(max_code + 0.1 * step) for step in steps], np.float32)
    _symmetric(_groups(x), np.float32(max_code), factors, array(scales).reshape(-1))
    return scales


def one_by_one(x: torch.Tensor, max_code: int) -> torch.Tensor:
    """See ``block_encoding.Searches``."""
    scales = x.new_empty(x.shape[:-1])
    _one_by_one(_groups(x), np.float32(max_code), array(scales).reshape(-1))
    return scales


COMPILED = Searches(with_minimum, symmetric, one_by_one)


def _groups(x: torch.Tensor) -> np.ndarray:
    return array(x).reshape(-1, x.shape[-1])


@kernel(exact=True)
def _take(x: np.ndarray, begin: int) -> np.ndarray:
    """Groups as lanes; missing groups are zero."""
    count, n = min(_LANES, len(x) - begin), x.shape[1]
    values = np.zeros((n, _LANES), np.float32)
    for lane in range(count):
        for i in range(n):
            values[i, lane] = x[begin + lane, i]
    return values


@kernel(exact=True)
def _joined(sums: np.ndarray, total: np.ndarray) -> None:
    """``block_encoding.sum_of``, from the sums [_SUMS, G] of every _SUMS-th term."""
    for lane in range(_LANES):
        total[lane] = (sums[0, lane] + sums[2, lane]) + (sums[1, lane] + sums[3, lane])


@kernel(exact=True)
def _inverse(x: np.float32) -> np.float32:
    return _ZERO if x == _ZERO else _ONE / x


@kernel(parallel=True, exact=True)
def _with_minimum(
    x: np.ndarray,
    importance: np.ndarray,
    max_code: np.float32,
    factors: np.ndarray,
    absolute: bool,
    scales: np.ndarray,
    minimums: np.ndarray,
) -> None:
    for part in prange((len(x) + _LANES - 1) // _LANES):
        begin = part * _LANES
        _some_with_minimum(
            _take(x, begin), _take(importance, begin), max_code, factors, absolute,
            scales[begin : begin + _LANES], minimums[begin : begin + _LANES],
        )  # fmt: skip


@kernel(exact=True)
def _some_with_minimum(
    x: np.ndarray,
    importance: np.ndarray,
    max_code: np.float32,
    factors: np.ndarray,
    absolute: bool,
    scales: np.ndarray,
    minimums: np.ndarray,
) -> None:
    n = len(x)
    codes = np.empty((n, _LANES), np.float32)
    terms = np.empty((3, _SUMS, _LANES), np.float32)
    total, sum_x = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    sum_l, sum_l2 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    sum_xl, new_error = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    lowest, inverse = np.zeros(_LANES, np.float32), np.empty(_LANES, np.float32)
    scale, minimum = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    best, a, b = (
        np.empty(_LANES, np.float32),
        np.empty(_LANES, np.float32),
        np.empty(_LANES, np.float32),
    )
    largest = x[0].copy()
    for i in range(n):
        for lane in range(_LANES):
            largest[lane] = max(largest[lane], x[i, lane])
            lowest[lane] = min(lowest[lane], x[i, lane])
    terms[:] = _NOTHING
    for i in range(n):
        for lane in range(_LANES):
            terms[0, i % _SUMS, lane] += importance[i, lane]
            terms[1, i % _SUMS, lane] += importance[i, lane] * x[i, lane]
    _joined(terms[0], total)
    _joined(terms[1], sum_x)
    for lane in range(_LANES):
        spread = largest[lane] - lowest[lane]
        inverse[lane] = _inverse(spread)
        scale[lane], minimum[lane] = spread / max_code, lowest[lane]
    _round_codes(x, lowest, inverse, max_code, max_code, codes)
    _error(x, importance, scale, minimum, codes, absolute, terms[0], best)
    for factor in factors:
        _round_codes(x, lowest, inverse, factor, max_code, codes)
        terms[:] = _NOTHING
        for i in range(n):
            for lane in range(_LANES):
                code, weight = codes[i, lane], importance[i, lane]
                terms[0, i % _SUMS, lane] += weight * code
                terms[1, i % _SUMS, lane] += weight * (code * code)
                terms[2, i % _SUMS, lane] += weight * code * x[i, lane]
        _joined(terms[0], sum_l)
        _joined(terms[1], sum_l2)
        _joined(terms[2], sum_xl)
        for lane in range(_LANES):
            l, l2, xl, w, wx = (  # noqa: E741
                sum_l[lane], sum_l2[lane], sum_xl[lane], total[lane], sum_x[lane]
            )  # fmt: skip
            over = _inverse(w * l2 - l * l)
            offset = (l2 * wx - l * xl) * over
            positive = offset > _ZERO
            a[lane] = xl * _inverse(l2) if positive else (w * xl - wx * l) * over
            b[lane] = _ZERO if positive else offset
        _error(x, importance, a, b, codes, absolute, terms[0], new_error)
        for lane in range(_LANES):
            determinant = total[lane] * sum_l2[lane] - sum_l[lane] * sum_l[lane]
            better = determinant > _ZERO and new_error[lane] < best[lane]
            scale[lane] = a[lane] if better else scale[lane]
            minimum[lane] = b[lane] if better else minimum[lane]
            best[lane] = new_error[lane] if better else best[lane]
    for lane in range(len(scales)):
        scales[lane], minimums[lane] = scale[lane], -minimum[lane]


@kernel(exact=True)
def _round_codes(
    x: np.ndarray,
    lowest: np.ndarray,
    inverse: np.ndarray,
    factor: np.float32,
    max_code: np.float32,
    codes: np.ndarray,
) -> None:
    for i in range(len(x)):
        for lane in range(_LANES):
            code = np.rint(factor * inverse[lane] * (x[i, lane] - lowest[lane]))
            codes[i, lane] = min(max(code, _ZERO), max_code)


@kernel(exact=True)
def _error(
    x: np.ndarray,
    importance: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray,
    codes: np.ndarray,
    absolute: bool,
    terms: np.ndarray,
    error: np.ndarray,
) -> None:
    terms[:] = _NOTHING
    for i in range(len(x)):
        for lane in range(_LANES):
            off = scale[lane] * codes[i, lane] + minimum[lane] - x[i, lane]
            off = abs(off) if absolute else off * off
            terms[i % _SUMS, lane] += importance[i, lane] * off
    _joined(terms, error)


@kernel(parallel=True, exact=True)
def _symmetric(
    x: np.ndarray, max_code: np.float32, factors: np.ndarray, scales: np.ndarray
) -> None:
    for part in prange((len(x) + _LANES - 1) // _LANES):
        begin = part * _LANES
        _some_symmetric(_take(x, begin), max_code, factors, scales[begin : begin + _LANES])


@kernel(exact=True)
def _some_symmetric(
    x: np.ndarray, max_code: np.float32, factors: np.ndarray, scales: np.ndarray
) -> None:
    inverse = _inverse_of_largest(x)
    terms = np.empty((2, _SUMS, _LANES), np.float32)
    sum_lx, sum_l2 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    scale, best = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
    for factor in factors:
        terms[:] = _NOTHING
        for i in range(len(x)):
            for lane in range(_LANES):
                one = x[i, lane]
                code = min(max(np.rint(factor * inverse[lane] * one), -max_code), max_code - _ONE)
                terms[0, i % _SUMS, lane] += one * one * one * code
                terms[1, i % _SUMS, lane] += one * one * (code * code)
        _joined(terms[0], sum_lx)
        _joined(terms[1], sum_l2)
        for lane in range(_LANES):
            new_scale = sum_lx[lane] * _inverse(sum_l2[lane])
            score = new_scale * sum_lx[lane]
            better = score > best[lane]
            scale[lane] = new_scale if better else scale[lane]
            best[lane] = score if better else best[lane]
    for lane in range(len(scales)):
        scales[lane] = scale[lane]


@kernel(exact=True)
def _inverse_of_largest(x: np.ndarray) -> np.ndarray:
    """The inverse of the number with the largest magnitude, the first one if several."""
    largest = x[0].copy()
    for i in range(1, len(x)):
        for lane in range(_LANES):
            larger = abs(x[i, lane]) > abs(largest[lane])
            largest[lane] = x[i, lane] if larger else largest[lane]
    for lane in range(_LANES):
        largest[lane] = _inverse(largest[lane])
    return largest


@kernel(parallel=True, exact=True)
def _one_by_one(x: np.ndarray, max_code: np.float32, scales: np.ndarray) -> None:
    for part in prange((len(x) + _LANES - 1) // _LANES):
        begin = part * _LANES
        _some_one_by_one(_take(x, begin), max_code, scales[begin : begin + _LANES])


@kernel(exact=True)
def _some_one_by_one(x: np.ndarray, max_code: np.float32, scales: np.ndarray) -> None:
    n, inverse = len(x), _inverse_of_largest(x)
    codes = np.empty((n, _LANES), np.float32)
    terms = np.full((2, _SUMS, _LANES), _NOTHING)
    sum_lx, sum_l2 = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for i in range(n):
        for lane in range(_LANES):
            one = x[i, lane]
            code = min(max(np.rint(-max_code * inverse[lane] * one), -max_code), max_code - _ONE)
            codes[i, lane] = code
            terms[0, i % _SUMS, lane] += one * one * one * code
            terms[1, i % _SUMS, lane] += one * one * (code * code)
    _joined(terms[0], sum_lx)
    _joined(terms[1], sum_l2)
    for _ in range(5):
        for i in range(n):
            for lane in range(_LANES):
                one, code = x[i, lane], codes[i, lane]
                weight = one * one
                lx, l2 = sum_lx[lane], sum_l2[lane]
                less_lx, less_l2 = lx - weight * one * code, l2 - weight * (code * code)
                new = np.rint(one * less_l2 * _inverse(less_lx))
                new = min(max(new, -max_code), max_code - _ONE)
                new_lx = less_lx + weight * one * new
                new_l2 = less_l2 + weight * (new * new)
                better = (
                    less_lx > _ZERO and new_l2 > _ZERO and new_lx * new_lx * l2 > lx * lx * new_l2
                )
                codes[i, lane] = new if better else code
                sum_lx[lane] = new_lx if better else lx
                sum_l2[lane] = new_l2 if better else l2
    for lane in range(len(scales)):
        scales[lane] = sum_lx[lane] * _inverse(sum_l2[lane])
