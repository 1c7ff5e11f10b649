"""The layout of KV: what each layer keeps of a token, on one rank. No torch.

Planning, the cache, the greeting between ranks, frames and the canary all use this description, so
layers may differ in every respect. The canonical bytes of some tokens of a layer are its components
one after the other, each as ``[head][token][dim]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..config.kv_dtypes import BYTES, SCALED_AS_A_WHOLE, SCALES
from ..errors import PeerRefusedError
from ..models.spec import DecoderSpec, KVSpec

# The scale of each component in each layer with KV of its own; empty if all are 1.
WholeScales = tuple[tuple[float, ...], ...]
UNSCALED: WholeScales = ()


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One tensor of a layer's KV: ``dim`` values for each head and token.

    ``scales`` names the component that these numbers scale; empty for values. Values are to be
    multiplied by ``scale``, which checkpoints have for KV in fp8.
    """

    name: str
    dim: int
    dtype: str
    scales: str = ""
    scale: float = 1.0

    @property
    def bytes(self) -> int:
        """Bytes of one head and token."""
        return self.dim * BYTES[self.dtype]


@dataclass(frozen=True)
class LayerLayout:
    """What one layer keeps of a token on one rank: the components of each of its heads, which are
    numbered in the whole model."""

    components: tuple[KVComponent, ...]
    first_head: int
    end_head: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.end_head)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head and token."""
        return sum(component.bytes for component in self.components)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of all heads of one token."""
        return len(self.heads) * self.head_bytes

    @property
    def values(self) -> tuple[KVComponent, ...]:
        """The components other than scales."""
        return tuple(each for each in self.components if not each.scales)

    @property
    def shape(self) -> str:
        """The shape of a head's values, in which two ranks must agree: ``K 64, V 64``."""
        return ", ".join(f"{each.name} {each.dim}" for each in self.values)

    def with_heads(self, first_head: int, end_head: int) -> LayerLayout:
        """The same components, of other heads."""
        return LayerLayout(self.components, first_head, end_head)

    def as_dtype(self, dtype: str, whole_scales: Sequence[float] = ()) -> LayerLayout:
        """The same layer in another KV dtype; fp8 takes a scale for each component, 1 by default.
        Raises ``PeerRefusedError`` if the dtype is unknown."""
        check_kv_dtype(dtype)
        if not whole_scales or dtype not in SCALED_AS_A_WHOLE:
            whole_scales = (1.0,) * len(self.values)
        values = tuple(
            KVComponent(each.name, each.dim, dtype, scale=scale)
            for each, scale in zip(self.values, whole_scales, strict=True)
        )
        scales = tuple(
            KVComponent(f"{each.name} scale", 1, SCALES[dtype], scales=each.name)
            for each in values
            if dtype in SCALES
        )
        # Scales come first: they are wider than values, and stay aligned.
        return LayerLayout(scales + values, self.first_head, self.end_head)


def components_of(shape: str) -> int:
    """The number of components in a ``LayerLayout.shape``."""
    return shape.count(", ") + 1


def check_kv_dtype(dtype: str) -> None:
    """Raise ``PeerRefusedError`` if a peer's dtype is unknown here."""
    if dtype not in BYTES:
        raise PeerRefusedError(f"unknown KV dtype {dtype[:32]!r}; supported: {', '.join(BYTES)}")


def layer_layout(
    kv: KVSpec, dtype: str, rank: int = 0, size: int = 1, whole_scales: Sequence[float] = ()
) -> LayerLayout:
    """One layer's KV in a dtype, on one of ``size`` ranks."""
    heads = kv.heads_of(rank, size)
    values = tuple(KVComponent(name, kv.dim, dtype) for name in kv.components)
    return LayerLayout(values, heads.start, heads.stop).as_dtype(dtype, whole_scales)


def kv_layout(
    spec: DecoderSpec,
    dtype: str,
    rank: int = 0,
    size: int = 1,
    whole_scales: WholeScales = UNSCALED,
) -> tuple[LayerLayout, ...]:
    """The KV of every layer of a model in a dtype, on one of ``size`` ranks."""
    return tuple(
        layer_layout(kv, dtype, rank, size, scales)
        for kv, scales in zip(
            spec.memories, whole_scales or ((),) * len(spec.memories), strict=True
        )
    )


def heads_by_rank(spec: DecoderSpec, size: int) -> list[tuple[range, ...]]:
    """The KV heads on each of ``size`` ranks, layer by layer."""
    return [tuple(kv.heads_of(rank, size) for kv in spec.memories) for rank in range(size)]


def scales_in(layout: Sequence[LayerLayout]) -> tuple[float, ...]:
    """The scales of all components, layer by layer; empty if all are 1."""
    scales = tuple(component.scale for layer in layout for component in layer.values)
    return scales if any(scale != 1.0 for scale in scales) else ()


def token_bytes(layout: Sequence[LayerLayout]) -> int:
    """Bytes of one token in all layers."""
    return sum(layer.token_bytes for layer in layout)


def widest_cell(layout: Sequence[LayerLayout]) -> int:
    """Bytes of one token in the largest layer."""
    return max(layer.token_bytes for layer in layout)
