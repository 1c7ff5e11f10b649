"""A layer's products and what lies between them, in one call.

With few rows, a call and the conversion of its arguments take as long as a small operator's work.
Each part calls the kernels of the operators that it is made of, so its results have their bits.

Shapes as in ``operators.py``; activations are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TypeGuard

import numpy as np
import torch
from numba import carray, prange

from ..attention_metadata import DecodeMetadata
from ..signatures import CosSin, LayerKV, Queries
from .byte_products import FEW, PanelLinear, PanelWeights, multiply_groups, plan_of_all
from .decode_attention import AttentionConstants, attend
from .jit import SameArrays, array, castable, kernel
from .pointwise import add_rms_norm, rms_norm, rope_and_cache_kv, silu_and_mul
from .vector import pointer


class CompiledQueries:
    """See ``Operators.prepare_queries``."""

    def __init__(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        qkv: Sequence[PanelLinear],
        head_weight_RD: torch.Tensor | None,
        head_eps: float,
        of_step: SameArrays,
        composed: Queries,
    ) -> None:
        """All layers of a model have the same ``of_step``. ``composed`` takes other caches."""
        self._products = qkv  # whose memory the runs have addresses of
        runs, self.width = runs_of(qkv)
        none = norm_weight.new_empty(0, 0)
        head_weight = array(none if head_weight_RD is None else head_weight_RD)
        self.before = array(norm_weight), eps, runs, self.width
        self.after = head_weight, head_eps
        self._of_step, self._of_cache = of_step, SameArrays()
        self._composed = composed

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """The rows' queries [T, H, D]."""
        if not is_plain(cache):
            return self._composed(x, cos_sin, cache, slots_T)
        cos, sin, slots = self._of_step(*cos_sin, slots_T)
        keys, values = self._of_cache(*cache)
        kv_heads, _, dim = keys.shape
        plan = plan_of_all(len(x))
        q = torch.empty(len(x), self.width // dim - 2 * kv_heads, dim)
        _project(
            array(x),
            *self.before,
            plan.sources,
            plan.tiles,
            plan.groups,
            *self.after,
            cos,
            sin,
            keys,
            values,
            slots,
            array(q),
        )
        return q


class CompiledFeedForward:
    """See ``Operators.prepare_feed_forward``."""

    def __init__(
        self,
        o: Sequence[PanelLinear],
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: Sequence[PanelLinear],
        down: Sequence[PanelLinear],
    ) -> None:
        self._products = o, gate_up, down  # whose memory the runs have addresses of
        gate_up_runs, width = runs_of(gate_up)
        norm = array(norm_weight)
        self.constants = runs_of(o)[0], norm, eps, gate_up_runs, width, runs_of(down)[0]

    def __call__(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [T, C]."""
        plan, out = plan_of_all(len(x)), torch.empty(x.shape)
        _feed_forward(
            array(attended),
            array(x),
            *self.constants,
            plan.sources,
            plan.tiles,
            plan.groups,
            array(out),
        )
        return out


# What layers differ in beside their weights: numbers, where the runs of each product begin, and the
# addresses of their caches.
_LAYER = np.dtype(
    [(name, np.float64) for name in ("eps", "head_eps", "scale", "soft_cap", "mlp_eps")]
    + [(name, np.int64) for name in ("width", "window", "mlp_width")]
    + [(name, np.int64) for name in ("qkv", "o", "gate_up", "down", "end")]
    + [(name, np.int64) for name in ("keys", "values")]
)


class CompiledLayers:
    """See ``Operators.prepare_decoding``."""

    def __init__(
        self, layers: Sequence[tuple[CompiledQueries, CompiledFeedForward, AttentionConstants]]
    ) -> None:
        self._parts = layers  # whose memory the runs have addresses of
        runs: list[np.ndarray] = []
        numbers, weights = [], []
        for queries, feed_forward, (window, scale, soft_cap, sinks) in layers:
            norm, eps, qkv, width = queries.before
            head_weight, head_eps = queries.after
            o, mlp_norm, mlp_eps, gate_up, mlp_width, down = feed_forward.constants
            ends = np.cumsum([len(runs), *map(len, (qkv, o, gate_up, down))])
            floats = eps, head_eps, scale, soft_cap, mlp_eps
            numbers.append((*floats, width, window, mlp_width, *ends, 0, 0))
            runs += [*qkv, *o, *gate_up, *down]
            weights.append((norm, head_weight, sinks, mlp_norm))
        self._layers = np.array(numbers, _LAYER)
        self._weights = np.array(runs), *map(np.stack, zip(*weights, strict=True))
        self._caches: Sequence[LayerKV] = ()
        # Those of the first layer, if kernels read them all.
        self._cache: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: CosSin,
        caches: Sequence[LayerKV],
        slots_T: torch.Tensor,
        decodes: DecodeMetadata,
    ) -> torch.Tensor | None:
        """The last layer's output [T, C]."""
        if len(caches) != len(self._caches) or not all(map(is_, caches, self._caches)):
            self._take(caches)
        if self._cache is None:
            return None
        plan, out = plan_of_all(len(x)), torch.empty(x.shape)
        _decode_layers(
            array(x),
            self._layers,
            *self._weights,
            plan.sources,
            plan.tiles,
            plan.groups,
            *(array(each) for each in cos_sin),
            *self._cache,
            array(slots_T),
            array(decodes.table),
            decodes.block_size,
            array(out),
        )
        return out

    def _take(self, caches: Sequence[LayerKV]) -> None:
        """Note the addresses of caches, if kernels read them and they are alike."""
        self._caches, self._cache = tuple(caches), None
        plain = [each for each in caches if is_plain(each)]
        kinds = {(k.shape, k.dtype, v.shape, v.dtype) for k, v in plain}
        if len(plain) < len(caches) or len(kinds) > 1:
            return
        self._layers["keys"] = [keys.data_ptr() for keys, _ in plain]
        self._layers["values"] = [values.data_ptr() for _, values in plain]
        keys, values = plain[0]
        self._cache = array(keys), array(values)


def is_plain(cache: LayerKV) -> TypeGuard[tuple[torch.Tensor, torch.Tensor]]:
    """Return whether kernels read and write a cache."""
    return all(isinstance(each, torch.Tensor) for each in cache) and castable(cache[0].dtype)


def runs_of(products: Sequence[PanelLinear | PanelWeights]) -> tuple[np.ndarray, int]:
    """The arguments of a product in runs, a row for each, and how many outputs it has."""
    rows, column = [], 0
    for each in products:
        rows.append((*each.constants, column))
        column += each.outputs
    return np.array(rows, np.int64), column


@kernel()
def multiply_runs(
    runs: np.ndarray,
    x: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    out: np.ndarray,
) -> None:
    for run in runs:
        multiply_groups(
            run[0],
            run[1],
            run[2],
            run[3],
            run[4],
            run[5],
            run[6],
            run[7],
            run[8],
            run[9],
            x,
            sources,
            tiles,
            groups,
            out,
            run[10],
        )


@kernel()
def _project(
    x: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    qkv_runs: np.ndarray,
    width: int,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    head_weight_RD: np.ndarray,
    head_eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    keys_KND: np.ndarray,
    values_KND: np.ndarray,
    slots_T: np.ndarray,
    q_THD: np.ndarray,
) -> None:
    rows, dim = len(x), q_THD.shape[2]
    normed, qkv = np.empty_like(x), np.empty((rows, width), np.float32)
    rms_norm(x, norm_weight, eps, normed)
    multiply_runs(qkv_runs, normed, sources, tiles, groups, qkv)
    rope_and_cache_kv(
        qkv.reshape(rows, width // dim, dim),
        head_weight_RD,
        head_eps,
        cos,
        sin,
        keys_KND,
        values_KND,
        slots_T,
        q_THD,
    )


@kernel()
def _decode(
    x: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    qkv_runs: np.ndarray,
    width: int,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    head_weight_RD: np.ndarray,
    head_eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    keys_KND: np.ndarray,
    values_KND: np.ndarray,
    slots_T: np.ndarray,
    table: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
    soft_cap: float,
    sinks: np.ndarray,
    o_runs: np.ndarray,
    mlp_norm_weight: np.ndarray,
    mlp_eps: float,
    gate_up_runs: np.ndarray,
    mlp_width: int,
    down_runs: np.ndarray,
    out: np.ndarray,
) -> None:
    """``out`` may be ``x``."""
    kv_heads, _, dim = keys_KND.shape
    q = np.empty((len(x), width // dim - 2 * kv_heads, dim), np.float32)
    _project(
        x,
        norm_weight,
        eps,
        qkv_runs,
        width,
        sources,
        tiles,
        groups,
        head_weight_RD,
        head_eps,
        cos,
        sin,
        keys_KND,
        values_KND,
        slots_T,
        q,
    )
    attended = np.empty_like(q)
    attend(
        q,
        keys_KND,
        values_KND,
        table,
        block_size,
        window,
        scale,
        soft_cap,
        sinks,
        attended,
    )
    _feed_forward(
        attended.reshape(len(x), -1),
        x,
        o_runs,
        mlp_norm_weight,
        mlp_eps,
        gate_up_runs,
        mlp_width,
        down_runs,
        sources,
        tiles,
        groups,
        out,
    )


@kernel()
def _decode_layers(
    x: np.ndarray,
    layers: np.ndarray,
    runs: np.ndarray,
    norm_weights: np.ndarray,
    head_weights: np.ndarray,
    sinks: np.ndarray,
    mlp_norm_weights: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    keys_KND: np.ndarray,
    values_KND: np.ndarray,
    slots_T: np.ndarray,
    table: np.ndarray,
    block_size: int,
    out: np.ndarray,
) -> None:
    """``keys`` and ``values`` are those of one layer; the others' have the same shape."""
    out[:] = x
    for index in range(len(layers)):
        layer = layers[index]
        _decode(
            out,
            norm_weights[index],
            layer.eps,
            runs[layer.qkv : layer.o],
            layer.width,
            sources,
            tiles,
            groups,
            head_weights[index],
            layer.head_eps,
            cos,
            sin,
            carray(pointer(layer.keys, keys_KND), keys_KND.shape),
            carray(pointer(layer.values, values_KND), values_KND.shape),
            slots_T,
            table,
            block_size,
            layer.window,
            layer.scale,
            layer.soft_cap,
            sinks[index],
            runs[layer.o : layer.gate_up],
            mlp_norm_weights[index],
            layer.mlp_eps,
            runs[layer.gate_up : layer.down],
            layer.mlp_width,
            runs[layer.down : layer.end],
            out,
        )


@kernel(parallel=True)
def _feed_forward(
    attended: np.ndarray,
    x: np.ndarray,
    o_runs: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    gate_up_runs: np.ndarray,
    width: int,
    down_runs: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    out: np.ndarray,
) -> None:
    rows = len(x)
    projected, normed, total = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    multiply_runs(o_runs, attended, sources, tiles, groups, projected)
    add_rms_norm(projected, x, norm_weight, eps, normed, total)
    hidden, activated = (
        np.empty((rows, width), np.float32),
        np.empty((rows, width // 2), np.float32),
    )
    multiply_runs(gate_up_runs, normed, sources, tiles, groups, hidden)
    silu_and_mul(hidden, activated)
    multiply_runs(down_runs, activated, sources, tiles, groups, out)
    if rows <= FEW:
        for t in range(rows):
            _add_row(out[t], total[t])
    else:
        for t in prange(rows):
            _add_row(out[t], total[t])


@kernel()
def _add_row(out: np.ndarray, more: np.ndarray) -> None:
    for c in range(len(out)):
        out[c] += more[c]
