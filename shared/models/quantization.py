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
_DETAILS = ("quant_algo", "kv_cache_quant_algo", "format", "fmt", "bits", "w_bit", "group_size")


def refuse_quantized(config: Config, remedy: str) -> None:
    """Raise ``ModelError`` if the weights are not numbers, by a config.json or a file beside it.
    ``remedy`` says what to use instead."""
    for key in (*_KEYS, *QUANTIZATION_FILES):
        if how := config.get(key):
            file = Path(config.file).with_name(key) if key in QUANTIZATION_FILES else config.file
            raise ModelError(
                f"{file}: the weights are quantized ({key}, method {_method(key, how)}), which is "
                f"not supported: {remedy}"
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
