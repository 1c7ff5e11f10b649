"""Gemma 3's text models: like Gemma 2, with another rope in layers with a window, and a norm over
each head of q and k."""

from __future__ import annotations

from dataclasses import replace

from ..config import FULL, SLIDING, Config, read_layer_types, read_rope_table
from ..spec import DecoderSpec, NormLayout, QKNorm, RopeSpec
from ..weight_names import AddOne, WeightNames
from . import gemma2
from .dense import read_attention, read_dense

WEIGHTS: WeightNames = gemma2.WEIGHTS | {
    f"model.layers.{{i}}.self_attn.{name}.weight": AddOne(f"layers.{{i}}.attention.{name}.weight")
    for name in ("q_norm", "k_norm")
}
_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("attention_bias", (False,), False)
    config.one_of("attn_logit_softcapping", (None,))  # not applied by every implementation
    kinds, window = _read_kinds(config), config.integer("sliding_window", 4096)
    # EmbeddingGemma, whose window covers both sides together.
    bidirectional = config.flag("use_bidirectional_attention")
    window = window // 2 + 1 if bidirectional else window
    attention = read_attention(
        config,
        qk_norm=QKNorm.HEAD,
        scale=gemma2.read_scale(config),
    )
    attention = replace(attention, causal=not bidirectional)
    ropes = _read_ropes(config, attention.head_dim)
    spec = read_dense(
        config,
        attention,
        windows=[window if kind == SLIDING else None for kind in kinds],
        ropes=[ropes[kind] for kind in kinds],
        mlps=[gemma2.read_mlp(config)] * len(kinds),
        norms=NormLayout.SANDWICH,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        tie_embeddings=True,
        pooling="mean" if bidirectional else "last",
    )
    return replace(spec, tie_embeddings=False, has_head=False) if bidirectional else spec


def _read_kinds(config: Config) -> list[str]:
    """Full attention in each ``sliding_window_pattern``-th layer, or by ``layer_types``."""
    layers = config.integer("num_hidden_layers")
    period = config.integer("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    kinds = [SLIDING if (index + 1) % period else FULL for index in range(layers)]
    return read_layer_types(config, layers) or kinds


def _read_ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """The ropes by kind of layer: tables by kind (transformers 5), or one for full attention and a
    theta for the others."""
    tables = config.get("rope_parameters")
    if tables is not None:
        are_tables = isinstance(tables, dict) and all(
            isinstance(tables.get(kind), dict) for kind in _THETAS
        )
        if not are_tables or set(tables) != set(_THETAS):
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
