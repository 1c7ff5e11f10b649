"""CPU operators: kernels compiled by numba, and torch's products where those are faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from ..activations import Activation
from ..attention_metadata import (
    AttentionConfig,
    AttentionMetadata,
    AttentionParams,
    SequenceMetadata,
    decode_metadata,
)
from ..batched_decode import batched_attention
from ..block_encoding import encode
from ..block_formats import BF16, Q8_0, BlockFormat
from ..operators import Operators
from ..quantized import QuantizedWeight
from ..reference import linear, norm
from ..scaled import INT8, CachedKV, ScaledKV
from ..signatures import (
    BlockCopies,
    CosSin,
    DecodingLayers,
    Experts,
    FeedForward,
    LayerKV,
    LayerParts,
    Linear,
    OutputHead,
    QuantizedLinear,
    Queries,
    Routing,
    Weight,
)
from . import pointwise
from .block_copy import CompiledBlockCopies
from .block_layouts import BLOCK, has_layout, layout_of
from .byte_products import PanelLinear
from .cached_kv import cached_arrays
from .chunk_attention import chunk_attention
from .decode_attention import constants, decode_attention
from .decoding_layers import CompiledLayers, alike
from .expert_layer import CompiledExpertLayer
from .grouped_experts import GroupedExperts, GroupedWeights, quantised_alike
from .jit import WIDE, Same, array, multiplies_bytes, multiplies_lines
from .layer_parts import CompiledFeedForward, CompiledQueries
from .linear import PACKED, PackedWeight
from .scale_search import COMPILED


class CompiledOperators(Operators):
    """Activations are fp32 or, with AVX-512 but not its VNNI, of the weights' dtype if the CPU
    multiplies that.

    Latent attention and activations other than silu have no kernel here and are computed by the
    reference.
    """

    def __init__(self) -> None:
        # The cache's dtype is known only after these products are prepared.
        self._compiles_queries = self._compiles_experts = False
        self._of_step = Same(array)

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Compiles the kernels for activations of this dtype."""
        in_dtype = _blocked(dtype) and not _in_pairs(dtype)
        activations = dtype if in_dtype else torch.float32
        _compile_pointwise(activations)
        return activations

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Supports any number of rows. With bf16 weights, activations are rounded to bf16."""
        if isinstance(in_blocks := _in_blocks(weight), QuantizedWeight):
            _compile_panels()
            return PanelLinear(in_blocks, bias)
        if _blocked(weight.dtype):
            dtype, product = weight.dtype, linear.prepare_linear(weight, bias)
            return lambda x: product(x.to(dtype)).to(x.dtype)
        _compile_linear(weight.dtype)
        packed = PackedWeight(weight)
        if bias is None:
            return packed
        wide = bias.float()
        return lambda x: packed(x).add_(wide)

    def has_product(self, format: BlockFormat, dtype: torch.dtype) -> bool:
        return _in_panels_here(format)

    def prepare_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Supports any number of rows. Activations are rounded to int8 if the CPU multiplies
        bytes."""
        if not has_panels(weight):
            return super().prepare_quantized(weight, bias, dtype)
        _compile_panels()
        return PanelLinear(weight, bias)

    def quantise(self, format: BlockFormat, weight: torch.Tensor, into: torch.Tensor) -> None:
        encode(format, weight, into, COMPILED)

    def prepare_experts(
        self,
        gate_up: list[Weight],
        down: list[Weight],
        activation: Activation,
        dtype: torch.dtype,
        gate_up_biases: list[torch.Tensor] | None = None,
        down_biases: list[torch.Tensor] | None = None,
    ) -> Experts:
        """Experts of the same formats are computed together."""
        biases = gate_up_biases, down_biases
        halves = [
            quantised_alike([tuple(map(_in_blocks, runs)) for runs in weights], has_panels)
            for weights in (gate_up, down)
        ]
        if None in halves:
            return super().prepare_experts(gate_up, down, activation, dtype, *biases)
        gate_up.clear()
        down.clear()
        _compile_panels()
        first, second = (
            GroupedWeights(weights, added)
            for weights, added in zip(halves, biases, strict=True)
            if weights is not None
        )
        experts = GroupedExperts(first, second, self.act_and_mul, activation)
        experts.compile(dtype)
        return experts

    def prepare_queries(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        qkv: Sequence[Linear],
        head_weight_RD: torch.Tensor | None,
        head_eps: float,
    ) -> Queries | None:
        panels = _in_panels(qkv)
        if not panels or norm_weight.dtype != torch.float32:
            return None
        self._compiles_queries = True
        return CompiledQueries(norm_weight, eps, panels, head_weight_RD, head_eps, self._of_step)

    def prepare_feed_forward(
        self,
        o: Sequence[Linear],
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activation: Activation,
    ) -> FeedForward | None:
        panels = [_in_panels(runs) for runs in (o, gate_up, down)]
        if not all(panels) or activation != "silu" or norm_weight.dtype != torch.float32:
            return None
        _compile_feed_forward()
        first, second, third = panels
        return CompiledFeedForward(first, norm_weight, eps, second, third)

    def prepare_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Packed, since oneDNN takes three times as long for one row of so small a weight."""
        _compile_linear(weight.dtype)
        packed = PackedWeight(weight)
        return packed if bias is None else lambda x: packed(x).add_(bias)

    def prepare_expert_feed_forward(
        self,
        o: Sequence[Linear],
        norm_weight: torch.Tensor,
        eps: float,
        router: Linear,
        routing: Routing,
        experts: Experts,
    ) -> FeedForward | None:
        panels = _in_panels(o)
        if not panels or norm_weight.dtype != torch.float32:
            return None
        if not isinstance(router, PackedWeight) or not isinstance(experts, GroupedExperts):
            return None
        if experts.activation != "silu":
            return None
        _compile_expert_layer()
        self._compiles_experts = True
        return CompiledExpertLayer(panels, norm_weight, eps, router, routing, experts)

    def prepare_decoding(
        self, layers: Sequence[LayerParts], head: OutputHead | None = None
    ) -> DecodingLayers | None:
        compiled = [
            (each.queries, each.feed_forward, constants(each.params, each.sinks_H))
            for each in layers
            if isinstance(each.queries, CompiledQueries)
            and isinstance(each.feed_forward, CompiledFeedForward | CompiledExpertLayer)
        ]
        if len(compiled) < len(layers) or not alike(compiled):
            return None
        if head is None:
            return CompiledLayers(compiled)
        products = _in_panels(head.runs)
        if not products or head.norm_weight.dtype != torch.float32:
            return None
        return CompiledLayers(compiled, (head.norm_weight, head.eps, products))

    def prepare_block_copies(self) -> BlockCopies:
        return CompiledBlockCopies()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() != 2:
            return norm.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        pointwise.rms_norm(array(x), array(weight), eps, array(out))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = x.new_empty(x.shape), x.new_empty(x.shape)
        pointwise.add_rms_norm(
            array(x), array(residual), array(weight), eps, array(out), array(total)
        )
        return out, total

    def act_and_mul(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation != "silu":
            return super().act_and_mul(x, activation)
        out = x.new_empty(len(x), x.shape[1] // 2)
        pointwise.silu_and_mul(array(x), array(out))
        return out

    def rope_and_cache_kv(
        self,
        qkv_TXD: torch.Tensor,
        norm_weight_RD: torch.Tensor | None,
        eps: float,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        rows, heads, dim = qkv_TXD.shape
        keys, values = map(cached_arrays, cache)
        q = qkv_TXD.new_empty(rows, heads - 2 * len(keys[0]), dim)
        qkv, cos = array(qkv_TXD), array(cos_sin[0])
        pointwise.rope_and_cache_kv(
            pointwise.row_rope(qkv.dtype, cos.dtype, keys[0].dtype),
            qkv,
            array(qkv_TXD.new_empty(0, 0) if norm_weight_RD is None else norm_weight_RD),
            eps,
            cos,
            array(cos_sin[1]),
            keys,
            values,
            array(slots_T),
            array(q),
        )
        return q

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        """Compiles the kernels that rotate, cache and attend."""
        if self._compiles_queries:
            _compile_layer(config.cache_dtype, experts=False)
        if self._compiles_queries and self._compiles_experts:
            _compile_layer(config.cache_dtype, experts=True)
        cos_sin = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
        keys, values = _zeros_of_cache(config.cache_dtype)
        ones = torch.ones(1, 3, 2, dtype=config.dtype)
        slots = torch.zeros(1, dtype=torch.int64)
        q = self.rope_and_cache_kv(ones, ones[0, :2], 1e-6, cos_sin, (keys, values), slots)
        sinks = torch.zeros(1) if config.params.sinks else None
        sequences = [SequenceMetadata(slice(0, 1), 0, [0], 1)]
        for decodes in (None, decode_metadata(sequences, q.device)):
            metadata = AttentionMetadata(sequences, slots, decodes)
            self.paged_attention(q, keys, values, metadata, config.params, sinks)
        return True

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        metadata: AttentionMetadata,
        params: AttentionParams,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return batched_attention(
            q_THD,
            keys_KND,
            values_KND,
            metadata,
            params,
            partial(decode_attention, sinks_H=sinks_H),
            partial(chunk_attention, sinks_H=sinks_H),
        )


def _in_panels(products: Sequence[Linear]) -> list[PanelLinear]:
    """The products, if all of them multiply bytes."""
    panels = [each for each in products if isinstance(each, PanelLinear)]
    return panels if len(panels) == len(products) else []


@cache
def _blocked(dtype: torch.dtype) -> bool:
    """True if oneDNN's products are faster: with AVX-512, for any number of rows."""
    return WIDE and linear.multiplies(dtype)


