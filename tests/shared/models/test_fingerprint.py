"""Fingerprints: equal for two copies of one model in any files, and different for two models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.shared.errors import ModelError
from tandem.shared.models.fingerprint import fingerprint_text, model_fingerprint
from tandem.shared.models.spec import (
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    fingerprint_fields,
)
from tandem.shared.text.tokenizer_files import TemplateText, TokenizerFiles, read_tokenizer_files
from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import tiny_models

VOCAB = {"a": 0, "b": 1, "ab": 2}


def files(content: dict[str, Any], **changes: Any) -> TokenizerFiles:
    return TokenizerFiles(json.dumps(content), "tokenizer.json", **changes)


def tokenizer(vocab: object = VOCAB, added: object = None, **model: Any) -> dict[str, Any]:
    return {"model": {"vocab": vocab, **model}, "added_tokens": added}


@pytest.fixture(scope="module")
def folder(model_root: Path) -> Path:
    return tiny_models.cached("qwen3", model_root)


def test_files_that_say_the_same_in_other_bytes_are_one_model(folder: Path, tmp_path: Path) -> None:
    spec, tokenizer_files = read_spec(folder), read_tokenizer_files(folder)
    again = json.dumps(json.loads(tokenizer_files.tokenizer), indent=7, sort_keys=True)
    template = (
        None
        if tokenizer_files.template is None
        else TemplateText(tokenizer_files.template.source + "\n", "x")
    )
    same = replace(tokenizer_files, tokenizer=again, origin="elsewhere", template=template)
    same = replace(same, tool_template=template)
    assert model_fingerprint(spec, same) == model_fingerprint(spec, tokenizer_files)


def test_dtype_and_precision_of_the_checkpoint_do_not_count(folder: Path) -> None:
    spec, tokenizer_files = read_spec(folder), files(tokenizer())
    rope = spec.layers[0].rope
    assert rope is not None
    other = replace(
        spec,
        dtype="float16",
        norm_eps=spec.norm_eps * (1 + 1e-8),
        layers=tuple(
            replace(each, rope=replace(rope, theta=rope.theta * (1 - 1e-8))) for each in spec.layers
        ),
    )
    assert other.norm_eps != spec.norm_eps
    assert model_fingerprint(other, tokenizer_files) == model_fingerprint(spec, tokenizer_files)
    other_spec = replace(spec, norm_eps=spec.norm_eps * 1.001)
    assert model_fingerprint(other_spec, tokenizer_files) != model_fingerprint(
        spec, tokenizer_files
    )


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_that_of_a_gguf_file(folder: Path, dim: int, factor: float) -> None:
    """Of Llama 3.1 to 3.3: in a file there are factors, which the converter computes so."""
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    rope = RopeSpec(theta=500_000.0, dim=dim, scaling=scaling)
    wavelengths = 2 * math.pi * 500_000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    smooth = (8192 / wavelengths - 1) / 3
    ramp = 1 / ((1 - smooth) / factor + smooth)
    stretched = torch.where(wavelengths > 8192, factor, torch.where(wavelengths < 2048, 1, ramp))
    factors = LongRopeScaling(factors=tuple(stretched.tolist()), attention_factor=1.0)
    spec = read_spec(folder)

    def fields(rope: RopeSpec) -> dict[str, str]:
        layers = tuple(replace(each, rope=rope) for each in spec.layers)
        return fingerprint_fields(replace(spec, layers=layers))

    assert fields(rope) == fields(replace(rope, scaling=factors))
    other = replace(rope, scaling=replace(scaling, factor=factor + 1))
    assert fields(rope) != fields(other)


def test_tokens_are_compared_by_number_and_text(folder: Path) -> None:
    def vocabulary(**content: Any) -> str:
        return model_fingerprint(read_spec(folder), files(tokenizer(**content)))["vocabulary"]

    here = vocabulary(added=[{"id": 3, "content": "<s>", "special": True}])
    assert here == vocabulary(vocab={"<s>": 3, **VOCAB}, merges=[["a", "b"]])
    assert here == vocabulary(vocab=[["a", -1.0], ["b", -2.5], ["ab", -3.0], ["<s>", 0.0]])
    assert here != vocabulary()
    assert here != vocabulary(added=[{"id": 4, "content": "<s>"}])
    assert here != vocabulary(added=[{"id": 3, "content": "</s>"}])


def test_a_template_counts_and_nothing_else_of_the_configuration(folder: Path) -> None:
    spec, content = read_spec(folder), tokenizer()
    one, other = (
        model_fingerprint(
            spec, files(content, template=values, config={"name_or_path": values.source})
        )
        for values in (TemplateText("one", "x"), TemplateText("other", "x"))
    )
    assert {name for name in one if one[name] != other[name]} == {"chat_template"}
    ours = TemplateText("one", "y")
    tools = files(content, template=ours, tool_template=TemplateText("other", "x"))
    assert model_fingerprint(spec, tools)["chat_template"] not in {
        one["chat_template"],
        other["chat_template"],
    }
    without = model_fingerprint(spec, None)
    assert "vocabulary" not in without and "layers=" in fingerprint_text(without)


@pytest.mark.parametrize(
    "content", [[], {}, {"model": {}}, tokenizer(vocab=[1]), tokenizer(added=[1])]
)
def test_a_file_that_is_no_tokenizer_is_rejected_by_name(content: Any) -> None:
    with pytest.raises(ModelError, match=r"not a tokenizer: .*; download it again"):
        files(content).vocabulary()


def test_what_a_tokenizer_lacks_is_named() -> None:
    with pytest.raises(ModelError, match="it has no 'vocab'"):
        files({"model": {}}).vocabulary()
