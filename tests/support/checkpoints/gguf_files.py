"""GGUF files of tiny checkpoints, written with the ``gguf`` library as llama.cpp's converter would.

The library is an oracle of its own: it names tensors, quantises, and reads the quantised back. In
formats that it only reads, weights are random, and as large as those that they stand for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tandem.kernels.block_codes import IQ4
from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.shared.weights.source import open_source
from tandem.tests.support.random_blocks import random_weight, rescaled

from .gguf_conversions import add_metadata, converted, with_usual_keys

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "phi": gguf.MODEL_ARCH.PHI2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
}
_PERMUTED = (
    *("llama", "mistral", "ministral3", "mixtral", "smollm3"),
    *("granite", "granitemoe", "granitemoeshared"),
)
_ONE_ADDED = ("gemma", "gemma2", "gemma3_text")
# Whose metadata is all in the common part.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3")
CONTROL, UNUSED = 3, 5
# llama.cpp's numbers of types that the library does not decode; one of them it does not know.
_NOT_IN_LIBRARY = {"Q1_0": 41, "Q2_0": 42}


def _make_known(name: str, number: int) -> None:
    """Have the library write a type, and find it in a file."""
    member = int.__new__(Type, number)
    member._name_, member._value_ = name, number
    Type._member_map_[name] = Type._value2member_map_[number] = member
    gguf.GGML_QUANT_SIZES[member] = (BLOCK_FORMATS[name].values, BLOCK_FORMATS[name].nbytes)


for _name, _number in _NOT_IN_LIBRARY.items():
    if _name not in Type.__members__:
        _make_known(_name, _number)


def decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The values of blocks in a type that the library does not decode, by its definition: a scale
    in fp16, and bits or pairs of them, the lowest first."""
    each = blocks.reshape(*blocks.shape[:-1], -1, 18)
    scales = np.ascontiguousarray(each[..., :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(each[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    codes = 2 * bits - 1 if kind == "Q1_0" else bits[..., 0::2] + 2 * bits[..., 1::2] - 1
    return (scales * codes).reshape(*blocks.shape[:-1], -1)


def write_gguf(
    folder: Path,
    file: Path,
    kind: str = "F32",
    *,
    others: dict[str, str] | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors_in_part: int = 0,
    architecture: gguf.MODEL_ARCH | None = None,
) -> Path:
    """Convert a checkpoint; its matrices become ``kind``, but for those whose names have a part of
    ``others``. ``change`` adds metadata or tensors. With ``tensors_in_part``, there are several
    files, whose names begin with that of ``file``. ``architecture`` is that of the family unless it
    is given."""
    config = with_usual_keys(json.loads((folder / "config.json").read_text()))
    family = config["model_type"]
    architecture = architecture or _ARCHITECTURES[family]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(file, name, split_max_tensors=tensors_in_part)
    _add_config(writer, config)
    add_tokenizer(writer, folder, config)
    weights = dict(sorted(_stacked(converted(_weights(folder), config)).items()))
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weight in weights.items():
        theirs = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        own = [other for part, other in (others or {}).items() if part in theirs]
        add_tensor(writer, theirs, _stored(name, weight, config).numpy(), *own[:1] or [kind])
    _add_rope_factors(writer, config)
    if change is not None:
        change(writer)
    finish(writer)
    return file


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what has been added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoder_writer(file: Path, architecture: str, config: dict[str, Any]) -> gguf.GGUFWriter:
    """A writer of an encoder's file, with the metadata that all encoders have."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    return writer


def dequantised(folder: Path, file: Path, target: Path) -> Path:
    """The checkpoint with the weights that the file has, in fp32, as a Hugging Face folder."""
    target.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        if "safetensors" not in each.name:
            (target / each.name).write_bytes(each.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        each.name: torch.from_numpy(_numbers(each).reshape(tuple(int(n) for n in each.shape[::-1])))
        for each in gguf.GGUFReader(file).tensors
    }
    names = gguf.get_tensor_name_map(
        _ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
    )
    weights = {}
    for name, weight in _weights(folder).items():
        tensor_name = names.get_name(name, (".weight", ".bias"))
        if tensor_name is None:  # one expert of several
            stem, number, part = _expert(name)
            tensor_name = names.get_name(f"{stem}.{part}", (".weight", ".bias"))
            assert tensor_name is not None
            tensor = tensors[tensor_name][number]
        else:
            tensor = tensors[tensor_name]
        weights[name] = _restored(name, tensor, config).reshape(weight.shape).contiguous().clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def in_numbers(file: Path, target: Path) -> Path:
    """The same file with its tensors in fp32."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in tensor.shape[::-1])
        writer.add_tensor(tensor.name, _numbers(tensor).astype(np.float32).reshape(shape))
    finish(writer)
    return target


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value.float() for file in files for name, value in load_file(file).items()}


def _expert(name: str) -> tuple[str, int, str]:
    stem, _, rest = name.partition(".experts.")
    number, _, part = rest.partition(".")
    return f"{stem}.experts", int(number), part


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of a layer in one tensor."""
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted((n for n in weights if ".experts." in n), key=lambda n: _expert(n)[1]):
        stem, _, part = _expert(name)
        stacked.setdefault(f"{stem}.{part}", []).append(weights[name])
    rest = {name: value for name, value in weights.items() if ".experts." not in name}
    return rest | {name: torch.stack(values) for name, values in stacked.items()}


def _heads(name: str, config: dict[str, Any]) -> int:
    """Heads whose rows the converter stores in pairs; zero for other tensors."""
    if config["model_type"] not in _PERMUTED:
        return 0
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _stored(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    if config["model_type"] in _ONE_ADDED and "norm" in name:
        return weight + 1
    if heads := _heads(name, config):
        rows = weight.unflatten(0, (heads, 2, -1))
        return rows.transpose(1, 2).flatten(0, 2).contiguous()
    return weight


def _restored(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    if config["model_type"] in _ONE_ADDED and "norm" in name:
        return weight - 1
    if heads := _heads(name, config):
        rows = weight.unflatten(0, (heads, -1, 2))
        return rows.transpose(1, 2).flatten(0, 2)
    return weight


def add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, kind: str) -> None:
    """A matrix becomes ``kind``, or what llama.cpp falls back to where its rows are no blocks."""
    matrix = weight.ndim > 1 and name.endswith(".weight") and "ffn_gate_inp" not in name
    target_type = Type[kind] if matrix else Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[target_type]
    if weight.shape[-1] % block:
        target_type = Type.Q8_0 if weight.shape[-1] % 32 == 0 else Type.F16
    writer.add_tensor(name, _quantised(name, weight, target_type), raw_dtype=target_type)


def _quantised(name: str, weight: np.ndarray, kind: Type) -> np.ndarray:
    if own := _QUANTISERS.get(kind):
        return own(weight)
    try:
        return np.array(gguf.quants.quantize(weight, kind))
    except NotImplementedError:
        format = BLOCK_FORMATS[kind.name]
        rows, seed = weight.size // weight.shape[-1], crc32(name.encode())
        sample = random_weight(format, rows, weight.shape[-1] // format.values, seed)
        blocks = rescaled(sample, float(weight.std())).blocks
        return blocks.numpy().reshape(*weight.shape[:-1], -1)


def quantise_q6_k(weight: np.ndarray) -> np.ndarray:
    """Q6_K by the largest value of each 16, which the library only reads."""
    groups = weight.reshape(-1, 16, 16)
    each = np.abs(groups).max(-1) / 31
    scale = (each.max(-1) / 127).astype(np.float16)
    wide = np.maximum(scale.astype(np.float32), 1e-8)
    scales = np.round(each / wide[:, None]).clip(1, 127)
    codes = np.round(groups / (scales * wide[:, None])[..., None]).clip(-32, 31) + 32
    # [blocks, half, quarter, 32]
    split = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = split & 15, split >> 4
    lows = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    highs = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
    parts = [lows, highs, scales.astype(np.int8).view(np.uint8), scale[:, None].view(np.uint8)]
    return np.concatenate(parts, axis=1).reshape(*weight.shape[:-1], -1)


def quantise_iq4_nl(weight: np.ndarray) -> np.ndarray:
    """IQ4_NL by the largest value of each 32, which gets the code of the least number."""
    groups = weight.reshape(-1, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[:, None], 1)
    scale = (largest / IQ4[0]).astype(np.float16)
    codes = np.abs(groups[..., None] - scale[..., None] * np.array(IQ4, np.float32)).argmin(-1)
    halves = codes[:, :16] | codes[:, 16:] << 4
    blocks = np.concatenate([scale.view(np.uint8), halves.astype(np.uint8)], axis=1)
    return blocks.reshape(*weight.shape[:-1], -1)


def quantise_q1_0(weight: np.ndarray) -> np.ndarray:
    """Q1_0: signs, and the mean of 128 values without theirs."""
    groups = weight.reshape(-1, 128)
    scale = np.abs(groups).mean(-1, keepdims=True).astype(np.float16)
    signs = np.packbits(groups >= 0, axis=1, bitorder="little")
    blocks = np.concatenate([scale.view(np.uint8), signs], axis=1)
    return blocks.reshape(*weight.shape[:-1], -1)


def quantise_q4_k(weight: np.ndarray) -> np.ndarray:
    """Q4_K by the range of each 32."""
    groups = weight.reshape(-1, 8, 32)
    minima = np.minimum(groups.min(-1), 0)
    each = (groups.max(-1) - minima) / 15
    wholes = [(part.max(-1) / 63).astype(np.float16) for part in (each, -minima)]
    wide, wide_least = (np.maximum(whole.astype(np.float32), 1e-8)[:, None] for whole in wholes)
    scales, minimums = np.round(each / wide).clip(1, 63), np.round(-minima / wide_least).clip(0, 63)
    steps, offsets = (scales * wide)[..., None], (minimums * wide_least)[..., None]
    codes = np.round((groups + offsets) / steps).clip(0, 15).astype(np.uint8)
    # [blocks, quarter, half, 32]
    pairs = codes.reshape(-1, 4, 2, 32)
    (s, s_high), (m, m_high) = (
        (part[:, :4], part[:, 4:]) for part in (scales.astype(np.uint8), minimums.astype(np.uint8))
    )
    parts = [
        *(whole[:, None].view(np.uint8) for whole in wholes),
        *(s | s_high >> 4 << 6, m | m_high >> 4 << 6, s_high & 15 | (m_high & 15) << 4),
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128),
    ]
    return np.concatenate(parts, axis=1).reshape(*weight.shape[:-1], -1)


# Of types that the library only reads.
_QUANTISERS = {
    Type.Q4_K: quantise_q4_k,
    Type.Q6_K: quantise_q6_k,
    Type.IQ4_NL: quantise_iq4_nl,
    Type.Q1_0: quantise_q1_0,
}


def _numbers(tensor: Any) -> np.ndarray:
    kind = Type(tensor.tensor_type).name
    if kind in _NOT_IN_LIBRARY:
        return decoded(kind, tensor.data)
    return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = config.get("head_dim") or hidden // heads
    rope = config["rope_parameters"]
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    if config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] not in _PLAIN:
        add_metadata(writer, config)


def _add_rope_factors(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        dim = config["head_dim"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        original, factors = rope["original_max_position_embeddings"], []
        for index in range(dim // 2):
            wave = 2 * math.pi * rope["rope_theta"] ** (2 * index / dim)
            smooth = (original / wave - low) / (high - low)
            smooth = min(1.0, max(0.0, smooth))
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            factors = rope[f"{name}_factor"]
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """The folder's, with its end tokens and its template."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = add_vocabulary(writer, folder, config["vocab_size"], "gpt-2")
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(tokens.index(settings["eos_token"]))
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])


def add_vocabulary(
    writer: gguf.GGUFWriter, folder: Path, size: int, pre_tokenizer: str
) -> list[str]:
    """The tokens of the folder's tokenizer, which merges bytes, and others up to ``size``; returns
    all of them."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [UNUSED] * len(tokens)
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], kinds[number] = token, 1
    for token_entry in tokenizer["added_tokens"]:
        tokens[token_entry["id"]], kinds[token_entry["id"]] = token_entry["content"], CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    return tokens


def transformers_model(file: Path) -> Any:
    """transformers' Llama with the weights of a file, in fp32."""
    import transformers

    values = open_source(file).config().values
    config = transformers.LlamaConfig(**values | {"dtype": "float32"})
    model = transformers.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
    weights = {}
    for name in model.state_dict():
        tensor = tensors.get(names.get_name(name, (".weight", ".bias")) or "")
        if tensor is not None:
            shape = tuple(int(size) for size in tensor.shape[::-1])
            weight = torch.from_numpy(_numbers(tensor).reshape(shape))
            weights[name] = _restored(name, weight, config.to_dict())
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()
