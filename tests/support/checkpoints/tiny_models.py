"""Tiny random checkpoints of each family, written by transformers: the oracle's own files.

``build("qwen3", folder)`` writes one; ``cached("qwen3", root)`` writes it once under ``root``.
The weights are scaled such that greedy decoding gives varied tokens with clear margins.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

VOCAB = 512
EOS, IM_START, IM_END = 256, 257, 258
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN_MLA = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}


_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.5, 1.8, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
}
_LONGROPE_PARTIAL: dict[str, Any] = {
    **{key: value[:4] if isinstance(value, list) else value for key, value in _LONGROPE.items()},
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 1,
    "attention_factor": 1.2,
}
_ROPE_BY_KIND = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_GEMMA3: dict[str, Any] = {
    "rope_parameters": None,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# Short chunks are attended in the absorbed form, but for the first of a prompt.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 8,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
# Name: (class prefix, config, options of this builder).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama_dynamic": ("Llama", {"rope_parameters": _DYNAMIC}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        _EXPERTS
        | {"decoder_sparse_step": 2, "mlp_only_layers": [0], "norm_topk_prob": False}
        | {"use_sliding_window": True, "sliding_window": 24},
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "phi3": ("Phi3", {"num_key_value_heads": 4, "sliding_window": 24}),
    # The context is the original one, so that all factors are the short ones.
    "phi3_short": (
        "Phi3",
        {"rope_parameters": _LONGROPE | {"original_max_position_embeddings": 4096}},
    ),
    # All factors are the long ones; on the first token transformers' short ones have no effect.
    "phi3_partial": (
        "Phi3",
        {"rope_parameters": _LONGROPE_PARTIAL, "original_max_position_embeddings": 1},
    ),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3_linear": (
        "Gemma3",
        _GEMMA3 | {"rope_parameters": _ROPE_BY_KIND, "final_logit_softcapping": 5.0},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"q_lora_rank": None, "rope_parameters": YARN_MLA}),
    "deepseek_v2_groups": (
        "DeepseekV2",
        _LATENT | _GROUPS | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 0},
    ),
    "deepseek_v3": ("DeepseekV3", _LATENT | _GROUPS | {"rope_parameters": YARN_MLA}),
    "deepseek_v3_dense": (
        "DeepseekV3",
        _LATENT | _GROUPS | {"first_k_dense_replace": 3, "rope_interleave": False},
    ),
}
_ALL_HEADS: dict[str, Any] = {"num_key_value_heads": None}
_LAYER_NORM: dict[str, Any] = {"rms_norm_eps": None}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_GPT2 = {
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 2048,
    "rope_parameters": None,
    "rms_norm_eps": None,
    "num_key_value_heads": None,
}
_SIGMOID: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
_GEMMA4: dict[str, Any] = {
    "pad_token_id": 0,  # in place of images, also where there are none
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": None,
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
}
MODELS |= {
    "mixtral": ("Mixtral", _LOCAL | {"sliding_window": 24}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "glm": ("Glm", {"rope_parameters": PARTIAL}),
    "glm4": ("Glm4", {"rope_parameters": PARTIAL, "attention_bias": False}),
    "glm4_moe": (
        "Glm4Moe",
        _SIGMOID | {"rope_parameters": PARTIAL, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT | {"mlp_layer_types": ["dense"] + ["sparse"] * 2}),
    "gpt_oss": (
        "GptOss",
        _LOCAL
        | {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": None}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7}
        | {"attention_multiplier": 0.2},
    ),
    "granite_moe": (
        "GraniteMoeShared",
        _LOCAL | {"shared_intermediate_size": 40, "residual_multiplier": 0.7},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": None}
        | {"rope_parameters": {kind: dict(table) for kind, table in _ROPE_BY_KIND.items()}},
    ),
    "seed_oss": ("SeedOss", {"attention_bias": True}),
    "ernie4_5": ("Ernie4_5", {"tie_word_embeddings": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_intermediate_size": 24, "moe_k": 3, "moe_num_experts": 6}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 24, "sliding_window_pattern": 2, "num_hidden_layers": 4}
        | {"layer_types": None},
    ),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan": ("HunYuanDenseV1", {"rope_parameters": _DYNAMIC | {"alpha": 4.0}}),
    "ministral": ("Ministral", {"sliding_window": 24, "layer_types": None}),
    "ministral3": (
        "Ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0}},
    ),
    "phi": ("Phi", _LAYER_NORM | {"rope_parameters": PARTIAL}),
    "gpt_neox": ("GPTNeoX", _LAYER_NORM | _ALL_HEADS | {"rope_parameters": PARTIAL}),
    "gpt_neox_serial": (
        "GPTNeoX",
        _LAYER_NORM | _ALL_HEADS | {"use_parallel_residual": False},
    ),
    "stablelm": ("StableLm", _LAYER_NORM | {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm_parallel": (
        "StableLm",
        _LAYER_NORM | {"use_parallel_residual": True, "qk_layernorm": True},
    ),
    "starcoder2": (
        "Starcoder2",
        _LAYER_NORM | {"sliding_window": 24},
    ),
    "gpt2": ("GPT2", _GPT2),
    "opt": (
        "OPT",
        _LAYER_NORM
        | {"ffn_dim": 96, "word_embed_proj_dim": 128}
        | {"rope_parameters": None, "num_key_value_heads": None},
    ),
    "cohere": ("Cohere", _LAYER_NORM | {"tie_word_embeddings": True, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2",
        _LAYER_NORM
        | {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": None}
        | {"tie_word_embeddings": True, "logit_scale": 0.25},
    ),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4_shared": (
        "Gemma4",
        _GEMMA4
        | {"layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 12},
    ),
    "gemma4_moe": (
        "Gemma4",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}
        | {"moe_intermediate_size": 24, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 4},
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "minimax_m2": ("MiniMaxM2", _LOCAL | {"rope_parameters": PARTIAL}),
}
# Encoders, which make vectors of texts.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"num_attention_heads": 4}),
    "roberta": ("Roberta", {"num_attention_heads": 4, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm_roberta": ("XLMRoberta", {"num_attention_heads": 4, "pad_token_id": 1}),
    "mpnet": ("MPNet", {"num_attention_heads": 4, "pad_token_id": 1}),
    "modernbert": (
        "ModernBert",
        {"num_attention_heads": 4, "local_attention": 16, "num_hidden_layers": 5}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
        | dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
    ),
}
# Decoders that were trained to see later tokens.
ENCODING_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding_gemma": ("Gemma3Text", _GEMMA3 | {"use_bidirectional_attention": True}),
}
# The same with a head that scores pairs of texts, and decoders with one.
CROSS_ENCODERS = tuple(f"{name}_scorer" for name in ENCODERS)
DECODING_SCORERS = ("qwen3_scorer", "gemma2_scorer", "gpt2_scorer")
# Of models of images: the text part's config is that of a text model.
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_vl": ("Gemma3", "gemma3", {"mm_tokens_per_image": 4}),
    "gemma4_vl": ("Gemma4", "gemma4_shared", {}),
    "gemma4_unified_vl": (
        "Gemma4Unified",
        "gemma4_unified",
        {
            "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "patch_size": 2},
            "audio_config": {"audio_embed_dim": 16},
        },
    ),
    "internvl": (
        "InternVL",
        "qwen2",
        {"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "llava": ("Llava", "llama_linear", {"vision_config": {"model_type": "clip_vision_model"}}),
    "mistral3": (
        "Mistral3",
        "ministral3",
        {"vision_config": {"model_type": "pixtral", "head_dim": 16}},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        "qwen2",
        {"rope_parameters": _MROPE, "vision_config": {"embed_dim": 32}},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2", {"rope_parameters": _MROPE}),
    "qwen3_vl": ("Qwen3VL", "qwen3", {"rope_parameters": _MROPE}),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_moe", {"rope_parameters": _MROPE}),
}
SHARDED = frozenset({"qwen2"})
WITHOUT_HEAD_DIM = frozenset(
    {"Qwen2", "Phi3", "SmolLM3", "Qwen2Moe", "Granite", "GraniteMoeShared", "Olmo2", "Olmo3"}
    | {"Exaone4", "Phi", "GPTNeoX", "StableLm", "Starcoder2", "GPT2", "OPT", "Cohere", "Cohere2"}
)
CONFIG_CLASSES = {prefix: f"{prefix}TextConfig" for prefix in ("Gemma3", "Gemma4", "Gemma4Unified")}
PLAIN = ("PhiFor", "GPT", "Starcoder2", "OPT")
MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cached(name: str, root: Path) -> Path:
    """The model's folder under ``root``, built if it is not there yet."""
    folder = root / name
    if not (folder / "tokenizer.json").is_file():
        build(name, folder)
    return folder


