"""The keys that clients must send: from --api-key, and from a file that may change."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from ...shared.errors import StartupError
from ...shared.security.watched_files import WatchedFiles
from ..options import RouterOptions

# A line of the file with the name of the key's owner: ``alice: KEY``. Keys cannot be mistaken for
# one, as no client sends a key with a space in it.
_NAMED = re.compile(rb"([\w.@-]{1,64}):\s+(\S+)")
UNNAMED = ""

Owners = Mapping[bytes, str]


class ApiKeys:
    """The owners of keys; keeps digests only. Raises ``StartupError`` for a file without keys."""

    def __init__(self, options: RouterOptions) -> None:
        self._given = {_digest(key.encode()): UNNAMED for key in options.api_keys}
        self._file: WatchedFiles[Owners] | None = None
        if (path := options.api_key_file) is not None:
            self._file = WatchedFiles([path], lambda: _read(path))

    @property
    def required(self) -> bool:
        """True if clients need a key."""
        return bool(self._given) or self._file is not None

    def owner(self, given: bytes) -> str | None:
        """The name of the key's owner, empty if the key has none; ``None`` for an unknown key."""
        digest = _digest(given)
        owner = None
        # Every key is compared, so that the time reveals nothing about a match.
        for key, name in self._all().items():
            if hmac.compare_digest(digest, key):
                owner = name
        return owner

    def _all(self) -> Owners:
        return {**self._given, **self._file.value()} if self._file is not None else self._given


def _read(path: str) -> Owners:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise StartupError(f"--api-key-file {path}: {error.strerror}") from None
    owners = dict(_owned(line.strip()) for line in lines if line.strip())
    if not owners:
        raise StartupError(f"--api-key-file {path} has no key, which would let everybody in")
    return owners


def _owned(line: bytes) -> tuple[bytes, str]:
    """The digest of a line's key, and its owner."""
    named = _NAMED.fullmatch(line)
    return (_digest(named[2]), named[1].decode()) if named else (_digest(line), UNNAMED)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()
