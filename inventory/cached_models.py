"""``tandem list``: the models in the caches of hubs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..shared.weights.folder_kind import INDEX
from ..shared.weights.gguf_choice import models_of, type_of
from ..shared.weights.safetensors_folder import weight_map
from ..shared.weights.transfer import in_words

_SPANS = ((86400 * 365, "year"), (86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A version of a model in a cache. ``refs`` are the branches and tags that it was downloaded
    as; ``last_used`` is in seconds since 1970."""

    name: str
    revision: str
    refs: tuple[str, ...]
    format: str
    size: int
    last_used: float
    path: str
    whole: bool


def cached_models() -> list[CachedModel]:
    """All models in the hub's cache, the last used first."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        scanned = scan_cache_dir()
    except CacheNotFound:
        return []
    found = [
        CachedModel(
            repository.repo_id,
            revision.commit_hash,
            tuple(sorted(revision.refs)),
            format_of(
                files := [
                    str(f.file_path.relative_to(revision.snapshot_path)) for f in revision.files
                ]
            ),
            revision.size_on_disk,
            max((f.blob_last_accessed for f in revision.files), default=revision.last_modified),
            str(revision.snapshot_path),
            is_whole(revision.snapshot_path, files),
        )
        for repository in scanned.repos
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(found, key=lambda each: -each.last_used)


def format_of(files: Iterable[str]) -> str:
    """The format of the weights among the files of a model."""
    files = list(files)
    if any(file.endswith(".safetensors") for file in files):
        return "safetensors"
    if ggufs := models_of(files):
        types = sorted({type_of(first) for first in ggufs} - {""})
        return " ".join(["GGUF", ", ".join(types)]).strip()
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return "pickle"
    return "no weights"


def is_whole(folder: Path, files: Sequence[str]) -> bool:
    """False if files are known to be missing: some of an index, or parts of a GGUF file."""
    if INDEX in files:
        try:
            return set(weight_map(folder / INDEX).values()) <= set(files)
        except Exception:
            return False
    for parts in models_of(files).values():
        count = re.search(r"-of-(\d{5})\.gguf$", parts[0], re.IGNORECASE)
        if count is not None and len(parts) < int(count[1]):
            return False
    return format_of(files) != "no weights"


def as_json(models: Sequence[CachedModel]) -> str:
    """Every field, for programs."""
    return json.dumps([asdict(model) for model in models], indent=2)


def as_table(models: Sequence[CachedModel]) -> str:
    """A line for each version."""
    if not models:
        return "no models; tandem pull MODEL downloads one"
    rows = [("NAME", "REVISION", "FORMAT", "SIZE", "LAST USED")]
    for model in models:
        short = model.revision[:8]
        revision = f"{','.join(model.refs)} ({short})" if model.refs else short
        kind = model.format if model.whole else f"{model.format}, not whole"
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
