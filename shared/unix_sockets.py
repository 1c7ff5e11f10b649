"""A folder in which nodes on one host meet, instead of ports: ``--pd-url file:///run/tandem``.

Two containers that share no network can share a volume. Both planes of a prefill node then listen
on Unix sockets in that folder, and whoever may open the folder may call. Each side names the folder
as it sees it, so what a node tells of its sockets is only their names.
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
# What gRPC calls the address of a Unix socket.
UNIX = "unix:"
_CONTROL = "control.sock"
_LOCK = "prefill.lock"
_KV_NAME = re.compile(r"kv-\d{1,4}-(bulk|control)\.sock")
# gRPC reads a query and a fragment behind ? and #, and % as an escape.
_ADDRESS = re.compile(rf"{UNIX}/[^?#%\0]*{re.escape(_CONTROL)}")
# A Unix socket's path has 108 bytes with its end.
_LONGEST_NAME = "kv-9999-control.sock"
_MAX_PATH = 107


def socket_address(flag: str, url: str) -> str:
    """Where the control plane of the node in this folder listens. Raises ``UsageError``."""
    parts = urlsplit(url)
    folder = unquote(parts.path)
    if parts.netloc or not folder.startswith("/"):
        raise UsageError(f"{flag} {url!r} is no file:///folder, such as file:///run/tandem")
    folder = folder.rstrip("/") or "/"
    if len(os.fsencode(f"{folder}/{_LONGEST_NAME}")) > _MAX_PATH:
        raise UsageError(f"{flag} {url!r}: too long for Unix sockets; choose a shorter folder")
    return f"{UNIX}{folder}/{_CONTROL}"


def is_socket_address(address: str) -> bool:
    """Whether gRPC would call the control socket of a meeting folder, and nothing else."""
    return len(address) <= _MAX_PATH + len(UNIX) and bool(_ADDRESS.fullmatch(address))


def folder_of(address: str) -> str:
    """The folder of such an address; empty for host:port."""
    return address.removeprefix(UNIX).rpartition("/")[0] if address.startswith(UNIX) else ""


def kv_endpoint(folder: str, rank: int, name: str) -> str:
    """Where a rank listens for KV in this folder; ``name`` is bulk or control."""
    return f"ipc://{folder}/kv-{rank}-{name}.sock"


def kv_endpoint_of(told: str, folder: str) -> str:
    """A rank's endpoint as its node told it, in our own name for the folder. Raises ``ValueError``
    for what is not a socket of this folder."""
    name = told.rpartition("/")[2]
    if not told.startswith("ipc://") or not _KV_NAME.fullmatch(name):
        raise ValueError(f"{told[:100]!r} is no socket for KV")
    return f"ipc://{folder}/{name}"


@contextlib.contextmanager
def reserved_folder(address: str) -> Iterator[None]:
    """The folder of an address is this process's to listen in, and its sockets are gone at the end.

    Raises ``StartupError``: sockets of a process that was killed are in nobody's way, those of one
    that lives would be taken away from it.
    """
    folder = folder_of(address)
    if not folder:
        yield
        return
    try:
        held = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(
            f"cannot meet in {folder}: {error.strerror}; it must be a folder that this user may "
            f"write to"
        ) from None
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartupError(
                f"another prefill node listens in {folder}; give each a folder of its own"
            ) from None
        yield
        _sweep(Path(folder))
    finally:
        os.close(held)


def _sweep(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == _CONTROL or _KV_NAME.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
