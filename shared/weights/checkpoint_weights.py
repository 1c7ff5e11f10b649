"""Weights of a checkpoint: every parameter filled once, every tensor used or listed as ignored."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.block_formats import BLOCK_FORMATS, BlockFormat
from ...kernels.quantized import QuantizedWeight, dequantize
from ..errors import ModelError
from ..models.layers.part import Part
from ..models.parallel import WeightSlot
from ..models.registry import Family
from ..models.spec import AttentionSpec, DecoderSpec, MLASpec
from ..models.weight_names import AddOne, Deinterleave, Target, layer_of, names_of
from .origins import EMBEDDING, HEAD, REMEDY, TensorOrigin, lacks_head, tensor_origins
from .source import WeightSource

# dtypes of numbers in checkpoints.
_SAVED_IN = ("BF16", "F16", "F32", "F64")


class CheckpointWeights:
    """Fills the parts of a decoder from an open source, in any order."""

    def __init__(self, source: WeightSource, family: Family, spec: DecoderSpec) -> None:
        self._source = source
        self._spec = spec
        names = source.weight_names(family)
        self._origins = tensor_origins(source.names(), names, spec, source.path, family.more_layers)

    def format_of(self, name: str) -> BlockFormat | None:
        """The block format of a parameter in the checkpoint; ``None`` for numbers."""
        origin = self._origins.get(name)
        return None if origin is None else BLOCK_FORMATS.get(self._source.dtype(origin.tensor))

    @property
    def has_head(self) -> bool:
        """False for a checkpoint that can embed but not generate."""
        return not lacks_head(self._origins, self._spec, self._source.path)

    def fill(self, part: Part) -> None:
        """Fill the slots of a part. Raises ``ModelError`` for missing and wrong tensors."""
        slots = part.weight_slots()
        missing = sorted(name for name in slots if name not in self._origins)
        if missing:
            raise ModelError(
                f"{self._source.path} lacks {len(missing)} weights ({', '.join(missing[:3])}): "
                f"{REMEDY}"
            )
        for name, slot in slots.items():
            self._fill_slot(name, slot, self._origins[name], slots)
        if EMBEDDING in slots and self._spec.tie_embeddings and HEAD in self._origins:
            self._check_tied(slots[EMBEDDING], self._origins.pop(HEAD).tensor)
        for name in slots:
            del self._origins[name]

    def finish(self) -> None:
        """Raise ``ModelError`` if a tensor has filled nothing."""
        for origin in self._origins.values():
            raise self._misplaced(origin.tensor)

    def _misplaced(self, tensor: str) -> ModelError:
        return ModelError(f"{self._source.path}: {tensor} has no place in this model: {REMEDY}")

    def _fill_slot(
        self, name: str, slot: WeightSlot, origin: TensorOrigin, slots: Mapping[str, WeightSlot]
    ) -> None:
        """Copy a parameter's part of a tensor, which may have the rows of several."""
        names = names_of(origin.target)
        if any(each not in slots for each in names):
            raise self._misplaced(origin.tensor)
        before = names[: names.index(name)]
        self._check(origin.tensor, (sum(slots[n].shape[0] for n in names), *slot.shape[1:]))
        offset = sum(slots[n].shape[0] for n in before) if slot.dim == 0 else 0
        if slot.end > slot.first:
            stored = self._read(origin.tensor, slot, slot.first + offset, slot.end + offset)
            slot.target.copy_(self._transformed(name, origin.target, stored))

    def _check_tied(self, embedding: WeightSlot, head: str) -> None:
        """Reject a head whose rows, those of this rank, are not those of the embedding."""
        self._check(head, embedding.shape)
        rows = self._read(head, embedding, embedding.first, embedding.end)
        if not torch.equal(rows.to(embedding.target), embedding.target):
            raise ModelError(
                f"{self._source.path}: {head} is not the embedding, but tie_word_embeddings is "
                f"true, or left out and true for this family: if the head was trained by itself, "
                f"set tie_word_embeddings to false in config.json"
            )

    def _check(self, tensor: str, expected: tuple[int, ...]) -> None:
        """Reject a tensor of another shape, or in a dtype that needs scales."""
        shape, dtype = self._source.shape(tensor), self._source.dtype(tensor)
        if shape != expected:
            raise ModelError(
                f"{self._source.path}: {tensor} has shape {list(shape)}, but the configuration "
                f"implies {list(expected)}: {REMEDY}"
            )
        if dtype not in _SAVED_IN and (dtype not in BLOCK_FORMATS or len(shape) != 2):
            raise ModelError(
                f"{self._source.path}: {tensor} is saved in {dtype}; supported: "
                f"{', '.join(_SAVED_IN)}: convert the weights to bfloat16"
            )

    def _read(self, tensor: str, slot: WeightSlot, first: int, end: int) -> torch.Tensor:
        """The slot's part of a tensor: bytes of blocks for a slot with a format, else numbers."""
        format = BLOCK_FORMATS.get(self._source.dtype(tensor))
        if format is None or format == slot.format:
            return self._source.read(tensor, slot.dim, first, end)
        rows = (first, end) if slot.dim == 0 else (0, slot.shape[0])
        whole = dequantize(QuantizedWeight(format, self._source.read(tensor, 0, *rows)))
        return whole if slot.dim == 0 else whole[:, first:end]

    def _transformed(self, name: str, target: Target, stored: torch.Tensor) -> torch.Tensor:
        match target:
            case AddOne():
                return stored.float() + 1
            case Deinterleave():
                attention = self._spec.layers[layer_of(name)].attention
                return deinterleave(stored, *_rotated_rows(attention, name))
        return stored


def _rotated_rows(attention: AttentionSpec | MLASpec, name: str) -> tuple[int, int]:
    """Rows of a head in a projection, and how many of them, the last, are rotated."""
    if isinstance(attention, AttentionSpec):
        return attention.head_dim, attention.head_dim
    rotated = attention.rope_dim if attention.rope_interleaved else 0
    return (attention.kv.dim if ".kv_a." in name else attention.qk_dim), rotated


def deinterleave(rows: torch.Tensor, width: int, rotated: int) -> torch.Tensor:
    """Move neighbours among the last ``rotated`` of each ``width`` rows half of them apart."""
    heads = rows.unflatten(0, (-1, width))
    kept, pairs = heads.split([width - rotated, rotated], dim=1)
    return torch.cat([kept, pairs[:, 0::2], pairs[:, 1::2]], dim=1).flatten(0, 1)
