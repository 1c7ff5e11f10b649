"""Gemma 4's text models: wider heads and another rope in layers without a window, keys and values
that later layers share, inputs of each layer that depend on the token, and experts beside a dense
feed-forward."""

from __future__ import annotations

from dataclasses import replace

from ..config import FULL, SLIDING, Config, read_layer_types, read_rope_table
from ..spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MoESpec,
    NormLayout,
    QKNorm,
    RopeSpec,
    RouterSpec,
    TokenInputs,
)
from ..weight_names import Split, Stacked, WeightNames, per_layer
from . import gemma2
from .dense import DENSE_WEIGHTS, QK_NORM, read_attention, read_decoder

_EXPERT = "layers.{i}.mlp.experts.{j}"
# Norm weights are not differences from one, unlike in earlier Gemmas.
WEIGHTS: WeightNames = (
    DENSE_WEIGHTS
    | QK_NORM
    | per_layer(
        {
            **gemma2.NORMS,
            "per_layer_input_gate": "token_gate.gate",
            "per_layer_projection": "token_gate.down",
            "post_per_layer_input_norm": "token_gate.norm",
            "router.proj": "mlp.router",
            "pre_feedforward_layernorm_2": "mlp.experts_norm",
            "post_feedforward_layernorm_1": "mlp.post_shared_norm",
            "post_feedforward_layernorm_2": "mlp.post_experts_norm",
        }
    )
    | {
        "model.embed_tokens_per_layer.weight": "token_inputs.table.weight",
        "model.per_layer_model_projection.weight": "token_inputs.projection.weight",
        "model.per_layer_projection_norm.weight": "token_inputs.norm.weight",
        "model.layers.{i}.layer_scalar": "layers.{i}.output_scale.weight",
        "model.layers.{i}.router.scale": "layers.{i}.mlp.router.norm.weight",
        "model.layers.{i}.router.per_expert_scale": "layers.{i}.mlp.router.expert_scale.weight",
        "model.layers.{i}.experts.gate_up_proj": Stacked(
            Split((f"{_EXPERT}.gate.weight", f"{_EXPERT}.up.weight"))
        ),
        "model.layers.{i}.experts.down_proj": Stacked(f"{_EXPERT}.down.weight"),
    }
)


def read(config: Config, *, window: int = 512, token_inputs: int = 256) -> DecoderSpec:
    """Read a config. ``window`` and ``token_inputs`` are the defaults of the sliding window and of
    the width of per-layer inputs."""
    # The last key is about images, whose tokens see each other.
    config.one_of("use_bidirectional_attention", (None, "vision"))
    count, window = config.integer("num_hidden_layers"), config.integer("sliding_window", window)
    period = config.integer("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    kinds = read_layer_types(config, count) or [
        SLIDING if (index + 1) % period else FULL for index in range(count)
    ]
    kinds = [*kinds[:-1], FULL]
    attentions, ropes = _read_attentions(config, kinds, window)
    mlp, wide = _read_mlps(config)
    sources = _read_sources(config, kinds)
    dim = config.count("hidden_size_per_layer_input", token_inputs)
    hidden = config.integer("hidden_size")
    layers = tuple(
        LayerSpec(
            attention=replace(attentions[kind], kv_of=source),
            mlp=mlp if source is None else wide,
            rope=ropes[kind],
            norms=NormLayout.SANDWICH,
            output_scale=True,
        )
        for kind, source in zip(kinds, sources, strict=True)
    )
    vocabulary = config.integer("vocab_size_per_layer_input", 262_144)
    return read_decoder(
        config,
        layers,
        embedding_scale=hidden**0.5,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        tie_embeddings=True,
        token_inputs=(
            TokenInputs(vocab_size=vocabulary, dim=dim, activation="gelu_tanh") if dim else None
        ),
    )


def read_unified(config: Config) -> DecoderSpec:
    """Read a config of models without encoders for images and audio. Their text part has neither
    experts nor per-layer inputs, whatever the config says."""
    config.one_of("enable_moe_block", (False,), False)
    config.one_of("hidden_size_per_layer_input", (0,), 0)
    return read(config, window=1024, token_inputs=0)


