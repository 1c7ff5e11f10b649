"""``x @ w.T + b`` for a quantised weight, decoded to fp32 some outputs at a time."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from ..grouped_codes import GroupedCodes
from ..quantized import QuantizedWeight
from ..signatures import QuantizedLinear

# Weights decoded to fp32 at a time: 4 MB.
_PIECE = 1 << 20
# The same on a GPU: 64 MB.
_DECODED = 1 << 24


class Decodable(Protocol):
    """A quantised weight [outputs, inputs] in any order of its bytes."""

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    def part(self, outputs: slice, /) -> QuantizedWeight | GroupedCodes:
        """Some of the outputs."""


def multiply_decoded(x: torch.Tensor, weight: Decodable, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in x's dtype."""
    step = max(1, _DECODED // weight.inputs)
    out = x.new_empty(x.shape[0], weight.outputs)
    for first in range(0, weight.outputs, step):
        rows = slice(first, first + step)
        part_bias = None if bias is None else bias[rows].to(x.dtype)
        out[:, rows] = F.linear(x, weight.part(rows).values().to(x.dtype), part_bias)
    return out


class DecodedLinear:
    """The product with a weight that stays in its bytes. Sums are fp32 for any dtype of
    activations."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        self._step = max(1, _PIECE // weight.inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide, weight = x.float(), self._weight
        out = x.new_empty(x.shape[0], weight.outputs)
        for first in range(0, weight.outputs, self._step):
            rows = slice(first, first + self._step)
            bias = None if self._bias is None else self._bias[rows]
            out[:, rows] = F.linear(wide, weight.part(rows).values(), bias)
        return out

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """See ``QuantizedLinear``."""
        return self._weight.part(outputs).values()


class OrderedLinear:
    """The product with a weight whose inputs are reordered."""

    def __init__(self, linear: QuantizedLinear, order: torch.Tensor) -> None:
        self._linear = linear
        self._order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.index_select(-1, self._order))

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """See ``QuantizedLinear``."""
        return self._linear.rows(outputs)[..., self._order.argsort()]
