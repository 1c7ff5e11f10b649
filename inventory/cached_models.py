"""``tandem list``: the models in the caches of hubs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from ..shared.errors import ModelError
from ..shared.weights.folder_kind import INDEX
from ..shared.weights.gguf.choice import models_of, type_of
from ..shared.weights.safetensors_folder import weight_map
from ..shared.weights.transfer import in_words

NO_WEIGHTS = "no weights"
_SPANS = ((86400 * 365, "year"), (86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A version of a model in a cache. ``refs`` are the branches and tags by which it was
    downloaded; ``last_used`` is Unix time."""

    name: str
    revision: str
    refs: tuple[str, ...]
    format: str
    size: int
    last_used: float
    path: str
    whole: bool


def cached_models() -> list[CachedModel]:
    """All models in the caches, the last used first."""
    return sorted((*_of_hugging_face(), *_of_modelscope()), key=lambda each: -each.last_used)


def _of_hugging_face() -> Iterator[CachedModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            folder = revision.snapshot_path
            files = [str(file.file_path.relative_to(folder)) for file in revision.files]
            yield CachedModel(
                repository.repo_id,
                revision.commit_hash,
                tuple(sorted(revision.refs)),
                format_of(files),
                revision.size_on_disk,
                max((f.blob_last_accessed for f in revision.files), default=revision.last_modified),
                str(folder),
                is_whole(folder, files),
            )


def _of_modelscope() -> Iterator[CachedModel]:
    if find_spec("modelscope_hub") is None:
        return
    from modelscope_hub import get_default_config

    for folder in sorted(get_default_config().cache_dir.glob("models/*/snapshots/*")):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        if not paths:
            continue
        files = [str(path.relative_to(folder)) for path in paths]
        states = [path.stat() for path in paths]
        yield CachedModel(
            f"modelscope:{folder.parts[-3].replace('--', '/', 1)}",
            folder.name,
            (folder.name,),
            format_of(files),
            sum(state.st_size for state in states),
            max(state.st_atime for state in states),
            str(folder),
            is_whole(folder, files),
        )


def format_of(files: Iterable[str]) -> str:
    """The format of a model's weights, by the names of its files."""
    files = list(files)
    if any(file.endswith(".safetensors") for file in files):
        return "safetensors"
    if ggufs := models_of(files):
        types = sorted({type_of(first) for first in ggufs} - {""})
        return " ".join(["GGUF", ", ".join(types)]).strip()
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return "pickle"
    return NO_WEIGHTS


def is_whole(folder: Path, files: Sequence[str]) -> bool:
    """False if files are known to be missing: files of an index, or parts of a GGUF file."""
    if INDEX in files:
        try:
            return set(weight_map(folder / INDEX).values()) <= set(files)
        except ModelError:
            return False
    for parts in models_of(files).values():
        count = re.search(r"-of-(\d{5})\.gguf$", parts[0], re.IGNORECASE)
        if count is not None and len(parts) < int(count[1]):
            return False
    return format_of(files) != NO_WEIGHTS


def as_json(models: Sequence[CachedModel]) -> str:
    """All fields as JSON."""
    return json.dumps([asdict(model) for model in models], indent=2)


def as_table(models: Sequence[CachedModel]) -> str:
    """A line for each version."""
    if not models:
        return "no models; tandem pull MODEL downloads one"
    rows = [("NAME", "REVISION", "FORMAT", "SIZE", "LAST USED")]
    for model in models:
        short, refs = model.revision[:8], ",".join(model.refs)
        revision = f"{refs} ({short})" if refs not in ("", model.revision) else refs or short
        incomplete = not model.whole and model.format != NO_WEIGHTS
        kind = f"{model.format}, incomplete" if incomplete else model.format
        rows.append((model.name, revision, kind, in_words(model.size), _ago(model.last_used)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _ago(moment: float) -> str:
    seconds = time.time() - moment
    for length, unit in _SPANS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
