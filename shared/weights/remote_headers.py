"""Weights of a model on a hub by their headers, beside its other files in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .header_files import header_folder, no_room, write_safetensors_header
from .locate import Download, FoundModel
from .remote_files import Listing
from .source import WeightSource, open_source

_REQUESTS_AT_ONCE = 8


def absent_files(location: FoundModel, source: WeightSource) -> list[str]:
    """The weight files that still have to be downloaded."""
    if location.download is None or not location.path.is_dir():
        return []
    return [file for file in source.weight_files() if not (location.path / file).is_file()]


@contextmanager
def with_headers(
    location: FoundModel,
    source: WeightSource,
    absent: Sequence[str],
    overrides: Mapping[str, Any] | None,
) -> Iterator[WeightSource]:
    """The source of a model with headers in place of absent files, as long as the context; without
    a listing, ``source`` itself. Raises ``ModelError``."""
    download = location.download
    if not absent or download is None or download.listing is None:
        yield source
        return
    with header_folder(download.name.repository) as folder:
        try:
            _fetch(location.path, download, download.listing, absent, folder)
        except OSError as error:
            raise no_room(str(download.name), error) from error
        yield open_source(folder, overrides)


def _fetch(
    local: Path, download: Download, listing: Listing, absent: Sequence[str], folder: Path
) -> None:
    for path in local.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(local)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(local)).symlink_to(path)

    def fetch(file: str) -> None:
        read = partial(download.hub.read, download.name, listing.commit, file)
        write_safetensors_header(read, listing.size_of(file), folder / file)

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        list(threads.map(fetch, absent))
