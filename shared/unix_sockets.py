"""Unix sockets in a shared folder instead of ports: ``--pd-url file:///run/tandem``.

Containers that share no network can share a volume. Both planes of a prefill node then listen on
Unix sockets in that folder, and its permissions decide who may connect. Each side may mount the
folder elsewhere, so only the names of the sockets are announced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import StartupError, UsageError

SCHEME = "file://"
# gRPC's prefix for Unix sockets.
UNIX = "unix:"
_CONTROL = "control.sock"
_LOCK = "prefill.lock"
_KV_NAME = re.compile(r"kv-\d{1,4}-(bulk|control)\.sock")
# gRPC parses ? and # as query and fragment, % as an escape.
_ADDRESS = re.compile(rf"{UNIX}/[^?#%\0]*{re.escape(_CONTROL)}")
# A Unix socket's path has at most 108 bytes, including the terminator.
_LONGEST_NAME = "kv-9999-control.sock"
_MAX_PATH = 107


def socket_address(flag: str, url: str) -> str:
    """The control-plane address of the node in this folder. Raises ``UsageError``."""
    parts = urlsplit(url)
    folder = unquote(parts.path)
    if parts.netloc or not folder.startswith("/"):
        raise UsageError(f"{flag} {url!r} is not file:///folder, such as file:///run/tandem")
    folder = folder.rstrip("/") or "/"
    if len(os.fsencode(f"{folder}/{_LONGEST_NAME}")) > _MAX_PATH:
        raise UsageError(f"{flag} {url!r}: too long for Unix sockets; choose a shorter folder")
    return f"{UNIX}{folder}/{_CONTROL}"


def is_socket_address(address: str) -> bool:
    """True if gRPC would only connect to the control socket of a shared folder."""
    return len(address) <= _MAX_PATH + len(UNIX) and bool(_ADDRESS.fullmatch(address))


def folder_of(address: str) -> str:
    """The folder of a control socket's address; empty for host:port."""
    return address.removeprefix(UNIX).rpartition("/")[0] if address.startswith(UNIX) else ""


def kv_endpoint(folder: str, rank: int, name: str) -> str:
    """A rank's data-plane endpoint in this folder; ``name`` is bulk or control."""
    return f"ipc://{folder}/kv-{rank}-{name}.sock"


def kv_endpoint_of(endpoint: str, folder: str) -> str:
    """A rank's announced endpoint, with this side's path of the folder. Raises ``ValueError`` for
    anything but a data-plane socket."""
    name = endpoint.rpartition("/")[2]
    if not endpoint.startswith("ipc://") or not _KV_NAME.fullmatch(name):
        raise ValueError(f"{endpoint[:100]!r} is not a data-plane socket")
    return f"ipc://{folder}/{name}"


@contextlib.contextmanager
def reserved_folder(address: str) -> Iterator[None]:
    """Lock the folder of an address for this process, and remove its sockets at the end.

    Sockets of a killed process are replaced. Raises ``StartupError`` if a live one holds the
    folder."""
    folder = folder_of(address)
    if not folder:
        yield
        return
    try:
        lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(
            f"cannot listen in {folder}: {error.strerror}; this user must be able to write to the "
            f"folder"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartupError(
                f"another prefill node listens in {folder}; give each node its own folder"
            ) from None
        yield
        _sweep(Path(folder))
    finally:
        os.close(lock)


def _sweep(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == _CONTROL or _KV_NAME.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
