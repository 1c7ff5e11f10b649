"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped
SwiGLU."""

from __future__ import annotations

from ....kernels.activations import CLAMPED_SWIGLU
from ..config import FULL, SLIDING, Config, read_layer_types, read_rope
from ..spec import DecoderSpec, DenseSpec, MoESpec, RouterSpec
from ..weight_names import Alternating, Stacked, Transposed, WeightNames
from .dense import DENSE_WEIGHTS, O_BIAS, QKV_BIAS, read_attention, read_dense

_LAYER, _EXPERT = "model.layers.{i}", "layers.{i}.mlp.experts.{j}"
WEIGHTS: WeightNames = (
    DENSE_WEIGHTS
    | QKV_BIAS
    | O_BIAS
    | {
        f"{_LAYER}.self_attn.sinks": "layers.{i}.attention.sinks.weight",
        f"{_LAYER}.mlp.router.weight": "layers.{i}.mlp.router.weight",
        f"{_LAYER}.mlp.router.bias": "layers.{i}.mlp.router.logits.bias",
        f"{_LAYER}.mlp.experts.gate_up_proj": Stacked(
            Transposed(Alternating((f"{_EXPERT}.gate.weight", f"{_EXPERT}.up.weight")))
        ),
        f"{_LAYER}.mlp.experts.gate_up_proj_bias": Stacked(
            Alternating((f"{_EXPERT}.gate.bias", f"{_EXPERT}.up.bias"))
        ),
        # The names that the reader of quantised weights gives to matrices.
        f"{_LAYER}.mlp.experts.{{j}}.gate_up_proj.weight": Alternating(
            (f"{_EXPERT}.gate.weight", f"{_EXPERT}.up.weight")
        ),
        f"{_LAYER}.mlp.experts.{{j}}.down_proj.weight": f"{_EXPERT}.down.weight",
        f"{_LAYER}.mlp.experts.down_proj": Stacked(Transposed(f"{_EXPERT}.down.weight")),
        f"{_LAYER}.mlp.experts.down_proj_bias": Stacked(f"{_EXPERT}.down.bias"),
    }
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("hidden_act", ("silu",), "silu")
    config.one_of("attention_bias", (True,), True)
    for key, value in CLAMPED_SWIGLU.items():
        config.one_of(key, (value,), value)
    config.get("initial_context_length")  # repeated in the rope
    layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 128)
    kinds = read_layer_types(config, layers)
    if kinds is None:
        kinds = [FULL if index % 2 else SLIDING for index in range(layers)]
    experts = config.integer("num_local_experts", config.get("num_experts"))
    top_k = config.integer(
        "num_experts_per_tok", config.get("experts_per_token", 4), at_most=experts
    )
    mlp = MoESpec(
        router=RouterSpec(experts=experts, top_k=top_k, bias=True),
        expert=DenseSpec(
            intermediate=config.integer("intermediate_size"),
            activation="clamped_swiglu",
            bias=True,
        ),
    )
    attention = read_attention(config, qkv_bias=True, o_bias=True, sinks=True)
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise config.refusal("rope_scaling", None, "a table of YaRN")
    rope = read_rope(config, attention.head_dim, theta=150_000.0)
    return read_dense(
        config,
        attention,
        windows=[window if kind == SLIDING else None for kind in kinds],
        ropes=[rope] * layers,
        mlps=[mlp] * layers,
        norm_eps=1e-5,
    )
