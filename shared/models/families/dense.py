"""Shared parts of Llama's many descendants: keys of the config, and names of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from ..config import Config, read_max_position, read_rope
from ..config_files import PROJECTIONS
from ..spec import (
    POOLINGS,
    Activation,
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    DynamicScaling,
    LayerSpec,
    MoESpec,
    NormKind,
    NormLayout,
    Pooling,
    PositionBias,
    PositionTable,
    ProjectionSpec,
    QKNorm,
    RopeSpec,
    TokenInputs,
    YarnScaling,
)
from ..weight_names import WeightNames

DENSE_WEIGHTS: WeightNames = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attention_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.self_attn.q_proj.weight": "layers.{i}.attention.q.weight",
    "model.layers.{i}.self_attn.k_proj.weight": "layers.{i}.attention.k.weight",
    "model.layers.{i}.self_attn.v_proj.weight": "layers.{i}.attention.v.weight",
    "model.layers.{i}.self_attn.o_proj.weight": "layers.{i}.attention.o.weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers.{i}.mlp.gate.weight",
    "model.layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.up.weight",
    "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down.weight",
    # Tables computed from the config, which older versions of transformers saved.
    **{
        f"{place}.{table}": None
        for place in (
            "model.rotary_emb",
            "model.rotary_emb_local",
            "model.layers.{i}.self_attn.rotary_emb",
        )
        for table in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
    },
}

# Names of activations in configs; silu with its gate is called SwiGLU.
_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(_SILU, "silu"),
    **dict.fromkeys(_GELU_TANH, "gelu_tanh"),
    "gelu": "gelu",
    "relu": "relu",
}

QKV_BIAS: WeightNames = {
    "model.layers.{i}.self_attn.q_proj.bias": "layers.{i}.attention.q.bias",
    "model.layers.{i}.self_attn.k_proj.bias": "layers.{i}.attention.k.bias",
    "model.layers.{i}.self_attn.v_proj.bias": "layers.{i}.attention.v.bias",
}

O_BIAS: WeightNames = {
    "model.layers.{i}.self_attn.o_proj.bias": "layers.{i}.attention.o.bias",
}

QK_NORM: WeightNames = {
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attention.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attention.k_norm.weight",
}

MLP_BIAS: WeightNames = {
    "model.layers.{i}.mlp.gate_proj.bias": "layers.{i}.mlp.gate.bias",
    "model.layers.{i}.mlp.up_proj.bias": "layers.{i}.mlp.up.bias",
    "model.layers.{i}.mlp.down_proj.bias": "layers.{i}.mlp.down.bias",
}


def read_dense(
    config: Config,
    attention: AttentionSpec,
    *,
    windows: list[int | None],
    ropes: Sequence[RopeSpec | None] | None = None,
    mlps: Sequence[DenseSpec | MoESpec] | None = None,
    norms: NormLayout = NormLayout.PRE,
    residual_scale: float = 1.0,
    **others: Unpack[Others],
) -> DecoderSpec:
    """The spec of a decoder with grouped-query attention.

    Layers have ``attention`` with their own window, and by default the config's rope and dense
    feed-forward. ``others``: see ``read_decoder``. Call this last: unread keys are rejected.
    """
    if any(windows):
        for key in ("use_sliding_window", "use_sliding_window_attention"):
            config.one_of(key, (True,), True)
    ropes = ropes or [read_rope(config, attention.head_dim)] * len(windows)
    mlps = mlps or [read_mlp(config)] * len(windows)
    layers = tuple(
        LayerSpec(
            attention=replace(attention, sliding_window=window),
            mlp=mlp,
            rope=rope,
            norms=norms,
            residual_scale=residual_scale,
        )
        for window, rope, mlp in zip(windows, ropes, mlps, strict=True)
    )
    return read_decoder(config, layers, **others)


def read_attention(
    config: Config,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QKNorm | None = None,
    sinks: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> AttentionSpec:
    """Grouped-query attention without a window."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    config.one_of("num_key_value_groups", (heads // kv_heads,), heads // kv_heads)
    # Set by the family; a config may repeat it.
    for key in ("qk_layernorm", "qk_norm", "use_qk_norm"):
        config.one_of(key, (qk_norm is not None,), qk_norm is not None)
    for key in ("add_qkv_bias", "qkv_bias", "use_qkv_bias"):
        config.one_of(key, (qkv_bias,), qkv_bias)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.integer("head_dim", config.integer("hidden_size") // heads),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        scale=scale,
        soft_cap=soft_cap,
    )


