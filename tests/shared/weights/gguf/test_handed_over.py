"""A folder in bfloat16 and a quantised file of the same model: one fingerprint, KV that passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.models.fingerprint import model_fingerprint
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.shared.models.test_kv_formats import CanaryOfRunners
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.runners import build_runner


def fingerprint(path: Path) -> dict[str, str]:
    return model_fingerprint(read_spec(path), open_source(path).tokenizer_files())


@pytest.mark.parametrize("name", ["llama_bias", "qwen2", "qwen3", "qwen3_moe", "phi3"])
def test_a_folder_and_a_file_of_one_model_have_one_fingerprint(tmp_path: Path, name: str) -> None:
    for dtype in ("bfloat16", "float32"):
        folder = tmp_path / dtype
        tiny_models.build(name, folder, dtype=dtype)
        file = write_gguf(folder, tmp_path / f"{dtype}.gguf", "Q8_0")
        assert fingerprint(file) == fingerprint(folder)
    other = tmp_path / "other"
    tiny_models.build(name, other, num_hidden_layers=2)
    assert fingerprint(other) != fingerprint(file)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_1", "Q4_0"])
def test_the_canary_allows_for_the_rounding_of_weights_and_for_no_other_weights(
    deep_models: list[Path], deep_senders: list[ModelRunner], tmp_path: Path, kind: str
) -> None:
    file = write_gguf(deep_models[0], tmp_path / "0.gguf", kind)
    assert kind in open_source(file).block_formats()
    quantised = build_runner(file, dtype="bfloat16", block_size=4, num_blocks=24)
    ratios = []
    for sender in deep_senders:
        canary = CanaryOfRunners(sender, quantised)
        canary.formats.append(kind)
        ratios.append(canary.ratio())
    assert ratios[0] < 1 < ratios[1]
