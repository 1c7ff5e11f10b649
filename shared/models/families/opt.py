"""OPT: learned positions, LayerNorms, and a feed-forward without a gate."""

from __future__ import annotations

from ..config import Config
from ..spec import DecoderSpec, NormKind, PositionTable
from ..weight_names import WeightNames, per_layer
from .dense import read_dense, read_plain_attention, read_plain_mlp

# Rows of the table before the first position.
_OFFSET = 2
# The first models were published without the prefix of names: see ``with_short_names``.
WEIGHTS: WeightNames = {
    "model.decoder.embed_tokens.weight": "embed.weight",
    "model.decoder.embed_positions.weight": "positions.weight",
    "model.decoder.final_layer_norm.weight": "norm.weight",
    "model.decoder.final_layer_norm.bias": "norm.bias",
    "lm_head.weight": "head.weight",
    **per_layer(
        {
            "self_attn_layer_norm": "attention_norm",
            "final_layer_norm": "mlp_norm",
            "self_attn.q_proj": "attention.q",
            "self_attn.k_proj": "attention.k",
            "self_attn.v_proj": "attention.v",
            "self_attn.out_proj": "attention.o",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        root="model.decoder.layers.{i}.",
        kinds=("weight", "bias"),
    ),
}


def read(config: Config) -> DecoderSpec:
    """Read a config. The 350M model alone has its norms behind attention and feed-forward, and
    narrower embeddings."""
    hidden = config.integer("hidden_size")
    config.one_of("do_layer_norm_before", (True,), True)
    config.one_of("_remove_final_layer_norm", (False,), False)
    config.one_of("word_embed_proj_dim", (hidden,), hidden)
    for key in ("enable_bias", "layer_norm_elementwise_affine", "learned_embeddings"):
        config.one_of(key, (True,), True)
    config.get("output_projection")  # all models have this head
    layers, position = (
        config.integer("num_hidden_layers"),
        config.integer("max_position_embeddings"),
    )
    attention, width = read_plain_attention(config), config.integer("ffn_dim")
    config.one_of("intermediate_size", (width,), width)
    mlp = read_plain_mlp(config, "relu", key="activation_function", width=width)
    return read_dense(
        config,
        attention,
        windows=[None] * layers,
        ropes=[None] * layers,
        mlps=[mlp] * layers,
        norm=NormKind.LAYER,
        eps_key="layer_norm_eps",
        norm_eps=1e-5,
        tie_embeddings=True,
        positions=PositionTable(rows=position + _OFFSET, offset=_OFFSET),
    )
