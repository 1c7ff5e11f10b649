"""What Llama's many descendants share: keys of the config, and names of the weights."""

from __future__ import annotations

from ...errors import ModelError
from ..config import Config, read_rope
from ..spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec, RopeSpec, YarnScaling

# Hugging Face's name to ours; {i} is the layer. None: known, and of no use to us.
DENSE_WEIGHTS: dict[str, str | None] = {
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
    "model.layers.{i}.self_attn.rotary_emb.inv_freq": None,
}

QKV_BIAS: dict[str, str | None] = {
    "model.layers.{i}.self_attn.q_proj.bias": "layers.{i}.attention.q.bias",
    "model.layers.{i}.self_attn.k_proj.bias": "layers.{i}.attention.k.bias",
    "model.layers.{i}.self_attn.v_proj.bias": "layers.{i}.attention.v.bias",
}

O_BIAS: dict[str, str | None] = {
    "model.layers.{i}.self_attn.o_proj.bias": "layers.{i}.attention.o.bias",
}

QK_NORM: dict[str, str | None] = {
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attention.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attention.k_norm.weight",
}

MLP_BIAS: dict[str, str | None] = {
    "model.layers.{i}.mlp.gate_proj.bias": "layers.{i}.mlp.gate.bias",
    "model.layers.{i}.mlp.up_proj.bias": "layers.{i}.mlp.up.bias",
    "model.layers.{i}.mlp.down_proj.bias": "layers.{i}.mlp.down.bias",
}


def read_dense(
    config: Config,
    *,
    windows: list[int | None],
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    mlp_bias: bool = False,
) -> DecoderSpec:
    """The spec, given what sets a family apart; refuses every key that nobody has read."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    head_dim = config.integer("head_dim", hidden // heads)
    mlp = DenseSpec(
        intermediate=config.integer("intermediate_size"),
        activation=config.one_of("hidden_act", ("silu",), "silu"),
        bias=mlp_bias,
    )
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                qkv_bias=qkv_bias,
                o_bias=o_bias,
                qk_norm=qk_norm,
                sliding_window=window,
            ),
            mlp=mlp,
        )
        for window in windows
    )
    return read_decoder(config, layers, rope_dim=head_dim)


def read_decoder(config: Config, layers: tuple[LayerSpec, ...], *, rope_dim: int) -> DecoderSpec:
    """What is around the layers. It is read last: what nobody has read by now is refused."""
    _refuse_quantized(config)
    bos = config.token_ids("bos_token_id")
    rope = read_rope(config, rope_dim)
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=config.flag("tie_word_embeddings"),
        max_position=_context(config.integer("max_position_embeddings"), rope),
        eos_token_ids=config.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        dtype=config.get("dtype", config.get("torch_dtype", "bfloat16")),
    )
    config.finish()
    return spec


# By the writer: transformers, MLX, and older compressed-tensors.
_QUANTIZED = ("quantization_config", "quantization", "compression_config")


def _refuse_quantized(config: Config) -> None:
    for key in _QUANTIZED:
        if how := config.get(key):
            method = how.get("quant_method") if isinstance(how, dict) else None
            raise ModelError(
                f"{config.file}: the weights are quantized ({key}, method {method or 'not named'}),"
                f" which is not supported: use the model's bfloat16 or float16 version"
            )


def _context(max_position: int, rope: RopeSpec) -> int:
    """How many tokens there may be. Qwen says to add YaRN to its configs and leave the rest, so
    that ``max_position_embeddings`` stays what it was without."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return max_position
    return max(max_position, int(scaling.factor * scaling.original_max_position))
