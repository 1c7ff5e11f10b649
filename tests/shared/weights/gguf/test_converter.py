"""Files that llama.cpp's converter makes of tiny checkpoints: their specs, and the logits of
transformers. Skipped without its source."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import tiny_models

from .test_models import FAMILIES, KNOWN, NEW, assert_logits

SOURCE = os.environ.get("LLAMA_CPP")
CONVERT = Path(__file__).with_name("convert.py")
# The converter expects the norms in published models' order, and the config of GLM-4 under the
# names of ChatGLM.
UNKNOWN = ("stablelm_parallel", "glm")
MODELS = {name: KNOWN.get(name, {}) for name in FAMILIES} | NEW


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    names = [name for name in MODELS if name not in UNKNOWN]
    for name in names:
        tiny_models.build(name, root / name, **MODELS[name])
    folders = [str(root / name) for name in names]
    subprocess.run([sys.executable, str(CONVERT), str(SOURCE), *folders], check=True, cwd=root)
    return root


@pytest.mark.skipif(SOURCE is None, reason="LLAMA_CPP is no folder of its source")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNKNOWN])
def test_a_converted_model_is_the_one_of_its_folder(converted: Path, name: str) -> None:
    folder, file = converted / name, converted / f"{name}.gguf"
    spec, expected = read_spec(file), read_spec(folder)
    # It cuts the vocabulary of Gemma 3, and names no end of a turn. The rope of the tiny Llama is
    # no published model's.
    expected = replace(expected, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    if name != "llama":
        assert spec == expected
    assert_logits(file, folder)
