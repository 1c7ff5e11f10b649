"""Specs: everything that varies between decoders, as plain data without torch.

The model is built from a spec, the KV cache is planned from it, and the handoff compares it. Every
per-layer pattern is resolved into ``DecoderSpec.layers`` when the config is read, so no other code
needs to know, for example, which layers have a sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, Literal, get_args

from ...kernels.activations import Activation
from ..scoring import Scoring

# The hidden state of the last token or of the first, or the mean over all.
Pooling = Literal["last", "cls", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
# The function from a classifier's logits to scores.
ScoreActivation = Literal["sigmoid", "softmax", "none"]


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Theta is set for the longest context, up to ``factor`` times the original one."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are divided by a factor, high ones kept, with a smooth ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies that turn fewer than ``beta_slow`` times in the original context are divided by a
    factor, those that turn more than ``beta_fast`` times are kept, with a linear ramp in between,
    whose ends are rounded with ``truncate``. cos and sin are multiplied by ``attention_factor``,
    and scores of latent attention also by ``score_factor``."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    score_factor: float


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Each frequency is divided by its own factor; cos and sin are multiplied by
    ``attention_factor``.

    Checkpoints have factors for short and for long contexts. They are chosen by the longest context
    when the config is read, since cached keys of a sequence must have equal factors.
    """

    factors: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Frequencies of whole heads, divided by ``factor``, of which only the first ``rotated``
    dimensions of each half are rotated. ``RopeSpec.dim`` is the whole head."""

    rotated: int
    factor: float


RopeScaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first ``dim`` dimensions of a head; dimension i rotates with
    i + dim / 2."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """A layer's KV of one token: for each of ``components``, ``heads`` vectors of ``dim``.

    ``window`` is the number of newest tokens that a token sees, including itself; ``None`` means
    all.
    """

    components: tuple[str, ...]
    heads: int
    dim: int
    window: int | None = None

    def heads_of(self, rank: int, size: int) -> range:
        """The heads on one rank; with more ranks than heads, several ranks have the same head."""
        if size > self.heads:
            head = rank * self.heads // size
            return range(head, head + 1)
        share = self.heads // size
        return range(rank * share, (rank + 1) * share)


class QKNorm(Enum):
    """Norms of queries and keys: over each head with a common weight, before or after the rotation;
    over all heads at once; or a LayerNorm over each head with its own weight."""

    HEAD = "head"
    ROTATED_HEAD = "rotated head"
    PROJECTION = "projection"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Queries at position p are multiplied by ``1 + beta * ln(1 + p // original_max_position)``."""

    beta: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention. ``sliding_window`` counts the token itself; ``None`` is no limit.
    Scores are multiplied by ``scale``, by default 1 / sqrt(head_dim); with ``soft_cap`` c, they are
    then ``c * tanh(score / c)``.

    ``v_norm`` is a norm over each value head, without a weight. ``values_are_keys``: values are the
    keys before norm and rotation, without a projection. ``sinks``: each head has a score that
    counts in the softmax but has no value. ``kv_of`` is the earlier layer whose keys and values are
    used, if the layer has none. Unless ``causal``, tokens also see later ones, so that a prompt is
    computed in one step, and a window reaches to both sides.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm | None = None
    v_norm: bool = False
    values_are_keys: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    query_scale: QueryScale | None = None
    kv_of: int | None = None
    causal: bool = True

    @property
    def memories(self) -> tuple[KVSpec, ...]:
        """What a layer caches of a sequence."""
        return () if self.kv_of is not None else (self.kv,)

    @property
    def kv(self) -> KVSpec:
        """K and V of each KV head."""
        return KVSpec(
            components=("K", "V"),
            heads=self.num_kv_heads,
            dim=self.head_dim,
            window=self.sliding_window if self.causal else None,
        )

    def split_problem(self, size: int) -> str | None:
        """The reason why this cannot be split over ``size`` ranks, or ``None``."""
        if self.num_heads % size:
            return f"{self.num_heads} query heads do not divide by {size}"
        if self.num_kv_heads % size and size % self.num_kv_heads:
            return f"{self.num_kv_heads} KV heads and {size} ranks do not divide each other"
        return None


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention: keys and values of all heads are computed from one latent.

    Query and key heads have ``nope_dim`` dimensions without position and ``rope_dim`` rotated ones;
    the rotated part of the keys is shared by all heads. ``q_lora_rank`` is the width of compressed
    queries, if any. ``rope_interleaved``: dimensions that rotate together are neighbours in the
    checkpoint, not half a head apart.
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
    def memories(self) -> tuple[KVSpec, ...]:
        """What a layer caches of a sequence."""
        return (self.kv,)

    @property
    def kv(self) -> KVSpec:
        """The normalised latent, then the rotated part of the keys."""
        return KVSpec(components=("latent",), heads=1, dim=self.kv_lora_rank + self.rope_dim)

    def split_problem(self, size: int) -> str | None:
        """The reason why this cannot be split over ``size`` ranks, or ``None``."""
        if self.num_heads % size:
            return f"{self.num_heads} query heads do not divide by {size}"
        return None


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A feed-forward: ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` if it
    is not ``gated``."""

    intermediate: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    def split_problem(self, size: int) -> str | None:
        """The reason why this cannot be split over ``size`` ranks, or ``None``."""
        if self.intermediate % size:
            return f"the feed-forward width {self.intermediate} does not divide by {size}"
        return None


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Routing of a token to the ``top_k`` experts with the best scores.

    With several ``groups`` of neighbouring experts, only those in the best ``open_groups`` are
    eligible; groups are ranked by the sum of their ``group_best`` best scores. With ``correction``,
    each expert has a bias that affects the choice only. An expert's result is weighted by its
    score, divided by the sum of the chosen scores if ``normalise``, times ``scale``, and with
    ``expert_scale`` times a weight of the expert. ``bias``: the logits have a bias. ``input_norm``:
    the router's input is normalised and multiplied by a weight and 1 / sqrt(its width).
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    open_groups: int = 1
    group_best: int = 1
    bias: bool = False
    correction: bool = False
    normalise: bool = True
    scale: float = 1.0
    expert_scale: bool = False
    input_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Experts, a few of which a router chooses for each token, and optionally a ``shared``
    feed-forward for all tokens; with ``shared_gate``, its result is multiplied by the sigmoid of a
    projection of the token. ``shared_norms``: there are norms before the experts, and after both;
    the router and the experts' norm see the layer's residual."""

    router: RouterSpec
    expert: DenseSpec
    shared: DenseSpec | None = None
    shared_gate: bool = False
    shared_norms: bool = False

    def split_problem(self, size: int) -> str | None:
        """The reason why this cannot be split over ``size`` ranks, or ``None``."""
        problem = self.expert.split_problem(size)
        if problem is None and self.shared is not None:
            return self.shared.split_problem(size)
        return problem


# The dtype of a checkpoint with quantised matrices.
QUANTIZED = "quantized"


class NormKind(Enum):
    """Root-mean-square norms, or LayerNorms with a bias or without."""

    RMS = "rms"
    LAYER = "layer"
    LAYER_UNBIASED = "layer without bias"


class NormLayout(Enum):
    """The norms of a layer: before attention and feed-forward, before the latter only, after both,
    or before and after both. In parallel, both see the layer's input through separate norms or one
    shared norm, and both are added to it. Residual norms are over the sums with the input."""

    PRE = "pre"
    PRE_MLP = "pre, of the feed-forward only"
    POST = "post"
    RESIDUAL = "residual"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"
    PARALLEL_SHARED = "parallel with one norm"


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer. Without ``rope``, its attention ignores positions. The outputs of attention and
    feed-forward are multiplied by ``residual_scale``, and with ``output_scale`` the layer's output
    by a number from the checkpoint."""

    attention: AttentionSpec | MLASpec
    mlp: DenseSpec | MoESpec
    rope: RopeSpec | None = None
    norms: NormLayout = NormLayout.PRE
    residual_scale: float = 1.0
    output_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class PositionTable:
    """A learned embedding of positions; position 0 is in row ``offset``."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class PositionBias:
    """A bias of each head's scores by the distance of two tokens, the same in all layers. Half of
    the ``buckets`` are for each direction; of these, half cover one distance each, and the others
    increasingly many, up to ``farthest``."""

    heads: int
    buckets: int
    farthest: int


@dataclass(frozen=True, kw_only=True)
class ProjectionSpec:
    """A linear layer without a bias over a text's vector."""

    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class ClassifierLayer:
    """The layer of a classifier before its last: linear, an activation and, if ``normed``, a
    LayerNorm without a bias."""

    activation: Literal["tanh"] | Activation
    bias: bool = True
    normed: bool = False


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec:
    """A head over a text's pooled hidden state: an optional ``layer``, and a linear with a logit
    for each of ``labels``. ``activation`` turns logits into scores."""

    labels: tuple[str, ...]
    activation: ScoreActivation
    pooling: Pooling
    layer: ClassifierLayer | None = None
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class TokenScoreSpec:
    """A score by the next token: the logit of the token ``true``, less that of ``false`` if there
    is one, through ``activation``."""

    true: int
    false: int | None
    activation: ScoreActivation
    labels: tuple[str, ...] = ("LABEL_0",)
    pooling: Pooling = "last"


Scorer = ClassifierSpec | TokenScoreSpec


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Per-layer inputs of ``dim`` numbers for each token: the sum of a row of a table and a
    projection of the token's embedding. A layer adds them through a gate."""

    vocab_size: int
    dim: int
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A whole decoder. ``dtype`` is the torch name of the checkpoint's dtype, or ``QUANTIZED``.
    ``kv_dtype`` is the dtype of the cache that the checkpoint is made for, if any: a torch name, or
    a description if it is not supported.

    Embeddings are multiplied by ``embedding_scale``, and logits by ``logit_scale``. With
    ``logit_soft_cap`` c, logits are ``c * tanh(logits / c)``. ``segments`` is the number of rows of
    a segment embedding, and with ``embedding_norm`` the sum of embeddings is normalised.
    ``pooling`` and ``projections`` turn a text's hidden states into a vector; ``embeds`` says that
    the model was trained for that. A model without a head only embeds; one with a ``classifier``
    scores or labels texts.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    norm: NormKind = NormKind.RMS
    positions: PositionTable | None = None
    position_bias: PositionBias | None = None
    segments: int = 0
    embedding_norm: bool = False
    token_inputs: TokenInputs | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    head_bias: bool = False
    has_head: bool = True
    pooling: Pooling = "last"
    projections: tuple[ProjectionSpec, ...] = ()
    embeds: bool = False
    classifier: Scorer | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = ""

    @property
    def bidirectional(self) -> bool:
        """True if tokens see later ones."""
        return not all(getattr(layer.attention, "causal", True) for layer in self.layers)

    @property
    def vector_size(self) -> int:
        """The size of a text's vector."""
        return self.projections[-1].outputs if self.projections else self.hidden_size

    @property
    def scoring(self) -> Scoring | None:
        """How it scores two texts; ``None`` for a model that generates text."""
        if self.classifier is not None:
            return "pair" if len(self.classifier.labels) == 1 else "labels"
        return "vectors" if self.embeds or self.bidirectional else None

    @property
    def memories(self) -> tuple[KVSpec, ...]:
        """What all layers cache of a sequence, in the order of the cache."""
        return tuple(memory for layer in self.layers for memory in layer.attention.memories)

    @property
    def memories_of_layer(self) -> tuple[slice, ...]:
        """The part of ``memories`` that each layer reads: its own, or that of an earlier layer."""
        parts: list[slice] = []
        count = 0
        for layer in self.layers:
            attention = layer.attention
            if isinstance(attention, AttentionSpec) and attention.kv_of is not None:
                parts.append(parts[attention.kv_of])
                continue
            parts.append(slice(count, count + len(attention.memories)))
            count = parts[-1].stop
        return tuple(parts)

    def dtype_for(self, name: str, *, on_cpu: bool, has_bfloat16: bool = True) -> str:
        """The dtype to run in. ``auto`` is the checkpoint's own, except that float16 becomes
        bfloat16 on a CPU, where attention is several times slower in float16 (request float16 or
        float32 to keep full precision).

        For quantised weights, it is the dtype of activations: float32 on a CPU, where it costs
        little, and rounding would hurt small models. GPUs that have no bfloat16 use float16.
        """
        if name != "auto":
            return name
        if self.dtype == QUANTIZED:
            dtype = "float32" if on_cpu else "bfloat16"
        else:
            dtype = "bfloat16" if on_cpu and self.dtype == "float16" else self.dtype
        return "float16" if dtype == "bfloat16" and not has_bfloat16 else dtype


def tensor_parallel_problem(spec: DecoderSpec, size: int) -> str | None:
    """The reason why this decoder cannot be split over ``size`` ranks, or ``None``."""
    for layer in spec.layers:
        problem = layer.attention.split_problem(size) or layer.mlp.split_problem(size)
        if problem is not None:
            return problem
    return None


def layers_before_routing(spec: DecoderSpec) -> int:
    """The number of leading memories that do not depend on any choice of experts."""
    moe_layers = (n for n, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoESpec))
    layers = spec.layers[: next(moe_layers, len(spec.layers) - 1) + 1]
    return sum(len(layer.attention.memories) for layer in layers)


def fingerprint_fields(spec: DecoderSpec) -> dict[str, str]:
    """The fields in which both nodes of a handoff must agree, by names for errors.

    Numbers are compared in float32's precision, the one of some checkpoint formats.
    """
    spec = _round_floats(spec)
    return {
        "layers": str(len(spec.layers)),
        "hidden_size": str(spec.hidden_size),
        "vocab_size": str(spec.vocab_size),
        **_fields_by_layer("attention", [layer.attention for layer in spec.layers]),
        **_fields_by_layer("mlp", [layer.mlp for layer in spec.layers]),
        **_rope_fields([layer.rope for layer in spec.layers]),
        "norms": _uniform_or_runs(layer.norms.value for layer in spec.layers),
        "residual_scale": _uniform_or_runs(layer.residual_scale for layer in spec.layers),
        "output_scale": _uniform_or_runs(layer.output_scale for layer in spec.layers),
        "norm": spec.norm.value,
        "norm_eps": repr(spec.norm_eps),
        "tie_embeddings": str(spec.tie_embeddings),
        "positions": str(spec.positions),
        "position_bias": str(spec.position_bias),
        "segments": str(spec.segments),
        "embedding_norm": str(spec.embedding_norm),
        "classifier": str(spec.classifier),
        "token_inputs": str(spec.token_inputs),
        "embedding_scale": repr(spec.embedding_scale),
        "logit_scale": repr(spec.logit_scale),
        "logit_soft_cap": repr(spec.logit_soft_cap),
        "head_bias": str(spec.head_bias),
    }


def _round_floats(value: Any) -> Any:
    """Round the floats in a spec, or in a part of one, to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, tuple):
        return tuple(map(_round_floats, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _round_floats(getattr(value, f.name)) for f in fields(value)}
        )
    return value


def _fields_by_layer(part: str, specs: list[Any]) -> dict[str, str]:
    """Each field of a layer's spec with its values in all layers; a dash where a layer lacks it."""
    names = dict.fromkeys(field.name for spec in specs for field in fields(spec))
    return {f"{part}.{name}": _runs(getattr(s, name, "-") for s in specs) for name in names}


def _rope_fields(ropes: list[RopeSpec | None]) -> dict[str, str]:
    ropes = [rope and _by_factors(rope) for rope in ropes]
    return {
        f"rope_{field.name}": _uniform_or_runs(getattr(rope, field.name, "-") for rope in ropes)
        for field in fields(RopeSpec)
    }


def _by_factors(rope: RopeSpec) -> RopeSpec:
    """The same rope with a factor for each frequency, which is how GGUF files have Llama 3's
    scaling. To three digits, since converters compute them in float32."""
    match rope.scaling:
        case Llama3Scaling() as llama3:
            factors, attention_factor = _llama3_factors(rope, llama3), 1.0
        case LongRopeScaling(factors=factors, attention_factor=attention_factor):
            pass
        case _:
            return rope
    digits = tuple(float(f"{factor:.3g}") for factor in factors)
    scaling = LongRopeScaling(factors=digits, attention_factor=attention_factor)
    return replace(rope, scaling=scaling)


def _llama3_factors(rope: RopeSpec, scaling: Llama3Scaling) -> tuple[float, ...]:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    factors = []
    for index in range(0, rope.dim, 2):
        frequency = rope.theta ** (-index / rope.dim)
        turns = scaling.original_max_position * frequency / (2 * math.pi)
        ramp = (turns - low) / (high - low) if high != low else math.inf * (turns - low or 1)
        weight = min(1.0, max(0.0, ramp))
        factors.append(1 / ((1 - weight) / scaling.factor + weight))
    return tuple(factors)


def _uniform_or_runs(values: Iterable[object]) -> str:
    """The value if it is the same in all layers, else runs."""
    items = list(values)
    return str(items[0]) if len(set(items)) == 1 else _runs(items)


def _runs(values: Iterable[object]) -> str:
    """Format ``8, 8, 8, None`` as ``8 x3, None x1``."""
    return ", ".join(f"{value} x{len(list(run))}" for value, run in groupby(values))
