"""The generated token of a local cluster, and how other commands of its user find it.

Every user of a machine can connect to its loopback. So ``tandem serve`` generates a token for its
parts and leaves it in a file that only its user can read, named after the registry's address, with
the URL of its router. The launcher holds a lock on the file as long as it lives: the token of a
killed launcher is invalid, and is never sent to another process that listens at that address since.
A router is found by the files alone, never by an answer: any process may serve at a URL."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..config import SecurityConfig
from ..config.fields import split_addresses
from ..errors import StartupError, UsageError
from ..host_port import join_host_port, loopback_ip, split_host_port
from .credentials import Credentials, read_credentials

# Prefix of files that are still being written and may not be locked yet.
_UNFINISHED = "."
_MAX_BYTES = 4096
_PORTS = {"http": 80, "https": 443}
_PORT = re.compile("[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class LeftToken:
    """The token that a launcher has left, and the URL of its router; empty if there is none."""

    token: str = ""
    url: str = ""


def make_token() -> str:
    return secrets.token_hex(32)


def find_credentials(config: SecurityConfig, routers: Sequence[str]) -> Credentials:
    """The configured credentials; if they have no token, with the one that was left for
    ``routers``, host:port of their registries.

    Raises ``UsageError`` if they have different ones: a node sends the same token to all.
    """
    return _with_token(read_credentials(config), routers)


def find_registry(
    config: SecurityConfig, given: str | None, fallback: str, url: str = ""
) -> tuple[str, Credentials]:
    """The registry that a command talks to, ``given`` or that of ``find_router``, with the
    credentials for it. Invalid credentials are reported before a registry is looked for."""
    credentials = read_credentials(config)
    registries = split_addresses("--router", given or find_router(fallback, url))
    if len(registries) > 1:
        raise UsageError(f"--router {given} has several addresses; give that of one router")
    return registries[0], _with_token(credentials, registries)


def _with_token(credentials: Credentials, routers: Sequence[str]) -> Credentials:
    if credentials.tokens or not routers:
        return credentials
    found = {find_token(router) for router in routers}
    if len(found) > 1:
        raise UsageError(
            f"the routers {', '.join(routers)} have different cluster tokens; start them, and "
            f"this, with one --cluster-token-file"
        )
    return replace(credentials, token=found.pop())


def find_token(address: str) -> str:
    """The token that a live launcher of this user has left for the registry at ``address``; empty
    if there is none."""
    return _left(address).token


def find_router(fallback: str, url: str = "") -> str:
    """The registry of the ``tandem serve`` that this user runs here: of the one whose router is at
    ``url``, or of the only one; else ``fallback``, as for the ``url`` of another machine.

    Raises ``UsageError`` if several run and none of them is ``fallback``.
    """
    found = {address: left for address in sorted(_addresses()) if (left := _left(address)).token}
    wanted = _server(url)
    serving = [address for address, left in found.items() if wanted and _server(left.url) == wanted]
    # Several routers of one launcher have one token.
    if len({found[address].token for address in serving}) == 1:
        return serving[0]
    elsewhere = wanted and not _name(wanted)
    if not found or elsewhere or _name(fallback) in found:
        return fallback
    if len({left.token for left in found.values()}) > 1:
        shown = ", ".join(f"{address} ({left.url})" for address, left in found.items())
        raise UsageError(f"several routers run here; choose one with --router: {shown}")
    return next(iter(found))


def _left(address: str) -> LeftToken:
    """The token for a registry, as long as its launcher lives."""
    name = _name(address)
    for folder in _folders() if name else ():
        if _ours(folder):
            with contextlib.suppress(OSError), _opened(folder / name) as file:
                if _held(file):
                    token, _, url = os.read(file, _MAX_BYTES).decode().partition("\n")
                    return LeftToken(token, url)
    return LeftToken()


def _server(url: str) -> str:
    """The host and port of a URL; empty if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return ""
    if not parts.hostname or not port:
        return ""
    address = join_host_port(parts.hostname, port)
    return _name(address) or address


def _addresses() -> set[str]:
    """The registries with a token file, whether the launcher lives or not."""
    names: set[str] = set()
    for folder in _folders():
        if _ours(folder):
            names |= {entry.name for entry in folder.iterdir() if _name(entry.name) == entry.name}
    return names


@contextlib.contextmanager
def left_token(address: str, token: str, url: str) -> Iterator[None]:
    """Make the ``token`` of the registry at ``address``, whose router serves ``url``, available to
    this user's commands until the block ends.

    Raises ``StartupError`` if there is no folder that only this user can read, or ``OSError``.
    """
    folder = _make_folder()
    _sweep(folder)
    name = folder / _name(address)
    unfinished = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, f"{token}\n{url}".encode())
        # Atomic: a reader never finds half a token, or an unlocked one.
        unfinished.rename(name)
        yield
    finally:
        for path in (name, unfinished):
            _remove(path, file)
        os.close(file)


def _name(address: str) -> str:
    """The file name of a registry, which is its address; empty for one on another machine, which
    never gets a generated token."""
    host, port = split_host_port(address)
    host = loopback_ip(host)
    return join_host_port(host, int(port)) if host and _PORT.fullmatch(port) else ""


def _folders() -> Iterator[Path]:
    """Folders for tokens, best first: a login session has one that a service lacks."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        yield Path(runtime) / "tandem"
    yield Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}"


def _make_folder() -> Path:
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if _ours(folder) and os.access(folder, os.W_OK):
            return folder
    raise StartupError(
        f"{folder} is not a folder that only this user can read; set XDG_RUNTIME_DIR to one"
    )


def _ours(folder: Path) -> bool:
    """True for a real folder that only this user can access; not for links or folders of others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    private = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private


def _sweep(folder: Path) -> None:
    """Remove the files of killed launchers."""
    for entry in folder.iterdir():
        if not entry.name.startswith(_UNFINISHED):
            with contextlib.suppress(OSError), _opened(entry) as file:
                if not _held(file):
                    _remove(entry, file)


def _remove(name: Path, file: int) -> None:
    """Remove the file, unless another one has replaced it since ``file`` was opened."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(name), os.fstat(file)):
            name.unlink()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _held(file: int) -> bool:
    """True if a live launcher holds the lock of this file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
