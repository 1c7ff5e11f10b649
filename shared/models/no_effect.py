"""Keys of a ``config.json`` that do not change the computation, whatever their value."""

from __future__ import annotations

# About the file, the tools that wrote it, and the tokenizer.
_DESCRIPTION = (
    "additional_special_tokens architectures attn_implementation auto_map base_model "
    "base_model_name_or_path bos_token chat_template custom_pipelines eos_token finetuning_task "
    "is_llama_config language library_name license max_seq_len max_seq_length "
    "max_sequence_length model_max_length model_name model_type pad_token padding_side "
    "pipeline_tag seq_length tags tokenizer_class tokenizer_model_max_length "
    "tokenizer_padding_side tokenizer_type transformers.js_config transformers_version "
    "transformers_weights trust_remote_code truncation_side unk_token unsloth_fixed "
    "unsloth_version use_flash_attention use_flash_attention_2 use_flash_attn"
)
# Initialisation, training and storage of the weights.
_TRAINING = (
    "attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout dtype "
    "embd_pdrop gradient_checkpointing gradient_checkpointing_kwargs hidden_dropout "
    "hidden_dropout_prob init_std initializer_factor initializer_range label_smoothing layerdrop "
    "loss_type move_model_to_device neftune_noise_alpha pretraining_tp resid_pdrop "
    "router_aux_loss_coef selective_checkpoint_enabled sequence_parallel_enabled torch_dtype "
    "use_bfloat16"
)
# Defaults of transformers' generation and of its classes; older versions wrote all of them.
_TRANSFORMERS = (
    "bad_words_ids begin_suppress_tokens cache_implementation chunk_size_feed_forward "
    "diversity_penalty do_sample "
    "early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty id2label "
    "is_decoder is_encoder_decoder label2id length_penalty max_length max_new_tokens "
    "max_window_layers min_length no_repeat_ngram_size num_beam_groups num_beams num_labels "
    "num_logits_to_keep num_return_sequences output_attentions output_hidden_states "
    "output_scores prefix problem_type remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder top_k top_p torchscript typical_p use_cache"
)
_NO_EFFECT = frozenset(f"{_DESCRIPTION} {_TRAINING} {_TRANSFORMERS}".split())


def has_no_effect(key: str, value: object) -> bool:
    """Return whether a key can be ignored: its feature is off, or it is listed above, the id of a
    special token, or private to the library that wrote the file."""
    off = value is None or value is False or value in ({}, [], "")
    return off or key in _NO_EFFECT or key.startswith("_") or key.endswith("_token_id")
