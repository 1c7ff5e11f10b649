"""GPT-NeoX and Pythia: LayerNorms, a feed-forward without a gate beside attention, and heads that
are rotated in part."""

from __future__ import annotations

from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, NormKind, NormLayout
from ..weight_names import GroupedHeads, WeightNames, per_layer
from .dense import read_attention, read_dense, read_plain_mlp

_ROOT, _BOTH = "gpt_neox.layers.{i}.", ("weight", "bias")
WEIGHTS: WeightNames = {
    "gpt_neox.embed_in.weight": "embed.weight",
    "gpt_neox.final_layer_norm.weight": "norm.weight",
    "gpt_neox.final_layer_norm.bias": "norm.bias",
    "embed_out.weight": "head.weight",
    "lm_head.weight": "head.weight",
    **per_layer(
        {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
            "attention.dense": "attention.o",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        root=_ROOT,
        kinds=_BOTH,
    ),
    **{
        f"{_ROOT}attention.query_key_value.{kind}": GroupedHeads(
            (
                f"layers.{{i}}.attention.q.{kind}",
                f"layers.{{i}}.attention.k.{kind}",
                f"layers.{{i}}.attention.v.{kind}",
            )
        )
        for kind in _BOTH
    },
    # Tables computed from the config.
    **{f"{_ROOT}attention.{name}": None for name in ("bias", "masked_bias", "rotary_emb.inv_freq")},
}


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    parallel = config.flag("use_parallel_residual", True)
    bias = config.flag("attention_bias", True)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    windows = read_full_attention(config)
    rope = read_rope(
        config,
        attention.head_dim,
        partial=True,
        part=0.25,
        theta_key="rotary_emb_base",
        part_key="rotary_pct",
    )
    # Newer names beside the older ones, which transformers reads.
    config.one_of("rope_theta", (rope.theta,), rope.theta)
    part = rope.dim / attention.head_dim
    config.one_of("partial_rotary_factor", (part,), part)
    config.get("num_steps")  # for training
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        mlps=[read_plain_mlp(config, "gelu")] * len(windows),
        norms=NormLayout.PARALLEL if parallel else NormLayout.PRE,
        norm=NormKind.LAYER,
        eps_key="layer_norm_eps",
        norm_eps=1e-5,
    )
