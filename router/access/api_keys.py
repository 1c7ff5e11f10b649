"""The API keys of clients, from flags and from files that may change."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...shared.errors import StartupError, UsageError
from ...shared.security.watched_files import WatchedFiles
from ..http.exchange import KeyOwner
from ..options import RouterOptions

# Each request is compared with all keys, which takes about 0.1 ms.
MAX_KEYS = 1024
# ``alice: KEY rpm=60 tpm=100000``; everything but the key is optional. Keys contain no spaces.
_LINE = re.compile(rb"(?:([\w.@-]{1,64}):\s+)?(\S+)((?:\s+(?:rpm|tpm)=[1-9]\d{0,9})*)")
_LIMIT = re.compile(rb"(rpm|tpm)=(\d+)")
FORM = "KEY or NAME: KEY, which rpm=N and tpm=N may follow"


@dataclass(frozen=True, slots=True)
class _Key:
    """The digest of a key; ``name`` is empty for a key without a name."""

    digest: bytes
    name: str
    requests_per_minute: int | None
    tokens_per_minute: int | None


class ApiKeys:
    """The owners of keys, of which it stores digests only. Raises ``UsageError`` for invalid flags,
    and ``StartupError`` for a file without keys."""

    def __init__(self, options: RouterOptions) -> None:
        self._users = _Source("--api-key", options.api_key, options.api_key_file)
        self._admins = _Source("--admin-api-key", options.admin_api_key, options.admin_api_key_file)
        self._sources: tuple[Sequence[_Key], ...] = ()  # of ``_owners``
        self._owners: Mapping[bytes, KeyOwner] = {}

    @property
    def required(self) -> bool:
        """True if clients need a key."""
        return self._users.is_set

    @property
    def has_admins(self) -> bool:
        """True if there are admin keys."""
        return self._admins.is_set

    def owner(self, key: bytes) -> KeyOwner | None:
        """The owner of a key; ``None`` for an unknown key."""
        digest = _digest(key)
        match = None
        # Compare with every key, so that the time reveals nothing about a match.
        for each, owner in self._all().items():
            if hmac.compare_digest(digest, each):
                match = owner
        return match

    def owner_named(self, name: str) -> KeyOwner:
        """The owner with this name and the limits of its first key. If its keys have been removed,
        an owner without own limits."""
        owners = (owner for owner in self._all().values() if owner.name == name)
        return next(owners, KeyOwner(name))

    def _all(self) -> Mapping[bytes, KeyOwner]:
        sources = (*self._users.keys(), *self._admins.keys())
        if sources != self._sources:
            users = _owners(self._users.keys(), "key", admin=False)
            self._owners = users | _owners(self._admins.keys(), "admin", admin=True)
            self._sources = sources
        return self._owners


class _Source:
    """The keys of one flag and of its file."""

    def __init__(self, flag: str, text: str | None, path: str | None) -> None:
        lines = [] if text is None else [part.encode() for part in text.split(",")]
        try:
            self._flag_keys = _parse(lines)
        except ValueError as error:
            raise UsageError(f"{flag}, {error}") from None
        self._file: WatchedFiles[Sequence[_Key]] | None = None
        if path is not None:
            self._file = WatchedFiles([path], lambda: _read(flag, path))
        self.is_set = bool(self._flag_keys) or self._file is not None

    def keys(self) -> tuple[Sequence[_Key], Sequence[_Key]]:
        """The keys of the flag, and of the file. Each is the same object until it changes."""
        return self._flag_keys, self._file.value() if self._file is not None else ()


def _owners(keys: Iterable[Sequence[_Key]], kind: str, *, admin: bool) -> dict[bytes, KeyOwner]:
    """The owners by digest. Keys without a name are numbered, so that logs tell them apart."""
    owners = {}
    unnamed = 0
    for key in (key for part in keys for key in part):
        unnamed += not key.name
        name = key.name or f"{kind}-{unnamed}"
        owners[key.digest] = KeyOwner(name, admin, key.requests_per_minute, key.tokens_per_minute)
    return owners


def _read(flag: str, path: str) -> Sequence[_Key]:
    name = f"{flag}-file {path}"
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise StartupError(f"{name}: {error.strerror}") from None
    try:
        keys = _parse(lines)
    except ValueError as error:
        raise StartupError(f"{name}, {error}") from None
    if not keys:
        raise StartupError(f"{name} has no key, so every client would be allowed; add a key")
    return keys


def _parse(lines: Sequence[bytes]) -> Sequence[_Key]:
    """The keys of all lines that are not empty. The message of its ``ValueError`` has no key."""
    keys = [_key(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if len(keys) > MAX_KEYS:
        raise ValueError(f"which has {len(keys)} keys: at most {MAX_KEYS} are supported")
    return keys


def _key(number: int, line: bytes) -> _Key:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"entry {number}: not of the form {FORM}")
    name, key, words = match.groups()
    limits = {word.decode(): int(count) for word, count in _LIMIT.findall(words)}
    return _Key(_digest(key), (name or b"").decode(), limits.get("rpm"), limits.get("tpm"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()
