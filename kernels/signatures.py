"""Types of the arguments and results of operators.

Shapes: T rows of a step, C hidden width, H query heads, K KV heads, G = H / K query heads of a KV
head, R = H + K heads that are rotated, X = H + 2 K heads of a row, D head dimension, N slots of the
cache, L tokens of context, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from .attention_metadata import AttentionParams, DecodeMetadata
from .quantized import QuantizedWeight
from .scaled import CachedKV

# x -> x @ weight.T + bias, for a weight that was prepared once.
Linear = Callable[[torch.Tensor], torch.Tensor]
# A weight in runs of outputs, each of plain numbers or in one format.
Weight = tuple[torch.Tensor | QuantizedWeight, ...]
# cos and sin of a step, fp32 [T, 1, rotated dimensions]; sin is negated in its first half.
CosSin = tuple[torch.Tensor, torch.Tensor]
# A layer's KV cache, one tensor for each component: keys and values, or latents.
LayerKV = tuple[CachedKV, ...]
# The caches of all layers.
Memories = Sequence[LayerKV]


@runtime_checkable
class QuantizedLinear(Protocol):
    """A ``Linear`` whose rows can be looked up, as embeddings: for a quantised weight, or a plain
    one that a backend stores in blocks."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``."""

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs in fp32."""


class Experts(Protocol):
    """The feed-forwards of a layer's experts, prepared once.

    ``waits`` is true if a call waits for the device, so that no CUDA graph can contain it.
    """

    waits: bool

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add the weighted results of each row's experts to ``out`` [T, C], or to zeros, and return
        the sums.

        ``weights`` and ``expert_ids`` are [T, experts of a row].
        """


# Computes weights and indices of the experts of each row, both [T, experts of a row], from logits,
# or from activations.
ExpertChoice = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Computes the rows' queries from the layer's input, and writes its KV to the cache.
Queries = Callable[[torch.Tensor, CosSin, LayerKV, torch.Tensor], torch.Tensor]
# Computes the layer's output from the result of attention and the layer's input.
FeedForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Computes the last layer's output from the first one's input and the layers' caches, if all rows
# decode; ``None``, without side effects, for unsupported caches.
DecodingLayers = Callable[
    [torch.Tensor, CosSin, Sequence[LayerKV], torch.Tensor, DecodeMetadata], torch.Tensor | None
]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits select a row's experts: the ``top_k`` with the best scores, to which
    ``correction`` [E] is added for the selection only. Scores weight the experts' results, divided
    by the selected scores' sum if ``normalise``, times ``scale``.

    Only experts in the ``open_groups`` best of ``groups`` are eligible, ranked by the sum of their
    ``group_best`` best scores. With ``expert_scale`` [E], each expert's weight is multiplied by its
    own factor."""

    scoring: Literal["softmax", "sigmoid"]
    top_k: int
    correction: torch.Tensor | None
    normalise: bool
    scale: float
    groups: int = 1
    open_groups: int = 1
    group_best: int = 1
    expert_scale: torch.Tensor | None = None


class RopeConfig(NamedTuple):
    """The kind of a layer's rotation, for which kernels are compiled. Heads have ``dim``
    dimensions, of which the first ``rotated`` are rotated, and are ``normed`` before.
    ``cache_dtype`` is ``None`` if there are only queries; ``has_scale`` is true of a
    ``TensorScaledKV``."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype | None
    has_scale: bool
    heads: int
    kv_heads: int
    dim: int
    rotated: int
    normed: bool


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A standard layer: its two parts, and the attention between them."""

    queries: Queries
    feed_forward: FeedForward
    params: AttentionParams
    sinks_H: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The norm and the products, in runs, that compute logits from the last layer's output."""

    norm_weight: torch.Tensor
    eps: float
    runs: Sequence[Linear]


class BlockCopies(Protocol):
    """Copies of whole blocks of a cache in a CPU's memory.

    All arrays are uint8 [K, blocks, bytes of a block], with a head's blocks side by side.
    ``indices`` are int64, and the caller has checked that the blocks exist.
    """

    def gather(self, cached: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
        """``out[:, i] = cached[:, indices[i]]``."""

    def scatter(self, cached: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """``cached[:, indices[i]] = data[:, i]``."""


# Stages the inputs of a step on a device: enters ``changes`` int32 [E, 2], flat index and block, in
# the block tables [N, B], and writes tokens, positions and cache slots to ``staged`` int64 [3, T].
# Arguments: ``inputs`` int32 [4, T], which are these and the index of each row's table, changes,
# tables, last tokens int32 [N], staged. A negative token stands for the last one of the row's
# sequence.
StageInputs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class FrameCells:
    """Tokens of some layers of a cache, in a sequence's blocks: int32, on the cache's device.
    ``heads`` are counted within the cache."""

    layers: range
    heads: range
    blocks: torch.Tensor
    first_token: int
    end_token: int


class FrameCopies(Protocol):
    """Copies between cells of one cache and a frame of the handoff on the same device.

    A frame is bytes, for each of its layers ``[component][head][token][dim]``; all of its layers
    have the same shapes. The caller has checked its size, and that the blocks exist.
    """

    @property
    def sums(self) -> bool:
        """True if copies of any frame compute its row sums on the way."""

    def pack(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor | None:
        """Copy cells to a frame. Returns its row sums, int64, unless they have to be computed
        apart."""

    def scatter(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor | None:
        """The inverse of ``pack``."""
