"""Model families: from a model's configuration to a spec and weight names. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError, UnsupportedWeightsError, brief
from .config import Config
from .config_files import LOGIT_SCORE, ModelConfig
from .families import (
    bert,
    classifier,
    cohere,
    deepseek,
    ernie4_5,
    exaone,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    internlm,
    llama,
    mimo,
    minimax_m2,
    mistral,
    mixtral,
    modernbert,
    mpnet,
    olmo2,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from .families.wrappers import is_wrapper, scores_only, text_values
from .kinds import kind_of, kind_of_parts
from .quantization import QUANTIZATION_KEYS, Quantization, read_quantization
from .spec import QUANTIZED, ClassifierSpec, DecoderSpec, Scorer, TokenScoreSpec
from .weight_names import WeightNames


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its names in a config, the config's reader, and its weight names.

    ``more_layers``: a checkpoint may have unused layers after the config's last, which predict
    further tokens. ``keys`` are the family's own names of config keys. ``wrapped``: the model is
    the text part of an image model. ``head`` reads a head that scores or labels texts instead of
    generating them.
    """

    architecture: str
    model_type: str
    read: Callable[[Config], DecoderSpec]
    weights: WeightNames
    more_layers: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    wrapped: bool = False
    head: Callable[[Config], Scorer] | None = None


