"""The keys that clients must send: from flags, and from files that may change."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...shared.errors import StartupError, UsageError
from ...shared.security.watched_files import WatchedFiles
from ..http.key_owner import KeyOwner
from ..options import RouterOptions

# Each request is compared with all of them, in about 0.1 ms.
MAX_KEYS = 1024
# ``alice: KEY rpm=60 tpm=100000``, where everything but the key may be missing. No client sends a
# key with a space in it.
_LINE = re.compile(rb"(?:([\w.@-]{1,64}):\s+)?(\S+)((?:\s+(?:rpm|tpm)=[1-9]\d{0,9})*)")
_LIMIT = re.compile(rb"(rpm|tpm)=(\d+)")
FORM = "KEY or NAME: KEY, which rpm=N and tpm=N may follow"


@dataclass(frozen=True, slots=True)
class _Key:
    """The digest of a key; ``name`` is empty if the line has none."""

    digest: bytes
    name: str
    requests_per_minute: int | None
    tokens_per_minute: int | None


class ApiKeys:
    """The owners of keys; keeps digests only. Raises ``UsageError`` for invalid flags and
    ``StartupError`` for a file without keys."""

    def __init__(self, options: RouterOptions) -> None:
        self._users = _Source("--api-key", options.api_key, options.api_key_file)
        self._admins = _Source("--admin-api-key", options.admin_api_key, options.admin_api_key_file)
        self._made_of: tuple[Sequence[_Key], ...] = ()
        self._owners: Mapping[bytes, KeyOwner] = {}

    @property
    def required(self) -> bool:
        """True if clients need a key."""
        return self._users.given

    @property
    def has_admins(self) -> bool:
        """True if there are admin keys."""
        return self._admins.given

    def owner(self, given: bytes) -> KeyOwner | None:
        """The owner of a key; ``None`` for an unknown key."""
        digest = _digest(given)
        found = None
        # Every key is compared, so that the time reveals nothing about a match.
        for key, owner in self._all().items():
            if hmac.compare_digest(digest, key):
                found = owner
        return found

    def owner_named(self, name: str) -> KeyOwner:
        """The owner of this name, with the limits of its first key; one without limits of its own
        if its keys are gone."""
        named = (owner for owner in self._all().values() if owner.name == name)
        return next(named, KeyOwner(name))

    def _all(self) -> Mapping[bytes, KeyOwner]:
        made_of = (*self._users.keys(), *self._admins.keys())
        if made_of != self._made_of:
            users = _owners(self._users.keys(), "key", admin=False)
            self._owners = users | _owners(self._admins.keys(), "admin", admin=True)
            self._made_of = made_of
        return self._owners


class _Source:
    """The keys of one flag and of its file."""

    def __init__(self, flag: str, text: str | None, path: str | None) -> None:
        lines = [] if text is None else [part.encode() for part in text.split(",")]
        try:
            self._given = _parsed(lines)
        except ValueError as error:
            raise UsageError(f"{flag}, {error}") from None
        self._file: WatchedFiles[Sequence[_Key]] | None = None
        if path is not None:
            self._file = WatchedFiles([path], lambda: _read(flag, path))
        self.given = bool(self._given) or self._file is not None

    def keys(self) -> tuple[Sequence[_Key], Sequence[_Key]]:
        """Those of the flag, and those of the file; each the same object until it changes."""
        return self._given, self._file.value() if self._file is not None else ()


def _owners(keys: Iterable[Sequence[_Key]], kind: str, *, admin: bool) -> dict[bytes, KeyOwner]:
    """The owners by digest. Keys without a name are numbered, so that logs tell them apart."""
    found = {}
    unnamed = 0
    for key in (key for part in keys for key in part):
        unnamed += not key.name
        name = key.name or f"{kind}-{unnamed}"
        found[key.digest] = KeyOwner(name, admin, key.requests_per_minute, key.tokens_per_minute)
    return found


def _read(flag: str, path: str) -> Sequence[_Key]:
    name = f"{flag}-file {path}"
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise StartupError(f"{name}: {error.strerror}") from None
    try:
        keys = _parsed(lines)
    except ValueError as error:
        raise StartupError(f"{name}, {error}") from None
    if not keys:
        raise StartupError(f"{name} has no key, so it would let everybody in")
    return keys


def _parsed(lines: Sequence[bytes]) -> Sequence[_Key]:
    """The keys of the lines that are not empty. Raises ``ValueError``, without the key."""
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
