"""``--hf-overrides``: a model with other values than those of its ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem import EngineConfig
from tandem.inventory.machine import this_machine
from tandem.inventory.model_report import describe_model
from tandem.router.cluster.pinned_model import read_pinned
from tandem.router.options import RouterOptions
from tandem.shared.errors import ModelError, UsageError
from tandem.shared.models.config_files import apply_overrides
from tandem.shared.models.fingerprint import fingerprint_text, model_fingerprint
from tandem.shared.models.spec import DecoderSpec
from tandem.shared.weights.obtain import obtain_model
from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf

ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "model"
    tiny_models.build("qwen3", target)
    return target


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    values = json.loads((folder / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values | changes))
    return target


def obtained(path: Path, overrides: dict[str, Any]) -> DecoderSpec:
    config = EngineConfig(model=str(path), hf_overrides=json.dumps(overrides))
    return obtain_model(config).spec


@pytest.mark.parametrize("changes", [ROPE, {"rms_norm_eps": 0.5}, {"max_position_embeddings": 77}])
def test_keys_count_as_if_they_were_in_the_file(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    expected = read_spec(edited(folder, tmp_path / "edited", **changes))
    assert obtained(folder, changes) == expected != read_spec(folder)
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert obtained(file, changes).layers == expected.layers
    assert obtained(file, changes).norm_eps == expected.norm_eps


def test_objects_replace_others_but_within_configurations() -> None:
    """As in vLLM."""
    values = {
        "a": 1,
        "rope_parameters": {"x": 1},
        "text_config": {"a": 1, "rope": {"x": 1, "y": 1}},
    }
    changes = {"rope_parameters": {"y": 2}, "text_config": {"rope": {"y": 2}}, "b": None}
    assert apply_overrides(values, changes) == {
        "a": 1,
        "rope_parameters": {"y": 2},
        "text_config": {"a": 1, "rope": {"x": 1, "y": 2}},
        "b": None,
    }
    assert values["text_config"] == {"a": 1, "rope": {"x": 1, "y": 1}}
    quantized = {"quantization_config": {"a": 1}}
    assert apply_overrides(quantized, {"quantization_config": {"b": 1}})["quantization_config"] == {
        "b": 1
    }
    assert apply_overrides({}, {"text_config": {"a": 1}}) == {"text_config": {"a": 1}}
    assert apply_overrides({"text_config": {"a": 1}}, {"text_config": 2}) == {"text_config": 2}


async def test_routers_and_reports_have_them_too(folder: Path) -> None:
    values: dict[str, Any] = {
        "model": str(folder),
        "hf_overrides": json.dumps({"max_position_embeddings": 77}),
    }
    source = obtain_model(EngineConfig(**values))
    pinned = await read_pinned(RouterOptions(port=0, registry_port=0, **values))
    own = model_fingerprint(source.spec, source.source.tokenizer_files())
    assert pinned is not None and pinned.card.fingerprint == fingerprint_text(own)
    config = EngineConfig(**values)
    assert describe_model(config, this_machine(config)).about["context"] == 77


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"a"'])
def test_anything_but_an_object_is_refused(text: str) -> None:
    for options in (EngineConfig, RouterOptions):
        with pytest.raises(UsageError, match=r"--hf-overrides .* is not a JSON object"):
            options(hf_overrides=text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unknown_scale": 2.0}, "unknown_scale"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
        ({"classifier_from_token": ["no", "yes"]}, "method"),
        ({"text_config": 1}, "text_config"),
    ],
)
def test_values_are_refused_as_those_of_a_file(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        obtained(folder, changes)
