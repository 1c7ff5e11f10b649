"""Layers of a step whose rows all decode, one after the other in one call.

Shapes as in ``operators.py``; activations are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from numba import carray

from ..attention_metadata import DecodeMetadata
from ..signatures import CosSin, LayerKV
from .byte_products import PanelLinear, plan_of_all
from .cached_kv import CachedArrays, cached_arrays
from .callees import Callee
from .decode_attention import AttentionConstants, attend, head_attention
from .expert_layer import CompiledExpertLayer, expert_layer
from .jit import Same, array, kernel
from .layer_parts import (
    CompiledFeedForward,
    CompiledQueries,
    feed_forward,
    multiply_runs,
    project,
    runs_of,
)
from .pointwise import rms_norm, row_rope
from .vector import pointer

# The parts of a layer, and its attention between them.
Parts = tuple[CompiledQueries, CompiledFeedForward | CompiledExpertLayer, AttentionConstants]
# The norm and the products that make logits of the last layer's output.
Head = tuple[torch.Tensor, float, Sequence[PanelLinear]]

# What differs between layers besides weights: numbers, the first run of each product, and the
# addresses of routers and caches.
_LAYER = np.dtype(
    [(name, np.float64) for name in ("eps", "head_eps", "scale", "soft_cap", "mlp_eps")]
    + [(name, np.float64) for name in ("key_scale", "value_scale")]
    + [(name, np.int64) for name in ("width", "window", "mlp_width")]
    + [(name, np.int64) for name in ("qkv", "o", "gate_up", "down", "end")]
    + [(name, np.int64) for name in ("router", "keys", "values", "key_scales", "value_scales")]
)


def alike(parts: Sequence[Parts]) -> bool:
    """True if one call can compute these layers: none has experts, or all have experts with the
    same routing."""
    feed_forwards = [part for _, part, _ in parts]
    experts = [each for each in feed_forwards if isinstance(each, CompiledExpertLayer)]
    if not experts:
        return True
    return len(experts) == len(feed_forwards) and len({each.kind for each in experts}) == 1


class CompiledLayers:
    """See ``Operators.prepare_decoding``. The layers are ``alike``."""

    def __init__(self, layers: Sequence[Parts], head: Head | None = None) -> None:
        self._parts = layers, head  # keeps the memory alive to which the runs point
        runs: list[np.ndarray] = []
        numbers, weights, corrections = [], [], []
        # From the first layer, the same in all layers.
        self._experts: tuple[Any, ...] = ()
        for queries, part, (window, scale, soft_cap, sinks) in layers:
            norm, eps, qkv, width = queries.before
            head_weight, head_eps = queries.after
            o, mlp_norm, mlp_eps, gate_up, mlp_width, down = part.constants
            ends = np.cumsum([len(runs), *map(len, (qkv, o, gate_up, down))])
            floats = eps, head_eps, scale, soft_cap, mlp_eps
            router = 0
            if isinstance(part, CompiledExpertLayer):
                panels, *routing, correction = part.routing
                router = panels.ctypes.data
                corrections.append(correction)
                self._experts = self._experts or (panels, *routing)
            of_cache = 0, 0, 0, 0  # set with the first cache
            numbers.append((*floats, 1, 1, width, window, mlp_width, *ends, router, *of_cache))
            runs += [*qkv, *o, *gate_up, *down]
            weights.append((norm, head_weight, sinks, mlp_norm))
        if corrections:
            self._experts = *self._experts, np.stack(corrections)
        self._layers = np.array(numbers, _LAYER)
        self._weights = np.array(runs), *map(np.stack, zip(*weights, strict=True))
        # Without a head there are no runs, and the output is the last layer's.
        self._head = weights[0][0], 0.0, self._weights[0][:0]
        self._outputs = 0
        if head is not None:
            norm_weight, eps, products = head
            head_runs, self._outputs = runs_of(products)
            self._head = array(norm_weight), eps, head_runs
        self._tables = Same(array)  # the same tensor in all steps
        self._caches: Sequence[LayerKV] = ()
        # The first layer's, if all layers have the same shapes and dtypes.
        self._cache: tuple[CachedArrays, CachedArrays] | None = None

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: CosSin,
        caches: Sequence[LayerKV],
        slots_T: torch.Tensor,
        decodes: DecodeMetadata,
    ) -> torch.Tensor | None:
        """The last layer's output [T, C], or the logits [T, V]."""
        if len(caches) != len(self._caches) or not all(map(is_, caches, self._caches)):
            self._take(caches)
        if self._cache is None:
            return None
        rows, width = x.shape
        cos, sin = (array(each) for each in cos_sin)
        cached = self._cache[0][0].dtype
        plan, out = plan_of_all(rows), np.empty((rows, self._outputs or width), np.float32)
        decode = _decode_expert_layers if self._experts else _decode_layers
        decode(
            array(x),
            self._layers,
            *self._weights,
            plan.sources,
            plan.tiles,
            plan.groups,
            row_rope(out.dtype, cos.dtype, cached),
            cos,
            sin,
            head_attention(out.dtype, cached),
            *self._cache,
            array(slots_T),
            array(decodes.rows),
            *self._tables(decodes.tables),
            decodes.block_size,
            *self._experts,
            *self._head,
            out,
        )
        return torch.from_numpy(out)

    def _take(self, caches: Sequence[LayerKV]) -> None:
        """Store the addresses of caches, if all have the same shapes and dtypes."""
        self._caches, self._cache = tuple(caches), None
        arrays = [(cached_arrays(keys), cached_arrays(values)) for keys, values in caches]
        kinds = {
            tuple((each.shape, each.dtype) for component in layer for each in component[:2])
            for layer in arrays
        }
        if len(kinds) > 1:
            return
        self._cache = arrays[0]
        for number, name in enumerate(("key", "value")):
            components = [layer[number] for layer in arrays]
            self._layers[f"{name}s"] = [codes.ctypes.data for codes, _, _ in components]
            self._layers[f"{name}_scales"] = [scales.ctypes.data for _, scales, _ in components]
            self._layers[f"{name}_scale"] = [scale for _, _, scale in components]


