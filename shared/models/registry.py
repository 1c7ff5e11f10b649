"""Model families: from a model's configuration to a spec and weight names. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
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
from .kinds import kind_of, kind_of_parts
from .model_config import ModelConfig
from .quantization import refuse_quantized
from .spec import DecoderSpec
from .weight_names import WeightNames


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its names in a config, how to read that, and its weight names.
    ``unquantized`` says what to use instead of quantized weights.

    ``more_layers``: a checkpoint may have layers after the config's last, which predict further
    tokens and are not used.
    """

    architecture: str
    model_type: str
    read: Callable[[Config], DecoderSpec]
    weights: WeightNames
    more_layers: bool = False
    unquantized: str = (
        "use the model's bfloat16 or float16 version, or a GGUF file of it in Q8_0, Q6_K or Q4_0"
    )


_FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        deepseek.read_v2,
        deepseek.WEIGHTS,
        unquantized=deepseek.UNQUANTIZED_V2,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        deepseek.read_v3,
        deepseek.WEIGHTS,
        more_layers=True,
        unquantized=deepseek.UNQUANTIZED_V3,
    ),
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
_BY_MODEL_TYPE = {family.model_type: family for family in _FAMILIES}
# The same models without a head, as embedding models are saved.
_HEADLESS = {
    (
        "Gemma3TextModel"  # Gemma3Model has a vision tower
        if family is FAMILIES["Gemma3ForCausalLM"]
        else f"{family.architecture.removesuffix('ForCausalLM')}Model"
    ): family
    for family in _FAMILIES
}

# An embedding model that is supported, for those who ask for an encoder.
_EMBEDDER = "Qwen/Qwen3-Embedding-0.6B"


def family_of(values: dict[str, Any], file: str = "config.json") -> Family:
    """The family of ``architectures``, or of ``model_type`` if that is missing."""
    names, model_type = values.get("architectures"), values.get("model_type")
    name = names[0] if isinstance(names, list) and names else names
    known = {**_HEADLESS, **FAMILIES} if name else _BY_MODEL_TYPE
    wanted = name or model_type
    if isinstance(wanted, str) and wanted in known:
        kind = kind_of_parts(values)
        if not kind:
            return known[wanted]
    else:
        kind = kind_of(values, {*_HEADLESS, *FAMILIES, *_BY_MODEL_TYPE}, embedder=_EMBEDDER)
    raise ModelError(
        f"{file}: architectures is {names!r} and model_type {model_type!r}"
        + (f": {kind}" if kind else f"; supported: {', '.join(sorted(FAMILIES))}")
    )


def spec_of(
    config: ModelConfig,
    ignored_keys: frozenset[str] = frozenset(),
    max_model_len: int | None = None,
) -> DecoderSpec:
    """The spec of a model, with the end tokens of both of its configurations.

    ``ignored_keys`` are treated as absent. ``max_model_len`` is the user's limit of the context, if
    any.
    """
    values = Config(config.values, config.file, ignored_keys, max_model_len)
    family = family_of(config.values, config.file)
    refuse_quantized(values, family.unquantized)
    spec = family.read(values)
    _check_model_type(family, config, spec, values)
    more = Config(config.generation, config.generation_file).token_ids("eos_token_id")
    return dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))


def _check_model_type(
    family: Family, config: ModelConfig, spec: DecoderSpec, values: Config
) -> None:
    """Refuse a ``model_type``, which transformers goes by, of a family that computes otherwise."""
    other = _BY_MODEL_TYPE.get(str(config.values.get("model_type")), family)
    if other is family or "model_type" not in values.values:
        return
    try:
        same = other.read(values.again()) == spec
    except ModelError:
        same = False
    if not same:
        raise ModelError(
            f"{config.file}: architectures is {family.architecture}, but model_type is "
            f"{other.model_type!r}, of {other.architecture}, which would compute something else; "
            f"correct the wrong one, or add --ignore-config-keys model_type to go by architectures"
        )
