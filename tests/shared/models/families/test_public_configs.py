"""Configs of published models, and what transformers writes for each family, are read.

``public_configs.json`` lists the keys that they have, and values where these differ from
``usual``. Sizes are made small there, and texts are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tandem.shared.errors import ModelError
from tandem.shared.models.model_config import ModelConfig
from tandem.shared.models.registry import FAMILIES, spec_of
from tandem.shared.models.spec import DecoderSpec

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("public_configs.json").read_text())
CONFIGS: list[dict[str, Any]] = TABLE["configs"]
# transformers' defaults are not those of any trained model.
UNTRAINED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "glm4_moe": {"head_dim": 128},
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
    assert {config["architecture"] for config in CONFIGS} <= set(FAMILIES)


@pytest.mark.parametrize("config", CONFIGS, ids=[config["models"][0] for config in CONFIGS])
def test_each_config_is_read(config: dict[str, Any]) -> None:
    """Quantized weights alone are refused, and with another line than a key that is unknown."""
    values = values_of(config)
    if "quantization_config" in values:
        with pytest.raises(ModelError, match=r"quantized .*bfloat16"):
            read(values)
        del values["quantization_config"]
    read(values)


@pytest.mark.parametrize("use_diff", [True, False], ids=["saved", "every default"])
@pytest.mark.parametrize(
    "kind", sorted({each.model_type for each in FAMILIES.values()} & {*CONFIG_MAPPING_NAMES})
)
def test_what_the_installed_transformers_writes_is_read(kind: str, use_diff: bool) -> None:
    written = AutoConfig.for_model(kind).to_json_string(use_diff=use_diff)
    read({**json.loads(written), **UNTRAINED.get(kind, {})})
