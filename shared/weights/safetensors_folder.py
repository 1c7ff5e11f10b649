"""Model folder in Hugging Face layout: its configuration, tokenizer and safetensors files."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.block_formats import BlockFormat
from ..errors import ModelError, brief
from ..models.config_files import ModelConfig, dense_folders, read_config, read_json
from ..models.registry import Family
from ..models.weight_names import WeightNames, with_short_names
from ..text.model_files import LFS_POINTER, LFS_REMEDY
from ..text.special_tokens import special_tokens
from ..text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from ..text.vocabulary.added_tokens import AddedTokens
from ..text.vocabulary.files import TOKENIZER_JSON
from .digest import StoredTensor
from .file_reads import FilePart, FileReads
from .folder_kind import INDEX, SINGLE, without_config, without_weights

if TYPE_CHECKING:
    import torch


_MAX_NAME, _MAX_REASON, _MAX_FILE = 1000, 300, 255
# The tensor of a linear layer over the text vector, in its own file, and our name for it.
_LINEAR, _PROJECTION = "linear.weight", "projections.{i}.weight"


class SafetensorsFolder:
    """A ``WeightSource``. The safetensors library validates the files.

    ``framework`` reads the tensors; "np" is enough for their names, and does not load torch.
    """

    format = "safetensors"

    def __init__(
        self,
        path: Path,
        framework: str = "pt",
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._overrides = overrides
        self._framework = framework
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._own_names: dict[str, str] = {}  # of tensors whose names in the files are not unique
        self._stored: dict[str, dict[str, StoredTensor]] = {}  # by file, and by their own names
        self._reads = FileReads()
        self._open = ExitStack()

    def __enter__(self) -> SafetensorsFolder:
        self._open.enter_context(self._reads)
        try:
            self._find()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def config(self) -> ModelConfig:
        """See ``WeightSource``."""
        if not (self.path / "config.json").is_file():
            kind = without_config(self._names_of_files(), str(self.path))
            raise ModelError(f"{self.path / 'config.json'} is missing: {kind}")
        return read_config(self.path, self._overrides)

    def tokenizer_files(self) -> TokenizerFiles:
        """See ``WeightSource``."""
        return self._tokenizer_files

    @cached_property
    def _tokenizer_files(self) -> TokenizerFiles:
        # Cached: converting other files than a tokenizer.json takes a second or two.
        return read_tokenizer_files(self.path)

    def end_tokens(self) -> list[int]:
        """See ``WeightSource``. Read from ``tokenizer_config.json`` as plain JSON: loading a
        tokenizer takes longer than everything else that a head does before its ranks start."""
        config_file, tokenizer_file = (
            self.path / "tokenizer_config.json",
            self.path / TOKENIZER_JSON,
        )
        config = read_json(config_file) if config_file.is_file() else {}
        text = special_tokens(config).get("eos_token")
        if not tokenizer_file.is_file():
            return self._end_tokens_of_other_files(config, text)
        added_tokens = None if text is None else read_json(tokenizer_file).get("added_tokens")
        tokens = [token for token in added_tokens or () if isinstance(token, dict)]
        ids = (token.get("id") for token in tokens if token.get("content") == text)
        return [token for token in ids if isinstance(token, int)]

    def weight_names(self, family: Family) -> WeightNames:
        """See ``WeightSource``."""
        return with_short_names(family.weights) | {_PROJECTION: _PROJECTION}

    def names(self) -> list[str]:
        """See ``WeightSource``."""
        return list(self._file_of)

    def weight_files(self) -> list[str]:
        """See ``WeightSource``."""
        index = self.path / INDEX
        files = sorted(set(weight_map(index).values())) if index.is_file() else [SINGLE]
        return files + self._projections()

    def tensor_names(self) -> list[str] | None:
        """See ``WeightSource``."""
        if all((self.path / file).is_file() for file in self.weight_files()):
            with SafetensorsFolder(self.path, "np") as folder:
                return folder.names()
        index = self.path / INDEX
        if not index.is_file():
            return None
        numbers = range(len(self._projections()))
        return [*weight_map(index), *(_PROJECTION.format(i=number) for number in numbers)]

    def dtype(self, name: str) -> str:
        """See ``WeightSource``."""
        return str(self._slice(name).get_dtype())

    def block_format(self, name: str) -> BlockFormat | None:
        """See ``WeightSource``."""
        return None

    def block_formats(self) -> frozenset[str]:
        """See ``WeightSource``. Tensors of other formats are rejected when they are loaded."""
        return frozenset()

    def order(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource``."""
        return None

    def stored(self) -> list[StoredTensor]:
        """See ``WeightSource``."""
        return [each for file in self.weight_files() for each in _stored(self.path / file)]

    def spare(self, name: str) -> bool:
        """See ``WeightSource``."""
        return False

    def whole(self, name: str) -> Any:
        """A whole small tensor, with any number of dimensions."""
        place = self._place(name)
        self._reads.note_read(place.end - place.begin)
        return self._files[self._file_of[name]].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return tuple(self._slice(name).get_shape())

    def read_ahead(self, names: Iterable[str]) -> None:
        """See ``WeightSource``."""
        self._reads.ahead([self._place(name) for name in names])

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
        import torch

        path, tensor = self.path / self._file_of[name], self._slice(name)
        begin = self._place(name).begin
        dtype = torch_dtype(str(tensor.get_dtype()))
        shape = tuple(tensor.get_shape())
        if index is not None:
            shape = shape[1:]
            begin += index * prod(shape) * dtype.itemsize
        of_row = prod(shape[1:]) * dtype.itemsize
        if dim == 1:
            columns = torch.empty((shape[0], end - first), dtype=dtype)
            self._reads.columns(path, begin, of_row, first * dtype.itemsize, columns, name)
            return columns
        if into is None:
            into = torch.empty((end - first, *shape[1:]), dtype=dtype)
        self._reads.rows(path, begin + first * of_row, into, name)
        return into

    def _end_tokens_of_other_files(self, config: dict[str, Any], text: str | None) -> list[int]:
        """The end tokens of a tokenizer that has to be converted, unless the configuration has the
        id. Empty if the conversion fails, since an engine works on token ids without one."""
        try:
            tokens = AddedTokens(self.path, config).by_number.items()
            if ids := [number for number, token in tokens if token["content"] == text]:
                return ids
            files = self.tokenizer_files()
        except ModelError:
            return []
        number = files.added_tokens().get(special_tokens(files.config).get("eos_token", ""))
        return [] if number is None else [number]

    def _place(self, name: str) -> FilePart:
        stored = self._stored[self._file_of[name]][self._own_names.get(name, name)]
        return FilePart(stored.file, stored.begin, stored.begin + stored.nbytes)

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._own_names.get(name, name))

    def _projections(self) -> list[str]:
        """The files of the linear layers over the text vector, in order."""
        return [f"{folder.name}/{SINGLE}" for folder in dense_folders(self.path)]

    def _names_of_files(self) -> list[str]:
        return [path.name for path in self.path.iterdir()] if self.path.is_dir() else []

    def _find(self) -> None:
        index = self.path / INDEX
        if index.is_file():
            self._find_shards(index)
        elif (self.path / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open_file(SINGLE), SINGLE)
        else:
            raise without_loadable_weights(self._names_of_files(), str(self.path))
        for number, file in enumerate(self._projections()):
            for name in self._open_file(file):
                ours = _PROJECTION.format(i=number) if name == _LINEAR else f"{file}: {name}"
                self._file_of[ours], self._own_names[ours] = file, name

    def _find_shards(self, index: Path) -> None:
        tensors = weight_map(index)
        for file in sorted(set(tensors.values())):
            present: set[str] = set(self._open_file(file))
            expected = {name for name, where in tensors.items() if where == file}
            if expected - present:
                raise ModelError(
                    f"{self.path / file} lacks {sorted(expected - present)[0]}, which {INDEX} "
                    f"says it has: the two come from different downloads; download both again"
                )
            # Tensors missing from the index are included, so that the loader rejects unknown ones.
            for name in sorted(present):
                self._file_of[name] = file

    def _open_file(self, file: str) -> list[str]:
        # Imported here, since routers do not need the library.
        from safetensors import SafetensorError, safe_open

        path = self.path / file
        if not path.is_file():
            lists = "modules.json" if "/" in file else INDEX
            raise ModelError(f"{path} is missing, and {lists} lists it: resume the download")
        try:
            content = self._open.enter_context(safe_open(path, framework=self._framework))
        except (SafetensorError, OSError) as error:
            raise self._broken(file, error) from error
        self._files[file] = content
        self._stored[file] = {each.name: each for each in _stored(path)}
        names = list(content.keys())
        _check_names(path, names)
        return names

    def _broken(self, file: str, error: Exception) -> ModelError:
        path = self.path / file
        with path.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER:
                return ModelError(f"{path} is {LFS_REMEDY}")
        size = path.stat().st_size
        return ModelError(
            f"{path} ({size} bytes) is truncated or not a safetensors file ({_in_line(error)}): "
            f"delete it and download it again"
        )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a name in the files. Raises ``ModelError`` for an unsupported one."""
    import torch

    kinds = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
    if name not in kinds:
        raise ModelError(f"a tensor is saved in {name}; supported: {', '.join(kinds)}")
    return kinds[name]


def _stored(file: Path) -> list[StoredTensor]:
    """The tensors of a valid file."""
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        place = file, 8 + length + begin, end - begin
        tensors.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *place))
    return tensors


def _check_names(path: Path, names: Iterable[str]) -> None:
    """Reject tensor names that do not fit in a line of an error message."""
    for name in names:
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise ModelError(
                f"{path} has a tensor named {brief(name)}: names are up to {_MAX_NAME} "
                "printable characters; delete the file and download it again"
            )


def _in_line(error: Exception) -> str:
    """The library's message, which quotes the file, in one line."""
    text = "".join(each if each.isprintable() else " " for each in str(error))
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def without_loadable_weights(files: Collection[str], place: str) -> ModelError:
    """The error for a folder or repository whose ``files`` have no loadable weights."""
    return ModelError(f"{place} has neither {SINGLE} nor {INDEX}: {without_weights(files, place)}")


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    tensors = read_json(index).get("weight_map")
    if not isinstance(tensors, dict) or not tensors:
        raise ModelError(f"{index}: weight_map is missing or empty: download the file again")
    _check_names(index, tensors)
    for file in tensors.values():
        if (
            not isinstance(file, str)
            or not file.isprintable()
            or Path(file).name != file
            or len(file.encode()) > _MAX_FILE
        ):
            raise ModelError(f"{index}: {brief(file)} is not the name of a file in the folder")
        if not file.endswith(".safetensors"):
            raise ModelError(
                f"{index}: {brief(file)} is not a safetensors file, as its name says; download or "
                f"convert the weights in safetensors"
            )
    return tensors
