"""Model folder with quantised weights, read as if it had one tensor for each matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ....kernels.block_formats import BlockFormat
from ...models.config_files import ModelConfig
from ...models.families.wrappers import text_tensor_name
from ...models.quantization import Quantization
from ...models.registry import Family
from ...models.weight_names import WeightNames, pattern_of
from ...text.tokenizer_files import TokenizerFiles
from ..digest import StoredTensor
from ..safetensors_folder import SafetensorsFolder
from .matrices import Matrix, find_matrices

if TYPE_CHECKING:
    import torch

_BIAS = re.compile(r"\.bias$")
_BIASES = ("F16", "BF16", "F32")


class QuantizedFolder:
    """A ``WeightSource`` around a plain folder."""

    format = "safetensors"

    def __init__(self, folder: SafetensorsFolder, how: Quantization) -> None:
        self.path: Path = folder.path
        self._folder = folder
        self._how = how
        self._matrices: dict[str, Matrix] = {}
        self._names: list[str] = []

    def __enter__(self) -> QuantizedFolder:
        self._folder.__enter__()
        try:
            self._matrices = find_matrices(self._folder, self._how)
        except BaseException:
            self._folder.__exit__(None, None, None)
            raise
        tensors_of_matrices = {
            name for matrix in self._matrices.values() for name in matrix.tensors
        }
        plain = (name for name in self._folder.names() if name not in tensors_of_matrices)
        self._names = [*plain, *self._matrices]
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.__exit__(*exc)

    def config(self) -> ModelConfig:
        """See ``WeightSource``."""
        return self._folder.config()

    def tokenizer_files(self) -> TokenizerFiles:
        """See ``WeightSource``."""
        return self._folder.tokenizer_files()

    def end_tokens(self) -> list[int]:
        """See ``WeightSource``."""
        return self._folder.end_tokens()

    def weight_names(self, family: Family) -> WeightNames:
        """See ``WeightSource``. Includes biases without effect, or unless it is open, all that may
        have none."""
        if self._names:
            return self._with_spare(family, self.spare)
        if (folder := self._by_headers) is None:
            return self._folder.weight_names(family)
        return folder._with_spare(family, folder._adds_bias)

    def _with_spare(self, family: Family, is_spare: Callable[[str], bool]) -> WeightNames:
        table = self._folder.weight_names(family)
        spare: dict[str, bool] = {}
        for name in self._names:
            text = text_tensor_name(name) if family.wrapped else name
            if text is not None and (pattern := pattern_of(text)) not in table:
                spare[pattern] = spare.get(pattern, True) and is_spare(name)
        return {**table, **dict.fromkeys(pattern for pattern, each in spare.items() if each)}

    def weight_files(self) -> list[str]:
        """See ``WeightSource``."""
        return self._folder.weight_files()

    def tensor_names(self) -> list[str] | None:
        """See ``WeightSource``."""
        return None if self._by_headers is None else self._by_headers.names()

    @cached_property
    def _by_headers(self) -> QuantizedFolder | None:
        """The names of tensors and matrices, if all files are here."""
        if any(not (self.path / file).is_file() for file in self.weight_files()):
            return None
        with QuantizedFolder(SafetensorsFolder(self.path, "np"), self._how) as folder:
            return folder

    def stored(self) -> list[StoredTensor]:
        """See ``WeightSource``."""
        return self._folder.stored()

    def names(self) -> list[str]:
        """See ``WeightSource``."""
        return self._names

    def dtype(self, name: str) -> str:
        """See ``WeightSource``."""
        matrix = self._matrices.get(name)
        return self._folder.dtype(name) if matrix is None else matrix.format.name

    def block_format(self, name: str) -> BlockFormat | None:
        """See ``WeightSource``."""
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.format

    def block_formats(self) -> frozenset[str]:
        """See ``WeightSource``."""
        with QuantizedFolder(SafetensorsFolder(self.path, "np"), self._how) as folder:
            return frozenset(each.format.name for each in folder._matrices.values())

    def order(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource``."""
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.order()

    def spare(self, name: str) -> bool:
        """See ``WeightSource``. GPTQ libraries add zero biases to all quantised linears."""
        if not self._adds_bias(name) or self._folder.dtype(name) not in _BIASES:
            return False
        return not bool(self._folder.whole(name).any())

    def _adds_bias(self, name: str) -> bool:
        weight = _BIAS.sub(".weight", name)
        in_them = self._how.method in ("gptq", "awq") and weight in self._matrices
        return in_them and weight != name

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        matrix = self._matrices.get(name)
        return self._folder.shape(name) if matrix is None else matrix.shape

    def read_ahead(self, names: Iterable[str]) -> None:
        """See ``WeightSource``."""
        matrices, here = self._matrices, set(self._folder.names())  # some tensors are optional
        tensors = (
            each
            for name in names
            for each in (matrices[name].tensors if name in matrices else (name,))
        )
        self._folder.read_ahead(dict.fromkeys(each for each in tensors if each in here))

    def read(
        self,
        name: str,
        dim: int,
        first: int,
        end: int,
        index: int | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``WeightSource``."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._folder.read(name, dim, first, end, index, into)
        if dim == 0:
            return matrix.blocks(first, end)
        blocks = matrix.blocks(0, matrix.shape[0])
        return blocks[:, matrix.format.bytes_of(first) : matrix.format.bytes_of(end)]
