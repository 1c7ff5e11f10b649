"""The keys that clients must send: from --api-key, and from a file that may change."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from ...shared.errors import StartupError
from ...shared.security.watched_files import WatchedFiles
from ..options import RouterOptions


class ApiKeys:
    """Keeps digests only. Raises ``StartupError`` for a file without keys."""

    def __init__(self, options: RouterOptions) -> None:
        self._given = frozenset(map(_digest, options.api_keys))
        self._file: WatchedFiles[frozenset[bytes]] | None = None
        if (path := options.api_key_file) is not None:
            self._file = WatchedFiles([path], lambda: _read(path))

    @property
    def required(self) -> bool:
        """True if clients need a key."""
        return bool(self._all())

    def known(self, given: bytes) -> bool:
        """Return whether this is one of the keys."""
        digest = _digest(given)
        # Every key is compared, so that the time reveals nothing about a match.
        return bool(sum(hmac.compare_digest(digest, key) for key in self._all()))

    def _all(self) -> frozenset[bytes]:
        return self._given | self._file.value() if self._file is not None else self._given


def _read(path: str) -> frozenset[bytes]:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise StartupError(f"--api-key-file {path}: {error.strerror}") from None
    keys = frozenset(_digest(line) for line in lines if line.strip())
    if not keys:
        raise StartupError(f"--api-key-file {path} has no key, which would let everybody in")
    return keys


def _digest(key: str | bytes) -> bytes:
    encoded = key.encode() if isinstance(key, str) else key
    return hashlib.sha256(encoded.strip()).digest()
