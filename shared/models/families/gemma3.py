"""Gemma 3's text models: sliding windows with a rope of their own, a norm before and after each
half of a layer, and norm weights that are stored as their difference from one."""

from __future__ import annotations

from ..config import FULL, SLIDING, Config, read_layer_types, read_rope_table, read_window
from ..spec import Activation, DecoderSpec, DenseSpec, NormLayout, RopeSpec
from ..weight_names import AddOne, WeightNames
from .dense import DENSE_WEIGHTS, read_dense, read_head_dim

_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
WEIGHTS: WeightNames = {
    **DENSE_WEIGHTS,
    "model.norm.weight": AddOne("norm.weight"),
    **{
        f"model.layers.{{i}}.{theirs}.weight": AddOne(f"layers.{{i}}.{ours}.weight")
        for theirs, ours in _NORMS.items()
    },
}
_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def read(config: Config) -> DecoderSpec:
    """Read a config. Scores are scaled by a number of the config instead of the head's width."""
    config.one_of("attention_bias", (False,), False)
    config.one_of("attn_logit_softcapping", (None,))
    config.one_of("use_bidirectional_attention", (False,), False)
    kinds, window = _read_kinds(config), read_window(config)
    ropes = _read_ropes(config, read_head_dim(config))
    width, activation = config.integer("intermediate_size"), _activation(config)
    mlp = DenseSpec(intermediate=width, activation=activation)
    cap = config.get("final_logit_softcapping")
    return read_dense(
        config,
        windows=[window if kind == SLIDING else None for kind in kinds],
        ropes=[ropes[kind] for kind in kinds],
        mlps=[mlp] * len(kinds),
        norms=NormLayout.SANDWICH,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_soft_cap=None if cap is None else config.number("final_logit_softcapping"),
        tie_embeddings=True,
    )


def _activation(config: Config) -> Activation:
    names = ("gelu_pytorch_tanh",)
    config.one_of("hidden_act", names, names[0])
    config.one_of("hidden_activation", names, names[0])
    return "gelu_tanh"


def _read_kinds(config: Config) -> list[str]:
    """Full attention in each ``sliding_window_pattern``-th layer, or by ``layer_types``."""
    layers = config.integer("num_hidden_layers")
    period = config.integer("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    kinds = [SLIDING if (index + 1) % period else FULL for index in range(layers)]
    return read_layer_types(config, layers) or kinds


def _read_ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """One for each kind of layer: tables by kind (transformers 5), or one for full attention and a
    theta for the others."""
    tables = config.get("rope_parameters")
    if tables is not None:
        known = isinstance(tables, dict) and all(
            isinstance(tables.get(kind), dict) for kind in _THETAS
        )
        if not known or set(tables) != set(_THETAS):
            raise config.refusal("rope_parameters", tables, f"a table for each of {list(_THETAS)}")
        return {
            kind: read_rope_table(
                config, f"rope_parameters: {kind}", tables[kind], head_dim, theta=theta
            )
            for kind, theta in _THETAS.items()
        }
    scaling = config.get("rope_scaling", {})
    if not isinstance(scaling, dict):
        raise config.refusal("rope_scaling", scaling, "a table")
    theta = config.number("rope_theta", _THETAS[FULL])
    local = config.number("rope_local_base_freq", _THETAS[SLIDING])
    return {
        FULL: read_rope_table(config, "rope_scaling", scaling, head_dim, theta=theta),
        SLIDING: RopeSpec(theta=local, dim=head_dim),
    }
