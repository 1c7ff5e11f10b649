"""Types of what operators take and return.

Shapes: T rows of a step, C hidden width, H query heads, K KV heads, G = H / K query heads of a KV
head, R = H + K heads that are rotated, X = H + 2 K heads of a row, D head dimension, N slots of the
cache, L tokens of context, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch

from .attention_metadata import AttentionParams, DecodeMetadata
from .quantized import QuantizedWeight
from .scaled import CachedKV

# x -> x @ weight.T + bias, for a weight that was prepared once.
Linear = Callable[[torch.Tensor], torch.Tensor]
# Outputs one after the other, in runs of numbers or of one format.
Weight = tuple[torch.Tensor | QuantizedWeight, ...]
# cos and sin of a step, fp32 [T, 1, rotated dimensions]; sin is negated in its first half.
CosSin = tuple[torch.Tensor, torch.Tensor]
# A memory of the KV cache, a tensor for each component: keys and values, or latents.
LayerKV = tuple[CachedKV, ...]
# Those of one layer.
Memories = Sequence[LayerKV]


@runtime_checkable
class QuantizedLinear(Protocol):
    """A ``Linear`` whose rows can be looked up, as in a table of embeddings: of a quantised weight,
    or of one that a backend keeps in blocks as if it were."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``."""

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs in fp32."""


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


# The rows' queries from the layer's input, whose KV is written to the cache.
Queries = Callable[[torch.Tensor, CosSin, LayerKV, torch.Tensor], torch.Tensor]
# The layer's output from what the rows attended to, and the layer's input.
FeedForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# The last layer's output from the first one's input where all rows decode, with the cache of each
# layer; ``None``, and nothing written, for caches that are not read so.
DecodingLayers = Callable[
    [torch.Tensor, CosSin, Sequence[LayerKV], torch.Tensor, DecodeMetadata], torch.Tensor | None
]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits choose a row's experts: those with the best scores, to which the
    ``correction`` [E] is added for the choice only. Scores weight the experts' results, divided by
    the sum of the chosen ones' if ``normalise``, times ``scale``."""

    scoring: Literal["softmax", "sigmoid"]
    chosen: int
    correction: torch.Tensor | None
    normalise: bool
    scale: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of the usual kind: its two parts, and the attention between them."""

    queries: Queries
    feed_forward: FeedForward
    params: AttentionParams
    sinks_H: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class OutputHead:
    """What makes logits of the last layer's output: a norm, and the products' runs."""

    norm_weight: torch.Tensor
    eps: float
    runs: Sequence[Linear]


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
