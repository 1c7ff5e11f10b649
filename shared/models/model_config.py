"""The configuration of a model as its files have it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError, shown
from ..text.lfs_pointer import LFS_POINTER, LFS_REMEDY
from .quantization import QUANTIZATION_FILES

_MODE = "pooling_mode_"
# Of sentence-transformers.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# The key of a config for the linear layers over a pooled vector.
PROJECTIONS = "dense_modules"


@dataclass(frozen=True)
class ModelConfig:
    """``values`` as in a ``config.json``, and the contents of files beside it that say how weights
    are quantized, by the files' names. ``generation`` as in a ``generation_config.json``.

    ``file`` and ``generation_file`` name the origins of both in error messages.
    """

    values: dict[str, Any]
    file: str = "config.json"
    generation: dict[str, Any] = field(default_factory=dict)
    generation_file: str = "generation_config.json"


def read_config(folder: Path) -> ModelConfig:
    """Read the configuration of a model folder, with the pooling that a file beside it names."""
    file, generation = folder / "config.json", folder / "generation_config.json"
    more = read_json(generation) if generation.is_file() else {}
    beside = {
        name: read_json(folder / name) for name in QUANTIZATION_FILES if (folder / name).is_file()
    }
    values = read_json(file) | beside
    for key, value in _read_modules(folder).items():
        values.setdefault(key, value)
    return ModelConfig(values, str(file), more, str(generation))


def _read_modules(folder: Path) -> dict[str, Any]:
    """What files of sentence-transformers say about a model, as keys of its config: the pooling,
    and layers after it. Requests say whether vectors are normalised, so that a module for that
    makes no difference."""
    found: dict[str, Any] = {}
    for kind, path in _modules(folder):
        file = path / "config.json"
        if kind == "Pooling" and file.is_file() and (mode := _pooling(read_json(file), file)):
            found["pooling_type"] = mode
        if kind == "Dense":
            found.setdefault(PROJECTIONS, []).append(read_json(file))
    return found


def dense_folders(folder: Path) -> list[Path]:
    """The folders of the linear layers over a pooled vector, in their order."""
    return [path for kind, path in _modules(folder) if kind == "Dense"]


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The kinds and folders of the modules that make a vector of a text."""
    file = folder / "modules.json"
    if not file.is_file():
        return [("Pooling", folder / "1_Pooling")]
    found = []
    for module in read_json_list(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise ModelError(
                f"{file}: the module {shown(module.get('type'))} is not supported; supported: "
                f"{', '.join(_MODULES)}"
            )
        name = str(module.get("path", ""))
        if kind != "Transformer" and (Path(name).name != name or not name):
            raise ModelError(f"{file}: {name!r} is not the name of a folder beside it")
        found.append((kind, folder / name))
    return found


def _pooling(values: dict[str, Any], file: Path) -> str:
    """The pooling of a sentence-transformers model: one of several switches, or by its name."""
    if values.get("include_prompt") is False:
        raise ModelError(f"{file}: include_prompt is false; supported: true")
    modes = [key for key, value in values.items() if value is True]
    modes = [key.removeprefix(_MODE) for key in modes if key.startswith(_MODE)]
    named = values.get(_MODE.removesuffix("_"))
    mode = "+".join(modes) or (named if isinstance(named, str) else "")
    return {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}.get(mode, mode)


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects from the model folder."""
    value = _read(file)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ModelError(f"{file} is not a list of objects: download it again")
    return value


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from the model folder."""
    value = _read(file)
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object: download it again")
    return value


def _read(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER.decode()):
            raise ModelError(f"{file} is {LFS_REMEDY}")
        value: Any = json.loads(text)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: give the folder of a Hugging Face model") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}): download it again") from error
    return value