# Families without support for GGUF files.
NOT_IN_GGUF = frozenset({"MinistralForCausalLM", "MPNetModel", "OPTForCausalLM"})
_NUMBERS, _OR_GGUF = "use the model's bfloat16 or float16 version", ", or a GGUF file of it"
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_FAMILIES = (
    Family("BertModel", "bert", bert.read, bert.WEIGHTS),
    Family("RobertaModel", "roberta", bert.read_roberta, bert.WEIGHTS),
    Family("XLMRobertaModel", "xlm-roberta", bert.read_roberta, bert.WEIGHTS),
    Family("MPNetModel", "mpnet", mpnet.read, mpnet.WEIGHTS),
    Family("ModernBertModel", "modernbert", modernbert.read, modernbert.WEIGHTS),
    Family("CohereForCausalLM", "cohere", cohere.read, cohere.WEIGHTS),
    Family("Cohere2ForCausalLM", "cohere2", cohere.read_cohere2, cohere.WEIGHTS),
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        deepseek.read_v2,
        deepseek.WEIGHTS,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        deepseek.read_v3,
        deepseek.WEIGHTS,
        more_layers=True,
    ),
    Family("Ernie4_5ForCausalLM", "ernie4_5", ernie4_5.read, ernie4_5.WEIGHTS),
    Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ernie4_5.read_moe, ernie4_5.MOE_WEIGHTS),
    Family("ExaoneForCausalLM", "exaone", exaone.read_exaone3, exaone.EXAONE3_WEIGHTS),
    Family("Exaone4ForCausalLM", "exaone4", exaone.read, exaone.WEIGHTS),
    Family("GemmaForCausalLM", "gemma", gemma.read, gemma.WEIGHTS),
    Family("Gemma2ForCausalLM", "gemma2", gemma2.read, gemma2.WEIGHTS),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma3.read, gemma3.WEIGHTS),
    Family("Gemma4ForCausalLM", "gemma4_text", gemma4.read, gemma4.WEIGHTS),
    Family("Gemma4UnifiedForCausalLM", "gemma4_unified_text", gemma4.read_unified, gemma4.WEIGHTS),
    Family("GlmForCausalLM", "glm", glm4.read_glm, glm4.GLM_WEIGHTS),
    Family("Glm4ForCausalLM", "glm4", glm4.read, glm4.WEIGHTS),
    Family("Glm4MoeForCausalLM", "glm4_moe", glm4_moe.read, glm4_moe.WEIGHTS, more_layers=True),
    Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        deepseek.read_glm4_lite,
        deepseek.WEIGHTS,
        more_layers=True,
    ),
    Family("GPT2LMHeadModel", "gpt2", gpt2.read, gpt2.WEIGHTS, keys=_GPT2_KEYS),
    Family("GPTNeoXForCausalLM", "gpt_neox", gpt_neox.read, gpt_neox.WEIGHTS),
    Family("GptOssForCausalLM", "gpt_oss", gpt_oss.read, gpt_oss.WEIGHTS),
    Family("GraniteForCausalLM", "granite", granite.read, granite.WEIGHTS),
    Family("GraniteMoeForCausalLM", "granitemoe", granite.read_moe, granite.MOE_WEIGHTS),
    Family(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", granite.read_moe, granite.MOE_WEIGHTS
    ),
    Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", hunyuan.read, hunyuan.WEIGHTS),
    Family(
        "InternLM2ForCausalLM", "internlm2", internlm.read_internlm2, internlm.INTERNLM2_WEIGHTS
    ),
    Family("InternLM3ForCausalLM", "internlm3", internlm.read, internlm.WEIGHTS),
    Family("IQuestCoderForCausalLM", "iquestcoder", llama.read_iquestcoder, llama.WEIGHTS),
    Family("LlamaForCausalLM", "llama", llama.read, llama.WEIGHTS),
    Family("MiMoForCausalLM", "mimo", mimo.read, mimo.WEIGHTS),
    Family("MiniMaxM2ForCausalLM", "minimax_m2", minimax_m2.read, minimax_m2.WEIGHTS),
    Family("MinistralForCausalLM", "ministral", mistral.read, mistral.WEIGHTS),
    Family("Ministral3ForCausalLM", "ministral3", mistral.read_ministral3, mistral.WEIGHTS),
    Family("MistralForCausalLM", "mistral", mistral.read, mistral.WEIGHTS),
    Family("MixtralForCausalLM", "mixtral", mixtral.read, mixtral.WEIGHTS),
    Family("Olmo2ForCausalLM", "olmo2", olmo2.read, olmo2.WEIGHTS),
    Family("Olmo3ForCausalLM", "olmo3", olmo2.read_olmo3, olmo2.WEIGHTS),
    Family("OPTForCausalLM", "opt", opt.read, opt.WEIGHTS),
    Family("PhiForCausalLM", "phi", phi.read, phi.WEIGHTS),
    Family("Phi3ForCausalLM", "phi3", phi3.read, phi3.WEIGHTS),
    Family("Qwen2ForCausalLM", "qwen2", qwen2.read, qwen2.WEIGHTS),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", qwen2_moe.read, qwen2_moe.WEIGHTS),
    Family("Qwen3ForCausalLM", "qwen3", qwen3.read, qwen3.WEIGHTS),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe.read, qwen3_moe.WEIGHTS),
    Family("SeedOssForCausalLM", "seed_oss", seed_oss.read, seed_oss.WEIGHTS),
    Family("SmolLM3ForCausalLM", "smollm3", smollm3.read, smollm3.WEIGHTS),
    Family("StableLmForCausalLM", "stablelm", stablelm.read, stablelm.WEIGHTS),
    Family("Starcoder2ForCausalLM", "starcoder2", starcoder2.read, starcoder2.WEIGHTS),
)
FAMILIES = {family.architecture: family for family in _FAMILIES}
_BY_MODEL_TYPE = {family.model_type: family for family in _FAMILIES} | {
    "stablelm_epoch": FAMILIES["StableLmForCausalLM"]
}
# Names of the same architectures in code that came with the first checkpoints.
_OLDER = {
    "Ernie4_5_ForCausalLM": FAMILIES["Ernie4_5ForCausalLM"],
    "HunYuanForCausalLM": FAMILIES["HunYuanDenseV1ForCausalLM"],
    "MixFormerSequentialForCausalLM": FAMILIES["PhiForCausalLM"],
    "StableLMEpochForCausalLM": FAMILIES["StableLmForCausalLM"],
    # With a head that fills gaps in texts, which is not used.
    **{
        f"{name}ForMaskedLM": FAMILIES[f"{name}Model"]
        for name in ("Bert", "ModernBert", "Roberta", "XLMRoberta", "MPNet")
    },
}
_CAUSAL = re.compile("(ForCausalLM|LMHeadModel)$")
# The same models without a head, as embedding models are saved.
_HEADLESS = {
    # Gemma3Model and the like have a vision tower.
    _CAUSAL.sub(
        "TextModel" if family.model_type.endswith("_text") else "Model", family.architecture
    ): family
    for family in _FAMILIES
}
# Those with a head that scores or labels texts.
_CLASSIFIERS = {
    f"{name}ForSequenceClassification": dataclasses.replace(
        FAMILIES[f"{name}Model"], head=head, weights=weights
    )
    for name, head, weights in (
        ("Bert", classifier.read_encoder_head, bert.BERT_CLASSIFIER),
        ("ModernBert", modernbert.read_head, modernbert.CLASSIFIER),
        ("MPNet", classifier.read_encoder_head, mpnet.CLASSIFIER),
        ("Roberta", classifier.read_encoder_head, bert.ROBERTA_CLASSIFIER),
        ("XLMRoberta", classifier.read_encoder_head, bert.ROBERTA_CLASSIFIER),
    )
} | {
    re.sub("Model$", "ForSequenceClassification", name): dataclasses.replace(
        family, head=classifier.read_decoder_head, weights=family.weights | classifier.SCORE_WEIGHTS
    )
    for name, family in _HEADLESS.items()
    if _CAUSAL.search(family.architecture)
}

# A supported one, for those who ask for another encoder.
_EMBEDDER = "BAAI/bge-m3"


