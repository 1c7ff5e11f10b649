"""The files of a model that are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from tandem.shared.weights.locate import locate_model

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
