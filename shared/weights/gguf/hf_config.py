"""Metadata of a GGUF file as the ``config.json`` of the same model: both give equal specs.

Metadata that has no counterpart keeps its own name, so that it is rejected as an unknown key. No
torch.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from ....kernels.block_formats import CODEBOOK_FORMATS
from ...errors import ModelError, UnsupportedWeightsError, brief
from ...models.spec import QUANTIZED
from ...version import install_command
from .architectures import ARCHITECTURES, Architecture, architecture
from .header import GGUFHeader
from .tensor_types import TENSOR_TYPES

# The last layer of a classifier.
HEAD = "cls.output.weight"
_LABELS = "classifier.output_labels"
CLASSIFIER = "ForSequenceClassification"
_GENERATES = re.compile("(ForCausalLM|LMHeadModel|Model)$")
# Architectures whose score head is two rows of the generating head.
_SCORED_BY_TOKENS = ("qwen3", "qwen3vl")

# Reads a tensor of F32.
ReadFloats = Callable[[str], Sequence[float]]

# Metadata that follows from other keys, or does not change the computation.
_IMPLIED = (
    "vocab_size",
    "rope.dimension_count",
    "attention.value_length",
    "rope.scaling.finetuned",
    "expert_weights_norm",
    "mm.tokens_per_image",
)
# Keys of all architectures, by their names in a config.json.
_COMMON_KEYS = {
    "attention.causal": "is_causal",
    "pooling_type": "pooling_type",
    _LABELS: _LABELS,
}
_POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# Patterns for other kinds of files, matched with "TYPE ARCHITECTURE".
_OTHER_KINDS = (
    ("^adapter", "it is a LoRA adapter; merge it into its base model with llama-export-lora"),
    (
        "^mmproj|clip$",
        "it is the vision or audio part (mmproj) of a model; give the file of the text model "
        "beside it",
    ),
    ("controlvector|imatrix", "it is a control vector or an importance matrix, and no model"),
    (
        "(?<!modern)-bert|eurobert|t5encoder",
        "it is an encoder, which embeds texts and generates none; for embeddings use one of the "
        "architecture bert, modern-bert or gemma-embedding, or a decoder such as "
        "Qwen/Qwen3-Embedding-0.6B-GGUF",
    ),
    (" t5$", "it is an encoder-decoder; only decoders are supported"),
    (
        " (flux|sd1|sd3|sdxl|wan|ltxv|hyvid|aura|lumina2|hidream|qwen_image|cosmos|pig)$",
        "it is a diffusion model; only text models are supported",
    ),
    (" (wavtokenizer-dec|whisper)$", "it is a model of audio; only text models are supported"),
    ("eagle|medusa", "it drafts tokens for another model; use that model"),
)
# Llama 3's models only differ in the factor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# With this number of layers, scores are scaled by hidden size / heads instead of the head width.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62, "gemma-embedding": None}


def architecture_of(header: GGUFHeader, origin: object) -> Architecture:
    """The architecture of a file. Raises ``ModelError`` for an unsupported one."""
    name = header.metadata.get("general.architecture")
    if isinstance(name, str) and name in ARCHITECTURES and not _kind(header.metadata):
        return architecture(name, header)
    kind = _kind(header.metadata)
    raise ModelError(
        f"{origin}: general.architecture is {'missing' if name is None else brief(name)}"
        + (f": {kind}" if kind else f"; supported: {', '.join(ARCHITECTURES)}")
    )


def _kind(metadata: dict[str, Any]) -> str:
    """Describe a file that is not a language model, by its type or architecture."""
    names = f"{metadata.get('general.type')} {metadata.get('general.architecture')}"
    return next((kind for sign, kind in _OTHER_KINDS if re.search(sign, names)), "")


def config_values(header: GGUFHeader, read_floats: ReadFloats, origin: object) -> dict[str, Any]:
    """The values that the model's ``config.json`` would have."""
    arch = architecture_of(header, origin)
    metadata, name = header.metadata, header.metadata["general.architecture"]
    entries = {
        key.removeprefix(f"{name}."): list(value) if isinstance(value, array) else value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    _refuse_experts(entries, arch, name, origin)
    _refuse_types(header, origin)
    scaling = {key: entries.pop(key) for key in list(entries) if key.startswith("rope.scaling.")}
    values = {
        arch.keys.get(key, _COMMON_KEYS.get(key, f"{name}.{key}")): value
        for key, value in entries.items()
        if key in arch.keys or (key not in _IMPLIED and key not in arch.ignored_keys)
    }
    if isinstance(pooling := values.get("pooling_type"), int):
        values["pooling_type"] = _POOLINGS.get(pooling, pooling)
    values.pop(_LABELS, None)
    if HEAD in header.tensors:
        values |= _of_head(header, arch, origin)
        values.pop("pooling_type", None)
    values |= arch.constants
    values |= _of_tensors(header, origin)
    values |= {
        "architectures": [_family(arch, header)],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header) or None,
    }
    values.setdefault("head_dim", _head_dim(values))
    if "attention.value_length" not in arch.ignored_keys:
        _check_head_dims(entries, values, name, origin)
    if arch.rotated_part is not None:
        values[arch.rotated_part] = values.pop("partial_rotary_factor", 1.0)
    values |= arch.derive(entries, header)
    values |= _rope(scaling, values, header, read_floats, arch.stretch, origin)
    if isinstance(rope := values.get("rope_scaling"), dict):
        values["rope_scaling"] = {**rope, **arch.scaling}
    values |= _score_scale(name, values)
    values |= arch.ropes(values)
    return {key: value for key, value in values.items() if value is not None}


