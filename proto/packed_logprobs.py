"""Tokens and their logprobs in eight bytes each, from a rank to the router, which formats them as
text. Lists are copied on the way without being parsed."""

from __future__ import annotations

import struct
from collections.abc import Iterable

# Maximum number of alternatives to a token.
MAX_LOGPROBS = 64

# A token id and its logprob.
_ENTRY = struct.Struct("<If")
ENTRY_BYTES = _ENTRY.size


def pack_logprobs(entries: Iterable[tuple[int, float]]) -> bytes:
    """Encode (token id, logprob) pairs."""
    return b"".join(_ENTRY.pack(token, logprob) for token, logprob in entries)


def unpack_logprobs(packed: bytes) -> list[tuple[int, float]]:
    """Decode pairs; the length of ``packed`` must be a multiple of ``ENTRY_BYTES``."""
    return list(_ENTRY.iter_unpack(packed))
