"""The generated token of a local cluster, and its discovery by other commands of the same user.

Every user of a machine can connect to its loopback. So ``tandem serve`` generates a token for its
parts and publishes it, with the URL of its router, in a file that only its user can read, named
after the registry's address. The launcher holds a lock on the file as long as it lives: the token
of a killed launcher is invalid, and is never sent to a process that has taken over its address. A
router is found by the files alone, never by a response: any process may serve at a URL."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..config import SecurityConfig
from ..config.fields import split_addresses
from ..errors import UsageError
from ..host_port import join_host_port, loopback_ip, split_host_port
from ..private_folder import is_private, private_folder, private_folders
from .credentials import Credentials, read_credentials

# Prefix of files that are incomplete and may not be locked yet.
_UNFINISHED = "."
_MAX_BYTES = 4096
_PORTS = {"http": 80, "https": 443}
_PORT = re.compile("[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class LocalToken:
    """The token of a launcher and the URL of its router; empty if there is none."""

    token: str = ""
    url: str = ""


def make_token() -> str:
    return secrets.token_hex(32)


def find_credentials(config: SecurityConfig, routers: Sequence[str]) -> Credentials:
    """The configured credentials; without a token, the published token of ``routers`` (host:port of
    their registries) is added.

    Raises ``UsageError`` if they have different tokens: a node sends the same one to all.
    """
    return _with_token(read_credentials(config), routers)


def find_registry(
    config: SecurityConfig, option: str | None, fallback: str, url: str = ""
) -> tuple[str, Credentials]:
    """The registry of a command, from its ``option`` or ``find_router``, and the credentials for
    it. Invalid credentials are reported before the search for a registry."""
    credentials = read_credentials(config)
    registries = split_addresses("--router", option or find_router(fallback, url))
    if len(registries) > 1:
        raise UsageError(f"--router {option} has several addresses; give that of one router")
    return registries[0], _with_token(credentials, registries)


def _with_token(credentials: Credentials, routers: Sequence[str]) -> Credentials:
    if credentials.tokens or not routers:
        return credentials
    tokens = {find_token(router) for router in routers}
    if len(tokens) > 1:
        raise UsageError(
            f"the routers {', '.join(routers)} have different cluster tokens; start them, and "
            f"this, with one --cluster-token-file"
        )
    return replace(credentials, token=tokens.pop())


def find_token(address: str) -> str:
    """The token that a live launcher of this user has published for the registry at ``address``;
    empty if there is none."""
    return _read_token(address).token


def find_router(fallback: str, url: str = "") -> str:
    """The registry of this user's ``tandem serve`` on this machine: the one whose router is at
    ``url``, or the only one. Else, or for the ``url`` of another machine, ``fallback``.

    Raises ``UsageError`` if several run and none of them is ``fallback``.
    """
    tokens = {
        address: token for address in sorted(_addresses()) if (token := _read_token(address)).token
    }
    server = _server(url)
    matches = [
        address for address, token in tokens.items() if server and _server(token.url) == server
    ]
    # Several routers of one launcher have one token.
    if len({tokens[address].token for address in matches}) == 1:
        return matches[0]
    elsewhere = server and not _name(server)
    if not tokens or elsewhere or _name(fallback) in tokens:
        return fallback
    if len({token.token for token in tokens.values()}) > 1:
        routers = ", ".join(f"{address} ({token.url})" for address, token in tokens.items())
        raise UsageError(f"several routers run here; choose one with --router: {routers}")
    return next(iter(tokens))


def _read_token(address: str) -> LocalToken:
    """The token for a registry, while its launcher lives."""
    name = _name(address)
    for folder in private_folders() if name else ():
        if is_private(folder):
            with contextlib.suppress(OSError), _open(folder / name) as file:
                if _is_locked(file):
                    token, _, url = os.read(file, _MAX_BYTES).decode().partition("\n")
                    return LocalToken(token, url)
    return LocalToken()


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
    """The registries with a token file, whether or not the launcher lives."""
    names: set[str] = set()
    for folder in private_folders():
        if is_private(folder):
            names |= {entry.name for entry in folder.iterdir() if _name(entry.name) == entry.name}
    return names


@contextlib.contextmanager
def token_file(address: str, token: str, url: str) -> Iterator[None]:
    """Publish the ``token`` of the registry at ``address``, whose router serves ``url``, to this
    user's commands until the block ends.

    Raises ``StartupError`` if there is no folder that only this user can read, or ``OSError``.
    """
    folder = private_folder()
    _sweep(folder)
    name = folder / _name(address)
    unfinished = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, f"{token}\n{url}".encode())
        # Atomic, so that a reader never finds an incomplete or unlocked file.
        unfinished.rename(name)
        yield
    finally:
        for path in (name, unfinished):
            _remove(path, file)
        os.close(file)


def _name(address: str) -> str:
    """The file name of a registry, which is its address; empty for one on another machine, since
    generated tokens are only for this one."""
    host, port = split_host_port(address)
    host = loopback_ip(host)
    return join_host_port(host, int(port)) if host and _PORT.fullmatch(port) else ""


def _sweep(folder: Path) -> None:
    """Remove the files of killed launchers."""
    for entry in folder.iterdir():
        if not entry.name.startswith(_UNFINISHED):
            with contextlib.suppress(OSError), _open(entry) as file:
                if not _is_locked(file):
                    _remove(entry, file)


def _remove(name: Path, file: int) -> None:
    """Remove a file, unless it was replaced after ``file`` was opened."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(name), os.fstat(file)):
            name.unlink()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    """True if a live launcher holds the lock of this file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
