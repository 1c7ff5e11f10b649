"""GGUF file: one model's configuration, tokenizer and tensors."""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ...errors import ModelError
from ...models.model_config import ModelConfig
from ...models.registry import Family
from ...models.weight_names import WeightNames
from ...text.tokenizer_files import TokenizerFiles
from .header import GGUFHeader, TensorEntry, read_header, shortest
from .hf_config import architecture_of, check_codebooks, config_values, end_tokens
from .tokenizer_json import tokenizer_files

if TYPE_CHECKING:
    import torch

# The most factors of rope that are read without torch.
_MAX_FACTORS = 1 << 12


class GGUFFile:
    """A ``WeightSource``. Tensors are read and not mapped: a mapped file that is truncated kills
    the process that looks at it."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> GGUFFile:
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    @cached_property
    def header(self) -> GGUFHeader:
        """The file's header."""
        return read_header(self.path)

    def config(self) -> ModelConfig:
        """See ``WeightSource``."""
        values = config_values(self.header, self._read_floats, self.path)
        return ModelConfig(values, str(self.path))

    def tokenizer_files(self) -> TokenizerFiles:
        """See ``WeightSource``."""
        return tokenizer_files(self.header, str(self.path))

    def end_tokens(self) -> list[int]:
        """See ``WeightSource``."""
        return end_tokens(self.header)

    def weight_names(self, family: Family) -> WeightNames:
        """See ``WeightSource``. Checks that the formats of the weights can be decoded here."""
        check_codebooks(self.header, self.path)
        return architecture_of(self.header, self.path).weights

    @cached_property
    def _tensors(self) -> dict[str, TensorEntry]:
        """The tensors; of one that has the experts of a layer, a matrix for each."""
        return {
            each.name: each for entry in self.header.tensors.values() for each in _matrices(entry)
        }

    def weight_files(self) -> list[str]:
        """See ``WeightSource``."""
        return [self.path.name]

    def tensor_names(self) -> list[str] | None:
        """See ``WeightSource``."""
        return self.names()

    def names(self) -> list[str]:
        """See ``WeightSource``."""
        return list(self._tensors)

    def dtype(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._tensors[name].type.name

    def block_formats(self) -> frozenset[str]:
        """See ``WeightSource``."""
        return frozenset(each.type.name for each in self._tensors.values() if each.type.values > 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._tensors[name].shape

    def read(
        self, name: str, dim: int, first: int, end: int, index: int | None = None
    ) -> torch.Tensor:
        """See ``WeightSource``. Stacked tensors are matrices with names of their own here."""
        assert index is None, name
        entry = self._tensors[name]
        if dim == 0:
            return self._rows(entry, first, end)
        whole = self._rows(entry, 0, entry.shape[0])
        if entry.type.values > 1:
            first, end = entry.type.bytes_of(first), entry.type.bytes_of(end)
        return whole[:, first:end]

    def _rows(self, entry: TensorEntry, first: int, end: int) -> torch.Tensor:
        import torch

        width = entry.type.bytes_of(entry.shape[1]) if len(entry.shape) > 1 else entry.type.nbytes
        data = torch.empty((end - first) * width, dtype=torch.uint8)
        self._fill(data.numpy().data, entry.name, entry.begin + first * width)
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        kind = dtypes.get(entry.type.name)
        rows = data if kind is None else data.view(kind)
        return rows.view(end - first, -1) if len(entry.shape) > 1 else rows

    def _fill(self, target: memoryview, name: str, begin: int) -> None:
        assert self._file is not None, "the source is not open"
        self._file.seek(begin)
        while target:
            count = self._file.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise ModelError(f"{self.path} was truncated while {name} was read")
            target = target[count:]

    def _read_floats(self, name: str) -> list[float]:
        """The factors of rope, which the configuration needs."""
        entry = self.header.tensors.get(name)
        if entry is None or entry.type.name != "F32" or entry.shape[-1] > _MAX_FACTORS:
            raise ModelError(f"{self.path}: {name} is missing, or no list of factors in F32")
        with self.path.open("rb") as file:
            file.seek(entry.begin)
            count = entry.shape[-1]
            return [shortest(value) for value in struct.unpack(f"<{count}f", file.read(4 * count))]


def _matrices(entry: TensorEntry) -> list[TensorEntry]:
    if len(entry.shape) != 3:
        return [entry]
    stem, _, kind = entry.name.rpartition(".")
    size = entry.type.bytes_of(entry.shape[1] * entry.shape[2])
    return [
        TensorEntry(
            f"{stem}.{index}.{kind}", entry.shape[1:], entry.type, entry.begin + index * size
        )
        for index in range(entry.shape[0])
    ]
