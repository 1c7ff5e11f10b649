"""The configuration of a model, from all of its files. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError, brief
from ..text.model_files import LFS_POINTER, LFS_REMEDY, read_json_object, sentence_config_file
from ..text.pair_template import COMPARES, is_reranker_by_name, score_tokens_by_name
from ..text.tokenizer_files import read_tokenizer_files
from .quantization import QUANTIZATION_FILES

_MODE = "pooling_mode_"
# Modules of sentence-transformers.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
# The key of a config for the linear layers over a pooled vector.
PROJECTIONS = "dense_modules"
# The key for the tokens whose logits are a score.
LOGIT_SCORE = "logit_score"
_ACTIVATION = "activation_fn"
_SCORE_TOKENS = "classifier_from_token"


@dataclass(frozen=True)
class ModelConfig:
    """``values`` as in a ``config.json``, and under their names the contents of files about
    quantization. ``generation`` as in a ``generation_config.json``. ``longest_text``: the number of
    tokens to which sentence-transformers truncates a text, if its files have one.

    ``file`` and ``generation_file`` name both origins in error messages, and ``origins`` the keys
    of ``values`` in a file other than a config.json.
    """

    values: dict[str, Any]
    file: str = "config.json"
    generation: dict[str, Any] = field(default_factory=dict)
    generation_file: str = "generation_config.json"
    longest_text: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the configuration of a model folder, including pooling. ``overrides`` replace keys of
    its ``config.json``."""
    file, generation = folder / "config.json", folder / "generation_config.json"
    more = read_json(generation) if generation.is_file() else {}
    beside = {
        name: read_json(folder / name) for name in QUANTIZATION_FILES if (folder / name).is_file()
    }
    values = apply_overrides(read_json(file), overrides or {}) | beside
    for key, value in _read_modules(folder).items():
        values.setdefault(key, value)
    values = with_token_score(
        values,
        str(file),
        lambda: read_tokenizer_files(folder).vocabulary(),
        named=is_reranker_by_name(folder),
    )
    return ModelConfig(values, str(file), more, str(generation), _longest_text(folder))


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values of a ``config.json``, as vLLM does: nested configurations (``text_config``)
    are merged recursively, other objects are replaced."""
    result = dict(values)
    for key, value in overrides.items():
        is_config = key.endswith("_config") and key != "quantization_config"
        result[key] = _merge(result.get(key), value) if is_config else value
    return result


def _merge(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merge(old.get(key), value) for key, value in new.items()}


def _read_modules(folder: Path) -> dict[str, Any]:
    """The contents of sentence-transformers' files as keys of the config: the pooling, and layers
    after it. Normalisation is up to requests, so its module is ignored."""
    values: dict[str, Any] = {}
    for kind, path in _modules(folder):
        file = path / "config.json"
        if kind == "Pooling" and file.is_file() and (mode := _pooling(read_json(file), file)):
            values["pooling_type"] = mode
        if kind == "Dense":
            values.setdefault(PROJECTIONS, []).append(read_json(file))
        # A published reranker names a folder that does not exist.
        if kind == "LogitScore" and (file.is_file() or not is_reranker_by_name(folder)):
            values[LOGIT_SCORE] = read_json(file)
    file = folder / "config_sentence_transformers.json"
    if file.is_file() and (name := read_json(file).get(_ACTIVATION)) is not None:
        values["sentence_transformers"] = {_ACTIVATION: name}
    return values


def _longest_text(folder: Path) -> int | None:
    """``max_seq_length`` of sentence-transformers; newer versions leave the limit to the tokenizer.
    Raises ``ModelError``."""
    file = sentence_config_file(folder)
    limit = read_json_object(file).get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ModelError(f"{file}: max_seq_length is {brief(limit)}; supported: a positive integer")
    return limit


def with_token_score(
    values: dict[str, Any], file: str, vocabulary: Callable[[], dict[str, int]], *, named: bool
) -> dict[str, Any]:
    """Add the tokens whose logits are a score, if vLLM's keys name them or the model is ``named``
    like a reranker. Raises ``ModelError``, which names ``file``."""
    if LOGIT_SCORE in values or (tokens := _score_tokens(values, file, named)) is None:
        return values
    return values | {LOGIT_SCORE: _logit_score(tokens, file, vocabulary())}


def _score_tokens(
    values: dict[str, Any], file: str, named: bool
) -> list[Any] | tuple[str, ...] | None:
    """The tokens whose logits are a score, by vLLM's keys or by the model's name. ``None`` for any
    other model."""
    tokens = values.get(_SCORE_TOKENS)
    if tokens is None:
        names = values.get("architectures")
        architecture = names[0] if isinstance(names, list) and names else None
        return score_tokens_by_name(architecture, named=named)
    method = values.get("method")
    if values.get(COMPARES) is True:
        method = "from_2_way_softmax"
    count = {"from_2_way_softmax": 2, "no_post_processing": 1}.get(str(method))
    if count is None:
        supported = "from_2_way_softmax or no_post_processing"
        raise ModelError(f"{file}: method is {brief(method)}; supported: {supported}")
    if not isinstance(tokens, list) or len(tokens) != count:
        raise ModelError(
            f"{file}: {_SCORE_TOKENS} is {brief(tokens)}; supported: {count} with {method}"
        )
    return tokens


def _logit_score(tokens: Sequence[Any], file: str, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """The table of ``LogitScore`` for one token, or for a negative and a positive one."""
    for token in tokens:
        if not isinstance(token, str) or token not in vocabulary:
            raise ModelError(
                f"{file}: the score token {brief(token)} is not a token of its tokenizer"
            )
    *false, true = [vocabulary[token] for token in tokens]
    return {"true_token_id": true, "false_token_id": false[0] if false else None}


def dense_folders(folder: Path) -> list[Path]:
    """The folders of the linear layers over a pooled vector, in order."""
    return [path for kind, path in _modules(folder) if kind == "Dense"]


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The kinds and folders of the modules that turn a text into a vector."""
    file = folder / "modules.json"
    if not file.is_file():
        return [("Pooling", folder / "1_Pooling")]
    modules = []
    for module in read_json_list(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise ModelError(
                f"{file}: the module {brief(module.get('type'))} is not supported; supported: "
                f"{', '.join(_MODULES)}"
            )
        name = str(module.get("path", ""))
        if kind != "Transformer" and (Path(name).name != name or not name):
            raise ModelError(f"{file}: {name!r} is not the name of a folder beside it")
        modules.append((kind, folder / name))
    return modules


def _pooling(values: dict[str, Any], file: Path) -> str:
    """The pooling of a sentence-transformers model, by its switches or by name."""
    if values.get("include_prompt") is False:
        raise ModelError(f"{file}: include_prompt is false; supported: true")
    modes = [key for key, value in values.items() if value is True]
    modes = [key.removeprefix(_MODE) for key in modes if key.startswith(_MODE)]
    name = values.get(_MODE.removesuffix("_"))
    mode = "+".join(modes) or (name if isinstance(name, str) else "")
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
