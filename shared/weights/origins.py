"""The tensor of each parameter, by the names in a checkpoint. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import ModelError
from ..models.families.wrappers import text_tensor_name
from ..models.parameters import parameters_of
from ..models.spec import DecoderSpec, MoESpec
from ..models.weight_names import (
    Stacked,
    Target,
    WeightNames,
    layer_of,
    names_of,
    numbers_in,
    pattern_of,
    rename_target,
    target_of,
    without_body,
)

# The head is missing if a model cannot generate; a tied one is the embedding.
HEAD, EMBEDDING = "head.weight", "embed.weight"
REMEDY = "configuration and weights do not belong together; download both again"

# Scales of activations, which other servers quantise to 8 bits, and of an 8-bit KV cache
# (``kv_scales.py``). Neither affects the weights.
_ACTIVATION_SCALE = re.compile(
    r"\.(input_scale|input_scale_inv|input_scale_ub|activation_scale|input_zero_point"
    r"|input_global_scale|output_scale|prob_output_scale|[qkv]_scale|[kv]_zero_point|kv_scale)$"
)
# The index of a matrix in a stacked tensor of a GGUF file.
_STACKED_INDEX = re.compile(r"(?<=_exps)\.\d+(?=\.)")
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """The tensor of a checkpoint that fills a parameter, or its matrix at ``index``."""

    tensor: str
    target: Target
    index: int | None = None


def tensor_origins(
    tensors: Iterable[str],
    names: WeightNames,
    spec: DecoderSpec,
    origin: object,
    more_layers: bool,
    wrapped: bool = False,
) -> dict[str, TensorOrigin]:
    """The origin of each parameter, and of a stored head that is tied to the embedding.
    ``more_layers`` and ``wrapped``: see ``Family``.

    Raises ``ModelError`` for a tensor that is unknown or belongs to a larger model.
    """
    origins: dict[str, TensorOrigin] = {}
    for tensor in tensors:
        text = text_tensor_name(tensor) if wrapped else tensor
        if (
            text is None
            or _ACTIVATION_SCALE.search(tensor)
            or (more_layers and layer_of(text) >= len(spec.layers))
        ):
            continue
        target = target_of(text, names, origin)
        for each in _unstack(tensor, target, spec):
            for name in names_of(each.target):
                if _has_no_part(name, spec):
                    continue
                if name in origins or layer_of(name) >= len(spec.layers):
                    raise ModelError(f"{origin}: {tensor} has no place in this model: {REMEDY}")
                origins[name] = each
    # Of two tensors that share memory, safetensors' save_model stores the first by name.
    if spec.tie_embeddings and HEAD in origins and EMBEDDING not in origins:
        origins[EMBEDDING] = TensorOrigin(origins.pop(HEAD).tensor, EMBEDDING)
    return origins


def _unstack(tensor: str, target: Target, spec: DecoderSpec) -> list[TensorOrigin]:
    """The origins of the parameters in a tensor, which may stack several experts or heads."""
    if not isinstance(target, Stacked):
        return [TensorOrigin(tensor, target)]
    first = next(iter(names_of(target)))
    layer = spec.layers[min(layer_of(first), len(spec.layers) - 1)]
    match target.over:
        case "experts":
            count = layer.mlp.router.experts if isinstance(layer.mlp, MoESpec) else 0
        case "heads":
            count = layer.attention.num_heads
        case "kv_heads":
            count = layer.attention.kv.heads
        case "one":
            count = 1
    return [_unstack_at(tensor, target.of, index) for index in range(count)]


def _unstack_at(tensor: str, target: Target, index: int) -> TensorOrigin:
    return TensorOrigin(tensor, rename_target(target, lambda name: name.format(j=index)), index)


def _has_no_part(name: str, spec: DecoderSpec) -> bool:
    """Return whether a parameter is for keys or values in a layer that shares another's:
    checkpoints have these tensors anyway."""
    layer = layer_of(name)
    if not 0 <= layer < len(spec.layers):
        return False
    attention = spec.layers[layer].attention
    leaf = name.split(".", 2)[-1]
    return not attention.memories and leaf.startswith(
        ("attention.k.", "attention.v.", "attention.k_norm.")
    )


def lacks_head(origins: Mapping[str, TensorOrigin], spec: DecoderSpec, origin: object) -> bool:
    """Return whether a checkpoint is a base model's, which embeds and cannot generate.

    Raises ``ModelError`` for a whole model (by the embedding's full name) without a head.
    """
    if not spec.has_head:
        return True
    if spec.tie_embeddings or HEAD in origins:
        return False
    embedding = origins.get(EMBEDDING)
    if embedding is not None and _has_body(embedding.tensor):
        raise ModelError(
            f"{origin} lacks lm_head.weight, and tie_word_embeddings is false, or left out and "
            f"false for this family: if the head is the embedding, set tie_word_embeddings to "
            f"true in config.json"
        )
    return embedding is not None


def check_complete(
    origins: Mapping[str, TensorOrigin],
    names: WeightNames,
    spec: DecoderSpec,
    origin: object,
    wrapped: bool = False,
) -> bool:
    """Raise ``ModelError`` for missing tensors, by their names in the files. Returns whether the
    model can generate."""
    generates = not lacks_head(origins, spec, origin)
    missing = [name for name in parameters_of(spec, has_head=generates) if name not in origins]
    if not missing:
        return generates
    names_in_files = _NamesInFiles(names, [each.tensor for each in origins.values()], wrapped)
    tensors = list(dict.fromkeys(map(names_in_files.of, missing)))
    text = ", ".join(tensors[:_MAX_NAMED])
    if len(tensors) > _MAX_NAMED:
        text += f" and {len(tensors) - _MAX_NAMED} more tensors"
    raise ModelError(f"{origin} lacks {text}: {REMEDY}")


class _NamesInFiles:
    """The names of parameters in the files of a checkpoint. If a family has several, the ones most
    like those of the other ``tensors``."""

    def __init__(self, names: WeightNames, tensors: Iterable[str], wrapped: bool) -> None:
        self._patterns: dict[str, list[str]] = {}
        for pattern, target in names.items():
            for name in names_of(target):
                self._patterns.setdefault(name, []).append(pattern)
        self._present: set[str] = set()
        self._prefixes: dict[str, str] = {}
        for tensor in tensors:
            text = text_tensor_name(tensor) if wrapped else tensor
            if text is None:
                continue
            self._present.add(pattern_of(text))
            rest = text.removeprefix(_first(text))
            self._prefixes.setdefault(_first(text), tensor.removesuffix(rest))
        self._with_body = any(map(_has_body, self._present))

    def of(self, parameter: str) -> str:
        """The name of a parameter's tensor."""
        patterns = self._patterns.get(pattern_of(parameter))
        if patterns is None:
            return parameter
        pattern = max(patterns, key=self._likeness)  # the first of equals
        text = pattern.format(**dict(zip("ij", numbers_in(parameter), strict=False)))
        first = _first(text)
        return _STACKED_INDEX.sub("", self._prefixes.get(first, first) + text.removeprefix(first))

    def _likeness(self, pattern: str) -> tuple[bool, bool]:
        return pattern in self._present, _has_body(pattern) == self._with_body


def _first(name: str) -> str:
    return name.partition(".")[0]


def _has_body(name: str) -> bool:
    return without_body(name) != name
