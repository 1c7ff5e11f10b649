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
# Whose heads are two rows of the one that generates.
_OF_ANSWERS = ("qwen3", "qwen3vl")

# Reads a tensor of F32.
ReadFloats = Callable[[str], Sequence[float]]

# Metadata that others imply, or that changes no computation.
_IMPLIED = (
    "vocab_size",
    "rope.dimension_count",
    "attention.value_length",
    "rope.scaling.finetuned",
    "expert_weights_norm",
    "mm.tokens_per_image",
)
# Names of all architectures, for what a config.json says under other ones.
_COMMON_KEYS = {
    "attention.causal": "is_causal",
    "pooling_type": "pooling_type",
    _LABELS: _LABELS,
}
_POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# Signs of other kinds in "TYPE ARCHITECTURE".
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
# Llama 3's models differ in the factor alone.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Models with so many layers, if any, scale scores by another number than the width of a head.
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
    """What a file is that is not that of a language model, by its type or its architecture."""
    names = f"{metadata.get('general.type')} {metadata.get('general.architecture')}"
    return next((kind for sign, kind in _OTHER_KINDS if re.search(sign, names)), "")


def config_values(header: GGUFHeader, read_floats: ReadFloats, origin: object) -> dict[str, Any]:
    """The values that the model's ``config.json`` would have."""
    known = architecture_of(header, origin)
    metadata, name = header.metadata, header.metadata["general.architecture"]
    own = {
        key.removeprefix(f"{name}."): list(value) if isinstance(value, array) else value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    _refuse_experts(own, known, name, origin)
    _refuse_types(header, origin)
    scaling = {key: own.pop(key) for key in list(own) if key.startswith("rope.scaling.")}
    values = {
        known.keys.get(key, _COMMON_KEYS.get(key, f"{name}.{key}")): value
        for key, value in own.items()
        if key in known.keys or (key not in _IMPLIED and key not in known.implied)
    }
    if isinstance(pooling := values.get("pooling_type"), int):
        values["pooling_type"] = _POOLINGS.get(pooling, pooling)
    values.pop(_LABELS, None)
    if HEAD in header.tensors:
        values |= _of_head(header, known, origin)
        values.pop("pooling_type", None)
    values |= known.constants
    values |= _of_tensors(header, origin)
    values |= {
        "architectures": [_family(known, header)],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header) or None,
    }
    values.setdefault("head_dim", _head_dim(values))
    if "attention.value_length" not in known.implied:
        _check_rotated(own, values, name, origin)
    if known.rotated_part is not None:
        values[known.rotated_part] = values.pop("partial_rotary_factor", 1.0)
    values |= known.derived(own, header)
    values |= _rope(scaling, values, header, read_floats, known.stretch, origin)
    if isinstance(rope := values.get("rope_scaling"), dict):
        values["rope_scaling"] = {**rope, **known.scaling}
    values |= _score_scale(name, values)
    values |= known.ropes(values)
    return {key: value for key, value in values.items() if value is not None}


def config_keys(header: GGUFHeader, origin: object) -> dict[str, str]:
    """The file's own names of the keys that a config.json would have."""
    known, name = architecture_of(header, origin), header.metadata["general.architecture"]
    return {ours: f"{name}.{key}" for key, ours in {**known.keys, **_COMMON_KEYS}.items()}


def compares_answers(header: GGUFHeader) -> bool:
    """Return whether the head's rows are those of yes and of no, of which llama.cpp takes the
    probability of the first: the difference of both is a logit."""
    name = header.metadata.get("general.architecture")
    labels = header.metadata.get(f"{name}.{_LABELS}", ["yes", "no"])
    head = header.tensors.get(HEAD)
    return (
        name in _OF_ANSWERS
        and head is not None
        and labels == ["yes", "no"]
        and head.shape[:1] == (2,)
    )


def _family(known: Architecture, header: GGUFHeader) -> str:
    """The family's name for a model with a head that scores or labels texts, or without one."""
    return _GENERATES.sub(CLASSIFIER, known.family) if HEAD in header.tensors else known.family


def _of_head(header: GGUFHeader, known: Architecture, origin: object) -> dict[str, Any]:
    """What a config says about a head that scores or labels texts."""
    if known.family == "BertModel" and "cls.weight" not in header.tensors:
        # BERT's own, which the converter leaves out.
        raise ModelError(
            f"{origin}: it lacks cls.weight, the layer between its encoder and its classifier; use "
            f"the model's folder with safetensors"
        )
    rows = 1 if compares_answers(header) else header.tensors[HEAD].shape[0]
    labels = header.metadata.get(f"{header.metadata['general.architecture']}.{_LABELS}")
    if rows == 1 or not isinstance(labels, list):
        return {"num_labels": rows}
    if len(labels) != rows:
        raise ModelError(f"{origin}: {_LABELS} has {len(labels)} labels, and {HEAD} {rows} rows")
    return {"id2label": dict(enumerate(labels))}


