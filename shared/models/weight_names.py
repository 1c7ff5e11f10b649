"""Weight names of a family: from a tensor of the checkpoint to our parameters. No torch.

In a name, ``{i}`` stands for the layer and ``{j}`` for the expert. Transforms happen once, while a
tensor is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ModelError


@dataclass(frozen=True)
class Split:
    """A fused tensor: the rows of several parameters, one after the other."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class AddOne:
    """A norm weight that is stored as its difference from one."""

    name: str


@dataclass(frozen=True)
class Deinterleave:
    """A projection to heads, of which the rows that are rotated against each other are neighbours
    in the checkpoint. They are placed half of the rotated rows apart, as the operators expect."""

    name: str


# The name of the parameter, or a transform to it. None: known and unused.
Target = str | Split | AddOne | Deinterleave | None
WeightNames = dict[str, Target]

# A component of a tensor's name that is a number.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def in_layers(prefix: str, names: dict[str, str]) -> WeightNames:
    """Names of weights under ``prefix`` in every layer."""
    return {
        f"model.layers.{{i}}.{prefix}.{theirs}.weight": f"layers.{{i}}.{ours}.weight"
        for theirs, ours in names.items()
    }


def target_of(theirs: str, names: WeightNames, origin: object) -> Target:
    """The parameters of a tensor of ``origin``; numbers in its name are those of the layer and the
    expert. Raises ``ModelError`` if the name is unknown."""
    numbers = _NUMBER.findall(theirs)
    letters = iter("ij")
    pattern = _NUMBER.sub(lambda number: f"{{{next(letters, '')}}}", theirs)
    if pattern not in names:
        raise ModelError(f"{origin}: tensor {theirs} is unknown for this model, and it may matter")
    indices = dict(zip("ij", numbers, strict=False))
    match names[pattern]:
        case None:
            return None
        case Split(names=ours):
            return Split(tuple(name.format(**indices) for name in ours))
        case AddOne(name=our):
            return AddOne(our.format(**indices))
        case Deinterleave(name=our):
            return Deinterleave(our.format(**indices))
        case our:
            return our.format(**indices)


def names_of(target: Target) -> tuple[str, ...]:
    """The parameters that a tensor fills."""
    match target:
        case None:
            return ()
        case Split(names=names):
            return names
        case AddOne(name=name) | Deinterleave(name=name):
            return (name,)
        case name:
            return (name,)


def layer_of(name: str) -> int:
    """The layer that a tensor or a parameter belongs to, -1 if none."""
    number = _NUMBER.search(name)
    return -1 if number is None else int(number[0])