def read_plain_attention(config: Config) -> AttentionSpec:
    """Multi-head attention with biases: one KV head for each query head."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise config.refusal("num_attention_heads", heads, f"a divisor of {hidden}")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        o_bias=True,
    )


def read_mlp(config: Config, *, bias: bool = False) -> DenseSpec:
    """The gated feed-forward of a layer without experts."""
    config.one_of("hidden_act", _SILU, _SILU[0])
    for key in ("activation", "activation_function", "hidden_activation"):
        config.one_of(key, (*_SILU, "swiglu"), _SILU[0])
    return DenseSpec(intermediate=config.integer("intermediate_size"), bias=bias)


def read_plain_mlp(
    config: Config,
    activation: str,
    *,
    key: str = "hidden_act",
    width: int | None = None,
    bias: bool = True,
) -> DenseSpec:
    """A feed-forward without a gate. ``activation`` and ``width`` are the family's defaults."""
    name = config.one_of(key, tuple(ACTIVATIONS), activation)
    return DenseSpec(
        intermediate=config.integer("intermediate_size", width),
        activation=ACTIVATIONS[name],
        bias=bias,
        gated=False,
    )


class Others(TypedDict, total=False):
    """Fields of ``DecoderSpec`` besides the layers. ``tie_embeddings`` and ``norm_eps`` are the
    family's defaults, ``eps_key`` is the latter's config key, and ``rope_name`` the name of the
    family's rope."""

    norm: NormKind
    eps_key: str
    norm_eps: float
    tie_embeddings: bool
    positions: PositionTable | None
    position_bias: PositionBias | None
    segments: int
    embedding_norm: bool
    pooling: Pooling
    token_inputs: TokenInputs | None
    embedding_scale: float
    logit_scale: float
    logit_soft_cap: float | None
    head_bias: bool
    rope_name: str


def read_decoder(
    config: Config, layers: tuple[LayerSpec, ...], **others: Unpack[Others]
) -> DecoderSpec:
    """The spec around the layers. Call this last: unread keys are rejected."""
    norm, scale = others.get("norm", NormKind.RMS), others.get("embedding_scale", 1.0)
    positions = others.get("positions")
    for key in ("scale_embedding", "scale_embeddings"):
        config.one_of(key, (scale != 1,), scale != 1)
    if norm is NormKind.RMS:
        config.one_of("norm_type", ("rmsnorm", "rms_norm", "RMSNorm", "rms", "hf_rms"), "rmsnorm")
    if positions is None:
        names = (others.get("rope_name", "rope"), "rotary")
        config.one_of("position_embedding_type", names, names[0])
    bos = config.token_ids("bos_token_id")
    tied = config.flag("tie_word_embeddings", others.get("tie_embeddings", False))
    if tied and others.get("head_bias"):
        raise config.refusal("tie_word_embeddings", tied, "false, as the head has a bias")
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm=norm,
        norm_eps=config.number(others.get("eps_key", "rms_norm_eps"), others.get("norm_eps", 1e-6)),
        tie_embeddings=tied,
        max_position=_context(config, layers),
        positions=positions,
        position_bias=others.get("position_bias"),
        segments=others.get("segments", 0),
        embedding_norm=others.get("embedding_norm", False),
        pooling=config.one_of("pooling_type", POOLINGS, others.get("pooling", "last")),
        projections=_projections(config),
        embeds=config.get("pooling_type") is not None,
        token_inputs=others.get("token_inputs"),
        embedding_scale=scale,
        logit_scale=others.get("logit_scale", 1.0),
        logit_soft_cap=others.get("logit_soft_cap"),
        head_bias=others.get("head_bias", False),
        eos_token_ids=config.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(config),
    )
    config.finish()
    return spec


def _projections(config: Config) -> tuple[ProjectionSpec, ...]:
    """Linear layers over a text's vector, which ``read_config`` adds to the config."""
    width, projections = config.integer("hidden_size"), []
    for number, values in enumerate(config.get(PROJECTIONS, ())):
        table = config.table(f"{PROJECTIONS}[{number}]", values)
        # Only linear maps commute with the mean over hidden states.
        table.one_of("bias", (False,), True)
        identity = "torch.nn.modules.linear.Identity"
        table.one_of("activation_function", (identity,), "torch.nn.modules.activation.Tanh")
        table.one_of("in_features", (width,))
        table.one_of("module_output_name", ("sentence_embedding",), "sentence_embedding")
        table.one_of("use_residual", (False,), False)
        projections.append(ProjectionSpec(inputs=width, outputs=table.integer("out_features")))
        width = projections[-1].outputs
    return tuple(projections)


def _dtype(config: Config) -> str:
    """``dtype``, formerly ``torch_dtype``, with or without the prefix ``torch.``."""
    older = config.get("torch_dtype", "bfloat16")
    return str(config.get("dtype", older)).removeprefix("torch.")


def _context(config: Config, layers: tuple[LayerSpec, ...]) -> int:
    """The context in tokens. Qwen's instructions only add YaRN to a config, so that
    ``max_position_embeddings`` excludes the stretch. With dynamic scaling, a user may request a
    longer context than the original one."""
    max_position = read_max_position(config)
    for layer in layers:
        match layer.rope and layer.rope.scaling:
            case YarnScaling(factor=factor, original_max_position=original):
                max_position = max(max_position, int(factor * original))
            case DynamicScaling(factor=factor, original_max_position=original):
                longest = min(config.max_model_len or 0, int(factor * original))
                max_position = max(max_position, longest)
    return max_position
