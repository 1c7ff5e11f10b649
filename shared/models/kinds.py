"""Identification of unsupported models by their ``config.json``. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

# Tables of wrappers with the text model's config; the last one contains such tables itself.
_TEXT_PARTS = (
    *("text_config", "llm_config", "language_config", "language_model_config", "llm"),
    "thinker_config",
)
# Parts beside a text model, by keys of a config.
_OTHER_PARTS = {
    "vision": re.compile(r"^(vision|visual|image|img|vit|vq)(_|$)|^mm_"),
    "audio": re.compile(r"^(audio|speech|whisper|codec|talker)(_|$)"),
}
_NAMES = {"vision": "a vision tower", "audio": "an audio part"}
_VISION_NAME = re.compile(
    r"vl(_|for|moe|\d|$)|vision|llava|visual|image|ocr|pixtral|molmo|florence|idefics"
    r"|fuyu|mllama|^(col)?pali|^col(q|smol)",
    re.IGNORECASE,
)
_DRAFT = re.compile(r"eagle|medusa|speculator|draft|nextn|mtp(model)?$", re.IGNORECASE)
_ENCODER = re.compile(
    r"bert|electra|mpnet|luke(for|model)|funnel|longformer|bigbird|canine|ernie(for|model|$)"
    r"|^new(model|for)|^gte|roformer|^esm|^luke$|bidir|encoder(model|$)|mntp",
    re.IGNORECASE,
)
_DIFFUSION = re.compile(r"llada|^dream|diffusion|sdar", re.IGNORECASE)
_ENCODER_DECODER = re.compile(
    r"(?<!p)t5|bart(for|model|$)|marian|pegasus|m2m_?100|blenderbot"
    r"|prophetnet|^led(for|model|$)|whisper|speech_?to_?text|moonshine",
    re.IGNORECASE,
)
_AUDIO = re.compile(
    r"whisper|speech|wav2vec|hubert|wavlm|encodec|musicgen|^bark|^vits|audio|^clap|mimi(model|$)"
    r"|moonshine|forctc|tts(for|model|$)|^csm",
    re.IGNORECASE,
)
_IMAGES = re.compile(
    r"^(clip|siglip|vit|dino|swin|detr|deit|beit|sam\d?(model|_|$)|resnet|convnext|blip|segformer)"
    r"|forimage|forobjectdetection|fordepth|formaskgeneration",
    re.IGNORECASE,
)
_HEADS = {
    "ForSequenceClassification": "classifies or scores texts",
    "ForTokenClassification": "classifies tokens",
    "ForQuestionAnswering": "marks answers in texts",
    "ForMultipleChoice": "chooses among answers",
    "RewardModel": "scores answers",
    "ForMaskedLM": "fills gaps in texts",
}


def kind_of(values: dict[str, Any], supported: Collection[str], *, embedder: str) -> str:
    """Describe the kind of model of a config without a supported architecture, and what to use
    instead; empty if it seems to be a decoder of an unsupported family.

    ``supported`` are architectures and model types, ``embedder`` is a supported embedding model.
    """
    name, inside = _name(values), _text_part(values)
    if "_diffusers_version" in values:
        return "it is a part of a diffusion model; only text models are supported"
    if not name:
        return "it names neither, so that it is not the config of a language model"
    if values.get("is_encoder_decoder") is True or _ENCODER_DECODER.search(name):
        speech = " for speech" if _AUDIO.search(name) else ""
        return f"it is an encoder-decoder{speech}; only decoders are supported"
    if inside is None and _AUDIO.search(name):
        return "it is a model of audio; only text models are supported"
    if _IMAGES.search(name):
        return "it is a model of images; only text models are supported"
    if _ENCODER.search(name) or (inside and _ENCODER.search(_name(inside))):
        return (
            "it is an encoder, which embeds or classifies texts and generates none; for embeddings "
            f"use an encoder such as {embedder}"
        )
    if inside is not None:
        return _wrapper_kind(values, name, inside, supported)
    if parts := _parts(values, name):
        return f"it is a text model with {parts}; use a text-only model instead"
    if _DRAFT.search(name):
        return "it drafts tokens for another model, and is none by itself; use that model"
    if _DIFFUSION.search(name):
        return (
            "it fills in tokens in any order, by diffusion; only models that append are supported"
        )
    for suffix, does in _HEADS.items():
        if name.endswith(suffix):
            return f"it {does}, and cannot generate text; use the model that it was made from"
    if name.endswith("ForConditionalGeneration"):
        return "it takes images, audio or the output of an encoder; use a text-only decoder instead"
    return ""


def kind_of_parts(values: dict[str, Any]) -> str:
    """Describe the kind of model of a config that is named like a supported text model but has
    tables of other parts; empty without them."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    parts = _parts(tables, "")
    return f"it is a text model with {parts}; use a text-only model instead" if parts else ""


def _name(values: dict[str, Any]) -> str:
    """The architecture, or else the model type."""
    names = values.get("architectures")
    first = names[0] if isinstance(names, list) and names else names
    for name in (first, values.get("model_type")):
        if isinstance(name, str) and name:
            return name
    return ""


def _text_part(values: dict[str, Any]) -> dict[str, Any] | None:
    for key in _TEXT_PARTS:
        if isinstance(part := values.get(key), dict):
            return _text_part(part) or part
    return None


def _wrapper_kind(
    values: dict[str, Any], name: str, inside: dict[str, Any], supported: Collection[str]
) -> str:
    parts = _parts(values, name) or "other parts"
    kinds = [inside.get("model_type"), _name(inside)]
    kind_name = next((kind for kind in kinds if isinstance(kind, str) and kind in supported), None)
    if kind_name is None:
        return (
            f"it is a text model ({_name(inside) or 'of a kind not named'}, not supported either) "
            f"with {parts}; use a text-only model of a supported architecture instead"
        )
    return (
        f"its text part is a supported {kind_name} model, but its checkpoint wraps that together "
        f"with {parts}, which cannot be loaded yet; use a text-only model, or a GGUF file of the "
        "text part if there is one"
    )


def _parts(values: dict[str, Any], name: str) -> str:
    """The parts beside a text model, each with a key as evidence."""
    parts = []
    for part, pattern in _OTHER_PARTS.items():
        keys = [key for key in values if pattern.search(key) and values[key]]
        if keys:
            example = min(keys, key=lambda key: (not key.endswith("_config"), key))
            parts.append(f"{_NAMES[part]} ({example})")
    if not parts and _VISION_NAME.search(name):
        parts.append(_NAMES["vision"])
    return " and ".join(parts)
