"""Small files of a model folder, read whole: their size is limited before they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .lfs_pointer import LFS_POINTER, LFS_REMEDY

# Of a file that becomes many objects; the largest tekken.json has 19 MiB.
MAX_BYTES = 32 << 20
# Of a tokenizer.json, which is four times the largest one that is published.
MAX_TOKENIZER_JSON = 128 << 20

# What sentence-transformers says of a text before it becomes tokens. Older versions named the file
# after the kind of model.
_SENTENCE_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a file. Raises ``ModelError`` if it is too large, or not the file itself."""
    try:
        size = path.stat().st_size
        if size > most:
            raise ModelError(
                f"{path} has {size >> 20} MiB; such a file of a model has at most {most >> 20} MiB"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if content.startswith(LFS_POINTER):
        raise ModelError(f"{path} is {LFS_REMEDY}")
    return content


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file, with line ends as they are. Raises ``ModelError``."""
    try:
        return read_bytes(path, most).decode()
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
    """The one that there is, or that of new versions."""
    files = [folder / name for name in _SENTENCE_CONFIGS]
    return next((file for file in files if file.is_file()), files[0])
