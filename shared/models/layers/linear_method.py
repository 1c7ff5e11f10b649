"""Methods of linears: how a weight is stored, loaded and multiplied.

A layer asks ``choose_method`` for the method of its weights and knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from ....kernels.block_formats import BlockFormat
from ....kernels.quantized import QuantizedWeight
from ....kernels.signatures import Linear, QuantizedLinear, Weight
from ..parallel import WeightPlacement, WeightSlot

# The total number of outputs (or inputs), and the range of them on this rank.
Shard = tuple[int, range]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One weight of a linear: its parameter's name, outputs and inputs. At most one of them is
    split over ranks. A rank pads its outputs with ``padding`` zeros."""

    name: str
    outputs: Shard
    inputs: Shard
    padding: int = 0

    @property
    def rows(self) -> range:
        """This rank's outputs, without padding."""
        return self.outputs[1]

    def slot(self, target: torch.Tensor, format: BlockFormat | None = None) -> WeightSlot:
        """The slot of the weight on this rank."""
        shape, dim = (self.outputs[0], self.inputs[0]), int(len(self.inputs[1]) < self.inputs[0])
        mine = (self.outputs, self.inputs)[dim][1]
        return WeightSlot(target[: len(self.rows)], shape, dim, mine.start, mine.stop, format)


class LinearMethod(Protocol):
    """The weights of parts with the same inputs, merged: outputs follow each other."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The weights by name, for the loader."""

    def finish_loading(self, bias: torch.Tensor | None, *, keep_rows: bool = False) -> None:
        """Convert the loaded weights to the form that their product needs and free the original,
        unless ``keep_rows`` is set and rows cannot be looked up in that form."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``."""

    def runs(self) -> list[Linear]:
        """The finished products, whose outputs follow each other."""

    def take_weight(self) -> Weight:
        """Remove and return the loaded weight, for an owner that computes with it."""


def choose_method(place: WeightPlacement, parts: Sequence[LinearPart]) -> LinearMethod:
    """The method for some weights, by their formats in the checkpoint: neighbours of the same
    format are merged."""
    methods = [
        _method(place, list(group), *kind)
        for kind, group in groupby(parts, lambda part: _kind(place, part))
    ]
    return methods[0] if len(methods) == 1 else MixedMethod(methods)


def choose_table(place: WeightPlacement, part: LinearPart) -> DenseMethod | QuantizedMethod:
    """The method for one weight whose rows are looked up."""
    return _method(place, [part], *_kind(place, part))


def _method(
    place: WeightPlacement,
    parts: Sequence[LinearPart],
    format: BlockFormat | None,
    order: _Order | None,
) -> DenseMethod | QuantizedMethod:
    if format is None:
        return DenseMethod(place, parts)
    return QuantizedMethod(place, parts, format, None if order is None else order.places)


class _Order:
    """An order of inputs that compares by its numbers."""

    def __init__(self, places: torch.Tensor) -> None:
        self.places = places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and torch.equal(self.places, other.places)


def _kind(place: WeightPlacement, part: LinearPart) -> tuple[BlockFormat | None, _Order | None]:
    """The format to keep a weight in, and the order of its inputs if it differs. ``None`` for
    unquantised weights, also if this rank's inputs do not begin and end with a block, or are
    scattered by the order."""
    format, (total, mine) = place.format_of(part.name), part.inputs
    if format is None or mine.start % format.values or mine.stop % format.values:
        return None, None
    order = place.order_of(part.name)
    if order is None:
        return format, None
    return (format, _Order(order)) if len(mine) == total else (None, None)