def config_keys(header: GGUFHeader, origin: object) -> dict[str, str]:
    """The file's own keys, by their names in a config.json."""
    arch, name = architecture_of(header, origin), header.metadata["general.architecture"]
    return {ours: f"{name}.{key}" for key, ours in {**arch.keys, **_COMMON_KEYS}.items()}


def compares_labels(header: GGUFHeader) -> bool:
    """Return whether the head's rows are for "yes" and "no", from which llama.cpp takes the
    probability of "yes": the difference of both is a logit."""
    name = header.metadata.get("general.architecture")
    labels = header.metadata.get(f"{name}.{_LABELS}", ["yes", "no"])
    head = header.tensors.get(HEAD)
    return (
        name in _SCORED_BY_TOKENS
        and head is not None
        and labels == ["yes", "no"]
        and head.shape[:1] == (2,)
    )


def _family(arch: Architecture, header: GGUFHeader) -> str:
    """The family's architecture name, with a classifier head if the file has one."""
    return _GENERATES.sub(CLASSIFIER, arch.family) if HEAD in header.tensors else arch.family


def _of_head(header: GGUFHeader, arch: Architecture, origin: object) -> dict[str, Any]:
    """The config values for a head that scores or labels texts."""
    if arch.family == "BertModel" and "cls.weight" not in header.tensors:
        # The layer is BERT's pooler, which the converter leaves out.
        raise ModelError(
            f"{origin}: it lacks cls.weight, the layer between its encoder and its classifier; use "
            f"the model's folder with safetensors"
        )
    rows = 1 if compares_labels(header) else header.tensors[HEAD].shape[0]
    labels = header.metadata.get(f"{header.metadata['general.architecture']}.{_LABELS}")
    if rows == 1 or not isinstance(labels, list):
        return {"num_labels": rows}
    if len(labels) != rows:
        raise ModelError(f"{origin}: {_LABELS} has {len(labels)} labels, and {HEAD} {rows} rows")
    return {"id2label": dict(enumerate(labels))}


def _refuse_experts(entries: dict[str, Any], arch: Architecture, name: str, origin: object) -> None:
    """Reject experts under the name of a dense architecture; a count of zero is ignored."""
    if "expert_count" in arch.keys:
        return
    if count := entries.pop("expert_count", 0):
        raise ModelError(
            f"{origin}: {name}.expert_count is {brief(count)}: it is a mixture of experts under "
            f"the name {name}, which is not supported"
        )
    if entries.get("expert_used_count") == 0:
        del entries["expert_used_count"]


def _refuse_types(header: GGUFHeader, origin: object) -> None:
    """Reject tensors of unsupported types."""
    if header.unsupported:
        examples = " and ".join(
            f"{name} is of type {of}" for of, name in header.unsupported.items()
        )
        are = "are" if len(header.unsupported) > 1 else "is"
        supported = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise UnsupportedWeightsError(
            f"{origin}: {examples}, which {are} not supported",
            f"use a file of the same model in one of these types: {supported}",
        )


def check_codebooks(header: GGUFHeader, origin: object) -> None:
    """Reject tensors of types that need the package gguf, if it is not installed."""
    types = {each.type for each in header.tensors.values()} & CODEBOOK_FORMATS
    if types and find_spec("gguf") is None:
        names = " and ".join(sorted(each.name for each in types))
        raise ModelError(
            f"{origin} has tensors of type {names}, whose codebooks are in the package gguf: "
            f"{install_command('gguf')}"
        )


