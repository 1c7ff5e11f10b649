"""Ernie 4.5: Llama with interleaved rope; and its mixtures of experts."""

from __future__ import annotations

from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, DenseSpec, MoESpec, RouterSpec
from ..weight_names import Stacked, WeightNames, per_layer, rotary_projections, stacked_experts
from . import llama
from .dense import read_attention, read_dense, read_mlp

WEIGHTS: WeightNames = llama.WEIGHTS | rotary_projections("q", "k")
_PARTS = ("gate", "up", "down")
MOE_WEIGHTS: WeightNames = (
    WEIGHTS
    | per_layer({"mlp.gate": "mlp.router"})
    | per_layer({f"mlp.experts.{{j}}.{p}_proj": f"mlp.experts.{{j}}.{p}" for p in _PARTS})
    | per_layer({f"mlp.shared_experts.{part}_proj": f"mlp.shared.{part}" for part in _PARTS})
    | stacked_experts("mlp.experts")
    | {
        f"model.layers.{{i}}.mlp.{place}.e_score_correction_bias": Stacked(
            "layers.{i}.mlp.router.bias", over="one"
        )
        for place in ("moe_statics", "gate.moe_statics")
    }
    # An unused layer that predicts a further token.
    | {
        f"model.mtp_{name}.weight": None
        for name in (
            *("emb_norm.{i}", "hidden_norm.{i}", "linear_proj.{i}"),
            *("block.{i}.input_layernorm", "block.{i}.post_attention_layernorm"),
            *(f"block.{{i}}.self_attn.{part}_proj" for part in "qkvo"),
            *(f"block.{{i}}.mlp.{part}_proj" for part in _PARTS),
        )
    }
)


def read(config: Config) -> DecoderSpec:
    """Read a config of a dense model."""
    bias = config.flag("use_bias")
    windows = read_full_attention(config)
    return _read(config, [read_mlp(config, bias=bias)] * len(windows), bias=bias)


def read_moe(config: Config) -> DecoderSpec:
    """Read a config of a mixture of experts, in every ``moe_layer_interval``-th layer of a
    range."""
    # No published model has biases, which transformers also adds to the head.
    config.one_of("use_bias", (False,), False)
    layers = config.integer("num_hidden_layers")
    for key in ("moe_use_aux_free", "use_correction_bias"):
        config.one_of(key, (True,), True)
    config.one_of("moe_gate", ("topk",), "topk")
    config.get("moe_norm_min")  # far below any sum of the best scores
    config.get("moe_capacity")  # of training
    config.get("num_nextn_predict_layers")  # of tokens after the next one
    experts = config.integer("moe_num_experts", config.get("num_experts"))
    top_k = config.integer("moe_k", config.get("num_experts_per_tok"), at_most=experts)
    width = config.integer("moe_intermediate_size")
    shared = config.count("moe_num_shared_experts", 2)
    mlp = MoESpec(
        router=RouterSpec(experts=experts, top_k=top_k, correction=True),
        expert=DenseSpec(intermediate=width),
        shared=DenseSpec(intermediate=shared * width) if shared else None,
    )
    first, last = config.count("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if isinstance(last, bool) or not isinstance(last, int) or not -1 <= last < layers:
        raise config.refusal("moe_layer_end_index", last, f"-1 or up to {layers - 1}")
    last = layers - 1 if last == -1 else last
    step, dense = config.integer("moe_layer_interval", 1), read_mlp(config)
    mlps: list[DenseSpec | MoESpec] = [
        mlp if first <= index <= last and (index + 1) % step == 0 else dense
        for index in range(layers)
    ]
    return _read(config, mlps, bias=False)


def _read(config: Config, mlps: list[DenseSpec | MoESpec], bias: bool) -> DecoderSpec:
    windows = read_full_attention(config)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    rope = read_rope(config, attention.head_dim, theta=500_000.0)
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        mlps=mlps,
        norm_eps=1e-5,
        tie_embeddings=True,
    )
