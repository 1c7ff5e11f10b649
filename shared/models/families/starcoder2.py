"""StarCoder2: LayerNorms, biases everywhere, and a feed-forward without a gate."""

from __future__ import annotations

from ..config import Config, read_window
from ..spec import DecoderSpec, NormKind
from ..weight_names import WeightNames, per_layer
from .dense import DENSE_WEIGHTS, O_BIAS, QKV_BIAS, read_attention, read_dense, read_plain_mlp

WEIGHTS: WeightNames = (
    DENSE_WEIGHTS
    | QKV_BIAS
    | O_BIAS
    | {"model.norm.bias": "norm.bias"}
    | per_layer({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}, kinds=("weight", "bias"))
    | per_layer(
        {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
        kinds=("bias",),
    )
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("norm_type", ("layer_norm",), "layer_norm")
    config.one_of("mlp_type", ("default",), "default")
    bias = config.flag("use_bias", True)
    layers = config.integer("num_hidden_layers")
    return read_dense(
        config,
        read_attention(config, qkv_bias=bias, o_bias=bias),
        windows=[read_window(config)] * layers,
        mlps=[read_plain_mlp(config, "gelu_pytorch_tanh", bias=bias)] * layers,
        norm=NormKind.LAYER,
        eps_key="norm_epsilon",
        norm_eps=1e-5,
        tie_embeddings=True,
    )