def family_of(values: dict[str, Any], file: str = "config.json") -> Family:
    """The family by ``architectures``, or else by ``model_type``; for an image model, that of its
    text part."""
    if is_wrapper(values):
        inside = text_values(values)
        if scores_only(values) and LOGIT_SCORE not in values:
            raise ModelError(
                f"{file}: architectures is {brief(values.get('architectures'))}, and no tokens "
                f"are named whose logits are the score; name them with classifier_from_token"
            )
        if inside["model_type"] in _BY_MODEL_TYPE:
            family = _with_token_score(_BY_MODEL_TYPE[inside["model_type"]], values)
            return dataclasses.replace(family, wrapped=True)
    names, model_type = values.get("architectures"), values.get("model_type")
    name = names[0] if isinstance(names, list) and names else names
    families = {**_HEADLESS, **_OLDER, **_CLASSIFIERS, **FAMILIES} if name else _BY_MODEL_TYPE
    key = name or model_type
    if isinstance(key, str) and key in families:
        kind = kind_of_parts(values)
        if not kind:
            return _with_token_score(families[key], values)
    else:
        kind = kind_of(values, {*_HEADLESS, *FAMILIES, *_BY_MODEL_TYPE}, embedder=_EMBEDDER)
    raise ModelError(
        f"{file}: architectures is {brief(names)} and model_type {brief(model_type)}"
        + (f": {kind}" if kind else f"; supported: {', '.join(sorted(FAMILIES))}")
    )


def _with_token_score(family: Family, values: dict[str, Any]) -> Family:
    """The family with the head of a decoder whose next token is a score, if its files say so."""
    if LOGIT_SCORE not in values:
        return family
    return dataclasses.replace(FAMILIES[family.architecture], head=classifier.read_token_score)


def _of_text_part(family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a text part, with the outer keys about its score."""
    keys = classifier.HEAD_KEYS if family.head is not None else frozenset()
    return text_values(values) | {key: values[key] for key in keys & values.keys()}


def spec_of(
    config: ModelConfig,
    ignored_keys: frozenset[str] = frozenset(),
    max_model_len: int | None = None,
) -> DecoderSpec:
    """The spec of a model, with the end tokens of both of its configurations.

    ``ignored_keys`` are treated as absent. ``max_model_len`` is the user's limit of the context, if
    any. If an embedding model's files limit texts, that is its context, unless ``max_model_len`` is
    larger.
    """
    family = family_of(config.values, config.file)
    if family.wrapped:
        config = dataclasses.replace(config, values=_of_text_part(family, config.values))
    values = Config(config.values, config.file, ignored_keys, max_model_len, origins=config.origins)
    quantization = _quantization(values, family)
    values = values.without(QUANTIZATION_KEYS)
    head = None if family.head is None else family.head(values)
    if head is not None:
        values = values.without(classifier.HEAD_KEYS)
    spec = family.read(values.with_aliases(family.keys))
    if quantization is not None and quantization.method != "none":
        spec = dataclasses.replace(spec, dtype=QUANTIZED)
    _check_model_type(family, config, spec, values)
    if isinstance(head, TokenScoreSpec) and not spec.has_head:
        raise ModelError(f"{config.file}: {LOGIT_SCORE} needs a decoder, but this is an encoder")
    if isinstance(head, ClassifierSpec):
        spec = dataclasses.replace(spec, tie_embeddings=False, has_head=False)
    spec = dataclasses.replace(spec, classifier=head)
    if config.longest_text is not None:
        longest = max(config.longest_text, max_model_len or 0)
        spec = dataclasses.replace(spec, max_position=min(spec.max_position, longest))
    more = Config(config.generation, config.generation_file).token_ids("eos_token_id")
    return dataclasses.replace(
        spec,
        eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)),
        kv_dtype="" if quantization is None else quantization.kv_dtype,
    )


def _quantization(values: Config, family: Family) -> Quantization | None:
    if family.architecture not in NOT_IN_GGUF:
        return read_quantization(values, _NUMBERS + _OR_GGUF)
    try:
        return read_quantization(values, _NUMBERS)
    except UnsupportedWeightsError as error:  # there is no GGUF file to suggest
        raise ModelError(str(error)) from error


def quantization_of(config: ModelConfig) -> Quantization | None:
    """How the weights of a model are quantised, if at all. ``None`` also for a model that
    ``spec_of`` rejects."""
    try:
        family = family_of(config.values, config.file)
        values = text_values(config.values) if family.wrapped else config.values
        return read_quantization(Config(values, config.file), "")
    except ModelError:
        return None


def _check_model_type(
    family: Family, config: ModelConfig, spec: DecoderSpec, values: Config
) -> None:
    """Reject a ``model_type``, by which transformers goes, of a family that computes
    differently."""
    other = _BY_MODEL_TYPE.get(str(config.values.get("model_type")), family)
    if other.model_type == family.model_type or "model_type" not in values.values:
        return
    try:
        same = other.read(values.with_aliases(other.keys)) == spec
    except ModelError:
        same = False
    if not same:
        raise ModelError(
            f"{config.file}: architectures is {family.architecture}, but model_type is "
            f"{other.model_type!r}, of {other.architecture}, which would compute something else; "
            f"correct the wrong one, or add --ignore-config-keys model_type to go by architectures"
        )
