"""Models in several GGUF files, as llama-gguf-split writes them: the first has the metadata, and
each has some of the tensors. No torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError, brief
from .header import MAX_MATRICES, GGUFHeader, matrices, read_header

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def read_model(path: Path) -> GGUFHeader:
    """The header of a model, given its file or any part: the metadata of the first part, and the
    tensors of all. Raises ``ModelError`` for a part that is missing, or no part of this model."""
    header = read_header(path)
    count = header.metadata.get(_COUNT, 1)
    if count in (0, 1):
        return header
    parts = part_files(path)
    if len(parts) != count:
        raise ModelError(
            f"{path} has {_COUNT} {brief(count)}, but not the name of one of so many parts, such "
            f"as model-00001-of-00002.gguf; the others are found by their names: rename it"
        )
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelError(
            f"{missing[0]} is missing, one of the {count} files of this model; download it too"
        )
    whole = header if path == parts[0] else read_header(parts[0])
    _check_part(parts[0], whole, 0, count)
    for number, part in enumerate(parts[1:], 1):
        whole = _joined(whole, part, number, count)
    total = whole.metadata.get(_TENSORS)
    if not whole.unsupported and total not in (None, len(whole.tensors)):
        raise ModelError(
            f"{parts[0]} has {_TENSORS} {brief(total)}, but its {count} parts have "
            f"{len(whole.tensors)} tensors; download all of them again"
        )
    return whole


def part_files(path: Path) -> list[Path]:
    """The files of a model that ``path`` is one of, by their names."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, count, suffix = path.name[: found.start()], int(found[2]), found[3]
    return [
        path.with_name(f"{stem}-{number:05}-of-{count:05}{suffix}")
        for number in range(1, count + 1)
    ]


def without_part(name: str) -> str:
    """The name of a file without its ending, and which part of a model it is."""
    return _PART.sub("", name) if _PART.search(name) else Path(name).stem


def _joined(whole: GGUFHeader, part: Path, number: int, count: int) -> GGUFHeader:
    header = read_header(part)
    _check_part(part, header, number, count)
    if twice := whole.tensors.keys() & header.tensors.keys():
        raise ModelError(
            f"{part} has tensor {min(twice)}, as a part before it has: they are not of one model"
        )
    tensors = whole.tensors | header.tensors
    if matrices(tensors.values()) > MAX_MATRICES:
        raise ModelError(f"{part}: the model has more than {MAX_MATRICES} matrices")
    return replace(whole, tensors=tensors, unsupported=header.unsupported | whole.unsupported)


def _check_part(part: Path, header: GGUFHeader, number: int, count: int) -> None:
    found = header.metadata.get(_NUMBER), header.metadata.get(_COUNT)
    if found != (number, count):
        raise ModelError(
            f"{part} has {_NUMBER} {brief(found[0])} and {_COUNT} {brief(found[1])}, but by its "
            f"name {number} and {count}: it is of another model, or was renamed"
        )
