"""Qwen2's mixtures of experts: a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from ..spec import DecoderSpec, DenseSpec
from ..weight_names import WeightNames, per_layer
from . import qwen2, qwen3_moe
from .dense import read_attention, read_dense

_PARTS = ("gate", "up", "down")
WEIGHTS: WeightNames = (
    qwen2.WEIGHTS
    | qwen3_moe.EXPERTS
    | per_layer({f"mlp.shared_expert.{part}_proj": f"mlp.shared.{part}" for part in _PARTS})
    | per_layer({"mlp.shared_expert_gate": "mlp.shared_gate"})
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    windows = qwen2.qwen_windows(config)
    bias = config.flag("qkv_bias", True)
    shared = DenseSpec(intermediate=config.integer("shared_expert_intermediate_size"))
    experts = replace(qwen3_moe.read_experts(config), shared=shared, shared_gate=True)
    return read_dense(
        config,
        read_attention(config, qkv_bias=bias),
        windows=windows,
        mlps=qwen3_moe.read_mlps(config, len(windows), experts),
    )
