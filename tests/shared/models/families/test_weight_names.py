"""The tensors of published checkpoints are known, and fill every parameter of their models; so are
those of base models, whose names are shorter.

In a name, ``(a|b)`` stands for one name with each. ``{i}`` is each layer, ``{d}`` each dense one
and ``{m}`` each with experts; ``{j}`` each expert, ``{h}`` and ``{k}`` each query and KV head, and
``{n}`` the number of a layer after the last, which predicts further tokens. ``{v}`` is each layer
with a projection to values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from tandem.shared.models.decoder import Decoder
from tandem.shared.models.layers.part import Part
from tandem.shared.models.parallel import TensorParallel, WeightPlacement
from tandem.shared.models.parameters import parameters_of
from tandem.shared.models.registry import FAMILIES, family_of
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoESpec
from tandem.shared.models.weight_names import with_short_names, without_body
from tandem.shared.weights.origins import HEAD, tensor_origins
from tandem.tests.shared.models.families.test_public_configs import CONFIGS, read, values_of

_LAYER = "model.layers.{i}."
_ENDS = "model.(embed_tokens|norm).weight "
_HEAD = "lm_head.weight "
_NORMS = f"{_LAYER}(input_layernorm|post_attention_layernorm).weight "
_NORM_BIASES = f"{_LAYER}(input_layernorm|post_attention_layernorm).bias model.norm.bias "
_ATTENTION = f"{_LAYER}self_attn.(q|k|v|o)_proj.weight "
_QKV_BIASES = f"{_LAYER}self_attn.(q|k|v)_proj.bias "
_QK_NORMS = f"{_LAYER}self_attn.(q|k)_norm.weight "
_DENSE = f"{_LAYER}mlp.(gate|up|down)_proj.weight "
_POST_NORMS = f"{_LAYER}(post_attention_layernorm|post_feedforward_layernorm).weight "
_LLAMA = _ENDS + _NORMS + _ATTENTION + _DENSE
_GEMMA2 = _LLAMA + f"{_LAYER}(pre|post)_feedforward_layernorm.weight "
_GEMMA4 = (
    f"{_ENDS}{_NORMS}{_DENSE}{_QK_NORMS}{_LAYER}self_attn.(q|k|o)_proj.weight "
    "model.layers.{v}.self_attn.v_proj.weight "
    f"{_LAYER}(pre|post)_feedforward_layernorm.weight "
)
_OLMO2 = _ENDS + _HEAD + _ATTENTION + _DENSE + _QK_NORMS + _POST_NORMS
_GLM = f"{_ENDS}{_HEAD}{_NORMS}{_ATTENTION}{_LAYER}mlp.(gate_up_proj|down_proj).weight "
_MIXTRAL = (
    f"{_ENDS}{_HEAD}{_NORMS}{_ATTENTION}{_LAYER}block_sparse_moe.gate.weight "
    f"{_LAYER}block_sparse_moe.experts.{{j}}.(w1|w2|w3).weight "
)
_DENSE_FIRST = "model.layers.{d}.mlp.(gate|up|down)_proj.weight "
_EXPERTS = (
    "model.layers.{m}.mlp.gate.weight model.layers.{m}.mlp.experts.{j}.(gate|up|down)_proj.weight "
)
_CORRECTION = "model.layers.{m}.mlp.gate.e_score_correction_bias "
_SHARED = "model.layers.{m}.mlp.shared_experts.(gate|up|down)_proj.weight "
_NEXT = (
    "model.layers.{n}.(eh_proj|enorm|hnorm|embed_tokens|shared_head.head|shared_head.norm).weight "
    "model.layers.{n}.(input_layernorm|self_attn.o_proj|mlp.experts.{j}.up_proj).weight "
)
_LATENT = (
    f"{_LAYER}self_attn.(q_a_proj|q_a_layernorm|q_b_proj|kv_a_proj_with_mqa|kv_a_layernorm).weight "
    f"{_LAYER}self_attn.(kv_b_proj|o_proj).weight "
)
_GRANITE_MOE = (
    f"{_ENDS}{_NORMS}{_ATTENTION}"
    f"{_LAYER}block_sparse_moe.(router.layer|input_linear|output_linear).weight "
)
_MTP_LAYER = (
    "(input_layernorm|post_attention_layernorm|self_attn.(q|k|v|o)_proj|mlp.(gate|up|down)_proj)"
    ".weight "
)
_GPT2 = (
    "(wte|wpe).weight ln_f.(weight|bias) h.{i}.(ln_1|ln_2|attn.c_attn|attn.c_proj).(weight|bias) "
    "h.{i}.mlp.(c_fc|c_proj).(weight|bias) h.{i}.attn.bias "
)
_OPT = (
    "decoder.(embed_tokens|embed_positions).weight decoder.final_layer_norm.(weight|bias) "
    "decoder.layers.{i}.(self_attn_layer_norm|final_layer_norm|fc1|fc2).(weight|bias) "
    "decoder.layers.{i}.self_attn.(q_proj|k_proj|v_proj|out_proj).(weight|bias) "
)
_BERT = (
    "embeddings.(word_embeddings|position_embeddings|token_type_embeddings).weight "
    "embeddings.LayerNorm.(weight|bias) "
    "encoder.layer.{i}.attention.self.(query|key|value).(weight|bias) "
    "encoder.layer.{i}.attention.output.(dense|LayerNorm).(weight|bias) "
    "encoder.layer.{i}.intermediate.dense.(weight|bias) "
    "encoder.layer.{i}.output.(dense|LayerNorm).(weight|bias) "
    "embeddings.position_ids pooler.dense.(weight|bias) "
)
# Of a model, or of one whose tensors are named in another way.
TENSORS: dict[str, str] = {
    "all-MiniLM-L6-v2": _BERT,
    "bge-m3": _BERT,
    "roberta-base": (
        " ".join(f"roberta.{name}" for name in _BERT.split() if not name.startswith("pooler"))
        + " lm_head.bias lm_head.(dense|layer_norm).(weight|bias) lm_head.decoder.weight"
    ),
    "all-mpnet-base-v2": (
        "embeddings.(word_embeddings|position_embeddings).weight "
        "embeddings.LayerNorm.(weight|bias) embeddings.position_ids pooler.dense.(weight|bias) "
        "encoder.relative_attention_bias.weight "
        "encoder.layer.{i}.attention.attn.(q|k|v|o).(weight|bias) "
        "encoder.layer.{i}.attention.LayerNorm.(weight|bias) "
        "encoder.layer.{i}.intermediate.dense.(weight|bias) "
        "encoder.layer.{i}.output.(dense|LayerNorm).(weight|bias) "
    ),
    # No norm is before the first layer's attention.
    "ModernBERT-base": (
        "model.embeddings.(tok_embeddings|norm).weight model.final_norm.weight "
        "model.layers.{a}.attn_norm.weight model.layers.{i}.(mlp_norm|mlp.Wi|mlp.Wo).weight "
        "model.layers.{i}.attn.(Wqkv|Wo).weight head.(dense|norm).weight decoder.(weight|bias) "
    ),
    "c4ai-command-r-v01": _ENDS + f"{_LAYER}input_layernorm.weight " + _ATTENTION + _DENSE,
    "c4ai-command-r-plus": (
        _ENDS + f"{_LAYER}input_layernorm.weight " + _ATTENTION + _DENSE + _QK_NORMS
    ),
    "c4ai-command-r7b-12-2024": _ENDS + f"{_LAYER}input_layernorm.weight " + _ATTENTION + _DENSE,
    "DeepSeek-V2": _ENDS + _HEAD + _NORMS + _LATENT + _DENSE_FIRST + _EXPERTS + _SHARED,
    "DeepSeek-V3": (
        _ENDS + _HEAD + _NORMS + _LATENT + _DENSE_FIRST + _EXPERTS + _SHARED + _CORRECTION + _NEXT
    ),
    "ERNIE-4.5-0.3B-PT": _LLAMA,
    "ERNIE-4.5-21B-A3B-PT": (
        f"{_ENDS}{_NORMS}{_ATTENTION}{_DENSE_FIRST}{_EXPERTS}{_SHARED}"
        "model.layers.{m}.mlp.moe_statics.e_score_correction_bias "
        f"model.mtp_(emb_norm|hidden_norm|linear_proj).0.weight model.mtp_block.0.{_MTP_LAYER}"
    ),
    "EXAONE-3.0-7.8B-Instruct": (
        f"transformer.(wte|ln_f).weight {_HEAD}transformer.h.{{i}}.(ln_1|ln_2).weight "
        "transformer.h.{i}.attn.attention.(q_proj|k_proj|v_proj|out_proj).weight "
        "transformer.h.{i}.mlp.(c_fc_0|c_fc_1|c_proj).weight "
    ),
    "EXAONE-4.0-32B": _OLMO2,
    "gemma-2b": _LLAMA,
    "gemma-2-2b-it": _GEMMA2,
    "gemma-3-1b-it": _GEMMA2 + _QK_NORMS,
    "gemma-4-12B-it (text)": f"{_GEMMA4}{_LAYER}layer_scalar ",
    "gemma-4-26B-A4B (text)": (
        f"{_GEMMA4}{_LAYER}pre_feedforward_layernorm_2.weight "
        f"{_LAYER}(post_feedforward_layernorm_1|post_feedforward_layernorm_2|router.proj).weight "
        f"{_LAYER}(layer_scalar|router.scale|router.per_expert_scale) "
        f"{_LAYER}experts.(gate_up_proj|down_proj) "
    ),
    "glm-4-9b-chat-hf": _GLM + _QKV_BIASES,
    "GLM-4-9B-0414": (
        _GLM + _QKV_BIASES + f"{_LAYER}(post_self_attn_layernorm|post_mlp_layernorm).weight "
    ),
    "GLM-4.5": (
        f"{_ENDS}{_HEAD}{_NORMS}{_ATTENTION}{_QKV_BIASES}{_QK_NORMS}"
        + _DENSE_FIRST
        + _EXPERTS
        + _SHARED
        + _CORRECTION
        + _NEXT
    ),
    "GLM-4.7-Flash": (
        _ENDS + _HEAD + _NORMS + _LATENT + _DENSE_FIRST + _EXPERTS + _SHARED + _CORRECTION + _NEXT
    ),
    "gpt2": _GPT2,
    "distilgpt2": " ".join(f"transformer.{name}" for name in _GPT2.split())
    + f" transformer.h.{{i}}.attn.masked_bias {_HEAD}",
    "pythia-70m": (
        "gpt_neox.embed_in.weight embed_out.weight gpt_neox.final_layer_norm.(weight|bias) "
        "gpt_neox.layers.{i}.(input_layernorm|post_attention_layernorm).(weight|bias) "
        "gpt_neox.layers.{i}.attention.(query_key_value|dense).(weight|bias) "
        "gpt_neox.layers.{i}.mlp.(dense_h_to_4h|dense_4h_to_h).(weight|bias) "
        "gpt_neox.layers.{i}.attention.(bias|masked_bias|rotary_emb.inv_freq) "
    ),
    "gpt-oss-20b-BF16": (
        f"{_ENDS}{_HEAD}{_NORMS}{_ATTENTION}{_QKV_BIASES}{_LAYER}self_attn.(o_proj.bias|sinks) "
        f"{_LAYER}mlp.router.(weight|bias) "
        f"{_LAYER}mlp.experts.(gate_up_proj|gate_up_proj_bias|down_proj|down_proj_bias) "
    ),
    "granite-3.0-2b-instruct": _LLAMA,
    "granite-3.0-1b-a400m-instruct": _GRANITE_MOE,
    "moe-7b-1b-active-shared-experts": (
        _GRANITE_MOE + f"{_LAYER}shared_mlp.(input_linear|output_linear).weight "
    ),
    "Hunyuan-7B-Instruct": _LLAMA + _HEAD + f"{_LAYER}self_attn.(query|key)_layernorm.weight ",
    "internlm2-7b": (
        f"model.(tok_embeddings|norm).weight output.weight "
        f"{_LAYER}(attention_norm|ffn_norm).weight "
        f"{_LAYER}attention.(wqkv|wo).weight {_LAYER}feed_forward.(w1|w2|w3).weight "
    ),
    "internlm3-8b-instruct": _LLAMA + _HEAD,
    "IQuest-Coder-V1-40B-Instruct": _LLAMA + _HEAD,
    "Llama-2-7b": _LLAMA + _HEAD + f"{_LAYER}self_attn.rotary_emb.inv_freq ",
    "MiMo-7B-Base": (
        f"{_LLAMA}{_HEAD}{_QKV_BIASES}model.mtp_layers.{{i}}.{_MTP_LAYER}"
        "model.mtp_layers.0.(token_layernorm|hidden_layernorm|final_layernorm|input_proj).weight "
        "model.mtp_layers.0.self_attn.(q|k|v)_proj.bias "
    ),
    "MiniMax-M2": _MIXTRAL + _QK_NORMS + f"{_LAYER}block_sparse_moe.e_score_correction_bias ",
    "Ministral-8B-Instruct-2410 (4.57)": _LLAMA + _HEAD,
    "Ministral-3-3B-Base-2512 (text)": _LLAMA + _HEAD,
    "mistral-7b": _LLAMA + _HEAD,
    "Mixtral-8x7B-v0.1": _MIXTRAL,
    "OLMo-2-1124-7B": _OLMO2,
    "Olmo-3-7B-Instruct": _OLMO2,
    "opt-125m": " ".join(f"model.{name}" for name in _OPT.split()) + f" {_HEAD}",
    "opt-1.3b": _OPT,
    "phi-2": (
        f"model.embed_tokens.weight model.final_layernorm.(weight|bias) {_HEAD}lm_head.bias "
        f"{_LAYER}input_layernorm.(weight|bias) {_LAYER}mlp.(fc1|fc2).(weight|bias) "
        f"{_LAYER}self_attn.(q_proj|k_proj|v_proj|dense).(weight|bias) "
    ),
    "Phi-3-mini-4k-instruct": (
        f"{_ENDS}{_HEAD}{_NORMS}{_LAYER}self_attn.(qkv_proj|o_proj).weight "
        f"{_LAYER}mlp.(gate_up_proj|down_proj).weight "
    ),
    "Qwen2.5-7B": _LLAMA + _HEAD + _QKV_BIASES,
    "Qwen1.5-MoE-A2.7B": (
        f"{_ENDS}{_HEAD}{_NORMS}{_ATTENTION}{_QKV_BIASES}{_EXPERTS}"
        "model.layers.{m}.mlp.shared_expert.(gate|up|down)_proj.weight "
        "model.layers.{m}.mlp.shared_expert_gate.weight "
    ),
    "Qwen3-8B": _LLAMA + _HEAD + _QK_NORMS,
    "Qwen3-30B-A3B": _ENDS + _HEAD + _NORMS + _ATTENTION + _QK_NORMS + _EXPERTS,
    "Seed-OSS-36B-Instruct": _LLAMA + _HEAD + _QKV_BIASES,
    "SmolLM3-3B": _LLAMA,
    "stablelm-2-1_6b": _LLAMA + _HEAD + _NORM_BIASES + _QKV_BIASES,
    "stablelm-2-12b": (
        f"{_ENDS}model.norm.bias {_HEAD}{_LAYER}input_layernorm.(weight|bias) {_ATTENTION}{_DENSE}"
        f"{_LAYER}self_attn.(q_layernorm.norms.{{h}}|k_layernorm.norms.{{k}}).weight "
    ),
    "starcoder2-3b": (
        f"{_ENDS}{_NORMS}{_NORM_BIASES}{_ATTENTION}{_LAYER}self_attn.(q|k|v|o)_proj.bias "
        f"{_LAYER}mlp.(c_fc|c_proj).(weight|bias) "
    ),
}


def config_of(model: str) -> dict[str, object]:
    values = values_of(next(config for config in CONFIGS if model in config["models"]))
    values.pop("quantization_config", None)
    return values


def expanded(patterns: str, spec: DecoderSpec) -> list[str]:
    layers, names = spec.layers, []
    with_experts = [n for n, layer in enumerate(layers) if isinstance(layer.mlp, MoESpec)]
    experts = [layer.mlp.router.experts for layer in layers if isinstance(layer.mlp, MoESpec)]
    places = {
        "i": range(len(layers)),
        "a": range(1, len(layers)),
        "d": [n for n in range(len(layers)) if n not in with_experts],
        "m": with_experts,
        "n": [len(layers)],
        "v": [n for n, layer in enumerate(layers) if not _values_are_keys(layer)],
        "j": range(experts[0] if experts else 0),
        "h": range(layers[0].attention.num_heads),
        "k": range(layers[0].attention.kv.heads),
    }
    for name in (name for pattern in patterns.split() for name in alternatives(pattern)):
        letters = re.findall(r"{(\w)}", name)
        for numbers in product(*(places[letter] for letter in letters)):
            names.append(name.format(**dict(zip(letters, numbers, strict=True))))
    return names


def _values_are_keys(layer: LayerSpec) -> bool:
    return isinstance(layer.attention, AttentionSpec) and layer.attention.values_are_keys


def alternatives(pattern: str) -> Iterator[str]:
    """The names that a pattern stands for; parts in brackets may have such parts themselves."""
    inner = re.search(r"\(([^()]*)\)", pattern)
    if inner is None:
        yield pattern
        return
    for part in inner[1].split("|"):
        yield from alternatives(pattern[: inner.start()] + part + pattern[inner.end() :])


def parameters(spec: DecoderSpec) -> set[str]:
    """The parameters of a model, which is built without memory."""
    names: set[str] = set()

    def note(part: Part) -> None:
        names.update(part.weight_slots())

    place = WeightPlacement(torch.float32, torch.device("meta"), TensorParallel())
    Decoder(spec, place, note, has_head=True)
    return names


def test_every_family_has_tensors() -> None:
    assert {family_of(config_of(model)).architecture for model in TENSORS} == set(FAMILIES)


@pytest.mark.parametrize("model", TENSORS)
def test_published_tensors_fill_every_parameter(model: str) -> None:
    values = config_of(model)
    spec, family = read(values), family_of(values)
    weight_names, names = with_short_names(family.weights), expanded(TENSORS[model], spec)
    expected = parameters(spec)
    assert sorted(parameters_of(spec)) == sorted(expected)
    for each in (names, [without_body(name) for name in names]):
        origins = tensor_origins(
            each, weight_names, spec, model, family.more_layers, family.wrapped
        )
        # A head beside an embedding that it is tied to is compared with that.
        filled = origins.keys() - {HEAD} if spec.tie_embeddings else origins.keys()
        assert filled == expected