class DenseMethod:
    """Unquantised weights."""

    def __init__(self, place: WeightPlacement, parts: Sequence[LinearPart]) -> None:
        self.parts = parts
        self.operators = place.operators
        self.activations = place.activations
        self.height = _height(parts)
        self.weight = place.empty(self.height, len(parts[0].inputs[1]))
        self._linear: Linear | None = None
        # The same, if rows can be looked up in it too.
        self._table: QuantizedLinear | None = None

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See ``LinearMethod``."""
        return _slots(self.parts, self.weight, None)

    def finish_loading(self, bias: torch.Tensor | None, *, keep_rows: bool = False) -> None:
        """See ``LinearMethod``."""
        self._linear = linear = self.operators.prepare_linear(self.weight, bias)
        if isinstance(linear, QuantizedLinear):
            self._table = linear
        if self._table is not None or not keep_rows:
            del self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._linear is not None, "finish_loading() comes first"
        return self._linear(x)

    def runs(self) -> list[Linear]:
        """See ``LinearMethod``."""
        assert self._linear is not None, "finish_loading() comes first"
        return [self._linear]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: embeddings. Before ``finish_loading``, or with ``keep_rows``."""
        if self._table is not None:
            return self._table.rows(indices).to(self.activations)
        return self.weight.index_select(0, indices).to(self.activations)

    def take_weight(self) -> Weight:
        """See ``LinearMethod``."""
        weight = self.weight
        del self.weight
        return (weight,)


class QuantizedMethod:
    """Quantised weights, as the bytes of their blocks."""

    def __init__(
        self,
        place: WeightPlacement,
        parts: Sequence[LinearPart],
        format: BlockFormat,
        order: torch.Tensor | None = None,
    ) -> None:
        self.parts = parts
        self.format = format
        self.order = None if order is None else order.to(place.device)
        self.operators = place.operators
        self.activations = place.activations
        self.height = _height(parts)
        shape = self.height, format.bytes_of(len(parts[0].inputs[1]))
        self.blocks = torch.empty(shape, dtype=torch.uint8, device=place.device)
        self._linear: QuantizedLinear | None = None

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See ``LinearMethod``."""
        return _slots(self.parts, self.blocks, self.format)

    def finish_loading(self, bias: torch.Tensor | None, *, keep_rows: bool = False) -> None:
        """See ``LinearMethod``."""
        (weight,) = self.take_weight()
        self._linear = self.operators.prepare_ordered(weight, bias, self.activations)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._linear is not None, "finish_loading() comes first"
        return self._linear(x)

    def runs(self) -> list[Linear]:
        """See ``LinearMethod``."""
        assert self._linear is not None, "finish_loading() comes first"
        return [self._linear]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: embeddings."""
        if self._linear is not None:
            return self._linear.rows(indices).to(self.activations)
        weight = QuantizedWeight(self.format, self.blocks[indices], self.order)
        return weight.values().to(self.activations)

    def take_weight(self) -> tuple[QuantizedWeight]:
        """See ``LinearMethod``."""
        blocks = self.blocks
        del self.blocks
        return (QuantizedWeight(self.format, blocks, self.order),)


class MixedMethod:
    """Weights of several formats: a product for each run of one format."""

    def __init__(self, methods: Sequence[DenseMethod | QuantizedMethod]) -> None:
        self.methods = methods

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See ``LinearMethod``."""
        return {name: slot for each in self.methods for name, slot in each.weight_slots().items()}

    def finish_loading(self, bias: torch.Tensor | None, *, keep_rows: bool = False) -> None:
        """See ``LinearMethod``."""
        heights = [each.height for each in self.methods]
        biases = [None] * len(heights) if bias is None else bias.split(heights)
        for each, its_bias in zip(self.methods, biases, strict=True):
            each.finish_loading(its_bias, keep_rows=keep_rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([each(x) for each in self.methods], dim=-1)

    def runs(self) -> list[Linear]:
        """See ``LinearMethod``."""
        return [run for each in self.methods for run in each.runs()]

    def take_weight(self) -> Weight:
        """See ``LinearMethod``."""
        return tuple(run for each in self.methods for run in each.take_weight())


def _height(parts: Sequence[LinearPart]) -> int:
    """Outputs on this rank, with padding."""
    return sum(len(part.rows) + part.padding for part in parts)


def _slots(
    parts: Sequence[LinearPart], weight: torch.Tensor, format: BlockFormat | None
) -> dict[str, WeightSlot]:
    """The slots of consecutive parts; padding is set to zero."""
    slots, row = {}, 0
    for part in parts:
        slots[part.name] = part.slot(weight[row:], format)
        row += len(part.rows) + part.padding
        weight[row - part.padding : row].zero_()
    return slots
