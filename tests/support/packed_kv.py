"""The size of KV in its canonical layout."""

from __future__ import annotations

from tandem.shared.kv.cache import KVCache


def packed_bytes(cache: KVCache, layer: int, tokens: int, heads: range | None = None) -> int:
    """Bytes of ``tokens`` tokens of one layer, of some of its heads or all."""
    layout = cache.layout[layer]
    return len(layout.heads if heads is None else heads) * tokens * layout.head_bytes
