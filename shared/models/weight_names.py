"""Weight names of a family: from a tensor of the checkpoint to our parameters. No torch.

In a name, ``{i}`` stands for the layer and ``{j}`` for the expert.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A fused tensor: the rows of several parameters, one after the other."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class AddOne:
    """A norm weight that is stored as its difference from one."""

    name: str


# The name of the parameter, or a transform to it. None: known and unused.
Target = str | Split | AddOne | None
WeightNames = dict[str, Target]


def in_layers(prefix: str, names: dict[str, str]) -> WeightNames:
    """Names of weights under ``prefix`` in every layer."""
    return {
        f"model.layers.{{i}}.{prefix}.{theirs}.weight": f"layers.{{i}}.{ours}.weight"
        for theirs, ours in names.items()
    }
