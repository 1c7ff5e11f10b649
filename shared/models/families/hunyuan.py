"""Hunyuan's dense models: a norm over each head of q and k after the rotation."""

from __future__ import annotations

from ..config import Config, read_full_attention
from ..spec import DecoderSpec, QKNorm
from ..weight_names import WeightNames, per_layer
from . import llama
from .dense import read_attention, read_dense

WEIGHTS: WeightNames = llama.WEIGHTS | per_layer(
    {
        "self_attn.query_layernorm": "attention.q_norm",
        "self_attn.key_layernorm": "attention.k_norm",
    }
)
# About latent attention, experts, state spaces and images in other models of the same code; and
# token ids.
_UNUSED = (
    "chunk_size cla_share_factor class_num dense_list hybrid_override_pattern im_end_id "
    "im_newline_id im_start_id kv_lora_rank mask_init_id n_group norm_topk_prob num_media_embeds "
    "num_shared_expert org_vocab_size pad_id pool_type q_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim routed_scaling_factor text_end_id text_start_id topk_group v_head_dim "
    "video_end_id video_start_id xdrope_section"
)
_NO_EFFECT = frozenset(_UNUSED.split())
_OTHERS = ("anyres_", "mamba_", "moe_", "vit_")


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("use_rotary_pos_emb", (True,), True)
    for key in ("position_embedding_xdrope", "use_cla", "use_mixed_mlp_moe"):
        config.one_of(key, (False,), False)
    config.one_of("num_experts", (1,), 1)
    for key in list(config.values):
        if key in _NO_EFFECT or key.startswith(_OTHERS):
            config.get(key)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.ROTATED_HEAD)
    config.one_of("attention_head_dim", (attention.head_dim,), attention.head_dim)
    return read_dense(
        config,
        attention,
        windows=read_full_attention(config),
        norm_eps=1e-5,
    )
