"""What can vary between decoders, as plain data without torch.

The model is built from it, the KV planner lays blocks out from it, and the handoff compares it.
Every per-layer pattern is resolved into ``DecoderSpec.layers`` when the config is read, so nobody
downstream asks "is this one of the layers with a window?" again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, a smooth ramp between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over the whole head, the two halves of a head rotated against each other."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention. ``sliding_window`` counts the token itself; ``None`` is no limit."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def query_heads_of(self, rank: int, size: int) -> range:
        """The query heads that one tensor-parallel rank computes."""
        share = self.num_heads // size
        return range(rank * share, (rank + 1) * share)

    def kv_heads_of(self, rank: int, size: int) -> range:
        """The KV heads that one rank holds; with more ranks than heads, several hold the same."""
        if size > self.num_kv_heads:
            head = rank * self.num_kv_heads // size
            return range(head, head + 1)
        share = self.num_kv_heads // size
        return range(rank * share, (rank + 1) * share)


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward: ``down(activation(gate(x)) * up(x))``."""

    intermediate: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One pre-norm layer."""

    attention: AttentionSpec
    mlp: DenseSpec


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A whole decoder. ``dtype`` is what the checkpoint says it was saved in, by its torch name."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"

    def dtype_for(self, wanted: str, *, on_cpu: bool) -> str:
        """The type to run in. ``auto`` is the checkpoint's own, except that float16 becomes
        bfloat16 on a CPU, which attends several times slower in float16 (ask for float16 or
        float32 to keep all of its bits)."""
        if wanted != "auto":
            return wanted
        return "bfloat16" if on_cpu and self.dtype == "float16" else self.dtype


def tensor_parallel_problem(spec: DecoderSpec, size: int) -> str | None:
    """Why this decoder cannot be split over ``size`` ranks, or ``None`` if it can."""
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        if attention.num_heads % size:
            return f"{attention.num_heads} query heads do not divide by {size}"
        if attention.num_kv_heads % size and size % attention.num_kv_heads:
            return f"{attention.num_kv_heads} KV heads and {size} ranks do not divide each other"
        if mlp.intermediate % size:
            return f"the feed-forward width {mlp.intermediate} does not divide by {size}"
    return None


def kv_heads_by_rank(spec: DecoderSpec, size: int) -> list[range]:
    """The KV heads that each of ``size`` ranks holds, in every layer alike."""
    return [spec.layers[0].attention.kv_heads_of(rank, size) for rank in range(size)]


def fingerprint_fields(spec: DecoderSpec) -> dict[str, str]:
    """What both sides of a handoff must agree on, field by field, so that a refusal can name it."""
    attention = [layer.attention for layer in spec.layers]
    mlps = [layer.mlp for layer in spec.layers]
    return {
        "layers": str(len(spec.layers)),
        "hidden_size": str(spec.hidden_size),
        "vocab_size": str(spec.vocab_size),
        "heads": _runs(a.num_heads for a in attention),
        "kv_heads": _runs(a.num_kv_heads for a in attention),
        "head_dim": _runs(a.head_dim for a in attention),
        "qkv_bias": _runs(a.qkv_bias for a in attention),
        "o_bias": _runs(a.o_bias for a in attention),
        "qk_norm": _runs(a.qk_norm for a in attention),
        "sliding_window": _runs(a.sliding_window for a in attention),
        "intermediate": _runs(m.intermediate for m in mlps),
        "activation": _runs(m.activation for m in mlps),
        "mlp_bias": _runs(m.bias for m in mlps),
        "norm_eps": repr(spec.norm_eps),
        "rope_theta": repr(spec.rope.theta),
        "rope_scaling": repr(spec.rope.scaling),
        "tie_embeddings": str(spec.tie_embeddings),
    }


def _runs(values: Iterable[object]) -> str:
    """``8, 8, 8, None`` as ``8 x3, None x1``."""
    return ", ".join(f"{value} x{len(list(run))}" for value, run in groupby(values))
