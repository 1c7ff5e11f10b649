"""ModernBERT: an encoder with rope and a gated feed-forward, most of whose layers have a window and
their own rope; also with a head that scores or labels texts."""

from __future__ import annotations

from dataclasses import replace

from ..config import FULL, SLIDING, Config, read_layer_types, read_rope_table
from ..spec import (
    AttentionSpec,
    ClassifierLayer,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    NormKind,
    NormLayout,
    RopeSpec,
)
from ..weight_names import Split, WeightNames
from .classifier import read_pooled_head
from .dense import ACTIVATIONS, read_decoder

_LAYER = "model.layers.{i}."
_ATTENTION = tuple(f"layers.{{i}}.attention.{name}.weight" for name in "qkv")
_ENCODER: WeightNames = {
    "model.embeddings.tok_embeddings.weight": "embed.weight",
    "model.embeddings.norm.weight": "embedding_norm.weight",
    "model.final_norm.weight": "norm.weight",
    f"{_LAYER}attn_norm.weight": "layers.{i}.attention_norm.weight",
    f"{_LAYER}attn.Wqkv.weight": Split(_ATTENTION),
    f"{_LAYER}attn.Wo.weight": "layers.{i}.attention.o.weight",
    f"{_LAYER}mlp_norm.weight": "layers.{i}.mlp_norm.weight",
    f"{_LAYER}mlp.Wi.weight": Split(("layers.{i}.mlp.gate.weight", "layers.{i}.mlp.up.weight")),
    f"{_LAYER}mlp.Wo.weight": "layers.{i}.mlp.down.weight",
}
WEIGHTS: WeightNames = {
    **_ENCODER,
    # The head for masked language modelling.
    "head.dense.weight": None,
    "head.norm.weight": None,
    "decoder.weight": None,
    "decoder.bias": None,
}
CLASSIFIER: WeightNames = {
    **_ENCODER,
    "head.dense.weight": "classifier.dense.weight",
    "head.dense.bias": "classifier.dense.bias",
    "head.norm.weight": "classifier.norm.weight",
    "classifier.weight": "classifier.out.weight",
    "classifier.bias": "classifier.out.bias",
}
_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
# About what the model was trained for, and how it is computed.
_UNUSED = (
    *("classifier_pooling", "classifier_bias", "classifier_activation", "decoder_bias"),
    *("cls_token_id", "sep_token_id", "sparse_prediction", "sparse_pred_ignore_index"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
    *("initializer_cutoff_factor", "compile", "sliding_window"),
    "layer_norm_eps",  # transformers reads norm_eps
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    for key in ("attention_bias", "mlp_bias", "norm_bias"):
        config.one_of(key, (False,), False)
    for key in _UNUSED:
        config.get(key)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise config.refusal("num_attention_heads", heads, f"a divisor of {hidden}")
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, causal=False
    )
    # The window covers both sides together.
    window = config.integer("local_attention", 128) // 2 + 1
    activation = ACTIVATIONS[config.one_of("hidden_activation", tuple(ACTIVATIONS), "gelu")]
    mlp = DenseSpec(intermediate=config.integer("intermediate_size"), activation=activation)
    ropes, kinds = _read_ropes(config, hidden // heads), _read_kinds(config)
    layers = tuple(
        LayerSpec(
            attention=replace(attention, sliding_window=window if kind == SLIDING else None),
            mlp=mlp,
            rope=ropes[kind],
            norms=NormLayout.PRE if index else NormLayout.PRE_MLP,
        )
        for index, kind in enumerate(kinds)
    )
    spec = read_decoder(
        config,
        layers,
        norm=NormKind.LAYER_UNBIASED,
        eps_key="norm_eps",
        norm_eps=1e-5,
        embedding_norm=True,
        pooling="cls",
        # Names in older configs; there is no position embedding either.
        rope_name=config.one_of("position_embedding_type", ("absolute", "sans_pos"), "absolute"),
    )
    return replace(spec, tie_embeddings=False, has_head=False)


def read_head(config: Config) -> ClassifierSpec:
    """Read the head of a config."""
    name = config.one_of("classifier_activation", tuple(ACTIVATIONS), "gelu")
    layer = ClassifierLayer(
        activation=ACTIVATIONS[name], bias=config.flag("classifier_bias"), normed=True
    )
    return read_pooled_head(
        config, config.one_of("classifier_pooling", ("cls", "mean"), "cls"), layer
    )


def _read_kinds(config: Config) -> list[str]:
    layers = config.integer("num_hidden_layers")
    every = config.integer("global_attn_every_n_layers", 3)
    return read_layer_types(config, layers) or [
        SLIDING if index % every else FULL for index in range(layers)
    ]


def _read_ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """The ropes by kind of layer: tables by kind (transformers 5), or two thetas."""
    tables = config.get("rope_parameters", {})
    config.one_of("rope_scaling", (None,))
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise config.refusal("rope_parameters", tables, f"a table for each of {list(_THETAS)}")
    return {
        kind: read_rope_table(
            config,
            f"rope_parameters: {kind}",
            tables.get(kind, {}),
            head_dim,
            theta=config.number(key, theta),
        )
        for kind, (key, theta) in _THETAS.items()
    }
