"""Weight sources: a model's configuration, tokenizer and tensors, in any kind of files.

Torch is loaded only to read a tensor, so that heads and routers can use the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ...kernels.block_formats import BlockFormat
from ..errors import ModelError
from ..models.config_files import ModelConfig
from ..models.registry import Family, quantization_of, spec_of
from ..models.spec import DecoderSpec
from ..models.weight_names import WeightNames
from ..text.tokenizer_files import TokenizerFiles
from .digest import StoredTensor
from .gguf.file import GGUFFile
from .locate import is_gguf
from .quantized.folder import QuantizedFolder
from .safetensors_folder import SafetensorsFolder

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A checkpoint. Tensors need its context."""

    path: Path
    format: str

    def __enter__(self) -> WeightSource: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def config(self) -> ModelConfig:
        """The configuration."""

    def tokenizer_files(self) -> TokenizerFiles:
        """The contents of the tokenizer's files."""

    def end_tokens(self) -> list[int]:
        """The end tokens of the tokenizer."""

    def weight_names(self, family: Family) -> WeightNames:
        """The family's names and transforms for this kind of checkpoint."""

    def weight_files(self) -> list[str]:
        """The names of the weight files in its folder, existing or not; needs no context."""

    def tensor_names(self) -> list[str] | None:
        """The names of all tensors, by the files that exist, or ``None`` if unknown; needs no
        context, and does not load torch."""

    def names(self) -> list[str]:
        """The names of all tensors."""

    def dtype(self, name: str) -> str:
        """A tensor's dtype (BF16, F16, F32, ...) or the name of its block format."""

    def block_format(self, name: str) -> BlockFormat | None:
        """A tensor's block format; ``None`` if it is not quantised."""

    def order(self, name: str) -> torch.Tensor | None:
        """The input at each place of a tensor's blocks, if their order differs from the model's."""

    def stored(self) -> list[StoredTensor]:
        """The tensors in its files; needs no context, and does not load torch."""

    def spare(self, name: str) -> bool:
        """Return whether a tensor may be ignored if the model has no place for it."""

    def block_formats(self) -> frozenset[str]:
        """The names of the block formats of its tensors; needs no context."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Reads nothing."""

    def read_ahead(self, names: Iterable[str]) -> None:
        """Begin to read tensors from the disk, given all names in the order of their reads."""

    def read(
        self,
        name: str,
        dim: int,
        first: int,
        end: int,
        index: int | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read ``tensor[first:end]`` along ``dim`` (0 or 1), or the same of ``tensor[index]``:
        numbers, or the bytes of blocks. Rows may be read into and returned as ``into``, a
        contiguous CPU tensor of the same dtype and shape."""


def open_source(path: str | Path, overrides: Mapping[str, Any] | None = None) -> WeightSource:
    """The source at the path of a model. ``overrides`` replace keys of its configuration."""
    path = Path(path)
    if is_gguf(path):
        return GGUFFile(path, overrides)
    folder = SafetensorsFolder(path, overrides=overrides)
    if not (path / "config.json").is_file():
        return folder
    quantization = quantization_of(folder.config())
    return folder if quantization is None else QuantizedFolder(folder, quantization)


def check_format(source: WeightSource, load_format: str) -> None:
    """Raise ``ModelError`` if ``--load-format`` is not the source's."""
    if load_format not in ("auto", source.format):
        raise ModelError(
            f"--load-format {load_format}, but {source.path} is {source.format}; omit the option"
        )


def read_spec(
    path: str | Path,
    ignored_keys: frozenset[str] = frozenset(),
    max_model_len: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DecoderSpec:
    """The spec of the model at a path; see ``spec_of`` and ``open_source``."""
    return spec_of(open_source(path, overrides).config(), ignored_keys, max_model_len)
