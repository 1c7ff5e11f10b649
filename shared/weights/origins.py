"""The tensor of each parameter, by the names in a checkpoint. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ModelError
from ..models.families.wrappers import unwrapped
from ..models.spec import DecoderSpec, MoESpec
from ..models.weight_names import (
    Stacked,
    Target,
    WeightNames,
    layer_of,
    names_of,
    renamed,
    target_of,
    without_body,
)

# The parameter that only models have that can generate; a tied one is the embedding.
HEAD, EMBEDDING = "head.weight", "embed.weight"
REMEDY = "configuration and weights do not belong together; download both again"

# Scales of activations, which other servers round to 8 bits for faster products, and of a cache in
# 8 bits (``kv_scales.py``). Neither changes what the weights are.
_OF_ACTIVATIONS = re.compile(
    r"\.(input_scale|input_scale_inv|input_scale_ub|activation_scale|input_zero_point"
    r"|input_global_scale|output_scale|prob_output_scale|[qkv]_scale|[kv]_zero_point|kv_scale)$"
)


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """The tensor of a checkpoint that fills a parameter; of a stacked one, the matrix at
    ``index``."""

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
    """The origin of each parameter, and of a head beside an embedding that it is tied to.
    ``more_layers`` and ``wrapped``: see ``Family``.

    Raises ``ModelError`` for a tensor that is unknown, or of a larger model.
    """
    origins: dict[str, TensorOrigin] = {}
    for tensor in tensors:
        text = unwrapped(tensor) if wrapped else tensor
        if (
            text is None
            or _OF_ACTIVATIONS.search(tensor)
            or (more_layers and layer_of(text) >= len(spec.layers))
        ):
            continue
        target = target_of(text, names, origin)
        for each in _unstacked(tensor, target, spec):
            for name in names_of(each.target):
                if _has_no_part(name, spec):
                    continue
                if name in origins or layer_of(name) >= len(spec.layers):
                    raise ModelError(f"{origin}: {tensor} has no place in this model: {REMEDY}")
                origins[name] = each
    # Of two tensors that are one, safetensors' save_model keeps the first by name.
    if spec.tie_embeddings and HEAD in origins and EMBEDDING not in origins:
        origins[EMBEDDING] = TensorOrigin(origins.pop(HEAD).tensor, EMBEDDING)
    return origins


def _unstacked(tensor: str, target: Target, spec: DecoderSpec) -> list[TensorOrigin]:
    """The origins of the parameters of a tensor, which may have those of several experts or
    heads."""
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
    return [_unstacked_at(tensor, target.of, index) for index in range(count)]


def _unstacked_at(tensor: str, target: Target, index: int) -> TensorOrigin:
    return TensorOrigin(tensor, renamed(target, lambda name: name.format(j=index)), index)


def _has_no_part(name: str, spec: DecoderSpec) -> bool:
    """Return whether a parameter is of keys or values in a layer that has none of its own:
    checkpoints have them all the same."""
    layer = layer_of(name)
    if not 0 <= layer < len(spec.layers):
        return False
    attention = spec.layers[layer].attention
    leaf = name.split(".", 2)[-1]
    return not attention.memories and leaf.startswith(
        ("attention.k.", "attention.v.", "attention.k_norm.")
    )


def lacks_head(origins: dict[str, TensorOrigin], spec: DecoderSpec, origin: object) -> bool:
    """Return whether a checkpoint is that of a base model, which embeds and cannot generate.

    Raises ``ModelError`` for one of a whole model, with the embedding under its full name.
    """
    if not spec.has_head:
        return True
    if spec.tie_embeddings or HEAD in origins:
        return False
    embedding = origins.get(EMBEDDING)
    if embedding is not None and embedding.tensor != without_body(embedding.tensor):
        raise ModelError(
            f"{origin} lacks lm_head.weight, and tie_word_embeddings is false, or left out and "
            f"false for this family: if the head is the embedding, set tie_word_embeddings to "
            f"true in config.json"
        )
    return embedding is not None
