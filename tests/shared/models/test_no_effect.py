"""Keys of configs that may be ignored, and those that only look like it."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.shared.errors import ModelError
from tandem.tests.shared.models.families.test_families import BASE, spec_of
from tandem.tests.shared.models.test_quantization import DEEPSEEK

FULL = ["full_attention"] * 4
# By architecture, what the others need.
NEEDS: dict[str, dict[str, Any]] = {"DeepseekV3": DEEPSEEK, "Qwen3": {}, "Gemma2": {}, "Qwen2": {}}


def of(family: str) -> dict[str, Any]:
    more = {"hidden_act": "gelu_pytorch_tanh"} if family.startswith("Gemma") else {}
    return {**NEEDS.get(family, {}), **more, "architectures": [f"{family}ForCausalLM"]}


@pytest.mark.parametrize("value", [False, None, 0, [], {}, ""])
@pytest.mark.parametrize(
    "key",
    [
        *("is_causal", "causal", "use_causal_mask", "unidirectional", "is_decoder_only"),
        *("use_rope", "use_rotary_embedding", "rms_norm", "use_rms_norm", "pre_norm", "gated_mlp"),
        "scale_attn_weights",
    ],
)
def test_what_all_models_do_cannot_be_off(key: str, value: object) -> None:
    for family in ("Llama", "Qwen3", "Gemma2", "DeepseekV3"):
        with pytest.raises(ModelError, match=f"{key} is .*; supported: True"):
            spec_of(**of(family), **{key: value})
    assert spec_of(**{key: True}) == spec_of()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "DeepseekV3"])
def test_attention_to_later_tokens_is_refused_as_what_it_is(family: str) -> None:
    causal = {"is_causal": False, "use_causal_mask": None, "unidirectional": 0}
    both = {
        "use_bidirectional_attention": True,
        "is_bidirectional": 1,
        "is_encoder": True,
        "bidirectional": "all",
        "prefix_lm": True,
    }
    for key, value in (causal | both).items():
        supported = key in causal
        with pytest.raises(ModelError, match=f"{key} is .*; supported: {supported}: tokens .*"):
            spec_of(**of(family), **{key: value})
    for key in both:
        for value in (False, None):
            assert spec_of(**of(family), **{key: value}) == spec_of(**of(family))


@pytest.mark.parametrize(
    "key",
    [
        *("use_attention", "apply_rotary", "enable_rope", "use_layer_norm", "do_layer_norm_before"),
        *("final_norm", "use_final_layernorm", "use_residual", "use_mlp", "mask_future_tokens"),
        *("use_softmax", "autoregressive", "use_position_embeddings", "gating", "use_swiglu"),
        *("embedding_scaling", "self_attn", "add_attention_residual", "pos_embed"),
    ],
)
def test_an_unknown_switch_for_a_part_of_every_model_is_refused_if_it_is_off(key: str) -> None:
    with pytest.raises(ModelError, match=f"{key} .False. is unknown.*--ignore-config-keys {key}"):
        spec_of(**{key: False})
    with pytest.raises(ModelError, match=key):
        spec_of(**{key: True})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("Qwen3", "use_qk_norm", False),
        ("Qwen3", "qk_layernorm", False),
        ("Llama", "use_qk_norm", True),
        ("Qwen2", "qkv_bias", False),
        ("Llama", "qkv_bias", True),
        ("Gemma2", "scale_embeddings", False),
        ("Llama", "scale_embedding", True),
        ("Gemma2", "tie_word_embeddings", None),  # transformers takes null for false
        ("DeepseekV3", "norm_topk_prob", None),
        ("DeepseekV3", "rope_interleaved", False),
        ("Gemma2", "use_sliding_window", False),
        ("Llama", "is_encoder_decoder", True),
        ("Llama", "rope_ratio", 2),
        ("Llama", "rotary_pct", 0.5),
        ("Gemma2", "rotary_pct", 0.25),
        ("Llama", "num_key_value_groups", 4),
        ("Llama", "sliding_window", 512),
        ("Llama", "layer_types", ["sliding_attention", *FULL[1:]]),
        ("Llama", "layer_types", FULL[1:]),
        ("Llama", "use_bidirectional_attention", True),
        ("Llama", "use_attention_switch", None),
        ("Llama", "flash_attention_window", 1024),
        ("Llama", "activation", "gelu"),
        ("Llama", "hidden_activation", "gelu_pytorch_tanh"),
        ("Gemma2", "hidden_activation", "silu"),
        ("Qwen2", "norm_type", "layernorm"),
        ("DeepseekV3", "position_embedding_type", "alibi"),
        ("Gemma2", "sliding_window", 0),
        ("Gemma3", "attn_logit_softcapping", 50.0),
    ],
)
def test_a_value_that_changes_the_computation_is_refused(
    family: str, key: str, value: object
) -> None:
    with pytest.raises(ModelError, match=key):
        spec_of(**of(family), **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("use_cache", value) for value in (False, True, None)),
        *((key, False) for key in ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "bias")),
        ("attention_out_bias", False),
        *((key, False) for key in ("add_cross_attention", "use_mrope", "parallel_attn", "use_moe")),
        *((key, False) for key in ("use_sliding_window", "use_qk_norm", "bidirectional", "alibi")),
        *((key, False) for key in ("norm_topk_prob", "is_decoder", "is_encoder_decoder")),
        *(
            (key, value)
            for key in ("use_flash_attn", "_flash_attn_2", "fused_mlp")
            for value in (True, False)
        ),
        ("cross_attention_hidden_size", None),
        ("attention_chunk_size", None),
        ("sliding_window", None),
        ("rope_scaling", {}),
        ("n_ctx", 4096),
        ("n_positions", 4096),
        ("num_key_value_groups", 2),
        ("add_bos_token", True),
        ("rope_ratio", 1),
        ("rope_ratio", 1.0),
        ("rope_ratio", None),
        ("is_encoder_decoder", None),
        ("rotary_pct", 1.0),
        ("output_router_logits", True),
        ("logits_to_keep", 0),
        ("fp16", True),
        ("bf16", True),
        ("activation_dropout", 0.1),
        ("layer_types", FULL),
        ("use_mtp", False),
        ("hidden_act", "swish"),
        ("activation", "swiglu"),  # as Falcon 3's
        ("activation_function", "silu"),
        ("norm_type", "rmsnorm"),
        ("position_embedding_type", "rope"),
        ("is_matryoshka", True),
        ("matryoshka_dimensions", [64, 128]),
        ("min_p", 0.1),
    ],
)
def test_a_key_without_effect_is_accepted(key: str, value: object) -> None:
    assert spec_of(**{key: value}) == spec_of()


def test_a_window_that_is_not_used_does_not_matter() -> None:
    assert spec_of(use_sliding_window=False, sliding_window=4096) == spec_of()
    with pytest.raises(ModelError, match="sliding_window is 4096"):
        spec_of(use_sliding_window=True, sliding_window=4096)


@pytest.mark.parametrize("key", ["max_sequence_length", "n_positions", "seq_length"])
def test_a_context_under_another_name_is_pointed_out(key: str) -> None:
    """LLaMA 1 has ``max_sequence_length``."""
    with pytest.raises(ModelError, match=rf"max_position_embeddings is missing; if {key}, .* 2048"):
        spec_of(max_position_embeddings=None, **{key: 2048})
    with pytest.raises(ModelError, match="max_position_embeddings is null; supported: a positive"):
        spec_of(max_position_embeddings=None)


def test_factors_that_transformers_ignores_are_ignored() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert spec_of(rope_scaling={**yarn, "attn_factor": 0.8782}) == spec_of(rope_scaling=yarn)
    with pytest.raises(ModelError, match="attn_factor"):
        spec_of(rope_scaling={"rope_type": "linear", "factor": 4.0, "attn_factor": 0.5})


def test_the_base_config_is_whole() -> None:
    assert spec_of(**BASE)
