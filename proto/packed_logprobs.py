"""Tokens with their logprobs in eight bytes each, from the rank that finds them to the router that
writes them as text: a list is copied on its way, and never walked."""

from __future__ import annotations

import struct
from collections.abc import Iterable

# Tokens that are listed beside the chosen one, at most.
MAX_LOGPROBS = 64

# A token's id and its logprob.
_ENTRY = struct.Struct("<If")
ENTRY_BYTES = _ENTRY.size


def pack_logprobs(entries: Iterable[tuple[int, float]]) -> bytes:
    """Entries as bytes."""
    return b"".join(_ENTRY.pack(token, logprob) for token, logprob in entries)


def unpack_logprobs(packed: bytes) -> list[tuple[int, float]]:
    """The entries in bytes, whose length must be a multiple of ``ENTRY_BYTES``."""
    return list(_ENTRY.iter_unpack(packed))