@cache
def _in_pairs(dtype: torch.dtype) -> bool:
    """True if plain weights are multiplied in panels, like quantised weights."""
    return WIDE and dtype == torch.bfloat16 and multiplies_lines()


def _in_blocks(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor | QuantizedWeight:
    """A weight as blocks, if its numbers are multiplied in panels."""
    if isinstance(weight, QuantizedWeight) or not _in_pairs(weight.dtype):
        return weight
    if weight.shape[1] % BLOCK:
        return weight
    return QuantizedWeight(BF16, weight.contiguous().view(torch.uint8))


@cache
def _compile_linear(dtype: torch.dtype) -> None:
    packed = PackedWeight(torch.zeros(1, 1, dtype=dtype))
    for rows in (1, PACKED):
        packed(torch.zeros(rows, 1))


def has_panels(weight: QuantizedWeight) -> bool:
    """True if a weight is multiplied in panels."""
    return has_layout(weight) and _in_panels_here(weight.format)


def _in_panels_here(format: BlockFormat) -> bool:
    """True if this CPU multiplies weights of a format in panels."""
    return layout_of(format) is not None and multiplies_bytes()


@cache
def _compile_panels() -> None:
    zeros = _block_of_zeros(1)
    zeros(torch.zeros(1, Q8_0.values))
    zeros.rows(torch.zeros(1, dtype=torch.int64))


@cache
def _compile_feed_forward() -> None:
    x = torch.zeros(1, Q8_0.values)
    _feed_forward_of_zeros()(x, x)


def _feed_forward_of_zeros() -> CompiledFeedForward:
    width = Q8_0.values
    o, up, down = (_block_of_zeros(outputs) for outputs in (width, 2 * width, width))
    return CompiledFeedForward([o], torch.zeros(width), 1e-6, [up], [down])


@cache
def _compile_expert_layer() -> None:
    layer = _expert_layer_of_zeros()
    for rows in (1, PACKED):
        layer(torch.zeros(rows, Q8_0.values), torch.zeros(rows, Q8_0.values))


def _expert_layer_of_zeros() -> CompiledExpertLayer:
    width = Q8_0.values
    gate_up, down = (GroupedWeights([(_zeros(outputs),)], None) for outputs in (2 * width, width))
    experts = GroupedExperts(gate_up, down, CompiledOperators().act_and_mul, "silu")
    router, routing = PackedWeight(torch.zeros(1, width)), Routing("softmax", 1, None, True, 1.0)
    return CompiledExpertLayer(
        [_block_of_zeros(width)], torch.zeros(width), 1e-6, router, routing, experts
    )


@cache
def _compile_layer(cache_dtype: torch.dtype, experts: bool) -> None:
    """Compile the queries of a layer, and layers in one call, for a cache of this dtype."""
    x, cos_sin = torch.zeros(1, Q8_0.values), (torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    keys, values = _zeros_of_cache(cache_dtype)
    slots, operators = torch.zeros(1, dtype=torch.int64), CompiledOperators()
    heads = Q8_0.values // keys.shape[2] + 2
    qkv = _block_of_zeros(heads * keys.shape[2])
    queries = operators.prepare_queries(x[0], 1e-6, [qkv], None, 1e-6)
    assert queries is not None
    queries(x, cos_sin, (keys, values), slots)
    feed_forward = _expert_layer_of_zeros() if experts else _feed_forward_of_zeros()
    parts = LayerParts(queries, feed_forward, AttentionParams(scale=1.0), None)
    layers = operators.prepare_decoding([parts])
    decodes = decode_metadata([SequenceMetadata(slice(0, 1), 0, [0], 1)], x.device)
    assert layers is not None and decodes is not None
    layers(x, cos_sin, [(keys, values)], slots, decodes)


def _zeros_of_cache(dtype: torch.dtype) -> tuple[CachedKV, CachedKV]:
    keys, values = torch.zeros(2, 1, 1, 2, dtype=dtype)
    if dtype != INT8:
        return keys, values
    scales = torch.zeros(1, 1, 1)
    return ScaledKV(keys, scales), ScaledKV(values, scales)


def _block_of_zeros(outputs: int) -> PanelLinear:
    return PanelLinear(_zeros(outputs), None)


def _zeros(outputs: int) -> QuantizedWeight:
    return QuantizedWeight(Q8_0, torch.zeros(outputs, Q8_0.nbytes, dtype=torch.uint8))


@cache
def _compile_pointwise(dtype: torch.dtype) -> None:
    operators, x = CompiledOperators(), torch.ones(1, 2, dtype=dtype)
    operators.add_rms_norm(operators.rms_norm(x, x[0], 1e-6), x, x[0], 1e-6)
    operators.act_and_mul(x, "silu")
