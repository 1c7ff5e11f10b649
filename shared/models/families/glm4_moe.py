"""GLM-4.5, 4.6 and 4.7: DeepSeek V3's experts, and heads of which half is rotated."""

from __future__ import annotations

from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, QKNorm
from ..weight_names import WeightNames
from . import deepseek
from .dense import DENSE_WEIGHTS, QK_NORM, QKV_BIAS, read_attention, read_dense, read_mlp

WEIGHTS: WeightNames = DENSE_WEIGHTS | QKV_BIAS | QK_NORM | deepseek.EXPERTS


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.get("num_nextn_predict_layers")  # layers that predict further tokens
    has_norm = config.flag("use_qk_norm")
    attention = read_attention(
        config,
        qkv_bias=config.flag("attention_bias"),
        qk_norm=QKNorm.HEAD if has_norm else None,
    )
    windows = read_full_attention(config)
    rope = read_rope(config, attention.head_dim, partial=True, part=0.5)
    experts = deepseek.read_sigmoid_experts(config)
    dense, first = read_mlp(config), config.count("first_k_dense_replace", 1)
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        mlps=[dense if index < first else experts for index in range(len(windows))],
        norm_eps=1e-5,
    )