@kernel()
def _attended(
    x: np.ndarray,
    layer: Any,
    runs: np.ndarray,
    norm_weight: np.ndarray,
    head_weight: np.ndarray,
    sinks: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    rope_row: Callee,
    cos: np.ndarray,
    sin: np.ndarray,
    attend_head: Callee,
    keys: CachedArrays,
    values: CachedArrays,
    slots_T: np.ndarray,
    rows: np.ndarray,
    tables: np.ndarray,
    block_size: int,
) -> np.ndarray:
    """The result of a layer's attention, [T, H D]. ``keys`` and ``values`` of any layer give the
    shape of all."""
    own_keys = (
        carray(pointer(layer.keys, keys[0]), keys[0].shape),
        carray(pointer(layer.key_scales, keys[1]), keys[1].shape),
        layer.key_scale,
    )
    own_values = (
        carray(pointer(layer.values, values[0]), values[0].shape),
        carray(pointer(layer.value_scales, values[1]), values[1].shape),
        layer.value_scale,
    )
    kv_heads, _, dim = keys[0].shape
    q = np.empty((len(x), layer.width // dim - 2 * kv_heads, dim), np.float32)
    project(
        x,
        norm_weight,
        layer.eps,
        runs[layer.qkv : layer.o],
        layer.width,
        sources,
        tiles,
        groups,
        head_weight,
        layer.head_eps,
        rope_row,
        cos,
        sin,
        own_keys,
        own_values,
        slots_T,
        q,
    )
    attended = np.empty_like(q)
    attend(
        attend_head,
        q,
        own_keys,
        own_values,
        rows,
        tables,
        block_size,
        layer.window,
        layer.scale,
        layer.soft_cap,
        sinks,
        attended,
    )
    return attended.reshape(len(x), -1)


@kernel()
def _finish(
    x: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    runs: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    out: np.ndarray,
) -> None:
    """The products of the normalised rows, or the rows themselves without products."""
    if len(runs) == 0:
        for row in range(len(x)):  # as in decode_attention.py
            for place in range(x.shape[1]):
                out[row, place] = x[row, place]
        return
    normed = np.empty_like(x)
    rms_norm(x, norm_weight, eps, normed)
    multiply_runs(runs, normed, sources, tiles, groups, out)


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
    rope_row: Callee,
    cos: np.ndarray,
    sin: np.ndarray,
    attend_head: Callee,
    keys: CachedArrays,
    values: CachedArrays,
    slots_T: np.ndarray,
    rows: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    output_norm_weight: np.ndarray,
    output_eps: float,
    output_runs: np.ndarray,
    out: np.ndarray,
) -> None:
    x = x.copy()
    for index in range(len(layers)):
        layer = layers[index]
        attended = _attended(
            x,
            layer,
            runs,
            norm_weights[index],
            head_weights[index],
            sinks[index],
            sources,
            tiles,
            groups,
            rope_row,
            cos,
            sin,
            attend_head,
            keys,
            values,
            slots_T,
            rows,
            tables,
            block_size,
        )
        feed_forward(
            attended,
            x,
            runs[layer.o : layer.gate_up],
            mlp_norm_weights[index],
            layer.mlp_eps,
            runs[layer.gate_up : layer.down],
            layer.mlp_width,
            runs[layer.down : layer.end],
            sources,
            tiles,
            groups,
            x,
        )
    _finish(x, output_norm_weight, output_eps, output_runs, sources, tiles, groups, out)


@kernel()
def _decode_expert_layers(
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
    rope_row: Callee,
    cos: np.ndarray,
    sin: np.ndarray,
    attend_head: Callee,
    keys: CachedArrays,
    values: CachedArrays,
    slots_T: np.ndarray,
    rows: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    router_panels: np.ndarray,
    experts: int,
    top_k: int,
    softmax: bool,
    normalise: bool,
    scale: float,
    corrections: np.ndarray,
    output_norm_weight: np.ndarray,
    output_eps: float,
    output_runs: np.ndarray,
    out: np.ndarray,
) -> None:
    """``router_panels`` of any layer give the shape of all."""
    x = x.copy()
    for index in range(len(layers)):
        layer = layers[index]
        attended = _attended(
            x,
            layer,
            runs,
            norm_weights[index],
            head_weights[index],
            sinks[index],
            sources,
            tiles,
            groups,
            rope_row,
            cos,
            sin,
            attend_head,
            keys,
            values,
            slots_T,
            rows,
            tables,
            block_size,
        )
        expert_layer(
            attended,
            x,
            runs[layer.o : layer.gate_up],
            mlp_norm_weights[index],
            layer.mlp_eps,
            runs[layer.gate_up : layer.down],
            layer.mlp_width,
            runs[layer.down : layer.end],
            sources,
            tiles,
            groups,
            carray(pointer(layer.router, router_panels), router_panels.shape),
            experts,
            top_k,
            softmax,
            normalise,
            scale,
            corrections[index],
            x,
        )
    _finish(x, output_norm_weight, output_eps, output_runs, sources, tiles, groups, out)
