"""The configuration of a model as its files have it. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError, shown
from ..text.model_files import LFS_POINTER, LFS_REMEDY, read_json_object, sentence_config_file
from ..text.pair_template import COMPARES, is_reranker_by_name, score_tokens_by_name
from ..text.tokenizer_files import read_tokenizer_files
from .quantization import QUANTIZATION_FILES

_MODE = "pooling_mode_"
# Of sentence-transformers.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
# The key of a config for the linear layers over a pooled vector.
PROJECTIONS = "dense_modules"
# The key for the tokens whose logits are a score.
LOGIT_SCORE = "logit_score"
_ACTIVATION = "activation_fn"
_ANSWERS = "classifier_from_token"


@dataclass(frozen=True)
class ModelConfig:
    """``values`` as in a ``config.json``, and the contents of files beside it that say how weights
    are quantized, by the files' names. ``generation`` as in a ``generation_config.json``.
    ``longest_text``: the tokens that sentence-transformers would cut a text to, if its files say.

    ``file`` and ``generation_file`` name the origins of both in error messages, and ``origins`` the
    keys of ``values`` as a file calls them that is no config.json.
    """

    values: dict[str, Any]
    file: str = "config.json"
    generation: dict[str, Any] = field(default_factory=dict)
    generation_file: str = "generation_config.json"
    longest_text: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the configuration of a model folder, with the pooling that a file beside it names.
    ``overrides`` replace keys of its ``config.json``."""
    file, generation = folder / "config.json", folder / "generation_config.json"
    more = read_json(generation) if generation.is_file() else {}
    beside = {
        name: read_json(folder / name) for name in QUANTIZATION_FILES if (folder / name).is_file()
    }
    values = overridden(read_json(file), overrides or {}) | beside
    for key, value in _read_modules(folder).items():
        values.setdefault(key, value)
    values = with_token_score(
        values,
        str(file),
        lambda: read_tokenizer_files(folder).vocabulary(),
        named=is_reranker_by_name(folder),
    )
    return ModelConfig(values, str(file), more, str(generation), _longest_text(folder))


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a ``config.json`` with some replaced, as vLLM does it: objects of a whole
    configuration (``text_config``) are merged with all that is in them, other ones replaced."""
    made = dict(values)
    for key, value in overrides.items():
        nested = key.endswith("_config") and key != "quantization_config"
        made[key] = _merged(made.get(key), value) if nested else value
    return made


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


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
        # One was published with the name of a folder that it does not have.
        if kind == "LogitScore" and (file.is_file() or not is_reranker_by_name(folder)):
            found[LOGIT_SCORE] = read_json(file)
    file = folder / "config_sentence_transformers.json"
    if file.is_file() and (name := read_json(file).get(_ACTIVATION)) is not None:
        found["sentence_transformers"] = {_ACTIVATION: name}
    return found


def _longest_text(folder: Path) -> int | None:
    """``max_seq_length`` of sentence-transformers, of which newer versions leave the limit to the
    tokenizer. Raises ``ModelError``."""
    file = sentence_config_file(folder)
    most = read_json_object(file).get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise ModelError(f"{file}: max_seq_length is {shown(most)}; supported: a positive integer")
    return most


def with_token_score(
    values: dict[str, Any], file: str, vocabulary: Callable[[], dict[str, int]], *, named: bool
) -> dict[str, Any]:
    """The values with the tokens whose logits are a score, if they tell them as vLLM's keys, or if
    the model is ``named`` as one that answers. Raises ``ModelError``, which names ``file``."""
    if LOGIT_SCORE in values or (answers := _answers(values, file, named)) is None:
        return values
    return values | {LOGIT_SCORE: _tokens_of(answers, file, vocabulary())}


def _answers(values: dict[str, Any], file: str, named: bool) -> list[Any] | tuple[str, ...] | None:
    """The answers whose logits are a score: as vLLM's keys name them, or those of a model that is
    told by its name only. ``None`` for any other model."""
    answers = values.get(_ANSWERS)
    if answers is None:
        names = values.get("architectures")
        architecture = names[0] if isinstance(names, list) and names else None
        return score_tokens_by_name(architecture, named=named)
    method = values.get("method")
    if values.get(COMPARES) is True:
        method = "from_2_way_softmax"
    wanted = {"from_2_way_softmax": 2, "no_post_processing": 1}.get(str(method))
    if wanted is None:
        known = "from_2_way_softmax or no_post_processing"
        raise ModelError(f"{file}: method is {shown(method)}; supported: {known}")
    if not isinstance(answers, list) or len(answers) != wanted:
        raise ModelError(
            f"{file}: {_ANSWERS} is {shown(answers)}; supported: {wanted} with {method}"
        )
    return answers


def _tokens_of(answers: Sequence[Any], file: str, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """``LogitScore``'s table of one answer, or of one against the other, which is the first."""
    for answer in answers:
        if not isinstance(answer, str) or answer not in vocabulary:
            raise ModelError(f"{file}: the answer {shown(answer)} is no token of its tokenizer")
    *false, true = [vocabulary[answer] for answer in answers]
    return {"true_token_id": true, "false_token_id": false[0] if false else None}


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
