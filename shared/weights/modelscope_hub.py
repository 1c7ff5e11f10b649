"""ModelScope: what a repository has, and downloads of some of it."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.model_name import HubName
from ..errors import ModelError
from .remote_files import DESCRIPTION, Listing
from .transfer import check_space, told, told_of_disk

if TYPE_CHECKING:
    from modelscope_hub import HubApi

_SECONDS = 20.0
_CACHE = "MODELSCOPE_CACHE"
_OF_SYSTEM = re.compile(r"\[Errno -?\d+\] [^()'\"]+")
# Without a network, the client's own numbers of attempts take a quarter of a minute.
_ATTEMPTS = ("MODELSCOPE_API_MAX_RETRIES", "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS")


class ModelScopeHub:
    """A ``ModelHub``, by modelscope_hub, whose variables hold: MODELSCOPE_API_TOKEN,
    MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE."""

    def listing(self, name: HubName) -> Listing:
        """See ``ModelHub``. ModelScope's cache has a folder for each name of a version, so that
        none is known by its commit."""
        with _asking(name) as api:
            files = api.list_repo_files(name.repository, "model", revision=name.revision)
        return Listing({file.path: file.size for file in files if file.type != "tree"})

    def cached(self, name: HubName, commit: str | None = None) -> Path | None:
        """See ``ModelHub``."""
        from modelscope_hub import CacheError, HubApi

        try:
            return HubApi().download_repo(
                name.repository, "model", revision=name.revision, local_files_only=True
            )
        except CacheError:
            return None

    def download_description(self, name: HubName, listing: Listing | None) -> Path:
        """See ``ModelHub``."""
        if listing is None:
            folder = self.cached(name)
            assert folder is not None, "asked for what is in the cache"
            return folder
        wanted = [
            file for file in listing.belonging() if any(fnmatch(file, form) for form in DESCRIPTION)
        ]
        return _download(name, wanted)

    def download(
        self, name: HubName, files: Sequence[str], listing: Listing | None, folder: Path | None
    ) -> Path:
        """See ``ModelHub``."""
        known = folder or self.cached(name)
        missing = [file for file in files if known is None or not (known / file).is_file()]
        if known is not None and not missing:
            return known
        if listing is None:
            raise ModelError(
                f"{str(name)!r} is not whole in ModelScope's cache, which lacks {missing[0]}"
            )
        from modelscope_hub import get_default_config

        cache = get_default_config().cache_dir
        place = cache / "models" / name.repository.replace("/", "--")
        begun = _held(place, "*.incomplete")
        size = listing.bytes_of(missing)
        check_space(str(name), size - begun, cache, _CACHE)
        before = _held(place) - begun
        with told(str(name), missing, size, cache, lambda: _held(place) - before):
            return _download(name, missing)

    def read(self, name: HubName, commit: str | None, file: str, begin: int, end: int) -> bytes:
        """See ``ModelHub``."""
        import requests
        from modelscope_hub import get_default_config

        with _asking(name) as api:
            url = api.legacy.get_download_url(
                name.repository, "model", file, name.revision or "master"
            )
            token = get_default_config().token
            reply = requests.get(
                url,
                headers={"Range": f"bytes={begin}-{end - 1}"},
                cookies={"m_session_id": token} if token else None,
                timeout=_SECONDS,
                stream=True,
            )
            with reply:
                reply.raise_for_status()
                if reply.status_code != 206 and begin:
                    raise ModelError(f"{url} is not given in parts, which its header needs")
                return _first(reply.iter_content(1 << 20), end - begin)


def _first(parts: Iterator[bytes], size: int) -> bytes:
    data = b""
    for part in parts:
        data += part
        if len(data) >= size:
            break
    return data[:size]


def _held(place: Path, form: str = "*") -> int:
    total = 0
    for file in place.rglob(form):
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _download(name: HubName, files: Sequence[str]) -> Path:
    with _asking(name) as api:
        return api.download_repo(
            name.repository,
            "model",
            revision=name.revision,
            allow_patterns=[glob.escape(file) for file in files],
        )


@contextmanager
def _asking(name: HubName) -> Iterator[HubApi]:
    """The client, at the site that has the model. Its errors become ``ModelError``."""
    for variable in _ATTEMPTS:  # read when the client is imported
        os.environ.setdefault(variable, "2")
    import requests
    from modelscope_hub import HubApi, HubError

    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)  # an error is the only line
    try:
        api = HubApi()
        yield HubApi(endpoint=api.resolve_endpoint_for_read(name.repository))
    except (HubError, requests.RequestException, OSError) as error:
        raise ModelError(
            f"{str(name)!r} is not on this machine, and cannot be downloaded from ModelScope: "
            f"{_reason(name, error)}"
        ) from error


def _reason(name: HubName, error: Exception) -> str:
    """The cause of a failed download, and what to do."""
    import requests
    from modelscope_hub import (
        AuthenticationError,
        FileDownloadError,
        NotExistError,
        PermissionDeniedError,
        RequestTimeoutError,
        ServerError,
        get_default_config,
    )

    if isinstance(error, FileDownloadError) and error.failed_files:
        failed = next(iter(error.failed_files.values()))
        return _reason(name, failed) if isinstance(failed, Exception) else str(failed)
    place = get_default_config().endpoint
    if isinstance(error, (AuthenticationError, PermissionDeniedError)):
        return (
            f"it is private or gated: ask for access at {place}/models/{name.repository}, then set "
            f"MODELSCOPE_API_TOKEN, or run modelscope login"
        )
    if isinstance(error, NotExistError):
        return _without(name, str(place))
    if isinstance(error, ServerError):
        return f"{place} answers with status {error.status_code}; try again later"
    if isinstance(error, OSError) and (
        of_disk := told_of_disk(error, get_default_config().cache_dir, _CACHE)
    ):
        return of_disk
    late = isinstance(error, (RequestTimeoutError, requests.Timeout))
    said = "it took too long" if late else _said(error)
    return (
        f"no answer from {place} ({said:.200}): without a network, download it elsewhere and give "
        f"the folder; MODELSCOPE_ENDPOINT sets a mirror"
    )


def _said(error: Exception) -> str:
    """The system's error that an error quotes; else what it says, unless that is in Chinese."""
    if found := _OF_SYSTEM.search(str(error)):
        return found[0]
    first = (str(error).splitlines() or [""])[0]
    return first if first and first.isascii() else type(error).__name__


def _without(name: HubName, place: str) -> str:
    from modelscope_hub import HubApi, HubError

    if name.revision is None:
        return f"{place} has no such model, or it is private: check the spelling"
    try:
        revisions = HubApi().list_repo_revisions(name.repository, "model")
    except HubError:
        return f"{place} has no such model or revision, or it is private: check the spelling"
    listed = [str(each.get("Revision") or each.get("revision") or "") for each in revisions]
    near = get_close_matches(name.revision, listed, 5, 0.4) or listed[:5]
    known = f"; it has {', '.join(near)}" if near else ""
    return f"{name.repository} has no revision {name.revision!r}{known}"