def build(name: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """Write config, weights and tokenizer, and return the model; ``changes`` override its
    config."""
    import torch

    model = new_model(name, **changes)
    randomise(model, seed)
    shards = {"max_shard_size": "200KB"} if name in SHARDED else {}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **shards)
    write_tokenizer(folder)
    return model


def new_model(name: str, **changes: Any) -> Any:
    """The model with weights that mean nothing."""
    import transformers

    if name in WRAPPED:
        return _new_wrapper(*deepcopy(WRAPPED[name]))
    if name in ENCODERS or name in CROSS_ENCODERS:
        prefix, config = ENCODERS[name.removesuffix("_scorer")]
        head = {"num_labels": 1} if name in CROSS_ENCODERS else {}
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 130}
        settings = {**sizes, **config, **head, **changes}
        kind = getattr(transformers, f"{prefix}Config")
        model = "ForSequenceClassification" if head else "Model"
        return getattr(transformers, f"{prefix}{model}")(kind(**settings))
    if name in ENCODING_DECODERS:
        prefix, config = ENCODING_DECODERS[name]
        kind = getattr(transformers, f"{prefix}Config")
        return getattr(transformers, f"{prefix}Model")(
            kind(**deepcopy({**_SHAPE, **config, **changes}))
        )
    settings, prefix = _settings(name.removesuffix("_scorer"), **changes)
    model = MODEL_CLASSES.get(prefix, f"{prefix}ForCausalLM")
    if name in DECODING_SCORERS:
        settings |= {"num_labels": 1} | changes
        model = f"{prefix}ForSequenceClassification"
    return getattr(transformers, model)(_config_class(prefix)(**settings))


