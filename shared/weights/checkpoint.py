"""Checkpoint in a Hugging Face model folder: index of its safetensors files, partial reads."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from ..models.registry import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """An open folder of safetensors. Files are memory-mapped, so a read costs only what it reads.

    Use as a context manager.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._open = ExitStack()

    def __enter__(self) -> Checkpoint:
        try:
            self._find()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def names(self) -> list[str]:
        """The names of all tensors in the folder."""
        return list(self._file_of)

    def dtype(self, name: str) -> str:
        """A tensor's dtype, by safetensors' names (BF16, F16, F32, ...)."""
        return str(self._slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Reads nothing."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int, first: int, end: int) -> torch.Tensor:
        """Read ``tensor[first:end]`` along ``dim`` (0 or 1)."""
        part = self._slice(name)
        try:
            return part[first:end] if dim == 0 else part[:, first:end]
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from error

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _find(self) -> None:
        index = self.folder / _INDEX
        if index.is_file():
            self._find_shards(index)
        elif (self.folder / _SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open_file(_SINGLE), _SINGLE)
        else:
            others = sorted(p.name for p in self.folder.glob("*.bin"))
            found = f"; {', '.join(others)} cannot be loaded: convert to safetensors" * bool(others)
            raise ModelError(
                f"{self.folder} has neither {_SINGLE} nor {_INDEX}: download the weights{found}"
            )

    def _find_shards(self, index: Path) -> None:
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ModelError(f"{index}: weight_map is missing or empty: download the file again")
        for file in listed.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{index}: {file!r} is not the name of a file in the folder")
        for file in sorted(set(listed.values())):
            present: set[str] = set(self._open_file(file))
            claimed = {name for name, where in listed.items() if where == file}
            if claimed - present:
                raise ModelError(
                    f"{self.folder / file} lacks {sorted(claimed - present)[0]}, which {_INDEX} "
                    f"says it holds: the two come from different downloads; download both again"
                )
            # Tensors missing from the index are listed too, so that the loader sees unknown ones.
            for name in sorted(present):
                self._file_of[name] = file

    def _open_file(self, file: str) -> list[str]:
        path = self.folder / file
        if not path.is_file():
            raise ModelError(f"{path} is missing, and {_INDEX} lists it: resume the download")
        try:
            opened = self._open.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise self._broken(file, error) from error
        self._files[file] = opened
        return list(opened.keys())

    def _broken(self, file: str, error: Exception) -> ModelError:
        path = self.folder / file
        size = path.stat().st_size
        return ModelError(
            f"{path} ({size} bytes) is truncated or not a safetensors file ({error}): "
            f"delete it and download it again"
        )
