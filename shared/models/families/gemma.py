"""Gemma 1: Llama with GELU, scaled embeddings, and norm weights stored as differences from one."""

from __future__ import annotations

from ..config import Config, read_full_attention
from ..spec import DecoderSpec, DenseSpec
from ..weight_names import AddOne, WeightNames
from .dense import DENSE_WEIGHTS, read_attention, read_dense

WEIGHTS: WeightNames = DENSE_WEIGHTS | {
    "model.norm.weight": AddOne("norm.weight"),
    "model.layers.{i}.input_layernorm.weight": AddOne("layers.{i}.attention_norm.weight"),
    "model.layers.{i}.post_attention_layernorm.weight": AddOne("layers.{i}.mlp_norm.weight"),
}


def read(config: Config) -> DecoderSpec:
    """Read a config. Published ones say ``gelu`` and mean its approximation by tanh."""
    config.one_of("attention_bias", (False,), False)
    config.one_of("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu")
    config.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    windows = read_full_attention(config)
    mlp = DenseSpec(intermediate=config.integer("intermediate_size"), activation="gelu_tanh")
    return read_dense(
        config,
        read_attention(config),
        windows=windows,
        mlps=[mlp] * len(windows),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        tie_embeddings=True,
    )