def _refuse_experts(
    own: dict[str, Any], architecture: Architecture, name: str, origin: object
) -> None:
    """Refuse experts under the name of a dense architecture; none at all do not matter."""
    if "expert_count" in architecture.keys:
        return
    if count := own.pop("expert_count", 0):
        raise ModelError(
            f"{origin}: {name}.expert_count is {brief(count)}: it is a mixture of experts under "
            f"the name {name}, which is not supported"
        )
    if own.get("expert_used_count") == 0:
        del own["expert_used_count"]


def _refuse_types(header: GGUFHeader, origin: object) -> None:
    """Refuse tensors whose types are not read."""
    if header.unsupported:
        found = " and ".join(f"{name} is of type {of}" for of, name in header.unsupported.items())
        are = "are" if len(header.unsupported) > 1 else "is"
        known = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise UnsupportedWeightsError(
            f"{origin}: {found}, which {are} not supported",
            f"use a file of the same model in one of these types: {known}",
        )


def check_codebooks(header: GGUFHeader, origin: object) -> None:
    """Refuse tensors of types that are decoded with a library, where that is not installed."""
    types = {each.type for each in header.tensors.values()} & CODEBOOK_FORMATS
    if types and find_spec("gguf") is None:
        names = " and ".join(sorted(each.name for each in types))
        raise ModelError(
            f"{origin} has tensors of type {names}, whose codebooks are in the package gguf: "
            f"{install_command('gguf')}"
        )


def end_tokens(header: GGUFHeader) -> list[int]:
    """The ids of the tokens that end an answer: of a text, of a turn, of a message."""
    names = ("eos", "eot", "eom")
    found = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _of_tensors(header: GGUFHeader, origin: object) -> dict[str, Any]:
    """Values that the tensors show: their dtype, biases, the vocabulary, a head of its own."""
    embeddings = header.tensors.get("token_embd.weight")
    if not header.tensors:
        raise ModelError(
            f"{origin} has a vocabulary and no weights; give the file of a whole model"
        )
    if embeddings is None:
        raise ModelError(f"{origin} lacks token_embd.weight: it is no whole model")
    return {
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "dtype": _dtype(header),
    }


def _dtype(header: GGUFHeader) -> str:
    """The dtype of matrices."""
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


def _check_rotated(own: dict[str, Any], values: dict[str, Any], name: str, origin: object) -> None:
    """Reject values of another width than keys; note a part of a head that is not rotated."""
    dim = values["head_dim"]
    if (width := own.get("attention.value_length", dim)) != dim:
        raise ModelError(
            f"{origin}: {name}.attention.value_length is {brief(width)}; supported: {brief(dim)}, "
            f"as for keys"
        )
    rotated = own.get("rope.dimension_count", dim)
    if rotated != dim and isinstance(rotated, int) and isinstance(dim, int) and dim > 0:
        values["partial_rotary_factor"] = rotated / dim


def _rope(
    scaling: dict[str, Any],
    values: dict[str, Any],
    header: GGUFHeader,
    read_floats: ReadFloats,
    stretch: float,
    origin: object,
) -> dict[str, Any]:
    """The scaling of rope, by metadata or by the tensors with a factor for each frequency."""
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
        # Multiplied by what follows from the factor, unlike a config's attention_factor.
        "attn_factor": "rope.scaling.attn_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    if isinstance(multiplier := get.get("yarn_log_multiplier"), float):
        # Of what the config has under two names, which are equal in every such model.
        del get["yarn_log_multiplier"]
        get |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier * stretch, 6))
    return {
        "rope_scaling": {"rope_type": kind}
        | {names.get(key, key): value for key, value in get.items()}
    }


def _llama3(factors: Sequence[float], values: dict[str, Any], origin: object) -> dict[str, Any]:
    """Llama 3's scaling, which a file has as its factors alone."""
    table = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    theta, dim = values.get("rope_theta", 10000.0), 2 * len(factors)
    if not isinstance(theta, float) or not 0 < theta < math.inf or min(factors) <= 0:
        raise ModelError(
            f"{origin}: rope.freq_base is {brief(theta)}, and rope_freqs.weight has "
            f"{min(factors)!r}; supported: positive numbers"
        )
    expected = [_llama3_factor(theta ** (2 * i / dim), max(factors)) for i in range(len(factors))]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)):
        return table
    # Any other factors are applied as they are.
    listed = list(factors)
    return {
        "rope_type": "longrope",
        "long_factor": listed,
        "short_factor": listed,
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
    """The number that Gemma's scores are scaled by, which llama.cpp knows from the model's size."""
    if name not in _SCALED_BY_HIDDEN:
        return {}
    by_hidden = values.get("num_hidden_layers") == _SCALED_BY_HIDDEN[name]
    return {"query_pre_attn_scalar": _head_dim(values) if by_hidden else values["head_dim"]}
