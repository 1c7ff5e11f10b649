"""Weights of a checkpoint: every parameter filled once, every tensor used or listed as ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ...kernels.block_formats import BlockFormat
from ...kernels.operators import Operators
from ...kernels.quantized import QuantizedWeight, dequantize
from ..errors import ModelError
from ..models.layers.part import Part
from ..models.parallel import WeightSlot
from ..models.parameters import parameters_of
from ..models.registry import Family
from ..models.spec import AttentionSpec, DecoderSpec, LayerSpec
from ..models.weight_names import (
    AddOne,
    Alternating,
    Deinterleave,
    GroupedHeads,
    Split,
    Target,
    Transposed,
    layer_of,
    names_of,
)
from .in_situ import InSitu
from .origins import EMBEDDING, HEAD, REMEDY, TensorOrigin, check_complete, tensor_origins
from .safetensors_folder import torch_dtype
from .source import WeightSource

# dtypes of unquantised tensors in checkpoints.
_SAVED_IN = ("BF16", "F16", "F32", "F64")


class CheckpointWeights:
    """Fills the parts of a decoder from an open source, in any order."""

    def __init__(
        self,
        source: WeightSource,
        family: Family,
        spec: DecoderSpec,
        in_situ: InSitu | None = None,
        operators: Operators | None = None,
    ) -> None:
        """``in_situ`` quantises weights as they are loaded, by ``operators``. Raises
        ``ModelError`` for missing or unknown tensors."""
        self._source = source
        self._operators = operators or Operators()
        self._in_situ = in_situ
        self._spec = spec
        names = source.weight_names(family)
        self._origins = tensor_origins(
            source.names(), names, spec, source.path, family.more_layers, family.wrapped
        )
        # False for a checkpoint that can embed but not generate.
        self.has_head = check_complete(self._origins, names, spec, source.path, family.wrapped)
        self._pending = dict.fromkeys(parameters_of(spec, has_head=self.has_head))

    def format_of(self, name: str) -> BlockFormat | None:
        """The block format of a parameter, in the checkpoint or after loading; ``None`` if it is
        not quantised."""
        origin = self._origins.get(name)
        if origin is None:
            return None
        format = self._source.block_format(origin.tensor)
        if format is not None or self._in_situ is None:
            return format
        transposed = isinstance(origin.target, Transposed)
        shape = self._source.shape(origin.tensor)
        return self._in_situ.format_of(name, shape[-2 if transposed else -1])

    def order_of(self, name: str) -> torch.Tensor | None:
        """The order of the inputs in a parameter's blocks; see ``WeightSource.order``."""
        origin = self._origins.get(name)
        return None if origin is None else self._source.order(origin.tensor)

    def read_ahead(self) -> None:
        """Read all tensors from the disk while others are packed. Call before ``fill``."""
        names = dict.fromkeys(self._origins[name].tensor for name in self._pending)
        self._source.read_ahead(names)

    def fill(self, part: Part) -> None:
        """Fill the slots of a part. Raises ``ModelError`` for wrong tensors."""
        slots = part.weight_slots()
        assert slots.keys() <= self._pending.keys(), "parameters_of lists what parts have"
        for name in slots:
            del self._pending[name]
        for name, slot in slots.items():
            self._fill_slot(name, slot, self._origins[name], slots)
        if EMBEDDING in slots and self._spec.tie_embeddings and HEAD in self._origins:
            self._check_tied(slots[EMBEDDING], self._origins.pop(HEAD))
        for name in slots:
            del self._origins[name]

    def finish(self) -> None:
        """Raise ``ModelError`` for a tensor that fills no parameter."""
        assert not self._pending, "parts have what parameters_of lists"
        for origin in self._origins.values():
            if not self._source.spare(origin.tensor):
                raise self._misplaced(origin.tensor)

    def _misplaced(self, tensor: str) -> ModelError:
        return ModelError(f"{self._source.path}: {tensor} has no place in this model: {REMEDY}")

    def _fill_slot(
        self, name: str, slot: WeightSlot, origin: TensorOrigin, slots: Mapping[str, WeightSlot]
    ) -> None:
        """Copy a parameter's part of a tensor, which may hold several parameters."""
        target, transposed = origin.target, isinstance(origin.target, Transposed)
        if isinstance(target, Transposed):
            target = target.of
        names = names_of(target)
        if any(each not in slots for each in names):
            raise self._misplaced(origin.tensor)
        shape = (sum(slots[n].shape[0] for n in names), *slot.shape[1:])
        if isinstance(origin.target, Transposed) and origin.target.or_not:
            transposed = self._source.shape(origin.tensor)[-2:] != shape
        self._check(origin, shape[::-1] if transposed else shape)
        if slot.end == slot.first:
            return
        if slot.dim == 1:
            values = self._read(origin, slot, 1 - transposed, slot.first, slot.end)
            self._store(slot, values.mT if transposed else values, origin)
            return
        rows = self._rows(name, target, slot, slots)
        into = slot.target if self._is_read_in_place(slot, origin) else None
        values = self._read(origin, slot, int(transposed), rows.first, rows.end, into)
        selection = rows.pick(values.mT if transposed else values)
        self._store(slot, self._transform(name, target, selection), origin)

    def _is_read_in_place(self, slot: WeightSlot, origin: TensorOrigin) -> bool:
        """True if a tensor can be read directly into a slot's memory."""
        format, destination = self._source.block_format(origin.tensor), slot.target
        if not isinstance(origin.target, str | Split) or format != slot.format:
            return False
        alike = (
            format is not None
            or torch_dtype(self._source.dtype(origin.tensor)) == destination.dtype
        )
        return alike and destination.is_contiguous() and destination.device.type == "cpu"

    def _store(self, slot: WeightSlot, rows: torch.Tensor, origin: TensorOrigin) -> None:
        if slot.format is None or self._source.block_format(origin.tensor) is not None:
            if rows is not slot.target:
                slot.target.copy_(rows)
        else:  # quantise on its device
            rows = rows.to(slot.target.device)
            self._operators.quantise(slot.format, rows, slot.target)

    def _rows(
        self, name: str, target: Target, slot: WeightSlot, slots: Mapping[str, WeightSlot]
    ) -> _Rows:
        """The rows of a tensor that belong to a slot."""
        first, end = slot.first, slot.end
        match target:
            case Split(names=names):
                offset = sum(slots[n].shape[0] for n in names[: names.index(name)])
                return _Rows(first + offset, end + offset)
            case Alternating(names=names):
                index, count = names.index(name), len(names)
                return _Rows(first * count, end * count, lambda rows: rows[index::count])
            case GroupedHeads(names=names):
                attention = self._spec.layers[layer_of(name)].attention
                assert isinstance(attention, AttentionSpec)
                return _grouped_rows(attention, names.index(name), first, end)
        return _Rows(first, end)

    def _check_tied(self, embedding: WeightSlot, head: TensorOrigin) -> None:
        """Reject a head that differs from the tied embedding in this rank's rows."""
        self._check(head, embedding.shape)
        copy = replace(embedding, target=torch.empty_like(embedding.target))
        rows = self._read(head, embedding, 0, embedding.first, embedding.end)
        self._store(copy, rows, head)
        if not torch.equal(copy.target, embedding.target):
            raise ModelError(
                f"{self._source.path}: {head.tensor} is not the embedding, but "
                f"tie_word_embeddings is true, or left out and true for this family: if the head "
                f"was trained by itself, set tie_word_embeddings to false in config.json"
            )

    def _check(self, origin: TensorOrigin, expected: tuple[int, ...]) -> None:
        """Reject a tensor with another shape, or with a dtype that needs scales."""
        tensor = origin.tensor
        shape, dtype = self._source.shape(tensor), self._source.dtype(tensor)
        # Stacked parameters have one dimension more.
        if (shape if origin.index is None else shape[1:]) != expected or (
            origin.index is not None and origin.index >= shape[0]
        ):
            raise ModelError(
                f"{self._source.path}: {tensor} has shape {list(shape)}, but the configuration "
                f"implies {['...'] * (origin.index is not None) + list(expected)}: {REMEDY}"
            )
        matrix = len(shape) == 2 and origin.index is None
        if isinstance(origin.target, Transposed) and self._source.block_format(tensor):
            raise ModelError(
                f"{self._source.path}: {tensor} is quantized, which is not supported where this "
                f"family's weights are stored as [inputs, outputs]"
            )
        blocks = self._source.block_format(tensor) is not None
        if dtype not in _SAVED_IN and not (blocks and matrix):
            raise ModelError(
                f"{self._source.path}: {tensor} is saved in {dtype}; supported: "
                f"{', '.join(_SAVED_IN)}: convert the weights to bfloat16"
            )

    def _read(
        self,
        origin: TensorOrigin,
        slot: WeightSlot,
        dim: int,
        first: int,
        end: int,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A part of a tensor along ``dim``: bytes of blocks for a slot with a format, else
        numbers. ``into``: see ``WeightSource.read``."""
        tensor = origin.tensor
        format = self._source.block_format(tensor)
        if format is None or format == slot.format:
            return self._source.read(tensor, dim, first, end, origin.index, into)
        order = self._source.order(tensor)
        if dim == 0 or order is not None:
            rows = (first, end) if dim == 0 else (0, slot.shape[0])
            blocks = self._source.read(tensor, 0, *rows)
            numbers = dequantize(QuantizedWeight(format, blocks, order))
            return numbers if dim == 0 else numbers[:, first:end]
        begin = first // format.values * format.values
        stop = -(-end // format.values) * format.values
        blocks = self._source.read(tensor, 1, begin, stop)
        return dequantize(QuantizedWeight(format, blocks))[:, first - begin : end - begin]

    def _transform(self, name: str, target: Target, rows: torch.Tensor) -> torch.Tensor:
        match target:
            case AddOne():
                return rows.float() + 1
            case Deinterleave():
                return deinterleave(rows, *_rope_rows(self._spec.layers[layer_of(name)], name))
        return rows


@dataclass(frozen=True, slots=True)
class _Rows:
    """A range of rows of a tensor, and the selection from them."""

    first: int
    end: int
    pick: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows


def _grouped_rows(attention: AttentionSpec, part: int, first: int, end: int) -> _Rows:
    """The rows of q, k or v (``part`` 0, 1 or 2) among ``GroupedHeads``."""
    dim = attention.head_dim
    group = attention.num_heads // attention.num_kv_heads
    width = (group + 2) * dim
    # Rows of the part in a group, and their offset.
    each, begin = (group * dim, 0) if part == 0 else (dim, (group + part - 1) * dim)
    first_group, end_group = first // each, -(-end // each)

    def pick(rows: torch.Tensor) -> torch.Tensor:
        groups: torch.Tensor = rows.unflatten(0, (-1, width))
        mine = groups[:, begin : begin + each].flatten(0, 1)
        return mine[first - first_group * each : end - first_group * each]

    return _Rows(first_group * width, end_group * width, pick)


def _rope_rows(layer: LayerSpec, name: str) -> tuple[int, range]:
    """The rows of a head in a projection, and which of them rope rotates."""
    attention = layer.attention
    if isinstance(attention, AttentionSpec):
        return attention.head_dim, range(0 if layer.rope is None else layer.rope.dim)
    width = attention.kv.dim if ".kv_a." in name else attention.qk_dim
    rope_dim = attention.rope_dim if attention.rope_interleaved else 0
    return width, range(width - rope_dim, width)


def deinterleave(rows: torch.Tensor, width: int, rope_rows: range) -> torch.Tensor:
    """Convert pairs to halves among the ``rope_rows`` of each ``width`` rows."""
    heads = rows.unflatten(0, (-1, width))
    before, pairs, after = heads.split(
        [rope_rows.start, len(rope_rows), width - rope_rows.stop], dim=1
    )
    return torch.cat([before, pairs[:, 0::2], pairs[:, 1::2], after], dim=1).flatten(0, 1)
