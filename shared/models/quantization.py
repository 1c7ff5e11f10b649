"""Quantized checkpoints, which are refused with the name of the method. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ModelError
from .config import Config

# Keys of a config.json: of transformers, of MLX, and of older compressed-tensors.
_KEYS = ("quantization_config", "quantization", "compression_config")
# Files beside a config.json, and the method of the libraries that write them.
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# What a description says about a method.
_DETAILS = ("quant_algo", "format", "fmt", "bits", "w_bit", "group_size")

_OTHER_VERSION = "use the model's bfloat16 or float16 version"
_GGUF = ", or a GGUF file of it in Q8_0, Q6_K or Q4_0"
_FP8_ALONE = (
    "models of this size are often published in fp8 alone; DeepSeek's repositories have "
    "inference/fp8_cast_bf16.py, which converts them to bfloat16 of twice the size"
)


def refuse_quantized(config: Config) -> None:
    """Raise ``ModelError`` if the weights are not numbers, by a config.json or a file beside it."""
    for key in (*_KEYS, *QUANTIZATION_FILES):
        if how := config.get(key):
            file = Path(config.file).with_name(key) if key in QUANTIZATION_FILES else config.file
            method = _method(key, how)
            raise ModelError(
                f"{file}: the weights are quantized ({key}, method {method}), which is not "
                f"supported: {_remedy(config, method)}"
            )


def _method(key: str, how: Any) -> str:
    if not isinstance(how, dict):
        return "not named"
    inner = how.get("quantization")
    how = {**how, **(inner if isinstance(inner, dict) else {})}
    name = how.get("quant_method") or how.get("quant_library") or QUANTIZATION_FILES.get(key)
    if name is None and {"bits", "group_size"} <= how.keys():
        name = "MLX"
    details = [f"{detail} {how[detail]}" for detail in _DETAILS if how.get(detail)]
    details += [name for name in ("load_in_4bit", "load_in_8bit") if how.get(name) is True]
    named = f"{name or 'not named'}"
    return f"{named}: {', '.join(details)}" if details else named


def _remedy(config: Config, method: str) -> str:
    """What can be served instead. No GGUF file of DeepSeek's models can."""
    names = str(config.values.get("architectures"))
    if "DeepseekV3" in names and method.startswith("fp8"):
        return _FP8_ALONE
    return _OTHER_VERSION if "Deepseek" in names else _OTHER_VERSION + _GGUF
