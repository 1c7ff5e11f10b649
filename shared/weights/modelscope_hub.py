"""ModelScope: listings and downloads."""

from __future__ import annotations

import glob
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
from .transfer import check_space, disk_problem, report_progress, silenced

if TYPE_CHECKING:
    from modelscope_hub import HubApi

_SECONDS = 20.0
_CACHE = "MODELSCOPE_CACHE"
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] [^()'\"]+")
# By default, the client retries for 15 seconds without a network.
_ATTEMPTS = ("MODELSCOPE_API_MAX_RETRIES", "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS")


class ModelScopeHub:
    """A ``ModelHub`` by modelscope_hub, with its environment variables: MODELSCOPE_API_TOKEN,
    MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE."""

    def listing(self, name: HubName) -> Listing:
        """See ``ModelHub``. Without a commit: ModelScope's cache has a folder for each revision
        name."""
        with _client(name) as api:
            files = api.list_repo_files(name.repository, "model", revision=name.revision)
        return Listing({file.path: file.size for file in files if file.type != "tree"})

    def cached_folder(self, name: HubName, commit: str | None = None) -> Path | None:
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
            folder = self.cached_folder(name)
            assert folder is not None, "without a listing, the model is in the cache"
            return folder
        files = [
            file for file in listing.belonging() if any(fnmatch(file, form) for form in DESCRIPTION)
        ]
        return _download(name, files)

    def download(
        self, name: HubName, files: Sequence[str], listing: Listing | None, folder: Path | None
    ) -> Path:
        """See ``ModelHub``."""
        local = folder or self.cached_folder(name)
        missing = [file for file in files if local is None or not (local / file).is_file()]
        if local is not None and not missing:
            return local
        if listing is None:
            raise ModelError(
                f"{str(name)!r} is incomplete in ModelScope's cache, which lacks {missing[0]}"
            )
        from modelscope_hub import get_default_config

        cache = get_default_config().cache_dir
        place = cache / "models" / name.repository.replace("/", "--")
        partial_bytes = _disk_usage(place, "*.incomplete")
        size = listing.bytes_of(missing)
        check_space(str(name), size - partial_bytes, cache, _CACHE)
        before = _disk_usage(place) - partial_bytes
        with report_progress(str(name), missing, size, cache, lambda: _disk_usage(place) - before):
            return _download(name, missing)

    def read(self, name: HubName, commit: str | None, file: str, begin: int, end: int) -> bytes:
        """See ``ModelHub``."""
        import requests
        from modelscope_hub import get_default_config

        with _client(name) as api:
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
                    raise ModelError(
                        f"{url} does not support range requests, which reading its header needs"
                    )
                return _first(reply.iter_content(1 << 20), end - begin)


def _first(parts: Iterator[bytes], size: int) -> bytes:
    data = b""
    for part in parts:
        data += part
        if len(data) >= size:
            break
    return data[:size]


def _disk_usage(place: Path, form: str = "*") -> int:
    total = 0
    for file in place.rglob(form):
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _download(name: HubName, files: Sequence[str]) -> Path:
    with _client(name) as api:
        return api.download_repo(
            name.repository,
            "model",
            revision=name.revision,
            allow_patterns=[glob.escape(file) for file in files],
        )


@contextmanager
def _client(name: HubName) -> Iterator[HubApi]:
    """A client for the site that has the model. Its errors become ``ModelError``."""
    for variable in _ATTEMPTS:  # read when the client is imported
        os.environ.setdefault(variable, "2")
    import requests
    from modelscope_hub import HubApi, HubError

    try:
        with silenced("modelscope_hub"):
            api = HubApi()
            yield HubApi(endpoint=api.resolve_endpoint_for_read(name.repository))
    except (HubError, requests.RequestException, OSError) as error:
        raise ModelError(
            f"{str(name)!r} is not on this machine, and cannot be downloaded from ModelScope: "
            f"{_reason(name, error)}"
        ) from error


def _reason(name: HubName, error: Exception) -> str:
    """The cause of a failed download, and the remedy."""
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
        cause = next(iter(error.failed_files.values()))
        return _reason(name, cause) if isinstance(cause, Exception) else str(cause)
    place = get_default_config().endpoint
    if isinstance(error, (AuthenticationError, PermissionDeniedError)):
        return (
            f"it is private or gated: ask for access at {place}/models/{name.repository}, then set "
            f"MODELSCOPE_API_TOKEN, or run modelscope login"
        )
    if isinstance(error, NotExistError):
        return _absence(name, str(place))
    if isinstance(error, ServerError):
        return f"{place} responds with status {error.status_code}; try again later"
    if isinstance(error, OSError) and (
        of_disk := disk_problem(error, get_default_config().cache_dir, _CACHE)
    ):
        return of_disk
    timed_out = isinstance(error, (RequestTimeoutError, requests.Timeout))
    message = "it took too long" if timed_out else _message(error)
    return (
        f"no response from {place} ({message:.200}): without a network, download it elsewhere "
        f"and give the folder; MODELSCOPE_ENDPOINT sets a mirror"
    )


def _message(error: Exception) -> str:
    """The system error that an error quotes, else its first line, unless that is Chinese."""
    if match := _SYSTEM_ERROR.search(str(error)):
        return match[0]
    first = (str(error).splitlines() or [""])[0]
    return first if first and first.isascii() else type(error).__name__


def _absence(name: HubName, place: str) -> str:
    from modelscope_hub import HubApi, HubError

    if name.revision is None:
        return f"{place} has no such model, or it is private: check the spelling"
    try:
        revisions = HubApi().list_repo_revisions(name.repository, "model")
    except HubError:
        return f"{place} has no such model or revision, or it is private: check the spelling"
    names = [str(each.get("Revision") or each.get("revision") or "") for each in revisions]
    near = get_close_matches(name.revision, names, 5, 0.4) or names[:5]
    hint = f"; it has {', '.join(near)}" if near else ""
    return f"{name.repository} has no revision {name.revision!r}{hint}"
