"""Configs of other kinds of models are refused as what they are, with what works instead."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.models.registry import FAMILIES, family_of
from tandem.tests.shared.models.families.test_families import spec_of

VISION = {"vision_config": {"hidden_size": 8}}
ENCODER = "is an encoder, which embeds or classifies texts"


def wrapper(name: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"architectures": [name], "text_config": text, **(more or VISION)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            wrapper("PaliGemmaForConditionalGeneration", {"model_type": "gemma2"}),
            "its text part is a supported gemma2 model, .*a vision tower .vision_config.",
        ),
        (
            wrapper("LlavaNextForConditionalGeneration", {"model_type": "mistral"}),
            "its text part is a supported mistral model",
        ),
        (
            wrapper("LlavaForConditionalGeneration", {"architectures": ["LlamaForCausalLM"]}),
            "its text part is a supported LlamaForCausalLM model.*GGUF file of the text part",
        ),
        (
            {
                "architectures": ["InternVLChatModel"],
                "llm_config": {"model_type": "qwen2"},
                **VISION,
            },
            "its text part is a supported qwen2 model",
        ),
        (
            {
                "architectures": ["Qwen2_5OmniForConditionalGeneration"],
                "thinker_config": {"text_config": {"model_type": "qwen2"}},
                "talker_config": {"model_type": "x"},
            },
            "its text part is a supported qwen2 model.*an audio part .talker_config.",
        ),
        (
            wrapper(
                "VoxtralForConditionalGeneration", {"model_type": "llama"}, audio_config={"a": 1}
            ),
            "supported llama model.*an audio part .audio_config.",
        ),
        (
            wrapper("Qwen3_5ForConditionalGeneration", {"model_type": "qwen3_5_text"}),
            "qwen3_5_text, not supported either. with a vision tower .vision_config.",
        ),
        (
            wrapper("Llama4ForConditionalGeneration", {"model_type": "llama4_text"}),
            "llama4_text, not supported either. with a vision tower",
        ),
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"], **VISION},
            "a text model with a vision tower .vision_config.; use a text-only model",
        ),
        (
            {"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "openai/clip"},
            "a text model with a vision tower .mm_vision_tower.",
        ),
        (
            {"architectures": ["Phi3VForCausalLM"], "img_processor": {"name": "clip"}},
            "a text model with a vision tower .img_processor.",
        ),
        ({"architectures": ["BertForTokenClassification"], "model_type": "bert"}, ENCODER),
        ({"architectures": ["ElectraModel"], "model_type": "electra"}, ENCODER),
        ({"architectures": ["ElectraModel"]}, ENCODER),
        ({"architectures": ["ModernBertForTokenClassification"]}, ENCODER),
        ({"architectures": ["NomicBertModel"]}, ENCODER),
        ({"architectures": ["DebertaV2ForSequenceClassification"]}, ENCODER),
        ({"architectures": ["NewModel"], "model_type": "new"}, ENCODER),
        ({"model_type": "electra"}, ENCODER),
        ({"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"}, ENCODER),
        (
            {"architectures": ["NVEmbedModel"], "text_config": {"model_type": "bidir_mistral"}},
            ENCODER,
        ),
        ({"architectures": ["GteModel"]}, ENCODER),
        ({"architectures": ["MistralBiForMNTP"], "model_type": "mistral"}, ENCODER),
        ({"architectures": ["LLaDAModelLM"]}, "by diffusion; only models that append"),
        (
            {"architectures": ["PixtralForConditionalGeneration"], "model_type": "pixtral"},
            "a text model with a vision tower; use a text-only model",
        ),
        ({"architectures": ["DiaForConditionalGeneration"]}, "use a text-only decoder instead"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **VISION},
            "a text model with a vision tower .vision_config.",
        ),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "it drafts tokens"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "is an encoder-decoder; only decoders"),
        ({"architectures": ["MBartForConditionalGeneration"]}, "is an encoder-decoder"),
        ({"architectures": ["AnyModel"], "is_encoder_decoder": True}, "is an encoder-decoder"),
        (
            {"architectures": ["WhisperForConditionalGeneration"]},
            "is an encoder-decoder for speech",
        ),
        ({"architectures": ["Wav2Vec2ForCTC"]}, "is a model of audio"),
        ({"architectures": ["CLIPModel"], "text_config": {}, **VISION}, "is a model of images"),
        ({"architectures": ["ViTForImageClassification"]}, "is a model of images"),
        ({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6.0"}, "diffusion model"),
        (
            {"architectures": ["XLNetForSequenceClassification"], "model_type": "xlnet"},
            "it classifies or scores texts, and cannot generate",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "it drafts tokens for another model"),
        ({}, "it names neither"),
        ({"architectures": [], "model_type": None}, "it names neither"),
        ({"architectures": ["JambaForCausalLM"]}, "supported: BertModel, Cohere2ForCausalLM, "),
        ({"architectures": ["FalconForCausalLM"]}, "supported: BertModel, Cohere2ForCausalLM, "),
        ({"model_type": "bloom"}, "supported: BertModel, Cohere2ForCausalLM, "),
    ],
)
def test_a_config_of_another_kind_says_so(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        family_of(config, "m/config.json")
    assert str(caught.value).startswith("m/config.json: architectures is ")
    assert "\n" not in str(caught.value)


def test_a_base_model_is_of_its_family() -> None:
    """As embedding models are saved."""
    for name, family in FAMILIES.items():
        base = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").removesuffix("Model")
        base += "Text" if family.model_type.endswith("_text") else ""
        assert family_of({"architectures": [f"{base}Model"]}) is family
    for images in ("Gemma3Model", "Gemma4Model", "Gemma4UnifiedModel"):
        with pytest.raises(ModelError):
            family_of({"architectures": [images]})


def test_tokens_and_empty_tables_of_other_parts_do_not_matter() -> None:
    fields = {"image_token_id": 7, "vision_start_token_id": 8, "audio_config": {}}
    assert family_of({"architectures": ["Qwen2ForCausalLM"], **fields})


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes", "same"),
    [
        ("Llama", "mistral", {"sliding_window": None}, True),
        ("Llama", "mistral", {"attention_bias": True}, False),
        ("Mistral", "llama", {"sliding_window": 8}, False),
        ("Mistral", "llama", {"sliding_window": None}, True),
        ("Llama", "qwen2", {}, False),
        ("Qwen2", "qwen3", {}, False),
        ("Llama", "Yi", {}, True),  # of code that comes with the model
        ("Llama", None, {}, True),
    ],
)
def test_names_of_two_families_must_mean_the_same(
    architecture: str, model_type: str, changes: dict[str, Any], same: bool
) -> None:
    """transformers goes by ``model_type``."""
    config = {"architectures": [f"{architecture}ForCausalLM"], **changes}
    if same:
        assert spec_of(**config, model_type=model_type) == spec_of(**config)
        return
    with pytest.raises(ModelError, match=rf"model_type is '{model_type}', of .*ignore-config-key"):
        spec_of(**config, model_type=model_type)