def end_tokens(header: GGUFHeader) -> list[int]:
    """The ids of the tokens that end a text, a turn or a message."""
    names = ("eos", "eot", "eom")
    ids = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def _of_tensors(header: GGUFHeader, origin: object) -> dict[str, Any]:
    """Values that follow from the tensors: dtype, biases, vocabulary, and a separate head."""
    embeddings = header.tensors.get("token_embd.weight")
    if not header.tensors:
        raise ModelError(
            f"{origin} has a vocabulary and no weights; give the file of a whole model"
        )
    if embeddings is None:
        raise ModelError(f"{origin} lacks token_embd.weight: it is not a whole model")
    return {
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "dtype": _dtype(header),
    }


def _dtype(header: GGUFHeader) -> str:
    """The dtype of the matrices."""
    matrices = [each.type for each in header.tensors.values() if len(each.shape) > 1]
    kinds = {kind.name for kind in matrices}
    if any(kind.values > 1 for kind in matrices):
        return QUANTIZED
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _head_dim(values: dict[str, Any]) -> Any:
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        return hidden // heads
    return None


def _check_head_dims(
    entries: dict[str, Any], values: dict[str, Any], name: str, origin: object
) -> None:
    """Reject values with another width than keys, and set the rotated part of a head."""
    dim = values["head_dim"]
    if (width := entries.get("attention.value_length", dim)) != dim:
        raise ModelError(
            f"{origin}: {name}.attention.value_length is {brief(width)}; supported: {brief(dim)}, "
            f"as for keys"
        )
    rope_dim = entries.get("rope.dimension_count", dim)
    if rope_dim != dim and isinstance(rope_dim, int) and isinstance(dim, int) and dim > 0:
        values["partial_rotary_factor"] = rope_dim / dim


def _rope(
    scaling: dict[str, Any],
    values: dict[str, Any],
    header: GGUFHeader,
    read_floats: ReadFloats,
    stretch: float,
    origin: object,
) -> dict[str, Any]:
    """The rope scaling, by metadata or by tensors with a factor for each frequency."""
    get = {key.removeprefix("rope.scaling."): value for key, value in scaling.items()}
    original = get.get("original_context_length")
    if "rope_freqs.weight" in header.tensors:
        return {"rope_scaling": _llama3(read_floats("rope_freqs.weight"), values, origin)}
    if "rope_factors_long.weight" in header.tensors:
        table = {
            "rope_type": "longrope",
            "long_factor": list(read_floats("rope_factors_long.weight")),
            "short_factor": list(read_floats("rope_factors_short.weight")),
            "attention_factor": get.get("attn_factor"),
        }
        return {"rope_scaling": table, "original_max_position_embeddings": original}
    kind = get.pop("type", "none")
    if kind == "none":
        return {}
    get.pop("finetuned", None)
    names = {
        "original_context_length": "original_max_position_embeddings",
        # Unlike a config's attention_factor, multiplied by the value that follows from the factor.
        "attn_factor": "rope.scaling.attn_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    if isinstance(multiplier := get.get("yarn_log_multiplier"), float):
        # A config has it under two keys, which are equal in every such model.
        del get["yarn_log_multiplier"]
        get |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier * stretch, 6))
    return {
        "rope_scaling": {"rope_type": kind}
        | {names.get(key, key): value for key, value in get.items()}
    }


def _llama3(factors: Sequence[float], values: dict[str, Any], origin: object) -> dict[str, Any]:
    """Llama 3's scaling, of which a file has only the factors."""
    table = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    theta, dim = values.get("rope_theta", 10000.0), 2 * len(factors)
    if not isinstance(theta, float) or not 0 < theta < math.inf or min(factors) <= 0:
        raise ModelError(
            f"{origin}: rope.freq_base is {brief(theta)}, and rope_freqs.weight has "
            f"{min(factors)!r}; supported: positive numbers"
        )
    llama3_factors = [
        _llama3_factor(theta ** (2 * i / dim), max(factors)) for i in range(len(factors))
    ]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(llama3_factors, factors, strict=True)):
        return table
    # Other factors are applied directly.
    long_factor = list(factors)
    return {
        "rope_type": "longrope",
        "long_factor": long_factor,
        "short_factor": long_factor,
        "original_max_position_embeddings": values.get("max_position_embeddings"),
        "attention_factor": 1.0,
    }


def _llama3_factor(inverse: float, factor: float) -> float:
    """The factor of a frequency, given its inverse."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * inverse)
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - smooth) / factor + smooth)


def _score_scale(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The scale of Gemma's scores, which llama.cpp derives from the model's size."""
    if name not in _SCALED_BY_HIDDEN:
        return {}
    by_hidden = values.get("num_hidden_layers") == _SCALED_BY_HIDDEN[name]
    return {"query_pre_attn_scalar": _head_dim(values) if by_hidden else values["head_dim"]}
