"""The dtypes in which KV crosses the wire, by their torch names.

KV travels in the receiver's dtype: the sender converts while it packs, which it does anyway.
"""

from __future__ import annotations

from ...config.kv_dtypes import BYTES
from ...errors import PeerRefusedError


def bytes_of(name: str) -> int:
    """Bytes of one value. Raises ``PeerRefusedError`` for an unknown dtype."""
    if name not in BYTES:
        raise PeerRefusedError(f"KV format {name[:32]!r}; known are {', '.join(BYTES)}")
    return BYTES[name]
