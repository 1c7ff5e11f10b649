"""Checkpoints with scales of K and V, under the names of the tools that write them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}


@dataclass(frozen=True)
class Naming:
    """The tensors of a layer's scales, without which K is in units of V's, and what a configuration
    says of them."""

    k: str
    v: str = ""
    config: dict[str, Any] | None = None
    shape: tuple[int, ...] = (1,)
    dtype: torch.dtype = torch.float32


NAMINGS = {
    "compressed-tensors": Naming(
        "self_attn.k_scale",
        "self_attn.v_scale",
        {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": _SCHEME},
        dtype=torch.bfloat16,
    ),
    "llm-compressor": Naming(
        "self_attn.k_proj.output_scale",
        "self_attn.v_proj.output_scale",
        {"quant_method": "compressed-tensors", "kv_cache_scheme": _SCHEME | {"dynamic": False}},
    ),
    "modelopt": Naming(
        "self_attn.k_proj.k_scale",
        "self_attn.v_proj.v_scale",
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        shape=(),
    ),
    "vllm": Naming("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "older vllm": Naming("self_attn.kv_scale"),
}


def scales_of(naming: Naming, layers: int, size: float) -> list[tuple[float, float]]:
    """A scale of K and one of V for each layer, as they are saved."""
    scales = []
    for layer in range(layers):
        both = torch.tensor([0.0117 * (layer + 1), 0.0029 / (layer + 1)]) * size
        k, v = both.to(naming.dtype).tolist()
        scales.append((k, v if naming.v else k))
    return scales


def write_kv_scales(
    folder: Path, target: Path, naming: Naming, size: float = 1.0
) -> list[tuple[float, float]]:
    """Copy a checkpoint with scales, which clamp some values of tiny models unless they have
    another ``size``; returns those of each layer."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    scales = scales_of(naming, config["num_hidden_layers"], size)
    for layer, both in enumerate(scales):
        for name, scale in zip((naming.k, naming.v), both, strict=True):
            if name:
                full = torch.full(naming.shape, scale, dtype=naming.dtype)
                tensors[f"model.layers.{layer}.{name}"] = full
    rewrite(target, tensors, {} if naming.config is None else naming.config)
    return scales


def rewrite(
    folder: Path, tensors: dict[str, torch.Tensor] | None, quantization: dict[str, Any]
) -> None:
    """Give a checkpoint other tensors or another ``quantization_config``."""
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if quantization:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
