"""What is downloaded of a model on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from tandem.shared.weights.locate import locate_model

WANTED = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
# As the folders of Mistral and Llama have them.
TWICE = ["consolidated.safetensors", "original/params.json", "original/consolidated.00.pth"]


def test_no_weights_are_downloaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def download(name: str, *, etag_timeout: float, **patterns: Any) -> str:
        taken.extend(filter_repo_objects([*WANTED, *TWICE, "README.md"], **patterns))
        return "/cache"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate_model("nobody/has-this-model") == Path("/cache")
    assert taken == WANTED
