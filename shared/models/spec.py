"""What can vary between decoders, as plain data without torch.

The model is built from it, the KV planner lays blocks out from it, and the handoff compares it.
Every per-layer pattern is resolved into ``DecoderSpec.layers`` when the config is read, so nobody
downstream asks "is this one of the layers with a window?" again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Literal


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


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies that turn less than ``beta_slow`` times in the original context divided by a
    factor, those that turn more than ``beta_fast`` times kept, a linear ramp over the ones between,
    whose ends are whole numbers with ``truncate``. ``attention_factor`` multiplies cos and sin;
    latent attention multiplies its scores with ``score_factor`` as well."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    score_factor: float


Activation = Literal["silu", "gelu_tanh"]
RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over the whole head, the two halves of a head rotated against each other."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What a layer keeps of each token: on every one of ``sides``, ``heads`` vectors of ``dim``.

    ``window`` is how many of the newest tokens a token sees, itself included; ``None`` is no limit.
    """

    components: tuple[str, ...]
    heads: int
    dim: int
    window: int | None = None

    def heads_of(self, rank: int, size: int) -> range:
        """The heads that one rank holds; with more ranks than heads, several hold the same."""
        if size > self.heads:
            head = rank * self.heads // size
            return range(head, head + 1)
        share = self.heads // size
        return range(rank * share, (rank + 1) * share)


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

    @property
    def kv(self) -> KVSpec:
        """K and V of each KV head."""
        return KVSpec(
            components=("K", "V"),
            heads=self.num_kv_heads,
            dim=self.head_dim,
            window=self.sliding_window,
        )

    def split_problem(self, size: int) -> str | None:
        """Why this cannot be split over ``size`` ranks, or ``None`` if it can."""
        if self.num_heads % size:
            return f"{self.num_heads} query heads do not divide by {size}"
        if self.num_kv_heads % size and size % self.num_kv_heads:
            return f"{self.num_kv_heads} KV heads and {size} ranks do not divide each other"
        return None


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention: keys and values of all heads are products of one latent.

    A query head has ``nope_dim`` numbers without position and ``rope_dim`` rotated ones, against
    keys of the same parts; the rotated part of the keys is one for all heads. ``q_lora_rank`` is
    the width that queries are compressed to, if they are. ``rope_interleaved``: the checkpoint has
    the numbers that are rotated against each other side by side, not half a head apart.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    norm_eps: float
    rope_interleaved: bool

    @property
    def qk_dim(self) -> int:
        """Width of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def kv(self) -> KVSpec:
        """The latent, normed, then the rotated part of the keys."""
        return KVSpec(components=("latent",), heads=1, dim=self.kv_lora_rank + self.rope_dim)

    def split_problem(self, size: int) -> str | None:
        """Why this cannot be split over ``size`` ranks, or ``None`` if it can."""
        if self.num_heads % size:
            return f"{self.num_heads} query heads do not divide by {size}"
        return None


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward: ``down(activation(gate(x)) * up(x))``."""

    intermediate: int
    activation: Activation = "silu"
    bias: bool = False

    def split_problem(self, size: int) -> str | None:
        """Why this cannot be split over ``size`` ranks, or ``None`` if it can."""
        if self.intermediate % size:
            return f"the feed-forward width {self.intermediate} does not divide by {size}"
        return None


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Which ``chosen`` of the experts compute a token: those with the best scores.

    With ``groups`` of neighbouring experts, only those in the best ``open_groups``; a group is as
    good as its ``group_best`` best scores together. With ``correction``, each expert has a bias
    that counts for the choice alone. What an expert computes is weighted with its score, as a part
    of all chosen ones' if ``normalise``, times ``scale``.
    """

    experts: int
    chosen: int
    scoring: Literal["softmax", "sigmoid"]
    groups: int
    open_groups: int
    group_best: int
    correction: bool
    normalise: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A feed-forward that every token goes through, and experts of which a router picks a few."""

    router: RouterSpec
    expert: DenseSpec
    shared: DenseSpec

    def split_problem(self, size: int) -> str | None:
        """Why this cannot be split over ``size`` ranks, or ``None`` if it can."""
        return self.expert.split_problem(size) or self.shared.split_problem(size)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One pre-norm layer."""

    attention: AttentionSpec | MLASpec
    mlp: DenseSpec | MoESpec


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
        problem = layer.attention.split_problem(size) or layer.mlp.split_problem(size)
        if problem is not None:
            return problem
    return None


def kv_heads_by_rank(spec: DecoderSpec, size: int) -> list[range]:
    """The KV heads that each of ``size`` ranks holds, in every layer alike."""
    kv = spec.layers[0].attention.kv
    return [kv.heads_of(rank, size) for rank in range(size)]


def layers_before_routing(spec: DecoderSpec) -> int:
    """How many of the first layers have KV that no choice of experts has touched."""
    routed = (n for n, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoESpec))
    return next(routed, len(spec.layers) - 1) + 1


def fingerprint_fields(spec: DecoderSpec) -> dict[str, str]:
    """What both sides of a handoff must agree on, field by field, so that a refusal can name it."""
    return {
        "layers": str(len(spec.layers)),
        "hidden_size": str(spec.hidden_size),
        "vocab_size": str(spec.vocab_size),
        **_fields_by_layer("attention", [layer.attention for layer in spec.layers]),
        **_fields_by_layer("mlp", [layer.mlp for layer in spec.layers]),
        "norm_eps": repr(spec.norm_eps),
        "rope_theta": repr(spec.rope.theta),
        "rope_scaling": repr(spec.rope.scaling),
        "tie_embeddings": str(spec.tie_embeddings),
    }


def _fields_by_layer(part: str, specs: list[Any]) -> dict[str, str]:
    """Each field that a layer's spec has, with its value in every layer; a dash where a layer is of
    a kind without it."""
    names = dict.fromkeys(field.name for spec in specs for field in fields(spec))
    return {f"{part}.{name}": _runs(getattr(s, name, "-") for s in specs) for name in names}


def _runs(values: Iterable[object]) -> str:
    """``8, 8, 8, None`` as ``8 x3, None x1``."""
    return ", ".join(f"{value} x{len(list(run))}" for value, run in groupby(values))
