"""Operators: the boundary between the models and the kernels that compute them.

Shapes: T rows of a step, C hidden width, H query heads, K KV heads, G = H / K query heads of a KV
head, R = H + K heads that are rotated, X = H + 2 K heads of a row, D head dimension, N slots of the
cache, L tokens of context, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch

from .attention_metadata import AttentionConfig, AttentionMetadata, AttentionParams
from .quantized import QuantizedWeight
from .scaled import CachedKV

Activation = Literal["silu", "gelu_tanh"]
# x -> x @ weight.T + bias, for a weight that was prepared once.
Linear = Callable[[torch.Tensor], torch.Tensor]
# cos and sin of a step, fp32 [T, 1, rotated dimensions]; sin is negated in its first half.
CosSin = tuple[torch.Tensor, torch.Tensor]
# A layer's part of the KV cache, a tensor for each component: keys and values, or latents.
LayerKV = tuple[CachedKV, ...]


class Experts(Protocol):
    """The feed-forwards of a layer's experts, prepared once."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add to ``out`` [T, C] the chosen experts' results for each row of ``x``, weighted.

        ``weights`` and ``chosen``, the indices of experts, are [T, chosen experts].
        """


class BlockCopies(Protocol):
    """Copies of whole blocks of a cache in a CPU's memory.

    ``held`` is [K, blocks, bytes of a block], uint8, and so are the others; a head's blocks lie
    side by side. ``indices`` are int64, and the caller has checked that they name blocks.
    """

    def gather(self, held: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
        """``out[:, i] = held[:, indices[i]]``."""

    def scatter(self, held: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """``held[:, indices[i]] = data[:, i]``."""


class SlotCopies(Protocol):
    """Copies between slots of a cache in a GPU's memory and consecutive rows, which may be in the
    host's.

    ``held`` is [K, N, D] of any dtype, and ``rows`` [K, T, D] of the same one. The caller has
    checked that the slots exist.
    """

    def gather(self, held_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor) -> None:
        """``rows[:] = held[:, slots]``."""

    def scatter(
        self, held_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor
    ) -> None:
        """``held[:, slots] = rows``."""


class Operators(Protocol):
    """All that models compute with. ``reference/`` implements each operator in plain torch; other
    backends inherit what they do not replace."""

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype of activations for weights of ``dtype``."""

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """``x @ weight.T + bias``, packed once for this weight."""

    def prepare_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear:
        """As ``prepare_linear``, computed from the codes of a quantised weight for activations of
        ``dtype``. Kernels are compiled and tried here."""

    def prepare_experts(
        self, gate_up: list[torch.Tensor], down: list[torch.Tensor], activation: Activation
    ) -> Experts:
        """Gated feed-forwards, one for each pair of weights. Empties both lists, so that plain and
        packed weights of a layer are never all in memory at once."""

    def prepare_block_copies(self) -> BlockCopies:
        """Copies for the handoff on a CPU. Kernels are compiled here."""

    def prepare_slot_copies(self, row_bytes: frozenset[int], device: torch.device) -> SlotCopies:
        """Copies for the handoff on a GPU, of rows of these sizes. Kernels are compiled and tried
        here."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise over the last dimension."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum of both, and the sum."""

    def act_and_mul(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``activation(gate) * up`` of [T, gate | up]."""

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

        Only as many leading dimensions of a head are rotated as cos and sin are wide.
        """

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

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        """Return whether ``paged_attention`` of this kind takes ``AttentionMetadata.decodes``; it
        gets none otherwise.

        Called before the first step: kernels are compiled and tried here.
        """

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Each row attends to its own sequence up to itself; [T, H, D]."""

    def latent_attention(
        self,
        q_THD: torch.Tensor,
        latents: CachedKV,
        k_up_HNC: torch.Tensor,
        v_up_HVC: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """As ``paged_attention``, over latents whose keys and values are products with ``k_up`` and
        ``v_up``; [T, H, V]."""
