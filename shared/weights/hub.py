"""The Hugging Face hub: listings and downloads."""

from __future__ import annotations

import glob
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..config.model_name import HubName
from ..errors import ModelError
from . import resumable
from .remote_files import DESCRIPTION, Listing
from .transfer import check_space, disk_problem, report_progress, silenced

# The folders that are left out if the hub does not list files.
_FOLDERS = ["*/*"]
# Loggers of the HTTP client.
_TRANSPORTS = ("httpx", "httpx2")
_SECONDS = 5.0


class HuggingFaceHub:
    """A ``ModelHub`` by huggingface_hub, with its environment variables: HF_TOKEN, HF_ENDPOINT,
    HF_HOME, HF_HUB_OFFLINE."""

    def listing(self, name: HubName) -> Listing:
        """See ``ModelHub``."""
        from huggingface_hub import HfApi

        with _client_errors(name):
            about = HfApi().model_info(
                name.repository, revision=name.revision, timeout=_SECONDS, files_metadata=True
            )
        return Listing({file.rfilename: file.size for file in about.siblings or ()}, about.sha)

    def cached_folder(self, name: HubName, commit: str | None = None) -> Path | None:
        """See ``ModelHub``."""
        folder = _folder(name)
        revision = commit or name.revision or "main"
        ref = folder / "refs" / revision
        commit = ref.read_text().strip() if ref.is_file() else revision
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and snapshot.is_dir() else None

    def download_description(self, name: HubName, listing: Listing | None) -> Path:
        """See ``ModelHub``."""
        with _without_progress_bars():  # small files need none; only errors are printed
            if listing is None:
                return _download(name, list(DESCRIPTION), name.revision, ignore_patterns=_FOLDERS)
            files = [
                file
                for file in listing.belonging()
                if any(fnmatch(file, form) for form in DESCRIPTION)
            ]
            return _download(name, [glob.escape(file) for file in files], name.revision)

    def download(
        self, name: HubName, files: Sequence[str], listing: Listing | None, folder: Path | None
    ) -> Path:
        """See ``ModelHub``."""
        local = folder or self.cached_folder(name, listing.commit if listing else None)
        missing = [file for file in files if local is None or not (local / file).is_file()]
        if local is not None and not missing:
            return local
        cache, blobs = _cache(), _folder(name) / "blobs"
        size = listing.bytes_of(missing) if listing is not None else 0
        partial_bytes = _disk_usage(blobs, f"*{resumable.ENDING}")
        if listing is not None:
            check_space(str(name), size - partial_bytes, cache, _variable())
        before = _disk_usage(blobs) - partial_bytes
        # The folder's version, since a newer one may have been published meanwhile.
        version = folder.name if folder else name.revision
        bars = nullcontext() if sys.stderr.isatty() else _without_progress_bars()
        with (
            report_progress(str(name), missing, size, cache, lambda: _disk_usage(blobs) - before),
            bars,
        ):
            if listing is not None:
                large = [f for f in missing if listing.bytes_of([f]) >= resumable.LARGE]
                with _client_errors(name):
                    resumable.fetch(name.repository, listing.commit or name.revision, large, blobs)
            result = _download(name, [glob.escape(file) for file in files], version)
        # Without a network, some versions of the client return an incomplete folder.
        if lacking := [file for file in files if not (result / file).is_file()]:
            raise ModelError(
                f"{str(name)!r} is incomplete in the hub's cache, which lacks {lacking[0]}: run "
                f"tandem pull {name} where there is a network"
            )
        return result

    def read(self, name: HubName, commit: str | None, file: str, begin: int, end: int) -> bytes:
        """See ``ModelHub``."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(name.repository, file, revision=commit or name.revision)
        headers = {
            **build_hf_headers(),
            "range": f"bytes={begin}-{end - 1}",
            "accept-encoding": "identity",
        }
        parts, remaining = [], end - begin
        session = get_session()
        with (
            _client_errors(name),
            session.stream("GET", url, headers=headers, timeout=4 * _SECONDS) as reply,
        ):
            hf_raise_for_status(reply)
            if reply.status_code != 206 and begin:
                raise ModelError(
                    f"{url} does not support range requests, which reading its header needs"
                )
            for part in reply.iter_bytes():
                parts.append(part[:remaining])
                remaining -= len(parts[-1])
                if remaining <= 0:
                    break
        return b"".join(parts)


@contextmanager
def _client_errors(name: HubName) -> Iterator[None]:
    """Silence the client, and turn its errors into ``ModelError``."""
    import huggingface_hub.utils.logging  # noqa: F401  # it sets the level of its logger

    try:
        with silenced("huggingface_hub", *_TRANSPORTS):
            yield
    except ModelError:
        raise
    except Exception as error:  # the client also raises errors of its transport
        raise _failure(name, error) from error


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from huggingface_hub import utils

    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def _closed_bars() -> Iterator[type]:
    """A class of progress bars that are closed at the end: the client leaves them open, so they
    would be drawn again when the process exits. Empty bars are removed."""
    from huggingface_hub.utils import tqdm

    bars: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
            bars.append(self)

    try:
        yield Bar
    finally:
        for bar in reversed(bars):  # in reverse, so that the cursor ends where the first bar began
            bar.leave = bar.n > 0
            bar.close()
        sys.stderr.flush()  # the last one is not followed by a newline


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _variable() -> str:
    """The environment variable that moves the cache."""
    return "HF_HUB_CACHE" if "HF_HUB_CACHE" in os.environ else "HF_HOME"


def _folder(name: HubName) -> Path:
    """The folder of a repository in the cache."""
    return _cache() / "--".join(("models", *name.repository.split("/")))


def _disk_usage(blobs: Path, form: str = "*") -> int:
    """The bytes of files in the cache, by default including incomplete ones."""
    total = 0
    for file in blobs.glob(form):
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += file.stat().st_blocks * 512
    return total


def _download(
    name: HubName,
    patterns: list[str],
    revision: str | None,
    ignore_patterns: list[str] | None = None,
) -> Path:
    from huggingface_hub import snapshot_download

    with _client_errors(name), _closed_bars() as bar, warnings.catch_warnings():
        # On a full disk, the client warns and continues until writing fails.
        warnings.filterwarnings("ignore", "Not enough free disk space", UserWarning)
        return Path(
            snapshot_download(
                name.repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=ignore_patterns,
                etag_timeout=_SECONDS,
                tqdm_class=bar,
            )
        )


def _failure(name: HubName, error: Exception) -> ModelError:
    return ModelError(
        f"{str(name)!r} is not on this machine, and cannot be downloaded from the hub: "
        f"{_reason(name, error)}"
    )


def _reason(name: HubName, error: Exception) -> str:
    """The cause of a failed download, and the remedy."""
    from huggingface_hub import constants, errors

    causes = list(_causes(error))
    hub = constants.ENDPOINT
    for cause in causes:
        if isinstance(cause, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
            return (
                f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} lacks the model or "
                f"a part of it; unset it, or run tandem pull {name} where there is a network"
            )
        if isinstance(cause, errors.GatedRepoError):
            return (
                f"it is gated: accept its terms at {hub}/{name.repository}, then run hf auth "
                f"login, or set HF_TOKEN to a token of the same account"
            )
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"{hub} has no such model, or it is private: check the spelling; for a private "
                f"one run hf auth login, or set HF_TOKEN"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return _of_revision(name)
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return f"{hub} lacks a file of it: {_first_line(cause)}"
        if isinstance(cause, errors.HfHubHTTPError) and cause.response is not None:
            return _of_status(hub, cause.response.status_code)
        if isinstance(cause, errors.HFValidationError):
            return "a name on the hub is OWNER/NAME, such as Qwen/Qwen3-0.6B"
        if isinstance(cause, ValueError):  # too large for a client without hf_xet
            return _first_line(cause)
        if isinstance(cause, OSError) and (
            of_disk := disk_problem(cause, constants.HF_HUB_CACHE, _variable())
        ):
            return of_disk
    message = _first_line(causes[-1])
    if getproxies().get(urlsplit(hub).scheme) or "Proxy" in type(causes[-1]).__name__:
        return f"no connection to {hub} through the proxy that HTTPS_PROXY names ({message})"
    return (
        f"no connection to {hub} ({message}): without a network, download it elsewhere and give "
        f"the folder; HTTPS_PROXY sets a proxy, HF_ENDPOINT a mirror"
    )


def _of_revision(name: HubName) -> str:
    """The message for an unknown revision, with similar ones."""
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(name.repository)
    except Exception:  # the client also raises errors of its transport
        revisions = []
    else:
        revisions = [ref.name for ref in (*refs.branches, *refs.tags)]
    near = get_close_matches(name.revision or "", revisions, 5, 0.4) or revisions[:5]
    hint = f"; it has {', '.join(near)}" if near else ""
    return f"{name.repository} has no revision {name.revision!r}{hint}"


def _of_status(hub: str, status: int) -> str:
    if status in (401, 403):
        return f"{hub} rejects the token of HF_TOKEN or hf auth login (status {status})"
    if status == 429:
        return f"{hub} has had too many requests (status 429): wait, or set HF_TOKEN"
    return f"{hub} responds with status {status}; try again later"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
