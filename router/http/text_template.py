"""JSON templates around a changing text, for the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from json.encoder import encode_basestring
from typing import Generic, TypeVar

from .encoding import dump

K = TypeVar("K", bound=Hashable)

# Placeholders; random, so that no client's text contains them.
_MARK = f"text {secrets.token_hex(16)}"
_STAMP = f"stamp {secrets.token_hex(16)}"


class TextTemplates(Generic[K]):
    """Templates by key. ``write`` formats a text as JSON; it is called once per key, and afterwards
    only the text is encoded, which takes a tenth of the time."""

    def __init__(self, write: Callable[[K, str], bytes]) -> None:
        self._write = write
        self._around: dict[K, list[bytes]] = {}

    def fill(self, key: K, text: str) -> bytes:
        """``write(key, text)`` from the template."""
        around = self._around.get(key)
        if around is None:
            around = self._around[key] = self._write(key, _MARK).split(dump(_MARK))
        return encode_basestring(text).encode().join(around)


class StampedTemplates(Generic[K]):
    """Templates for JSON with a stamp, such as a number or a time, before the text. ``write`` gets
    the key, the stamp and the text."""

    def __init__(self, write: Callable[[K, str, str], bytes]) -> None:
        self._write = write
        self._around: dict[K, tuple[bytes, bytes, bytes]] = {}

    def fill(self, key: K, stamp: bytes, text: str) -> bytes:
        """``write(key, stamp, text)`` from the template; ``stamp`` is JSON."""
        around = self._around.get(key)
        if around is None:
            head, rest = self._write(key, _STAMP, _MARK).split(dump(_STAMP))
            middle, tail = rest.split(dump(_MARK))
            around = self._around[key] = head, middle, tail
        head, middle, tail = around
        return b"".join((head, stamp, middle, encode_basestring(text).encode(), tail))
