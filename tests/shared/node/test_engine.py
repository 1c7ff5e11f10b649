"""What a head finds out about its model before any rank does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.models.registry import read_spec
from tandem.shared.node.engine import _with_every_end

ADDED = [{"id": 5, "content": "<end>"}, {"id": 7, "content": "</s>"}, {"id": 10**6, "content": "x"}]


@pytest.mark.parametrize(
    ("named", "added", "ends"),
    [
        ("<end>", ADDED, (2, 5)),
        ({"content": "</s>", "lstrip": False}, ADDED, (2, 7)),
        ("x", ADDED, (2,)),  # beyond the vocabulary
        ("unheard of", ADDED, (2,)),
        (None, ADDED, (2,)),
        ("<end>", None, (2,)),
        ("<end>", ["<end>", {"content": "<end>", "id": "5"}, {}], (2,)),
    ],
)
def test_every_end_token_that_the_folder_names_counts(
    tmp_path: Path, named: Any, added: Any, ends: tuple[int, ...]
) -> None:
    spec = read_spec(builtin_model_path())
    assert _with_every_end(spec, tmp_path) == spec
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert _with_every_end(spec, tmp_path).eos_token_ids == ends
