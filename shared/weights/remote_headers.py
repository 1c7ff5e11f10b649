"""Weights of a model on a hub by their headers alone, beside its other files, which are here."""

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


def absent_files(found: FoundModel, source: WeightSource) -> list[str]:
    """The files of weights that a folder of a hub's model lacks so far."""
    if found.download is None or not found.path.is_dir():
        return []
    return [file for file in source.weight_files() if not (found.path / file).is_file()]


@contextmanager
def with_headers(
    found: FoundModel,
    source: WeightSource,
    absent: Sequence[str],
    overrides: Mapping[str, Any] | None,
) -> Iterator[WeightSource]:
    """The source of a model with the headers of the files that are absent, which last as long as
    the context; without a listing, the source as it is. Raises ``ModelError``."""
    download = found.download
    if not absent or download is None or download.listing is None:
        yield source
        return
    with header_folder(download.name.repository) as folder:
        try:
            _fetch(found.path, download, download.listing, absent, folder)
        except OSError as error:
            raise no_room(str(download.name), error) from error
        yield open_source(folder, overrides)


def _fetch(
    described: Path, download: Download, listing: Listing, absent: Sequence[str], folder: Path
) -> None:
    for path in described.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(described)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(described)).symlink_to(path)

    def fetch(file: str) -> None:
        read = partial(download.hub.read, download.name, listing.commit, file)
        write_safetensors_header(read, listing.size_of(file), folder / file)

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        list(threads.map(fetch, absent))
