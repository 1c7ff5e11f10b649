"""Models on the Hugging Face hub, whose weights are downloaded last."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import ModelError

# Everything that says what a model is.
_DESCRIPTION = ["*.json", "*.jinja", "tokenizer.model"]
# The folders that belong to it; others have other formats.
_DESCRIBING = ("additional_chat_templates/", "1_Pooling/")
_FOLDERS = ["*/*"]
_SECONDS = 5.0


def list_files(name: str) -> list[str] | None:
    """The files of a model's repository, of those in folders only what describes it; ``None`` if
    the hub does not tell, which the download will explain unless the model is in the cache."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, timeout=_SECONDS).siblings
    except Exception:  # the client raises its transport's errors as well as its own
        return None
    names = [file.rfilename for file in files or ()]
    return [name for name in names if "/" not in name or name.startswith(_DESCRIBING)]


def download_description(name: str, files: Sequence[str] | None) -> Path:
    """Download everything but the weights, given what ``list_files`` returned. Returns the folder
    of the model's current version."""
    with _without_progress_bars():
        if files is None:
            return _download(name, _DESCRIPTION, None, unwanted=_FOLDERS)
        wanted = [file for file in files if any(fnmatch(file, form) for form in _DESCRIPTION)]
        return _download(name, [glob.escape(file) for file in wanted], None)


def download_weights(name: str, folder: Path, files: Sequence[str]) -> None:
    """Download files of the version of a model that is in ``folder``."""
    _download(name, [glob.escape(file) for file in files], folder.name)
    for file in files:
        if not (folder / file).is_file():  # without a network, some versions return what there is
            raise ModelError(
                f"{name!r} is not whole in the hub's cache, which lacks {file}: run hf download "
                f"{name} where there is a network"
            )


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Small files need none, and an error is then the only line."""
    from huggingface_hub import utils

    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _download(
    name: str, wanted: list[str], revision: str | None, unwanted: list[str] | None = None
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=unwanted,
                etag_timeout=_SECONDS,
            )
        )
    except Exception as error:  # as above
        raise ModelError(
            f"{name!r} is not a folder here, and cannot be downloaded from the hub: "
            f"{_reason(name, error)}"
        ) from error


def _reason(name: str, error: Exception) -> str:
    """The cause of a failed download, and what to do."""
    from huggingface_hub import constants, errors

    causes = list(_causes(error))
    hub = constants.ENDPOINT
    for cause in causes:
        if isinstance(cause, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
            return (
                f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} lacks the model or "
                f"a part of it; unset it, or run hf download {name} where there is a network"
            )
        if isinstance(cause, errors.GatedRepoError):
            return (
                f"it is gated: accept its terms at {hub}/{name}, then run hf auth login, or set "
                f"HF_TOKEN to a token of the same account"
            )
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"{hub} has no such model, or it is private: check the spelling; for a private "
                f"one run hf auth login, or set HF_TOKEN"
            )
        if isinstance(cause, errors.HfHubHTTPError) and cause.response is not None:
            return _of_status(hub, cause.response.status_code)
        if isinstance(cause, errors.HFValidationError):
            return "a name on the hub is OWNER/NAME, such as Qwen/Qwen3-0.6B"
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            return (
                f"{os.strerror(cause.errno)}, in the cache {constants.HF_HUB_CACHE}: HF_HOME moves "
                f"it"
            )
    said = _first_line(causes[-1])
    if getproxies().get(urlsplit(hub).scheme) or "Proxy" in type(causes[-1]).__name__:
        return f"no connection to {hub} through the proxy that HTTPS_PROXY names ({said})"
    return (
        f"no connection to {hub} ({said}): without a network, download it elsewhere and give the "
        f"folder; HTTPS_PROXY sets a proxy, HF_ENDPOINT a mirror"
    )


def _of_status(hub: str, status: int) -> str:
    if status in (401, 403):
        return f"{hub} rejects the token of HF_TOKEN or hf auth login (status {status})"
    if status == 429:
        return f"{hub} has had too many requests (status 429): wait, or set HF_TOKEN"
    return f"{hub} answers with status {status}; try again later"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from, outermost first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
