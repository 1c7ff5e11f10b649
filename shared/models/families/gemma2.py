"""Gemma 2: soft caps on scores and logits, sliding windows in every other layer, a norm before and
after each half of a layer, and norm weights that are stored as their difference from one."""

from __future__ import annotations

import math

from ..config import FULL, SLIDING, Config, read_layer_types
from ..spec import Activation, DecoderSpec, DenseSpec, NormLayout
from ..weight_names import AddOne, WeightNames
from .dense import DENSE_WEIGHTS, read_attention, read_dense

NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
WEIGHTS: WeightNames = {
    **DENSE_WEIGHTS,
    "model.norm.weight": AddOne("norm.weight"),
    **{
        f"model.layers.{{i}}.{theirs}.weight": AddOne(f"layers.{{i}}.{ours}.weight")
        for theirs, ours in NORMS.items()
    },
}


def read(config: Config) -> DecoderSpec:
    """Read a config. Scores are scaled by a key of the config instead of the head's width."""
    config.one_of("attention_bias", (False,), False)
    layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    config.one_of("sliding_window_size", (window,), window)
    kinds = [FULL if index % 2 else SLIDING for index in range(layers)]
    kinds = read_layer_types(config, layers) or kinds
    soft_cap = config.optional_number("attn_logit_softcapping", 50.0)
    return read_dense(
        config,
        read_attention(config, scale=read_scale(config), soft_cap=soft_cap),
        windows=[window if kind == SLIDING else None for kind in kinds],
        mlps=[read_mlp(config)] * layers,
        norms=NormLayout.SANDWICH,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        tie_embeddings=True,
    )


def read_scale(config: Config) -> float:
    """The factor of scores."""
    return math.pow(config.number("query_pre_attn_scalar", 256), -0.5)


def read_mlp(config: Config) -> DenseSpec:
    """The gated feed-forward, with GELU."""
    supported = ("gelu_pytorch_tanh",)
    config.one_of("hidden_act", supported, supported[0])
    config.one_of("hidden_activation", supported, supported[0])
    activation: Activation = "gelu_tanh"
    return DenseSpec(intermediate=config.integer("intermediate_size"), activation=activation)
