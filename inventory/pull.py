"""``tandem pull``: the download of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..shared.config import EngineConfig
from ..shared.text.tokenizer import Tokenizer
from ..shared.weights.obtain import obtain_model
from ..shared.weights.transfer import in_words


def pull(config: EngineConfig) -> str:
    """Download a model if it can be served; returns its path and size. Raises ``ModelError``."""
    # The KV dtype does not matter here; it is an option of servers.
    model = obtain_model(replace(config, kv_cache_dtype="bfloat16"))
    Tokenizer.load(model.source.tokenizer_files(), model.spec.vocab_size)  # as every router does
    folder = model.path if model.path.is_dir() else model.path.parent
    weights = [folder / file for file in model.source.weight_files()]
    return f"{model.path}  {in_words(size_of(model.path, weights))}"


def size_of(path: Path, weights: list[Path]) -> int:
    """The size of a model in bytes: of all files in its folder, or of its weights."""
    files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else weights
    return sum(file.stat().st_size for file in files)
