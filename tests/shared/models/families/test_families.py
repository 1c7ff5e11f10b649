"""Configs in, specs out; what is not implemented is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tandem.shared.errors import ModelError
from tandem.shared.models import registry
from tandem.shared.models.config import Config
from tandem.shared.models.config_files import ModelConfig
from tandem.shared.models.registry import family_of
from tandem.shared.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    YarnScaling,
    fingerprint_fields,
    tensor_parallel_problem,
)

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 8],
}

QWEN_WINDOW: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
UNIFIED = {"architectures": ["Gemma4UnifiedForCausalLM"]}
# Of SmolLM2, and of a config that transformers 4 wrote with all of its defaults.
BOOKKEEPING: dict[str, Any] = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "neftune_noise_alpha": 5.0,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "pruned_heads": {},
    "repetition_penalty": 1.0,
    "typical_p": 1.0,
}


def spec_of(**changes: Any) -> DecoderSpec:
    return registry.spec_of(ModelConfig({**BASE, **changes}))


def scaling_of(spec: DecoderSpec) -> Any:
    rope = spec.layers[0].rope
    assert rope is not None
    return rope.scaling


def attention_of(spec: DecoderSpec, layer: int) -> AttentionSpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def windows(spec: DecoderSpec) -> list[int | None]:
    return [attention_of(spec, at).sliding_window for at in range(len(spec.layers))]


def test_llama_defaults() -> None:
    spec = spec_of()
    attention = attention_of(spec, 3)
    assert (attention.num_kv_heads, attention.head_dim, attention.qkv_bias) == (2, 16, False)
    assert spec.layers[3].rope == RopeSpec(theta=10000.0, dim=16)
    assert spec.eos_token_ids == (7, 8)
    assert not spec.tie_embeddings


def test_both_spellings_of_rope_scaling() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    old = spec_of(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    new = spec_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert old.layers == new.layers
    assert scaling_of(old) == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=512
    )
    oldest = spec_of(rope_scaling={"type": "linear", "factor": 2.0})
    assert scaling_of(oldest) == LinearScaling(factor=2.0)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_a_dtype_has_two_names_and_two_spellings(key: str, value: str) -> None:
    assert spec_of(**{"torch_dtype": None, key: value}).dtype == "float16"


def test_a_scaling_beside_another_one_is_refused() -> None:
    """As model cards tell to enter one, into a config that transformers 5 has written."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 256}
    newer = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ModelError, match=r"rope_scaling is .*; supported: none beside rope_param"):
        spec_of(rope_parameters=newer, rope_scaling={"rope_type": "yarn", **yarn})
    with pytest.raises(ModelError, match=r"rope_scaling is .*; supported: none beside rope_param"):
        spec_of(rope_parameters=newer, rope_scaling={"type": "mrope"})
    same = {"rope_type": "yarn", "rope_theta": 5e5, **yarn}
    for beside in ({"type": "yarn", **yarn}, {}, None):
        both = spec_of(rope_parameters=same, rope_scaling=beside)
        assert both == spec_of(rope_parameters=same)


# Enough for a model, where a config of transformers' defaults alone is none.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "glm4_moe": {"head_dim": 128},
}


@pytest.mark.parametrize(
    "name", [n for n, f in registry.FAMILIES.items() if f.model_type in CONFIG_MAPPING_NAMES]
)
def test_what_a_config_leaves_out_is_as_in_transformers(name: str) -> None:
    """Each key alone: without it the model is the same, or it is refused. Keys that shapes of
    tensors have to fit are not worth a default, nor are tokens."""
    family = registry.FAMILIES[name]
    values = AutoConfig.for_model(family.model_type).to_dict()
    values |= {"architectures": [family.architecture], **NEEDED.get(family.model_type, {})}
    whole = registry.spec_of(ModelConfig(values))
    shapes = {"num_key_value_heads", "head_dim", "q_lora_rank", "num_global_key_value_heads"}
    for key in values.keys() - shapes - {"bos_token_id", "eos_token_id"}:
        rest = {k: v for k, v in values.items() if k != key}
        if key == "rope_parameters":
            rest |= {"rope_theta": None, "rope_scaling": None}
        try:
            assert registry.spec_of(ModelConfig(rest)) == whole, key
        except ModelError:
            assert key not in {"rms_norm_eps", "layer_norm_eps", "tie_word_embeddings"}, key


def test_yarn_is_resolved_when_it_is_read() -> None:
    """The attention factor is the config's own, a quotient, or what the stretch alone asks for."""
    table = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    alone, both, own = (
        scaling_of(spec_of(rope_scaling={**table, **more}))
        for more in (
            {"beta_fast": 16},
            {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
            {"attention_factor": 1.5},
        )
    )
    assert alone == YarnScaling(
        factor=40.0,
        original_max_position=64,
        beta_fast=16.0,
        beta_slow=1.0,
        truncate=True,
        attention_factor=pytest.approx(1.3689, abs=1e-4),  # type: ignore[arg-type]
        score_factor=1.0,
    )
    assert both is not None and both.attention_factor == pytest.approx(1.3689 / 1.1844, abs=1e-3)
    assert both.score_factor == pytest.approx(1.1844**2, abs=1e-3)
    assert own is not None and own.attention_factor == 1.5


def test_windows_of_mistral_and_qwen() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(spec_of(**mistral, sliding_window=8)) == [8] * 4
    assert windows(spec_of(**mistral, sliding_window=None)) == [None] * 4
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(spec_of(**mistral, sliding_window=8, layer_types=types)) == [None, 8, None, 8]
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 3}
    assert windows(spec_of(**qwen, use_sliding_window=False)) == [None] * 4
    assert windows(spec_of(**qwen, use_sliding_window=True)) == [None, None, None, 8]


