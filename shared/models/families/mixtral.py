"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from ..config import Config, read_rope, read_window
from ..spec import DecoderSpec, DenseSpec, MoESpec, RouterSpec
from ..weight_names import WeightNames, per_layer, stacked_experts
from .dense import DENSE_WEIGHTS, read_attention, read_dense

WEIGHTS: WeightNames = (
    DENSE_WEIGHTS
    | per_layer(
        {
            "block_sparse_moe.gate": "mlp.router",
            "block_sparse_moe.experts.{j}.w1": "mlp.experts.{j}.gate",
            "block_sparse_moe.experts.{j}.w2": "mlp.experts.{j}.down",
            "block_sparse_moe.experts.{j}.w3": "mlp.experts.{j}.up",
        }
    )
    | per_layer({"mlp.gate": "mlp.router"})
    | stacked_experts("mlp.experts")
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("hidden_act", ("silu",), "silu")
    config.get("router_jitter_noise")  # for training
    experts = config.integer("num_local_experts", 8)
    top_k = config.integer("num_experts_per_tok", 2, at_most=experts)
    mlp = MoESpec(
        router=RouterSpec(experts=experts, top_k=top_k),
        expert=DenseSpec(intermediate=config.integer("intermediate_size")),
    )
    layers = config.integer("num_hidden_layers")
    attention = read_attention(config)
    return read_dense(
        config,
        attention,
        windows=[read_window(config)] * layers,
        ropes=[read_rope(config, attention.head_dim, theta=1_000_000.0)] * layers,
        mlps=[mlp] * layers,
        norm_eps=1e-5,
    )
