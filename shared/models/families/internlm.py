"""InternLM 2 and 3: Llama, the first with q, k and v in one tensor."""

from __future__ import annotations

from ..config import Config, read_full_attention
from ..spec import DecoderSpec
from ..weight_names import GroupedHeads, WeightNames, per_layer
from . import llama
from .dense import read_attention, read_dense, read_mlp

INTERNLM2_WEIGHTS: WeightNames = {
    "model.tok_embeddings.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "output.weight": "head.weight",
    **per_layer(
        {
            "attention_norm": "attention_norm",
            "ffn_norm": "mlp_norm",
            "feed_forward.w1": "mlp.gate",
            "feed_forward.w2": "mlp.down",
            "feed_forward.w3": "mlp.up",
        }
    ),
    **per_layer({"attention.wo": "attention.o"}, kinds=("weight", "bias")),
    **{
        f"model.layers.{{i}}.attention.wqkv.{kind}": GroupedHeads(
            (
                f"layers.{{i}}.attention.q.{kind}",
                f"layers.{{i}}.attention.k.{kind}",
                f"layers.{{i}}.attention.v.{kind}",
            )
        )
        for kind in ("weight", "bias")
    },
}
WEIGHTS = llama.WEIGHTS


def read_internlm2(config: Config) -> DecoderSpec:
    """Read a config of InternLM 2 or 2.5."""
    bias = config.flag("bias")
    return read_dense(
        config,
        read_attention(config, qkv_bias=bias, o_bias=bias),
        windows=read_full_attention(config),
    )


def read(config: Config) -> DecoderSpec:
    """Read a config of InternLM 3: one switch for the biases of q, k, v, one for all others."""
    qkv_bias, bias = config.flag("qkv_bias"), config.flag("bias")
    # Equal, since transformers has one switch for attention.
    whole = config.flag("attention_bias")
    windows = read_full_attention(config)
    return read_dense(
        config,
        read_attention(config, qkv_bias=qkv_bias or whole, o_bias=bias or whole),
        windows=windows,
        mlps=[read_mlp(config, bias=bias or config.flag("mlp_bias"))] * len(windows),
        norm_eps=1e-5,
    )
