"""Image models around a text model, of which only the text model is used. No torch.

The text model's config is nested in theirs, and its weights are under a prefix in their
checkpoints.
"""

from __future__ import annotations

import re
from typing import Any

from ..config_files import PROJECTIONS

_TEXT = "text_config"
# Model types of text parts, and of the equivalent text models: the three position parts of Qwen's
# image models are equal in a text.
_TEXT_MODELS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "InternVLForConditionalGeneration": "internvl",
    "LlavaForConditionalGeneration": "llava",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
}
# Outer keys that apply to the text part.
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("quantization_config", "quantization", "compression_config"),
    *("pooling_type", PROJECTIONS),
)
# Other keys where the text model has no table of its own.
_BESIDE = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id")
# transformers' defaults for keys that published text parts leave out.
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
_GEMMA3 = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}
_GEMMA4 = _GEMMA3 | {"num_hidden_layers": 30, "vocab_size": 262144}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4 | {"max_position_embeddings": 262144},
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
}
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
_OTHER_PARTS = (
    *("vision_tower.", "vision_model.", "visual.", "vision_embedder.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio."),
)

# The suffix in vLLM's configs of a wrapper whose next token is a score.
_SCORING = re.compile("ForSequenceClassification$")


def is_wrapper(values: dict[str, Any]) -> bool:
    """Return whether a config is that of a wrapper around a supported text model, which generates
    or whose next token is a score."""
    name, kind = _name(values), values.get("model_type")
    return _SCORING.sub("ForConditionalGeneration", name) in WRAPPERS or (
        not name and str(kind) in WRAPPERS.values()
    )


def scores_only(values: dict[str, Any]) -> bool:
    """Return whether a config is named like a model that only scores."""
    return _SCORING.search(_name(values)) is not None


def _name(values: dict[str, Any]) -> str:
    names = values.get("architectures")
    return str((names[0] if isinstance(names, list) and names else names) or "")


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model, with the model type of a plain text model. The text part of
    ``values``, the whole config, may be a table or all of it."""
    inside = values.get(_TEXT)
    if not isinstance(inside, dict):
        inside = {key: value for key, value in values.items() if key not in _BESIDE}
    shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
    tied = values.get("tie_word_embeddings", inside.get("tie_word_embeddings"))
    kind = inside.get("model_type")
    kind = _TEXT_MODELS.get(str(kind), kind)
    own = {key: value for key, value in inside.items() if value is not None or key not in shared}
    result = {**DEFAULTS.get(str(kind), {}), **shared, **own, "model_type": kind}
    result.pop("architectures", None)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(table := result.get(key), dict):
            result[key] = _without_image_positions(table)
    return result if tied is None else {**result, "tie_word_embeddings": tied}


def _without_image_positions(table: dict[str, Any]) -> dict[str, Any]:
    """A rope table without its keys for image positions."""
    result = {key: value for key, value in table.items() if not key.startswith("mrope_")}
    for key in ("rope_type", "type"):
        if result.get(key) == "mrope":
            result[key] = "default"
    return result


def text_tensor_name(tensor: str) -> str | None:
    """The name of a tensor in a checkpoint of the text model alone; ``None`` for a tensor of other
    parts."""
    if tensor.removeprefix("model.").startswith(_OTHER_PARTS):
        return None
    for prefix, text in _PREFIXES:
        if tensor.startswith(prefix):
            return text + tensor.removeprefix(prefix)
    return tensor
