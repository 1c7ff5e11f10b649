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
    tensors of all. Raises ``ModelError`` if a part is missing or belongs to another model."""
    header = read_header(path)
    count = header.metadata.get(_COUNT, 1)
    if count in (0, 1):
        return header
    parts = part_files(path)
    if len(parts) != count:
        raise ModelError(
            f"{path} has {_COUNT} {brief(count)}, but is not named like a part, such as "
            f"model-00001-of-00002.gguf; the others are found by their names: rename it"
        )
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelError(
            f"{missing[0]} is missing, one of the {count} files of this model; download it too"
        )
    whole = header if path == parts[0] else read_header(parts[0])
    _check_part(parts[0], whole, 0, count)
    for number, part in enumerate(parts[1:], 1):
        whole = _join(whole, part, number, count)
    total = whole.metadata.get(_TENSORS)
    if not whole.unsupported and total not in (None, len(whole.tensors)):
        raise ModelError(
            f"{parts[0]} has {_TENSORS} {brief(total)}, but its {count} parts have "
            f"{len(whole.tensors)} tensors; download all of them again"
        )
    return whole


def part_files(path: Path) -> list[Path]:
    """The files of the model that ``path`` is a part of, by name."""
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem, count, suffix = path.name[: match.start()], int(match[2]), match[3]
    return [
        path.with_name(f"{stem}-{number:05}-of-{count:05}{suffix}")
        for number in range(1, count + 1)
    ]


def without_part(name: str) -> str:
    """The name of a file without its extension and part number."""
    return _PART.sub("", name) if _PART.search(name) else Path(name).stem


def _join(whole: GGUFHeader, part: Path, number: int, count: int) -> GGUFHeader:
    header = read_header(part)
    _check_part(part, header, number, count)
    if twice := whole.tensors.keys() & header.tensors.keys():
        raise ModelError(
            f"{part} has tensor {min(twice)}, as has an earlier part: they belong to different "
            f"models"
        )
    tensors = whole.tensors | header.tensors
    if matrices(tensors.values()) > MAX_MATRICES:
        raise ModelError(f"{part}: the model has more than {MAX_MATRICES} matrices")
    return replace(whole, tensors=tensors, unsupported=header.unsupported | whole.unsupported)


def _check_part(part: Path, header: GGUFHeader, number: int, count: int) -> None:
    numbering = header.metadata.get(_NUMBER), header.metadata.get(_COUNT)
    if numbering != (number, count):
        raise ModelError(
            f"{part} has {_NUMBER} {brief(numbering[0])} and {_COUNT} {brief(numbering[1])}, but "
            f"by its name {number} and {count}: it belongs to another model, or was renamed"
        )
