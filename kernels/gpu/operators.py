"""GPU operators: Triton kernels, and the reference for everything else.

Imports Triton, which not every machine has, and which takes half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..activations import Activation
from ..attention_metadata import (
    AttentionConfig,
    AttentionMetadata,
    AttentionParams,
    LatentConfig,
)
from ..batched_decode import ChunkKernel, DecodeKernel, batched_attention
from ..block_formats import CODEBOOK_FORMATS, BlockFormat
from ..grouped_codes import GroupedCodes
from ..operators import Operators
from ..quantized import QuantizedWeight, grouped_codes
from ..reference.attention import paged_attention
from ..reference.latent import latent_attention
from ..reference.quantized_linear import multiply_decoded
from ..scaled import CachedKV, TensorScaledKV
from ..signatures import (
    CosSin,
    ExpertChoice,
    Experts,
    FrameCopies,
    LayerKV,
    Linear,
    QuantizedLinear,
    RopeConfig,
    Routing,
    StageInputs,
    Weight,
)
from . import activation as gated
from . import (
    chunk_attention,
    chunk_trial,
    decode_trial,
    flash_attention,
    frame_copy_trial,
    fused_trial,
    latent_store,
    latent_trial,
    norm,
    paged_decode,
    quantized_trial,
    rope_store,
    routing_trial,
    skinny_trial,
    step_inputs_trial,
)
from .grouped_experts import TritonExperts, stack, stackable
from .latent_attention import attend_latents
from .packed_codes import PackedCodes, pack
from .quantized_linear import multiply
from .router import route
from .routing import choose_experts
from .scaled_linear import scaled_linear
from .step_inputs import stage_inputs
from .triton_frames import TritonFrames


class _SlicedLinear:
    """A product by torch with decoded slices of a weight."""

    def __init__(
        self, weight: GroupedCodes | PackedCodes | QuantizedWeight, bias: torch.Tensor | None
    ) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_decoded(x, self._weight, self._bias)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """See ``QuantizedLinear``."""
        return self._weight.part(outputs).values()


class _TritonLinear(_SlicedLinear):
    """A product by Triton with codes."""

    def __init__(self, codes: PackedCodes, bias: torch.Tensor | None) -> None:
        super().__init__(codes, bias)
        self._codes = codes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self._codes.outputs)
        out = multiply(x, self._codes)
        return out if self._bias is None else out + self._bias.to(out.dtype)


class GpuOperators(Operators):
    """Sequences decode one by one if Triton does not work; with ``triton_required``,
    ``prepare_batched_decode`` raises ``KernelUnavailableError`` instead."""

    def __init__(self, *, triton_required: bool = False) -> None:
        self._triton_required = triton_required
        # The kinds whose kernels work; the reference computes all others.
        self._norms: set[tuple[int, torch.dtype]] = set()
        self._activations: set[tuple[Activation, int, torch.dtype]] = set()
        self._ropes: set[RopeConfig] = set()
        # Kinds of attention whose chunks FlashAttention 3 computes.
        self._flash: set[AttentionConfig] = set()
        # True if the store kernel works for every kind of latent attention that was prepared.
        self._stores_latents: bool | None = None

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Few rows are multiplied by Triton with small weights, whatever else by torch."""
        return skinny_trial.skinny_linear(weight, bias) or super().prepare_linear(weight, bias)

    def has_product(self, format: BlockFormat, dtype: torch.dtype) -> bool:
        """True for formats with a Triton kernel."""
        return quantized_trial.has_kernel(format, dtype)

    def prepare_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Stores codes in the kernel's order. Without a kernel, codes and scales are separated, so
        that a GPU reads whole words, except with a codebook, where that would need several times
        the memory."""
        if scaled := scaled_linear(weight, bias, dtype):
            return scaled
        if quantized_trial.works(weight.format, dtype, weight.blocks.device):
            return _TritonLinear(pack(weight), bias)
        codes = weight if weight.format in CODEBOOK_FORMATS else grouped_codes(weight)
        return _SlicedLinear(codes, bias)

    def prepare_experts(
        self,
        gate_up: list[Weight],
        down: list[Weight],
        activation: Activation,
        dtype: torch.dtype,
        gate_up_biases: list[torch.Tensor] | None = None,
        down_biases: list[torch.Tensor] | None = None,
    ) -> Experts:
        """Experts of the same kind are computed together, in one launch for each half."""
        if stackable(gate_up, dtype) and stackable(down, dtype):
            halves = stack(gate_up, gate_up_biases), stack(down, down_biases)
            return TritonExperts(*halves, self.act_and_mul, activation)
        return super().prepare_experts(
            gate_up, down, activation, dtype, gate_up_biases, down_biases
        )

    def prepare_routing(self, routing: Routing, experts: int, device: torch.device) -> ExpertChoice:
        if routing_trial.works(routing, experts, device):
            return partial(choose_experts, routing=routing)
        return super().prepare_routing(routing, experts, device)

    def prepare_fused_router(
        self, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> ExpertChoice | None:
        """For a weight that is the same in ``dtype``, as those of most checkpoints are."""
        narrow = routing_trial.narrowed(weight, dtype)
        if narrow is None or not routing_trial.router_works(narrow, bias, routing):
            return None
        return partial(route, weight_EC=narrow, bias_E=bias, routing=routing)

    def prepare_frame_copies(
        self, layers: Sequence[Sequence[torch.Tensor]], block_size: int
    ) -> FrameCopies:
        if frame_copy_trial.works(layers, block_size):
            return TritonFrames(layers, block_size)
        return super().prepare_frame_copies(layers, block_size)

    def prepare_step_inputs(self, device: torch.device) -> StageInputs:
        if step_inputs_trial.works(device):
            return stage_inputs
        return super().prepare_step_inputs(device)

    def prepare_norm(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        if fused_trial.norm_works(width, dtype, device):
            self._norms.add((width, dtype))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if (x.shape[-1], x.dtype) in self._norms and norm.takes(x):
            return norm.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_tried = (x.shape[-1], x.dtype) in self._norms
        if is_tried and norm.takes(x) and norm.takes(residual):
            return norm.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps)

    def prepare_act_and_mul(
        self, activation: Activation, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if fused_trial.activation_works(activation, width, dtype, device):
            self._activations.add((activation, width, dtype))

    def act_and_mul(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if (activation, x.shape[-1] // 2, x.dtype) in self._activations and gated.takes(x):
            return gated.act_and_mul(x, activation)
        return super().act_and_mul(x, activation)

    def prepare_rope(self, config: RopeConfig) -> None:
        if fused_trial.rope_works(config):
            self._ropes.add(config)

    def rope_and_cache_kv(
        self,
        qkv_TXD: torch.Tensor,
        norm_weight_RD: torch.Tensor | None,
        eps: float,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        arguments = qkv_TXD, norm_weight_RD, eps, cos_sin, cache, slots_T
        is_tried = _rope_config(qkv_TXD, norm_weight_RD, cos_sin, cache[0]) in self._ropes
        if is_tried and rope_store.takes(qkv_TXD, cos_sin):
            return rope_store.rope_and_cache_kv(*arguments)
        return super().rope_and_cache_kv(*arguments)

    def rope_queries(
        self,
        q_THD: torch.Tensor,
        norm_weight_HD: torch.Tensor | None,
        eps: float,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        arguments = q_THD, norm_weight_HD, eps, cos_sin
        is_tried = _rope_config(q_THD, norm_weight_HD, cos_sin, None) in self._ropes
        if is_tried and rope_store.takes(q_THD, cos_sin):
            return rope_store.rope_queries(*arguments)
        return super().rope_queries(*arguments)

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        # Without causality, prompts are computed whole, and few have a single token.
        return config.params.causal and decode_trial.works(config, required=self._triton_required)

    def prepare_batched_chunks(self, config: AttentionConfig) -> bool:
        if flash_attention.works(config):
            self._flash.add(config)
            return True
        return chunk_trial.works(config)

    @property
    def chunks_in_place(self) -> bool:
        return not self._flash

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        metadata: AttentionMetadata,
        params: AttentionParams,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attention = partial(paged_attention, sinks_H=sinks_H)
        decode_kernel: DecodeKernel[CachedKV] = partial(paged_decode.paged_decode, sinks_H=sinks_H)
        chunk_kernel: ChunkKernel[CachedKV] = partial(
            chunk_attention.chunk_attention, sinks_H=sinks_H
        )
        if self._flash and metadata.chunks is not None:
            config = _attention_config(q_THD, keys_KND, metadata.chunks.block_size, params)
            if config in self._flash:
                chunk_kernel = flash_attention.flash_attention
        return batched_attention(
            q_THD, keys_KND, values_KND, metadata, params, decode_kernel, attention, chunk_kernel
        )

    def prepare_latent_decode(self, config: LatentConfig) -> bool:
        self._stores_latents = latent_trial.stores(config) and self._stores_latents is not False
        return latent_trial.decodes(config, required=self._triton_required)

    def prepare_latent_chunks(self, config: LatentConfig) -> bool:
        return latent_trial.takes_chunks(config)

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
        (latents,) = cache
        inputs = q_THD, kv_TC, norm_weight, eps, cos_sin
        if self._stores_latents and latent_store.takes(q_THD, kv_TC):
            return latent_store.rope_and_cache_latent(*inputs, latents, slots_T)
        return super().rope_and_cache_latent(*inputs, cache, slots_T)

    def latent_attention(
        self,
        q_THD: torch.Tensor,
        latents: CachedKV,
        k_up_HNC: torch.Tensor,
        v_up_HVC: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        decodes, chunks = metadata.decodes, metadata.chunks
        if decodes is None and chunks is None:
            return super().latent_attention(q_THD, latents, k_up_HNC, v_up_HVC, metadata, scale)
        others = [
            sequence
            for sequence in metadata.sequences
            if (chunks if sequence.num_rows > 1 else decodes) is None
        ]
        out = q_THD.new_empty(q_THD.shape[0], *v_up_HVC.shape[:2])
        # Without the rows at the end that torch attends for, such as those of a long chunk.
        end = len(out)
        for other in reversed(others):
            end = other.rows.start if other.rows.stop == end else end
        inputs = latents, k_up_HNC, v_up_HVC
        attend_latents(q_THD[:end], *inputs, decodes, chunks, scale, out[:end])
        if others:
            latent_attention(q_THD, *inputs, others, scale, out=out)
        return out


def _attention_config(
    q_THD: torch.Tensor, keys_KND: CachedKV, block_size: int, params: AttentionParams
) -> AttentionConfig:
    return AttentionConfig(
        device=q_THD.device,
        dtype=q_THD.dtype,
        cache_dtype=keys_KND.dtype,
        heads=q_THD.shape[1],
        kv_heads=keys_KND.shape[0],
        dim=q_THD.shape[2],
        block_size=block_size,
        params=params,
    )


def _rope_config(
    qkv_TXD: torch.Tensor,
    norm_weight_RD: torch.Tensor | None,
    cos_sin: CosSin,
    keys_KND: CachedKV | None,
) -> RopeConfig:
    kv_heads = 0 if keys_KND is None else keys_KND.shape[0]
    _, heads, dim = qkv_TXD.shape
    # By position, since this is asked in each layer.
    return RopeConfig(
        qkv_TXD.device,
        qkv_TXD.dtype,
        None if keys_KND is None else keys_KND.dtype,
        isinstance(keys_KND, TensorScaledKV),
        heads - 2 * kv_heads,
        kv_heads,
        dim,
        cos_sin[0].shape[-1],
        norm_weight_RD is not None,
    )
