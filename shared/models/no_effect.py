"""Keys of a ``config.json`` that do not change the computation, always or with some values."""

from __future__ import annotations

import re

# With any value: about the file, the tools that wrote it, and the tokenizer.
_DESCRIPTION = (
    "add_bos_token add_eos_token additional_special_tokens architectures attn_implementation "
    "auto_map base_model base_model_name_or_path bos_token chat_template cls_token "
    "custom_pipelines eos_token finetuning_task is_llama_config is_matryoshka language "
    "library_name license mask_token matryoshka_dimensions max_seq_len max_seq_length "
    "max_sequence_length model_max_length model_name "
    "model_type n_ctx n_positions pad_token padding_side pipeline_tag sep_token seq_length tags "
    "tokenizer_class tokenizer_model_max_length tokenizer_padding_side tokenizer_type "
    "transformers.js_config transformers_version transformers_weights truncation_side "
    "trust_remote_code unk_token unsloth_fixed unsloth_version"
)
# Initialisation, training and storage of the weights.
_TRAINING = (
    "attn_pdrop bf16 dtype embd_pdrop fp16 gradient_checkpointing gradient_checkpointing_kwargs "
    "init_std initializer_factor initializer_range label_smoothing layerdrop loss_type "
    "move_model_to_device neftune_noise_alpha pretraining_tp resid_pdrop router_aux_loss_coef "
    "selective_checkpoint_enabled sequence_parallel_enabled torch_dtype use_bfloat16"
)
# Defaults of transformers' generation and classes; older versions wrote all of them.
_TRANSFORMERS = (
    "bad_words_ids begin_suppress_tokens cache_implementation chunk_size_feed_forward "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size epsilon_cutoff "
    "eta_cutoff exponential_decay_length_penalty guidance_scale id2label is_decoder label2id "
    "length_penalty logits_to_keep low_memory max_length max_new_tokens max_time "
    "max_window_layers min_length min_new_tokens min_p no_repeat_ngram_size num_beam_groups "
    "num_beams num_labels num_logits_to_keep num_return_sequences output_attentions "
    "output_hidden_states output_past output_router_logits output_scores penalty_alpha prefix "
    "problem_type remove_invalid_values renormalize_logits repetition_penalty return_dict "
    "return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder top_k top_p torchscript typical_p use_cache"
)
_NO_EFFECT = frozenset(f"{_DESCRIPTION} {_TRAINING} {_TRANSFORMERS}".split())
# Features that no model has, or does not read from here, if these are off.
_FEATURES = (
    "add_cross_attention alibi attention_bias attention_gate attention_sink attention_sinks "
    "attn_output_gate bias clip_qkv gated_attention is_encoder_decoder lm_head_bias mlp_bias "
    "norm_bias norm_topk_prob parallel_attn parallel_residual qk_layernorm qk_norm qkv_bias "
    "rope_interleaved rotary_interleaved scale_attn_by_inverse_layer_idx use_alibi "
    "use_attention_sinks use_bias use_gated_attention use_mrope use_parallel_residual use_qk_norm "
    "use_qkv_bias use_sliding_window use_sliding_window_attention"
)
_OFF = frozenset(_FEATURES.split())
# Features that all models here have.
_CAUSAL = (
    "causal causal_attention causal_mask decoder_only is_causal is_decoder_only unidirectional "
    "use_causal_attention use_causal_mask"
)
_ON = (
    "gated_mlp pre_norm rms_norm rope scale_attn_weights use_gated_mlp use_glu use_pre_norm "
    "use_rms_norm use_rmsnorm use_rope use_rotary use_rotary_embedding use_rotary_embeddings"
)
_BIDIRECTIONAL = (
    "bidirectional bidirectional_attention enable_bidirectional_attention is_bidirectional "
    "is_encoder is_encoder_only prefix_lm use_bidirectional use_bidirectional_attention"
)
# Keys about attention to later tokens.
DIRECTION = frozenset(f"{_CAUSAL} {_BIDIRECTIONAL}".split())
# The only supported value of keys that describe what all models here do.
SUPPORTED: dict[str, object] = {
    **dict.fromkeys(f"{_CAUSAL} {_ON}".split(), True),
    **dict.fromkeys(_BIDIRECTIONAL.split(), False),
    "rope_ratio": 1,
    "rotary_pct": 1,
}
# Names of ways to compute the same.
_IMPLEMENTATION = re.compile(r"flash|fused|memory_efficient|sdpa|xformers")
# Parts of the computation that are always on: a switch with such a name may turn one off.
_COMPUTATION = re.compile(
    r"activation|attention|attn|autoregress|caus|decod|embed|ffn|feed_?forward|(^|_)gat(e|ed|ing)"
    r"|glu|mask|mlp|norm|(^|_)pos(_|ition)|residual|rope|rotary|scal(e|ing)|softmax|unidirect"
)
_SWITCH = re.compile(r"^(allow|apply|do|enable|has|is|use|with)_|_enabled$")


def has_no_effect(key: str, value: object) -> bool:
    """Return whether an unread key can be ignored.

    It can if its value is the only supported one, its feature is off, or it does not affect the
    computation. For an unknown key, ``false`` means off unless its name refers to a part that is
    always on; a switch with null or an empty value counts as ``false``.
    """
    if key in SUPPORTED:
        return value == SUPPORTED[key] or (value is None and SUPPORTED[key] is not True)
    if key in _OFF:
        return not value
    about_else = key.startswith("_") or key.endswith("_token_id") or "dropout" in key
    if key in _NO_EFFECT or about_else:
        return True
    # A number is more likely a size.
    if _IMPLEMENTATION.search(key) and (value is None or isinstance(value, (bool, str))):
        return True
    if value is None or value in ({}, [], ""):
        return not (_SWITCH.search(key) and _COMPUTATION.search(key))
    # If there are biases anyway, their tensors are rejected.
    return value is False and (key.endswith("bias") or not _COMPUTATION.search(key))
