"""Operators: the boundary between the models and the kernels that compute them.

Shapes: T rows of a step, C hidden width, H query heads, K KV heads, G = H / K query heads of a KV
head, R = H + K heads that are rotated, X = H + 2 K heads of a row, D head dimension, N slots of the
cache, L tokens of context, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from .activations import Activation
from .attention_metadata import (
    AttentionConfig,
    AttentionMetadata,
    AttentionParams,
    LatentConfig,
)
from .block_encoding import encode
from .block_formats import BlockFormat
from .quantized import QuantizedWeight
from .reference import attention, latent, linear, norm, quantized_linear
from .reference.activation import act_and_mul, activate
from .reference.cache import IndexedFrames, NumpyBlockCopies, write_cache, write_kv
from .reference.experts import LoopedExperts
from .reference.quantized_linear import OrderedLinear
from .reference.rope import apply_rotary
from .reference.routing import choose_experts
from .reference.step_inputs import stage_inputs
from .scaled import CachedKV
from .signatures import (
    BlockCopies,
    CosSin,
    DecodingLayers,
    ExpertChoice,
    Experts,
    FeedForward,
    FrameCopies,
    LayerKV,
    LayerParts,
    Linear,
    OutputHead,
    QuantizedLinear,
    Queries,
    RopeConfig,
    Routing,
    StageInputs,
    Weight,
)


class Operators:
    """All operators of models, in plain torch, on any device.

    Backends are subclasses that override what they compute faster; this class is their fallback and
    the oracle of their tests.
    """

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype of activations for weights of ``dtype``."""
        return linear.activation_dtype(dtype, device)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """``x @ weight.T + bias``, packed once for this weight."""
        return linear.prepare_linear(weight, bias)

    def prepare_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Like ``prepare_linear``, for a quantised weight with its inputs in order, and activations
        of ``dtype``. Kernels are compiled and tried here."""
        return quantized_linear.DecodedLinear(weight, bias)

    def has_product(self, format: BlockFormat, dtype: torch.dtype) -> bool:
        """True if this backend has a kernel for activations of ``dtype`` and codes of a format.
        Without one, weights are decoded for each product."""
        return False

    def prepare_ordered(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Like ``prepare_quantized``, also for weights with reordered inputs."""
        order = weight.order
        in_order = self.prepare_quantized(replace(weight, order=None), bias, dtype)
        return in_order if order is None else OrderedLinear(in_order, order)

    def quantise(self, format: BlockFormat, weight: torch.Tensor, into: torch.Tensor) -> None:
        """Quantise numbers, in rows of whole blocks, to ``into`` on the same device."""
        encode(format, weight, into)

    def prepare_experts(
        self,
        gate_up: list[Weight],
        down: list[Weight],
        activation: Activation,
        dtype: torch.dtype,
        gate_up_biases: list[torch.Tensor] | None = None,
        down_biases: list[torch.Tensor] | None = None,
    ) -> Experts:
        """Gated feed-forwards, one for each pair of weights, for activations of ``dtype``. Empties
        the lists of weights, so that a layer's plain and packed weights are never all in memory."""
        return LoopedExperts(
            self._prepare_all(gate_up, gate_up_biases, dtype),
            self._prepare_all(down, down_biases, dtype),
            self.act_and_mul,
            activation,
        )

    def _prepare_all(
        self, weights: list[Weight], biases: list[torch.Tensor] | None, dtype: torch.dtype
    ) -> list[Linear]:
        added: Sequence[torch.Tensor | None] = biases or [None] * len(weights)
        weights.reverse()
        return [self._prepare_runs(weights.pop(), bias, dtype) for bias in added]

    def _prepare_runs(
        self, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear:
        heights = [run.outputs if isinstance(run, QuantizedWeight) else len(run) for run in weight]
        biases = [None] * len(weight) if bias is None else bias.split(heights)
        runs = [
            self.prepare_ordered(run, its_bias, dtype)
            if isinstance(run, QuantizedWeight)
            else self.prepare_linear(run, its_bias)
            for run, its_bias in zip(weight, biases, strict=True)
        ]
        return joined(runs)

    def prepare_queries(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        qkv: Sequence[Linear],
        head_weight_RD: torch.Tensor | None,
        head_eps: float,
    ) -> Queries | None:
        """The first part of a layer: ``rms_norm``, a product in runs of outputs, and
        ``rope_and_cache_kv``; ``None`` if separate operators are as fast. Needs at least one row,
        like ``prepare_feed_forward``."""
        return None

    def prepare_feed_forward(
        self,
        o: Sequence[Linear],
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activation: Activation,
    ) -> FeedForward | None:
        """The part of a layer after attention: the output projection, ``add_rms_norm`` with the
        layer's input, and a gated feed-forward, whose result is added to that sum; ``None`` if
        separate operators are as fast. Products are in runs of outputs."""
        return None

    def prepare_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Like ``prepare_linear``, for few outputs in fp32."""
        return self.prepare_linear(weight, bias)

    def prepare_routing(self, routing: Routing, experts: int, device: torch.device) -> ExpertChoice:
        """The choice of experts from logits in fp32. Kernels are compiled and tried here."""
        return partial(choose_experts, routing=routing)

    def prepare_fused_router(
        self, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> ExpertChoice | None:
        """Both in one, from activations of ``dtype`` for a weight in fp32; ``None`` if separate
        operators are as fast. Kernels are compiled and tried here."""
        return None

    def prepare_expert_feed_forward(
        self,
        o: Sequence[Linear],
        norm_weight: torch.Tensor,
        eps: float,
        router: Linear,
        routing: Routing,
        experts: Experts,
    ) -> FeedForward | None:
        """Like ``prepare_feed_forward``, with experts; ``None`` if separate parts are as fast."""
        return None

    def prepare_decoding(
        self, layers: Sequence[LayerParts], head: OutputHead | None = None
    ) -> DecodingLayers | None:
        """Consecutive layers of the same shapes and rotation, and the logits if they end with a
        ``head``, for steps in which all rows decode; ``None`` if separate parts are as fast."""
        return None

    def prepare_block_copies(self) -> BlockCopies:
        """Copies for the handoff on a CPU. Kernels are compiled here."""
        return NumpyBlockCopies()

    def prepare_frame_copies(
        self, layers: Sequence[Sequence[torch.Tensor]], block_size: int
    ) -> FrameCopies:
        """Copies for the handoff between frames and a cache with these components of each layer,
        [K, N, D]. Kernels are compiled and tried here."""
        return IndexedFrames(layers, block_size)

    def prepare_step_inputs(self, device: torch.device) -> StageInputs:
        """See ``StageInputs``. Kernels are compiled and tried here."""
        return stage_inputs

    def prepare_norm(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Called before the first ``rms_norm`` or ``add_rms_norm`` of this width. Kernels are
        compiled and tried here, as in the other methods whose names begin so."""

    def prepare_act_and_mul(
        self, activation: Activation, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Called before the first ``act_and_mul`` with ``width`` results a row."""

    def prepare_rope(self, config: RopeConfig) -> None:
        """Called before the first ``rope_and_cache_kv`` or ``rope_queries`` of this kind."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise over the last dimension."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum of both, and the sum."""
        return norm.add_rms_norm(x, residual, weight, eps)

    def act_and_mul(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``activation(gate) * up`` of [T, gate | up]."""
        return act_and_mul(x, activation)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``activation(x)``, for feed-forwards without a gate."""
        return activate(x, activation)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Subtract the mean and divide by the standard deviation of the last dimension."""
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def rope_and_cache_kv(
        self,
        qkv_TXD: torch.Tensor,
        norm_weight_RD: torch.Tensor | None,
        eps: float,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """Normalise the query and key heads if there is a weight, rotate them, and write keys and
        values to the cache. Returns the queries [T, H, D].

        Only the leading dimensions of a head are rotated, as many as cos and sin have.
        """
        keys, values = cache
        kv_heads = keys.shape[0]
        # Without the checks of ``split``, which take as long as the split.
        qk, v = qkv_TXD.split_with_sizes([qkv_TXD.shape[1] - kv_heads, kv_heads], dim=1)
        if norm_weight_RD is not None:
            qk = norm.head_rms_norm(qk, norm_weight_RD, eps)
        qk = apply_rotary(qk, cos_sin)
        q, k = qk.split_with_sizes([qk.shape[1] - kv_heads, kv_heads], dim=1)
        write_kv(keys, values, slots_T, k, v)
        return q

    def rope_queries(
        self,
        q_THD: torch.Tensor,
        norm_weight_HD: torch.Tensor | None,
        eps: float,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        """Normalise the queries if there is a weight, and rotate them: for a layer that attends to
        another layer's keys and values."""
        if norm_weight_HD is not None:
            q_THD = norm.head_rms_norm(q_THD, norm_weight_HD, eps)
        return apply_rotary(q_THD, cos_sin)

    def rope_and_cache_latent(
        self,
        q_THD: torch.Tensor,
        kv_TC: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """Normalise the latent of ``kv`` (latent | rotated dimensions), rotate the rest of it and
        the last dimensions of each query, and write it to the cache. Returns the queries, which may
        be rotated in place."""
        (latents,) = cache
        latent_dim = norm_weight.shape[0]
        latent, k_rope = kv_TC.split([latent_dim, kv_TC.shape[-1] - latent_dim], dim=-1)
        q_rope = q_THD[..., q_THD.shape[-1] - k_rope.shape[-1] :]
        rotated = apply_rotary(torch.cat([q_rope, k_rope[:, None]], dim=1), cos_sin)
        q_rope.copy_(rotated[:, :-1])
        normed = self.rms_norm(latent, norm_weight, eps)
        cached = torch.cat([normed, rotated[:, -1]], dim=-1)
        write_cache(latents, slots_T, cached[:, None])
        return q_THD

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        """True if ``paged_attention`` of this kind supports ``AttentionMetadata.decodes``, which is
        ``None`` otherwise.

        Called before the first step: kernels are compiled and tried here.
        """
        return False

    def prepare_batched_chunks(self, config: AttentionConfig) -> bool:
        """The same for ``AttentionMetadata.chunks``."""
        return False

    @property
    def chunks_in_place(self) -> bool:
        """True if no kernel that was prepared for chunks allocates memory for their contexts."""
        return True

    def prepare_latent_decode(self, config: LatentConfig) -> bool:
        """Like ``prepare_batched_decode``, for ``latent_attention``. Also prepares
        ``rope_and_cache_latent``."""
        return False

    def prepare_latent_chunks(self, config: LatentConfig) -> bool:
        """Like ``prepare_batched_chunks``, for ``latent_attention``."""
        return False

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        metadata: AttentionMetadata,
        params: AttentionParams,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each row attends to its own sequence up to itself; [T, H, D]. ``sinks`` are fp32 scores,
        if ``params`` has them."""
        sequences = metadata.sequences
        return attention.paged_attention(
            q_THD, keys_KND, values_KND, sequences, params, sinks_H=sinks_H
        )

    def biased_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        metadata: AttentionMetadata,
        params: AttentionParams,
        biases: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Each row attends to its whole sequence, with a bias of the scores [H, rows, tokens]; [T,
        H, D]."""
        return attention.paged_attention(
            q_THD, keys_KND, values_KND, metadata.sequences, params, biases=biases
        )

    def latent_attention(
        self,
        q_THD: torch.Tensor,
        latents: CachedKV,
        k_up_HNC: torch.Tensor,
        v_up_HVC: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Like ``paged_attention``, over latents, whose products with ``k_up`` and ``v_up`` are
        keys and values; [T, H, V]."""
        return latent.latent_attention(
            q_THD, latents, k_up_HNC, v_up_HVC, metadata.sequences, scale
        )


def joined(runs: Sequence[Linear]) -> Linear:
    """The product that concatenates the outputs of the runs."""
    if len(runs) == 1:
        return runs[0]
    return lambda x: torch.cat([run(x) for run in runs], dim=-1)
