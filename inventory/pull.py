"""``tandem pull``: have a model on this machine before it is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..shared.config import EngineConfig
from ..shared.text.tokenizer import Tokenizer
from ..shared.weights.obtain import obtain_model
from ..shared.weights.transfer import in_words


def pull(config: EngineConfig) -> str:
    """Download a model as a server would, once it is known that it can be served. Returns where it
    is, and its size. Raises ``ModelError``."""
    # What its KV is cached in is left to servers, which have an option for that.
    model = obtain_model(replace(config, kv_cache_dtype="bfloat16"))
    Tokenizer.load(model.source.tokenizer_files(), model.spec.vocab_size)  # as every router does
    folder = model.path if model.path.is_dir() else model.path.parent
    weights = [folder / file for file in model.source.weight_files()]
    return f"{model.path}  {in_words(size_of(model.path, weights))}"


def size_of(path: Path, weights: list[Path]) -> int:
    """The bytes of a model: of a folder, of all its files; else of those of its weights."""
    files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else weights
    return sum(file.stat().st_size for file in files)
