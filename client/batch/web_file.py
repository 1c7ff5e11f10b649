"""Files of ``tandem run-batch`` at http(s) URLs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import IO

import httpx

from ...shared.errors import TandemError, UsageError
from ...shared.host_port import is_loopback
from ...shared.process.backoff import Backoff
from ..openai_server import CONNECT_SECONDS

SCHEMES = ("http://", "https://")
# Time limits of a transfer, and of a pause in it.
TRANSFER_SECONDS, SILENCE_SECONDS = 1000.0, 120.0
MAX_BYTES = 4 << 30
CHUNK = 1 << 20
MAX_ATTEMPTS = 5
FIRST_PAUSE, MAX_PAUSE = 1.0, 16.0


class WebFileError(TandemError):
    """A file cannot be read from its URL, or written to it."""


def is_url(name: str) -> bool:
    return name.lower().startswith(SCHEMES)


def check_url(flag: str, url: str) -> None:
    """Raise ``UsageError`` for an invalid URL."""
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL as error:
        raise UsageError(f"{flag} {without_secrets(url)}: {error}") from None
    if not host:
        raise UsageError(f"{flag} {without_secrets(url)} has no host")


def without_secrets(url: str) -> str:
    """A path, or a URL without its password and its query, which may have a signature."""
    if not is_url(url):
        return url
    scheme, _, rest = url.partition("://")
    location = rest.partition("?")[0].partition("#")[0]
    host, slash, path = location.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


@contextlib.contextmanager
def download(flag: str, url: str) -> Iterator[Path]:
    """A copy of the file at ``url`` that is removed after the block. Raises ``WebFileError``."""
    with tempfile.NamedTemporaryFile() as copy:
        _repeat(flag, url, lambda client: _download(client, url, copy))
        yield Path(copy.name)


def upload(flag: str, url: str, file: IO[bytes]) -> None:
    """PUT ``file``, with the content length that object stores require. Raises
    ``WebFileError``."""
    _repeat(flag, url, lambda client: _upload(client, url, file))


def _download(client: httpx.Client, url: str, copy: IO[bytes]) -> None:
    copy.seek(0)
    copy.truncate()
    with client.stream("GET", url, follow_redirects=True) as response:
        response.raise_for_status()
        for data in _in_time(response.iter_bytes(CHUNK)):
            copy.write(data)
            if copy.tell() > MAX_BYTES:
                raise WebFileError(f"it has more than {MAX_BYTES} bytes; give a path instead")
    copy.flush()


def _upload(client: httpx.Client, url: str, file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    chunks = _in_time(iter(lambda: file.read(CHUNK), b""))
    headers = {"content-type": "application/jsonl", "content-length": str(size)}
    client.put(url, content=chunks, headers=headers).raise_for_status()


def _in_time(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks. Raises ``WebFileError`` at the time limit of a transfer."""
    deadline = time.monotonic() + TRANSFER_SECONDS
    for chunk in chunks:
        if time.monotonic() > deadline:
            raise WebFileError(f"it takes more than {TRANSFER_SECONDS:g} s")
        yield chunk


def _repeat(flag: str, url: str, transfer: Callable[[httpx.Client], None]) -> None:
    """Run ``transfer``, again after a transient failure."""
    backoff = Backoff(FIRST_PAUSE, MAX_PAUSE)
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    with httpx.Client(timeout=timeout, trust_env=not is_loopback(httpx.URL(url).host)) as client:
        for retries in reversed(range(MAX_ATTEMPTS)):
            try:
                transfer(client)
                return
            except WebFileError as error:
                raise WebFileError(f"{flag} {without_secrets(url)}: {error}") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if not retries or not _is_transient(error):
                    raise WebFileError(f"{flag} {without_secrets(url)}: {_reason(error)}") from None
            time.sleep(backoff.pause())


def _is_transient(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(error, httpx.TransportError) and not isinstance(
        error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
    )


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {error.response.reason_phrase}".rstrip()
    return str(error) or type(error).__name__
