"""Configs of published models, and what transformers writes for each family, are read.

``public_configs.json`` lists the keys that they have, and values where these differ from
``usual``. Sizes are made small there, and texts are left out. An architecture may be named as in
the code that came with a checkpoint. Under ``wrappers`` are whole configs of models of images, of
which the text part is read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tandem.shared.errors import ModelError
from tandem.shared.models.config_files import ModelConfig
from tandem.shared.models.families import wrappers
from tandem.shared.models.registry import FAMILIES, family_of, spec_of
from tandem.shared.models.spec import QUANTIZED, DecoderSpec

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("public_configs.json").read_text())
CONFIGS: list[dict[str, Any]] = TABLE["configs"]
WRAPPERS: dict[str, dict[str, Any]] = {
    each["models"][0]: each["config"] for each in TABLE["wrappers"]
}
# transformers' defaults are not those of any trained model.
UNTRAINED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "glm4_moe": {"head_dim": 128},
}

# Files that transformers 5 refuses, or for which it has another default than the model's tensors.
ONLY_HERE = {"Phi-3-mini-128k-instruct (4.39.3)", "deepseek-v2-lite (other file)"}
# Models of supported families, by the file that theirs differs from, that compute something else.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "opt-350m": (
        "opt-125m",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "do_layer_norm_before is False; supported: True",
    ),
    "galactica-6.7b": (
        "galactica-125m",
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        "enable_bias is False; supported: True",
    ),
    "stanford-crfm alias-gpt2-small-x21": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is True; supported: False",
    ),
    "phi-1_5 (first)": (
        "gpt2",
        {"architectures": ["MixFormerSequentialForCausalLM"], "rotary_dim": 32},
        "n_embd is there instead of hidden_size, .*use a version saved by transformers",
    ),
    "phi-2 (first)": (
        "gpt2",
        {"architectures": ["PhiForCausalLM"], "model_type": "phi-msft", "rotary_dim": 32},
        "n_embd is there instead of hidden_size, .*use a version saved by transformers",
    ),
}


def read(values: dict[str, Any]) -> DecoderSpec:
    return spec_of(ModelConfig(values))


def values_of(config: dict[str, Any]) -> dict[str, Any]:
    keys = config["keys"].split()
    usual = {key: TABLE["usual"][key] for key in keys}
    return {**usual, **config["values"], "architectures": [config["architecture"]]}


def test_the_table_covers_every_family_and_enough_models() -> None:
    models = [model for config in CONFIGS for model in config["models"]]
    published = [model for model in models if not model.startswith("transformers ")]
    assert len(set(published)) == len(published) >= 60
    assert {family_of(values_of(config)).architecture for config in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("config", CONFIGS, ids=[config["models"][0] for config in CONFIGS])
def test_each_config_is_read_as_by_transformers(config: dict[str, Any]) -> None:
    values = values_of(config)
    if method := values.pop("quantization_config", {}).get("quant_method"):
        assert read({**values, "quantization_config": {"quant_method": method}}).dtype == QUANTIZED
    spec = read(values)
    kind = family_of(values).model_type
    if kind in CONFIG_MAPPING_NAMES and config["models"][0] not in ONLY_HERE:
        assert without_tokens(spec) == without_tokens(read(as_transformers_reads(kind, values)))


@pytest.mark.parametrize("kind", wrappers.DEFAULTS)
def test_what_a_text_part_leaves_out_is_as_in_transformers(kind: str) -> None:
    around = {"architectures": ["LlavaForConditionalGeneration"]}
    whole = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
    parts = [{**around, "text_config": text} for text in ({"model_type": kind}, whole)]
    assert without_tokens(read(parts[0])) == without_tokens(read(parts[1]))


def as_transformers_reads(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The same config, by newer names and with everything that it leaves out."""
    names = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
    config = type(AutoConfig.for_model(kind)).from_dict(names)
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": kind}


@pytest.mark.parametrize("model", WRAPPERS)
def test_the_text_part_of_each_wrapper_is_read_as_by_transformers(model: str) -> None:
    config = WRAPPERS[model]
    kind = config["model_type"]
    everything = as_transformers_reads(kind, config) | {"architectures": config["architectures"]}
    expected = read(everything)
    if kind == "mistral3":  # whose published models have a head of their own
        expected = replace(expected, tie_embeddings=False)
    assert without_tokens(read(config)) == without_tokens(expected)


def without_tokens(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, eos_token_ids=(), bos_token_id=None)


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_that_computes_something_else_is_refused(model: str) -> None:
    other, changes, words = REFUSED[model]
    config = next(config for config in CONFIGS if other in config["models"])
    with pytest.raises(ModelError, match=words):
        read({**values_of(config), **changes})


@pytest.mark.parametrize("use_diff", [True, False], ids=["saved", "every default"])
@pytest.mark.parametrize(
    "kind", sorted({each.model_type for each in FAMILIES.values()} & {*CONFIG_MAPPING_NAMES})
)
def test_what_the_installed_transformers_writes_is_read(kind: str, use_diff: bool) -> None:
    text = AutoConfig.for_model(kind).to_json_string(use_diff=use_diff)
    read({**json.loads(text), **UNTRAINED.get(kind, {})})
