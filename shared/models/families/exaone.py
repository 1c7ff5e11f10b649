"""EXAONE 3.5 and 4: the first is Llama under the names of GPT-2; the second has norms behind both
halves of a layer, and no rope in layers without a window between others."""

from __future__ import annotations

from ..config import Config, read_rope, read_window, read_windows
from ..spec import DecoderSpec, DenseSpec, NormLayout, QKNorm
from ..weight_names import WeightNames, per_layer
from .dense import DENSE_WEIGHTS, QK_NORM, read_attention, read_dense
from .olmo2 import POST_NORMS

_ROOT = "transformer.h.{i}."
EXAONE3_WEIGHTS: WeightNames = {
    "transformer.wte.weight": "embed.weight",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.rotary.inv_freq": None,
    "lm_head.weight": "head.weight",
    **per_layer(
        {
            "ln_1": "attention_norm",
            "ln_2": "mlp_norm",
            "attn.attention.q_proj": "attention.q",
            "attn.attention.k_proj": "attention.k",
            "attn.attention.v_proj": "attention.v",
            "attn.attention.out_proj": "attention.o",
            "mlp.c_fc_0": "mlp.gate",
            "mlp.c_fc_1": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        root=_ROOT,
    ),
}
WEIGHTS: WeightNames = DENSE_WEIGHTS | QK_NORM | per_layer(POST_NORMS)


def read_exaone3(config: Config) -> DecoderSpec:
    """Read a config of EXAONE 3 or 3.5."""
    config.one_of("activation_function", ("silu",), "silu")
    layers = config.integer("num_layers", config.get("num_hidden_layers"))
    config.one_of("num_hidden_layers", (layers,), layers)
    mlp = DenseSpec(intermediate=config.integer("intermediate_size"))
    return read_dense(
        config,
        read_attention(config),
        windows=[None] * layers,
        mlps=[mlp] * layers,
        eps_key="layer_norm_epsilon",
        norm_eps=1e-5,
    )


def read(config: Config) -> DecoderSpec:
    """Read a config of EXAONE 4. Without a window all layers are rotated."""
    layers = config.integer("num_hidden_layers")
    pattern = config.get("sliding_window_pattern")
    window = read_window(config, 4096)
    if window is None:
        config.get("layer_types")
        windows: list[int | None] = [None] * layers
    else:
        kinds = _read_pattern(config, pattern, layers)
        windows = read_windows(
            config, layers, tuple(window if sliding else None for sliding in kinds)
        )
    attention = read_attention(config, qk_norm=QKNorm.HEAD)
    rope = read_rope(config, attention.head_dim)
    rope_everywhere = not any(windows)
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope if rope_everywhere or window else None for window in windows],
        norms=NormLayout.POST,
        norm_eps=1e-5,
    )


def _read_pattern(config: Config, pattern: object, layers: int) -> list[bool]:
    """Whether each layer has a window: by a period, or by letters, L for a layer with a window."""
    match pattern:
        case None:
            return [(index + 1) % 4 != 0 for index in range(layers)]
        case int() if pattern > 0:
            return [(index + 1) % pattern != 0 for index in range(layers)]
        case str() if pattern and set(pattern) <= set("LG"):
            kinds = [pattern[index % len(pattern)] == "L" for index in range(layers)]
            return [*kinds[:-1], False]
    raise config.refusal("sliding_window_pattern", pattern, "a period, or letters such as 'LLLG'")
