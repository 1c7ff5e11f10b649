"""Small files of a model folder, read whole up to a limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError

# For a file that becomes many objects; the largest tekken.json has 19 MiB.
MAX_BYTES = 32 << 20
# Four times the largest published tokenizer.json.
MAX_TOKENIZER_JSON = 128 << 20

# The beginning of a file that a clone without Git LFS has in place of a large one.
LFS_POINTER = b"version https://git-lfs"
LFS_REMEDY = (
    "a Git LFS pointer and not the file itself: run git lfs pull in its folder, or download it "
    "with hf download"
)

# Older versions of sentence-transformers named this file after the kind of model.
_SENTENCE_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file. Raises ``ModelError`` if it is too large or a Git LFS pointer."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(
                f"{path} has {size >> 20} MiB; such a file of a model has at most "
                f"{max_bytes >> 20} MiB"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if content.startswith(LFS_POINTER):
        raise ModelError(f"{path} is {LFS_REMEDY}")
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file, with its own line ends. Raises ``ModelError``."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file. Raises ``ModelError``."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def sentence_config_file(folder: Path) -> Path:
    """The existing file, or else the name that new versions use."""
    files = [folder / name for name in _SENTENCE_CONFIGS]
    return next((file for file in files if file.is_file()), files[0])
