"""The scales of K and V in a checkpoint, for a cache in fp8.

Each layer has one for K and one for V. Their names depend on the tool: vLLM and llm-compressor
(``self_attn.k_scale``, older ``k_proj.output_scale``), ModelOpt (``k_proj.k_scale``), and one for
both in vLLM's first files (``self_attn.kv_scale``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..kv.layout import UNSCALED, WholeScales
from ..models.families.wrappers import text_tensor_name
from ..models.registry import family_of
from ..models.spec import DecoderSpec
from ..models.weight_names import layer_of
from .locate import is_gguf
from .safetensors_folder import SafetensorsFolder

_SCALE = re.compile(r"\.(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")
_ZERO_POINT = re.compile(r"\.[kv]_zero_point$")
_SAVED_IN = ("BF16", "F16", "F32", "F64", "F8_E4M3", "I8", "U8", "I32", "I64")
_REMEDY = "use --kv-cache-dtype bfloat16 or int8, which need no scales of a checkpoint"


def read_kv_scales(
    path: str | Path, spec: DecoderSpec, overrides: Mapping[str, Any] | None = None
) -> WholeScales:
    """The scales of a model's KV in fp8; 1 for layers without scales, as in vLLM.

    Latents, which are both keys and values, use the scale of K. Raises ``ModelError`` for scales
    per head, and for zero points.
    """
    if is_gguf(Path(path)):
        return UNSCALED
    folder = SafetensorsFolder(Path(path), overrides=overrides)
    config = folder.config()
    family = family_of(config.values, config.file)
    by_layer: dict[int, dict[str, float]] = {}
    with folder:
        for tensor in folder.names():
            text = text_tensor_name(tensor) if family.wrapped else tensor
            if text is None or layer_of(text) >= len(spec.layers):
                continue
            if _ZERO_POINT.search(text) and _whole(folder, tensor).any():
                raise ModelError(
                    f"{path}: {tensor} is not zero: KV that is quantised asymmetrically is not "
                    f"supported; {_REMEDY}"
                )
            if match := _SCALE.search(text):
                scales_of_layer = by_layer.setdefault(layer_of(text), {})
                for component in match[1] or match[2]:
                    scales_of_layer[component] = _scale(folder, tensor)
    scales = tuple(
        _layer_scales(path, number, by_layer.get(number, {}), len(memory.components))
        for number, layer in enumerate(spec.layers)
        for memory in layer.attention.memories
    )
    return scales if any(scale != 1.0 for layer in scales for scale in layer) else UNSCALED


def _whole(folder: SafetensorsFolder, tensor: str) -> Any:
    """A tensor in fp32."""
    if (dtype := folder.dtype(tensor)) not in _SAVED_IN:
        raise ModelError(
            f"{folder.path}: {tensor} is saved in {dtype}; supported: {', '.join(_SAVED_IN)}; "
            f"{_REMEDY}"
        )
    return folder.whole(tensor).float()


def _scale(folder: SafetensorsFolder, tensor: str) -> float:
    if (count := prod(folder.shape(tensor))) != 1:
        raise ModelError(
            f"{folder.path}: {tensor} has {count} scales; KV in fp8 has one for all heads "
            f"of a layer; {_REMEDY}"
        )
    scale = float(_whole(folder, tensor))
    if not 0 < scale < math.inf:
        raise ModelError(
            f"{folder.path}: {tensor} is {scale:g}; a scale is positive and finite; {_REMEDY}"
        )
    return scale


def _layer_scales(
    path: str | Path, number: int, scales: dict[str, float], components: int
) -> tuple[float, ...]:
    """The scales of a layer's components: K and V, or latents."""
    names = "kv"[:components]
    if scales and not scales.keys() >= set(names):
        lacking = next(each for each in names if each not in scales)
        raise ModelError(
            f"{path}: layer {number} has a {next(iter(scales))}_scale and no {lacking}_scale; "
            f"{_REMEDY}"
        )
    return tuple(scales.get(each, 1.0) for each in names)
