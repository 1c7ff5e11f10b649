"""The names of a decoder's parameters. No torch.

They are used to reject an incomplete checkpoint without loading torch. The loader asserts that the
decoder's parts have exactly these.
"""

from __future__ import annotations

from collections.abc import Iterator

from .spec import (
    AttentionSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    NormKind,
    NormLayout,
    QKNorm,
)

_BEFORE = (NormLayout.PRE, NormLayout.SANDWICH, NormLayout.PARALLEL)
_AFTER = (NormLayout.POST, NormLayout.SANDWICH, NormLayout.RESIDUAL)
# The norms of a layer, each with the layouts that have it.
_NORMS = {
    "attention_norm": (*_BEFORE, NormLayout.PARALLEL_SHARED),
    "mlp_norm": (*_BEFORE, NormLayout.PRE_MLP),
    "post_attention_norm": _AFTER,
    "post_mlp_norm": _AFTER,
}


def parameters_of(spec: DecoderSpec, *, has_head: bool = True) -> Iterator[str]:
    """The names of all parameters. ``has_head``: see ``Decoder``."""
    yield "embed.weight"
    if spec.tie_embeddings and spec.head_bias:
        yield "embed.bias"
    if spec.positions is not None:
        yield "positions.weight"
    if spec.position_bias is not None:
        yield "position_bias.weight"
    if spec.segments:
        yield "segments.weight"
    if spec.embedding_norm:
        yield from _norm("embedding_norm", spec.norm)
    if spec.token_inputs is not None:
        for name in ("table", "projection", "norm"):
            yield f"token_inputs.{name}.weight"
    for index, layer in enumerate(spec.layers):
        for name in _of_layer(layer, spec):
            yield f"layers.{index}.{name}"
    if spec.layers[-1].norms is not NormLayout.RESIDUAL:
        yield from _norm("norm", spec.norm)
    for index in range(len(spec.projections)):
        yield f"projections.{index}.weight"
    if isinstance(spec.classifier, ClassifierSpec):
        yield from _of_classifier(spec.classifier)
    if has_head and spec.has_head and not spec.tie_embeddings:
        yield from _linear("head", bias=spec.head_bias)


def _linear(name: str, *, bias: bool) -> Iterator[str]:
    yield f"{name}.weight"
    if bias:
        yield f"{name}.bias"


def _norm(name: str, kind: NormKind) -> Iterator[str]:
    yield from _linear(name, bias=kind is NormKind.LAYER)


def _of_layer(layer: LayerSpec, spec: DecoderSpec) -> Iterator[str]:
    for name, layouts in _NORMS.items():
        if layer.norms in layouts:
            yield from _norm(name, spec.norm)
    match layer.attention:
        case AttentionSpec() as grouped:
            attention = _of_attention(grouped)
        case MLASpec() as latent:
            attention = _of_latent_attention(latent)
    for name in attention:
        yield f"attention.{name}"
    for name in _of_feed_forward(layer.mlp):
        yield f"mlp.{name}"
    if spec.token_inputs is not None:
        for name in ("gate", "down", "norm"):
            yield f"token_gate.{name}.weight"
    if layer.output_scale:
        yield "output_scale.weight"


def _of_attention(spec: AttentionSpec) -> Iterator[str]:
    kv = "kv" if spec.memories else ""
    for name in ("q", *kv.removesuffix("v" if spec.values_are_keys else "")):
        yield from _linear(name, bias=spec.qkv_bias)
    yield from _linear("o", bias=spec.o_bias)
    match spec.qk_norm:
        case QKNorm.PROJECTION:
            yield from ("q_norm.weight", "k_norm.weight")
        case QKNorm.LAYER:
            yield from (f"q_norm.{head}.weight" for head in range(spec.num_heads))
            yield from (f"k_norm.{head}.weight" for head in range(spec.num_kv_heads))
        case QKNorm.HEAD | QKNorm.ROTATED_HEAD:
            yield from (f"{name}_norm.weight" for name in ("q", *kv[:1]))
    if spec.sinks:
        yield "sinks.weight"


def _of_latent_attention(spec: MLASpec) -> Iterator[str]:
    queries = ("q",) if spec.q_lora_rank is None else ("q_a", "q_a_norm", "q_b")
    for name in (*queries, "kv_a", "kv_a_norm", "kv_b", "o"):
        yield f"{name}.weight"


def _of_feed_forward(spec: DenseSpec | MoESpec) -> Iterator[str]:
    if isinstance(spec, DenseSpec):
        for name in ("gate", "up", "down") if spec.gated else ("up", "down"):
            yield from _linear(name, bias=spec.bias)
        return
    router = spec.router
    for name, has in (
        ("weight", True),
        ("logits.bias", router.bias),
        ("bias", router.correction),
        ("expert_scale.weight", router.expert_scale),
        ("norm.weight", router.input_norm),
    ):
        if has:
            yield f"router.{name}"
    for index in range(router.experts):
        for name in ("gate", "up", "down"):
            yield from _linear(f"experts.{index}.{name}", bias=spec.expert.bias)
    if spec.shared_norms:
        assert spec.shared is not None
        yield from _of_feed_forward(spec.shared)
        for name in ("experts_norm", "post_experts_norm", "post_shared_norm"):
            yield f"{name}.weight"
        return
    if spec.shared is not None:
        yield from (f"shared.{name}" for name in _of_feed_forward(spec.shared))
    if spec.shared_gate:
        yield "shared_gate.weight"


def _of_classifier(spec: ClassifierSpec) -> Iterator[str]:
    yield from _linear("classifier.out", bias=spec.bias)
    if spec.layer is not None:
        yield from _linear("classifier.dense", bias=spec.layer.bias)
        if spec.layer.normed:
            yield "classifier.norm.weight"