def _read_attentions(
    config: Config, kinds: list[str], window: int
) -> tuple[dict[str, AttentionSpec], dict[str, RopeSpec]]:
    """Attention and rope of each kind of layer. Layers without a window have heads of another
    width, and values that are keys if the config says so."""
    config.one_of("attention_bias", (False,), False)
    local = replace(
        read_attention(config, qk_norm=QKNorm.HEAD, scale=1.0), sliding_window=window, v_norm=True
    )
    same = config.flag("attention_k_eq_v")
    dim, heads = _read_wide_heads(config, kinds, local, same)
    wide = replace(
        local, sliding_window=None, head_dim=dim, num_kv_heads=heads, values_are_keys=same
    )
    attentions = {SLIDING: local, FULL: wide}
    tables = config.get("rope_parameters", {})
    if not isinstance(tables, dict) or not set(tables) <= set(attentions):
        raise config.refusal("rope_parameters", tables, f"a table for each of {list(attentions)}")
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    ropes = {
        kind: read_rope_table(
            config,
            f"rope_parameters: {kind}",
            tables.get(kind) or (default if kind == FULL else {}),
            attention.head_dim,
            theta=1_000_000.0 if kind == FULL else 10_000.0,
            partial=True,
        )
        for kind, attention in attentions.items()
    }
    return attentions, ropes


def _read_wide_heads(
    config: Config, kinds: list[str], local: AttentionSpec, same: bool
) -> tuple[int, int]:
    """The width and number of KV heads in layers without a window: common keys, or a table for each
    layer (transformers 5)."""
    tables = config.get("per_layer_config")
    if tables is None:
        heads = config.integer("num_global_key_value_heads", local.num_kv_heads)
        return config.integer("global_head_dim", 512), heads if same else local.num_kv_heads
    full = [index for index, kind in enumerate(kinds) if kind == FULL]
    values = list(tables.values()) if isinstance(tables, dict) else []
    if (
        not values
        or not all(key.isdecimal() for key in tables)
        or sorted(map(int, tables)) != full
        or any(each != values[0] for each in values)
        or not isinstance(values[0], dict)
    ):
        raise config.refusal("per_layer_config", tables, f"equal tables for layers {full}")
    table = config.table("per_layer_config", values[0])
    dim = table.integer("head_dim", local.head_dim)
    heads = table.integer("num_key_value_heads", local.num_kv_heads)
    table.finish()
    return dim, heads


def _read_mlps(config: Config) -> tuple[DenseSpec | MoESpec, DenseSpec | MoESpec]:
    """The feed-forward of layers with their own KV, and of layers without."""
    dense = gemma2.read_mlp(config)
    double = config.flag("use_double_wide_mlp")
    wide = replace(dense, intermediate=2 * dense.intermediate) if double else dense
    if not config.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            config.get(key)
        return dense, wide
    experts = config.integer("num_experts")
    top_k = config.integer("top_k_experts", at_most=experts)
    router = RouterSpec(experts=experts, top_k=top_k, expert_scale=True, input_norm=True)
    expert = replace(dense, intermediate=config.integer("moe_intermediate_size"))
    both = MoESpec(router=router, expert=expert, shared=dense, shared_norms=True)
    return both, replace(both, shared=wide)


def _read_sources(config: Config, kinds: list[str]) -> list[int | None]:
    """The layer whose keys and values each of the last ``num_kv_shared_layers`` attends to: the
    last one of its kind before them."""
    shared = config.count("num_kv_shared_layers", 0)
    kinds_with_kv = kinds[: len(kinds) - shared]
    if shared and (shared >= len(kinds) or set(kinds_with_kv) != set(kinds)):
        raise config.refusal(
            "num_kv_shared_layers", shared, "layers of each kind before those that share their KV"
        )
    last = {kind: index for index, kind in enumerate(kinds_with_kv)}
    return [None] * len(kinds_with_kv) + [last[kind] for kind in kinds[len(kinds_with_kv) :]]
