"""The tensor of each parameter, by the names in a checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ModelError
from ..models.spec import DecoderSpec
from ..models.weight_names import (
    MODEL_PREFIX,
    Target,
    WeightNames,
    layer_of,
    names_of,
    target_of,
)

# The parameter that only models have that can generate; a tied one is the embedding.
HEAD = "head.weight"
REMEDY = "configuration and weights do not belong together; download both again"


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """The tensor of a checkpoint that fills a parameter."""

    tensor: str
    target: Target


def tensor_origins(
    tensors: Iterable[str],
    names: WeightNames,
    spec: DecoderSpec,
    origin: object,
    more_layers: bool,
) -> dict[str, TensorOrigin]:
    """The origin of each parameter. ``more_layers``: see ``Family``.

    Raises ``ModelError`` for a tensor that is unknown, or of a larger model.
    """
    origins: dict[str, TensorOrigin] = {}
    for tensor in tensors:
        if more_layers and layer_of(tensor) >= len(spec.layers):
            continue
        target = target_of(tensor, names, origin)
        if target == HEAD and spec.tie_embeddings:
            continue  # whatever was saved beside the embedding
        for name in names_of(target):
            if name in origins or layer_of(name) >= len(spec.layers):
                raise ModelError(f"{origin}: {tensor} has no place in this model: {REMEDY}")
            origins[name] = TensorOrigin(tensor, target)
    return origins


def lacks_head(origins: dict[str, TensorOrigin], spec: DecoderSpec) -> bool:
    """Return whether a checkpoint is that of a base model, which embeds and cannot generate.

    One of a whole model with the embedding under its full name is rather damaged.
    """
    if spec.tie_embeddings or HEAD in origins:
        return False
    embedding = origins.get("embed.weight")
    return embedding is not None and not embedding.tensor.startswith(MODEL_PREFIX)
