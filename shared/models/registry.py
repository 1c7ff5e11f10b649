"""Model families: from a folder's ``config.json`` to a spec and weight names. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .config import Config
from .families import (
    deepseek,
    gemma2,
    gemma3,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from .spec import DecoderSpec
from .weight_names import WeightNames


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its names in a config, how to read that, and its weight names.

    ``more_layers``: a checkpoint may have layers after the config's last, which predict further
    tokens and are not used.
    """

    architecture: str
    model_type: str
    read: Callable[[Config], DecoderSpec]
    weights: WeightNames
    more_layers: bool = False


_FAMILIES = (
    Family("DeepseekV2ForCausalLM", "deepseek_v2", deepseek.read_v2, deepseek.WEIGHTS),
    Family("DeepseekV3ForCausalLM", "deepseek_v3", deepseek.read_v3, deepseek.WEIGHTS, True),
    Family("Gemma2ForCausalLM", "gemma2", gemma2.read, gemma2.WEIGHTS),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma3.read, gemma3.WEIGHTS),
    Family("LlamaForCausalLM", "llama", llama.read, llama.WEIGHTS),
    Family("MistralForCausalLM", "mistral", mistral.read, mistral.WEIGHTS),
    Family("Phi3ForCausalLM", "phi3", phi3.read, phi3.WEIGHTS),
    Family("Qwen2ForCausalLM", "qwen2", qwen2.read, qwen2.WEIGHTS),
    Family("Qwen3ForCausalLM", "qwen3", qwen3.read, qwen3.WEIGHTS),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe.read, qwen3_moe.WEIGHTS),
    Family("SmolLM3ForCausalLM", "smollm3", smollm3.read, smollm3.WEIGHTS),
)
FAMILIES = {family.architecture: family for family in _FAMILIES}
_BY_MODEL_TYPE = {family.model_type: family.architecture for family in _FAMILIES}


def family_of(values: dict[str, Any], file: str = "config.json") -> Family:
    """The family of ``architectures``, or of ``model_type`` if that is missing."""
    names = values.get("architectures") or [_BY_MODEL_TYPE.get(values.get("model_type") or "")]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{file}: architectures is {values.get('architectures')!r} and model_type "
            f"{values.get('model_type')!r}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def read_spec(
    folder: str | Path,
    ignored_keys: frozenset[str] = frozenset(),
    max_model_len: int | None = None,
) -> DecoderSpec:
    """Read the spec of the model in a folder, including the end tokens of
    ``generation_config.json``.

    ``ignored_keys`` of ``config.json`` are treated as absent. ``max_model_len`` is the user's limit
    of the context, if any.
    """
    folder = Path(folder)
    file = folder / "config.json"
    values = read_json(file)
    config = Config(values, str(file), ignored_keys, max_model_len)
    spec = family_of(values, str(file)).read(config)
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return spec
    more = Config(read_json(generation), str(generation)).token_ids("eos_token_id")
    return dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from the model folder."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: give the folder of a Hugging Face model") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object: download it again")
    return value
