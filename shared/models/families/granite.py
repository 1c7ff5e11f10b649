"""Granite 3: Llama with four multipliers; its mixtures of experts have fused experts."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config, read_full_attention
from ..spec import DecoderSpec, DenseSpec, MoESpec, RouterSpec
from ..weight_names import Split, Stacked, WeightNames, per_layer, stacked_experts
from . import llama
from .dense import read_attention, read_dense, read_mlp

WEIGHTS = llama.WEIGHTS
_EXPERT, _SHARED = "layers.{i}.mlp.experts.{j}", "layers.{i}.mlp.shared"
_MOE = "model.layers.{i}.block_sparse_moe"
MOE_WEIGHTS: WeightNames = (
    WEIGHTS
    | per_layer({f"block_sparse_moe.{name}": "mlp.router" for name in ("router.layer", "router")})
    | stacked_experts("block_sparse_moe.experts")
    | {
        f"{_MOE}.input_linear.weight": Stacked(
            Split((f"{_EXPERT}.gate.weight", f"{_EXPERT}.up.weight"))
        ),
        f"{_MOE}.output_linear.weight": Stacked(f"{_EXPERT}.down.weight"),
        "model.layers.{i}.shared_mlp.input_linear.weight": Split(
            (f"{_SHARED}.gate.weight", f"{_SHARED}.up.weight")
        ),
        "model.layers.{i}.shared_mlp.output_linear.weight": f"{_SHARED}.down.weight",
    }
)


def read(config: Config) -> DecoderSpec:
    """Read a config of a dense model."""
    return _read(config, read_mlp(config, bias=config.flag("mlp_bias")))


def read_moe(config: Config) -> DecoderSpec:
    """Read a config of a mixture of experts, with a shared one or without."""
    config.one_of("hidden_act", ("silu",), "silu")
    experts = config.integer("num_local_experts")
    top_k = config.integer("num_experts_per_tok", at_most=experts)
    shared = config.count("shared_intermediate_size", 0)
    mlp = MoESpec(
        router=RouterSpec(experts=experts, top_k=top_k),
        expert=DenseSpec(intermediate=config.integer("intermediate_size")),
        shared=DenseSpec(intermediate=shared) if shared else None,
    )
    return _read(config, mlp)


def _read(config: Config, mlp: DenseSpec | MoESpec) -> DecoderSpec:
    windows, bias = read_full_attention(config), config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    return read_dense(
        config,
        replace(attention, scale=config.number("attention_multiplier", 1.0)),
        windows=windows,
        mlps=[mlp] * len(windows),
        residual_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )
