"""A model's configuration, tokenizer and tensors in one or several GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....kernels.block_formats import BlockFormat
from ...errors import ModelError
from ...models.config_files import LOGIT_SCORE, ModelConfig, apply_overrides, with_token_score
from ...models.registry import Family
from ...models.weight_names import WeightNames
from ...text.tokenizer_files import TokenizerFiles
from ..digest import StoredTensor
from ..file_reads import FilePart, FileReads
from .architectures import CLASSIFIER_WEIGHTS
from .header import GGUFHeader, TensorEntry, shortest
from .hf_config import (
    HEAD,
    architecture_of,
    check_codebooks,
    compares_labels,
    config_keys,
    config_values,
    end_tokens,
)
from .parts import part_files, read_model
from .tensor_types import TENSOR_TYPES
from .tokenizer_json import is_reranker_by_name, tokenizer_files

if TYPE_CHECKING:
    import torch

F32 = TENSOR_TYPES[0]
# The maximum number of rope factors.
_MAX_FACTORS = 1 << 12


class GGUFFile:
    """A ``WeightSource``, given its file or any of its parts."""

    format = "gguf"

    def __init__(self, path: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._overrides = overrides or {}
        self._reads = FileReads()

    def __enter__(self) -> GGUFFile:
        self._reads.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._reads.__exit__()

    @cached_property
    def header(self) -> GGUFHeader:
        """The header of the model."""
        return read_model(self.path)

    def config(self) -> ModelConfig:
        """See ``WeightSource``."""
        file, header = str(self.path), self.header
        values = apply_overrides(
            config_values(header, self._read_floats, self.path), self._overrides
        )
        values = with_token_score(
            values,
            file,
            lambda: self.tokenizer_files().vocabulary(),
            named=is_reranker_by_name(header, file),
        )
        if LOGIT_SCORE in values and values.get("pooling_type") == "rank":
            del values["pooling_type"]  # the score tokens are in the generating head
        return ModelConfig(values, file, origins=config_keys(header, self.path))

    def tokenizer_files(self) -> TokenizerFiles:
        """See ``WeightSource``."""
        return tokenizer_files(self.header, str(self.path))

    def end_tokens(self) -> list[int]:
        """See ``WeightSource``."""
        return end_tokens(self.header)

    def weight_names(self, family: Family) -> WeightNames:
        """See ``WeightSource``. Checks that the formats of the weights can be decoded here."""
        check_codebooks(self.header, self.path)
        names = architecture_of(self.header, self.path).weights
        return names if family.head is None else names | CLASSIFIER_WEIGHTS

    @cached_property
    def _tensors(self) -> dict[str, TensorEntry]:
        """The tensors; a stacked tensor becomes a matrix for each expert."""
        split = {part.name for pair in self._expansions.values() for part in pair}
        entries = (entry for name, entry in self.header.tensors.items() if name not in split)
        tensors = {each.name: each for entry in entries for each in _matrices(entry)}
        if compares_labels(self.header):
            tensors[HEAD] = replace(tensors[HEAD], shape=(1, tensors[HEAD].shape[1]), type=F32)
        return tensors | {
            name: replace(keys, name=name, shape=_expansion_shape(keys, values), type=F32)
            for name, (keys, values) in self._expansions.items()
        }

    @cached_property
    def _expansions(self) -> dict[str, tuple[TensorEntry, TensorEntry]]:
        """Pairs of tensors of latent attention that form one tensor of a Hugging Face checkpoint,
        by its name in older files: for each head the rows of keys, which are stored as columns, and
        the rows of values."""
        pairs = {}
        for name, keys in self.header.tensors.items():
            stem, separator, _ = name.partition(".attn_k_b.weight")
            values = self.header.tensors.get(f"{stem}.attn_v_b.weight")
            if not separator or values is None or len(keys.shape) != 3 or len(values.shape) != 3:
                continue
            if (keys.shape[0], keys.shape[1]) == (values.shape[0], values.shape[2]):
                pairs[f"{stem}.attn_kv_b.weight"] = keys, values
        return pairs

    def weight_files(self) -> list[str]:
        """See ``WeightSource``."""
        return [part.name for part in part_files(self.path)]

    def tensor_names(self) -> list[str] | None:
        """See ``WeightSource``."""
        return self.names()

    def names(self) -> list[str]:
        """See ``WeightSource``."""
        return list(self._tensors)

    def dtype(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._tensors[name].type.name

    def block_format(self, name: str) -> BlockFormat | None:
        """See ``WeightSource``."""
        kind = self._tensors[name].type
        return kind if kind.values > 1 else None

    def order(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource``."""
        return None

    def stored(self) -> list[StoredTensor]:
        """See ``WeightSource``."""
        return [
            StoredTensor(each.name, each.type.name, each.shape, each.file, each.begin, each.nbytes)
            for each in self.header.tensors.values()
        ]

    def spare(self, name: str) -> bool:
        """See ``WeightSource``."""
        return False

    def block_formats(self) -> frozenset[str]:
        """See ``WeightSource``."""
        return frozenset(each.type.name for each in self._tensors.values() if each.type.values > 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._tensors[name].shape

    def read_ahead(self, names: Iterable[str]) -> None:
        """See ``WeightSource``."""
        entries = [
            entry for name in names for entry in self._expansions.get(name, (self._tensors[name],))
        ]
        self._reads.ahead(
            [FilePart(each.file, each.begin, each.begin + each.nbytes) for each in entries]
        )

    def read(
        self,
        name: str,
        dim: int,
        first: int,
        end: int,
        index: int | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``WeightSource``. Stacked matrices have their own names here."""
        entry = self._tensors[name]
        if name in self._expansions:
            return self._expansion(*self._expansions[name], first, end)
        if name == HEAD and compares_labels(self.header):
            yes, no = self._numbers(self.header.tensors[HEAD], 0).unbind()
            return (yes - no)[None].narrow(dim, first, end - first)
        if index is not None:
            return self._rows(entry, index, index + 1)[0, first:end]
        return self._rows(entry, first, end, into) if dim == 0 else self._columns(entry, first, end)

    def _expansion(
        self, keys: TensorEntry, values: TensorEntry, first: int, end: int
    ) -> torch.Tensor:
        """Rows of whole heads from a pair."""
        import torch

        width = keys.shape[2] + values.shape[1]
        heads = range(first // width, end // width)
        parts = [
            part
            for head in heads
            for part in (self._numbers(keys, head).mT, self._numbers(values, head))
        ]
        return torch.cat(parts)

    def _numbers(self, entry: TensorEntry, index: int) -> torch.Tensor:
        """One of the matrices of a tensor, in fp32."""
        from ....kernels.quantized import QuantizedWeight, dequantize

        matrix = _matrices(entry)[index]
        rows = self._rows(matrix, 0, matrix.shape[0])
        return (
            rows.float()
            if entry.type.values == 1
            else dequantize(QuantizedWeight(entry.type, rows))
        )

    def _rows(
        self, entry: TensorEntry, first: int, end: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        import torch

        of_row = prod(entry.shape[1:])
        if into is None:
            into = torch.empty((end - first, *_row_shape(entry, of_row)), dtype=_dtype(entry))
        begin = entry.begin + first * entry.type.bytes_of(of_row)
        self._reads.rows(entry.file, begin, into, entry.name)
        return into

    def _columns(self, entry: TensorEntry, first: int, end: int) -> torch.Tensor:
        import torch

        rows, inputs = entry.shape
        columns = torch.empty((rows, *_row_shape(entry, end - first)), dtype=_dtype(entry))
        whole, begin = entry.type.bytes_of(inputs), entry.type.bytes_of(first)
        self._reads.columns(entry.file, entry.begin, whole, begin, columns, entry.name)
        return columns

    def _read_floats(self, name: str) -> list[float]:
        """Read rope factors, which the configuration needs."""
        entry = self.header.tensors.get(name)
        if entry is None or entry.type.name != "F32" or entry.shape[-1] > _MAX_FACTORS:
            raise ModelError(f"{self.path}: {name} is missing, or is not a list of factors in F32")
        with FileReads() as reads:
            data = reads.bytes_at(entry.file, entry.begin, 4 * entry.shape[-1], name)
        return [shortest(value) for (value,) in struct.iter_unpack("<f", data)]


def _dtype(entry: TensorEntry) -> torch.dtype:
    """The dtype that a tensor is read as: numbers, or bytes of blocks."""
    import torch

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return dtypes.get(entry.type.name, torch.uint8)


def _row_shape(entry: TensorEntry, inputs: int) -> tuple[int, ...]:
    """The shape of a row of ``inputs`` inputs; empty for a vector."""
    if len(entry.shape) == 1:
        return ()
    return (entry.type.bytes_of(inputs) if entry.type.values > 1 else inputs,)


def _expansion_shape(keys: TensorEntry, values: TensorEntry) -> tuple[int, int]:
    heads, rank, width = keys.shape
    return heads * (width + values.shape[1]), rank


def _matrices(entry: TensorEntry) -> list[TensorEntry]:
    if len(entry.shape) != 3:
        return [entry]
    stem, _, kind = entry.name.rpartition(".")
    size = entry.type.bytes_of(entry.shape[1] * entry.shape[2])
    return [
        replace(
            entry,
            name=f"{stem}.{index}.{kind}",
            shape=entry.shape[1:],
            begin=entry.begin + index * size,
        )
        for index in range(entry.shape[0])
    ]