def test_a_window_of_qwen3s_experts_is_in_all_layers() -> None:
    """Unlike in the dense models, whatever ``max_window_layers`` and ``layer_types`` say."""
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "sliding_window": 8,
        "max_window_layers": 3,
    }
    assert windows(spec_of(**moe)) == [None] * 4
    assert windows(spec_of(**moe, use_sliding_window=True)) == [8] * 4
    with pytest.raises(ModelError, match=r"layer_types is .*; supported: sliding_attention only"):
        spec_of(**moe, use_sliding_window=True, layer_types=["full_attention"] * 4)


def test_the_family_is_found_by_model_type_too() -> None:
    assert attention_of(spec_of(architectures=None, model_type="qwen3"), 0).qk_norm


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported: .*Llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type is 'ntk'; supp"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor is 0.5; supported: 1 or"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": "1"}}, "mscale is '1'"),
        ({"rope_scaling": YARN | {"extrapolation_factor": 0.5}}, "ion_factor is 0.5; .* 1.0$"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, "one flat table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; supported: a divisor of 4"),
        ({"vocab_size": "100"}, "vocab_size is '100'; supported: a positive integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({**UNIFIED, "hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8; .* 0$"),
        ({**UNIFIED, "enable_moe_block": True}, "enable_moe_block is True; supported: False"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is .*it names neither"),
        (
            {"quantization_config": {"bits": 4}},
            "quantized .*quantization_config, method not named.* use the model's bfloat16",
        ),
        ({"quantization": {"bits": 7, "group_size": 64}}, "quantization: bits is 7"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; supported: a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000"),
        ({**QWEN_WINDOW, "sliding_window": "8"}, "sliding_window is '8'"),
        ({**QWEN_WINDOW, "sliding_window": -1}, "sliding_window is -1"),
        ({**QWEN_WINDOW, "max_window_layers": "2"}, "max_window_layers is '2'"),
        ({**QWEN_WINDOW, "layer_types": [{}] * 4}, "layer_types is"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(**changes)


def test_unknown_keys_that_are_off_do_not_matter() -> None:
    assert spec_of(use_mtp=False, attn_logit_softcapping=None, _attn_implementation="sdpa")


def test_a_key_that_is_not_known_is_refused_with_the_flag_that_ignores_it() -> None:
    strange = {"query_scale": 2.0, "depth_gate": "on"}
    with pytest.raises(ModelError) as caught:
        spec_of(**strange)
    assert "query_scale (2.0), depth_gate ('on')" in str(caught.value)
    assert "--ignore-config-keys query_scale,depth_gate" in str(caught.value)
    values = {**BASE, **strange}
    ignored = Config(values, ignored_keys=frozenset(strange))
    assert family_of(values).read(ignored) == spec_of()


def test_a_key_inside_a_table_can_be_ignored_too() -> None:
    values = {**BASE, "rope_parameters": {"rope_type": "default", "twist": 2.0}}
    with pytest.raises(ModelError, match=r"rope_parameters: twist .*--ignore-config-keys twist"):
        family_of(values).read(Config(values))
    assert family_of(values).read(Config(values, ignored_keys=frozenset({"twist"}))) == spec_of()


def test_ids_of_special_tokens_do_not_matter() -> None:
    assert spec_of(unk_token_id=0, mask_token_id=4, cls_token_id=5) == spec_of()


def test_bookkeeping_does_not_matter() -> None:
    assert spec_of(**BOOKKEEPING) == spec_of()
    with pytest.raises(ModelError, match="pruned_heads"):
        spec_of(pruned_heads={"0": [1]})
    with pytest.raises(ModelError, match="rope_interleaved"):
        spec_of(rope_interleaved=True)


def test_yarn_stretches_the_context() -> None:
    """``max_position_embeddings`` may count the stretch already or not."""
    table = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "finetuned": True,
    }
    for stated in (1024, 4096):
        assert spec_of(rope_scaling=table, max_position_embeddings=stated).max_position == 4096
    assert spec_of(rope_scaling=table, max_position_embeddings=5120).max_position == 5120


def test_a_fingerprint_names_the_field_that_differs() -> None:
    one = fingerprint_fields(spec_of())
    other = fingerprint_fields(
        spec_of(architectures=["MistralForCausalLM"], sliding_window=8, rope_theta=1e6)
    )
    differing = {key for key in one if one[key] != other[key]}
    assert differing == {"rope_theta", "attention.sliding_window"}


def test_heads_are_split_or_held_twice() -> None:
    kv = spec_of().layers[0].attention.kv
    assert [kv.heads_of(rank, 2) for rank in range(2)] == [range(1), range(1, 2)]
    assert [kv.heads_of(rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    assert tensor_parallel_problem(spec_of(), 4) is None
    assert "query heads" in (tensor_parallel_problem(spec_of(), 3) or "")
