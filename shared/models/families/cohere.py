"""Command R and R7B: LayerNorms without biases, parallel halves after one norm, and scaled logits.
Cohere 2 has windows in three of four layers, and rope in these only."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config, read_full_attention, read_rope, read_windows
from ..spec import AttentionSpec, DecoderSpec, NormKind, NormLayout, QKNorm, RopeSpec
from ..weight_names import Deinterleave, Stacked, WeightNames, rotary_projections
from . import llama
from .dense import read_attention, read_dense

WEIGHTS: WeightNames = (
    llama.WEIGHTS
    | rotary_projections("q", "k")
    | {
        "model.layers.{i}.self_attn.q_norm.weight": Stacked(
            Deinterleave("layers.{i}.attention.q_norm.{j}.weight"), over="heads"
        ),
        "model.layers.{i}.self_attn.k_norm.weight": Stacked(
            Deinterleave("layers.{i}.attention.k_norm.{j}.weight"), over="kv_heads"
        ),
    }
)


def read(config: Config) -> DecoderSpec:
    """Read a config of Command R or R+."""
    windows = read_full_attention(config)
    has_norm = config.flag("use_qk_norm")
    attention = _read_attention(config, QKNorm.LAYER if has_norm else None)
    rope = read_rope(config, attention.head_dim, theta=500_000.0)
    return _read(config, attention, windows, [rope] * len(windows))


def read_cohere2(config: Config) -> DecoderSpec:
    """Read a config of Command R7B or Command A."""
    layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    period = config.integer("sliding_window_pattern", config.get("_sliding_window_pattern", 4))
    config.one_of("order_of_interleaved_layers", ("local_attn_first",), "local_attn_first")
    config.get("cache_implementation")
    default = tuple(window if (index + 1) % period else None for index in range(layers))
    windows = read_windows(config, layers, default)
    attention = _read_attention(config, None)
    rope = read_rope(config, attention.head_dim)
    return _read(config, attention, windows, [rope if window else None for window in windows])


def _read_attention(config: Config, norm: QKNorm | None) -> AttentionSpec:
    bias = config.flag("attention_bias")
    return read_attention(config, qkv_bias=bias, o_bias=bias, qk_norm=norm)


def _read(
    config: Config,
    attention: AttentionSpec,
    windows: list[int | None],
    ropes: list[RopeSpec | None],
) -> DecoderSpec:
    for key in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing"):
        config.one_of(key, (True,), True)
    config.one_of("use_parallel_embedding", (False,), False)
    config.get("layer_switch")
    spec = read_dense(
        config,
        attention,
        windows=windows,
        ropes=ropes,
        norms=NormLayout.PARALLEL_SHARED,
        norm=NormKind.LAYER_UNBIASED,
        eps_key="layer_norm_eps",
        norm_eps=1e-5,
        logit_scale=config.number("logit_scale", 0.0625),
        tie_embeddings=True,
        rope_name="rope_gptj",
    )
    # Command R's max_position_embeddings is shorter than the context that it was trained for.
    return replace(spec, max_position=config.integer("model_max_length", spec.max_position))