def _config_class(prefix: str) -> Any:
    """The class of a text model's config."""
    import transformers

    return getattr(transformers, CONFIG_CLASSES.get(prefix, f"{prefix}Config"))


def _new_wrapper(prefix: str, text: str, more: dict[str, Any]) -> Any:
    import transformers

    settings, text_prefix = _settings(text)
    for key in ("rope_parameters",):
        settings |= {key: more.pop(key)} if key in more else {}
    vision = _VISION | more.pop("vision_config", {})
    config = getattr(transformers, f"{prefix}Config")
    own = config.sub_configs["text_config"]  # AutoConfig if the text model may be of any kind
    kind = getattr(own, "model_type", "") or _config_class(text_prefix).model_type
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(
        config(
            text_config={"model_type": kind, **settings},
            vision_config=vision,
            tie_word_embeddings=settings["tie_word_embeddings"],
            **more,
        )
    )


def _settings(name: str, **changes: Any) -> tuple[dict[str, Any], str]:
    """The keys of a model's config, and the prefix of its classes."""
    prefix, config = MODELS[name]
    # A copy of its tables: the classes change them.
    settings = deepcopy({"tie_word_embeddings": False, **_SHAPE, **config, **changes})
    for key in ("rms_norm_eps", "num_key_value_heads"):
        if settings[key] is None:
            del settings[key]
    if prefix in WITHOUT_HEAD_DIM:
        del settings["head_dim"]
        settings["hidden_size"] = changes.get("hidden_size", 128)
    if "ffn_dim" in settings:
        del settings["intermediate_size"]
    if "n_embd" in settings:
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            del settings[key]
        del settings["max_position_embeddings"], settings["intermediate_size"]
    return settings, prefix


def randomise(model: Any, seed: int) -> None:
    """Give every parameter its random value."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    # Without gates, biases and the mean of activations would outweigh what varies.
    plain = type(model).__name__.startswith(PLAIN)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ("norm" in name or "ln_" in name) and not name.endswith("bias"):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_((0.02 if plain else 0.2) * noise)
            elif plain and ("embed" in name or "wte" in name):
                parameter.copy_(2.0 * noise)
            elif "embed_tokens" in name:
                scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
                parameter.copy_(0.5 / scale * noise)
            else:
                # The layers must outweigh the embedding, or a tied model repeats its input.
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            noise = torch.randn(buffer.shape, generator=generator)
            if "correction" in name:
                buffer.copy_(0.3 * noise)
            elif "layer_scalar" in name:
                buffer.copy_(1 + 0.1 * noise)


def write_tokenizer(folder: Path) -> None:
    """One token a byte, three special tokens, a ChatML template."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
