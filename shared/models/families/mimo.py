"""MiMo 7B: Qwen2 with layers that predict further tokens, which are not used."""

from __future__ import annotations

from ..config import Config
from ..spec import DecoderSpec
from ..weight_names import WeightNames
from . import qwen2

WEIGHTS: WeightNames = qwen2.WEIGHTS | {
    f"model.mtp_layers.{{i}}.{name}": None
    for name in (
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "final_layernorm.weight",
        "input_proj.weight",
        *(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
        "self_attn.o_proj.weight",
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    )
}


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.get("num_nextn_predict_layers")
    config.one_of("attention_bias", (True,), True)
    return qwen2.read(config)
