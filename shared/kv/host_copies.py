"""Copies between a cache in a CPU's memory and buffers in the canonical layout, in the same
dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.signatures import BlockCopies


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens first to end of a sequence, in some of a cache's heads of one layer."""

    layer: int
    heads: range
    table: Sequence[int]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """A span of one component, in the cache and in the buffer.

    ``whole`` is the buffer's view of the blocks with these ``indices`` in ``component``. ``edges``
    are views of partly covered blocks: (cache, buffer).
    """

    component: np.ndarray
    indices: np.ndarray | None
    whole: np.ndarray
    edges: list[tuple[np.ndarray, np.ndarray]]


class HostCopies:
    """``layers`` has the components of each layer as bytes, [heads, blocks, bytes of a block]."""

    def __init__(
        self, layers: Sequence[Sequence[np.ndarray]], block_size: int, copies: BlockCopies
    ) -> None:
        self._layers = layers
        self._block_size = block_size
        self._copies = copies

    def pack(self, span: TokenSpan, out: np.ndarray) -> None:
        """Copy a span to ``out``, all of it. Raises ``IndexError``."""
        for parts in self._parts(span, out):
            if parts.indices is not None:
                self._copies.gather(parts.component, parts.indices, parts.whole)
            for cached, tokens in parts.edges:
                tokens[:] = cached

    def scatter(self, span: TokenSpan, data: np.ndarray) -> None:
        """The inverse of ``pack``."""
        for parts in self._parts(span, data):
            if parts.indices is not None:
                self._copies.scatter(parts.component, parts.indices, parts.whole)
            for cached, tokens in parts.edges:
                cached[:] = tokens

    def _parts(self, span: TokenSpan, buffer: np.ndarray) -> Iterator[_Parts]:
        size, heads, count = self._block_size, len(span.heads), span.end - span.first
        start, stop = -(-span.first // size), span.end // size
        indices = self._checked(span.table[start:stop], span.layer) if start < stop else None
        edges = list(self._edges(span.table, span.first, span.end))
        at = 0
        for all_heads in self._layers[span.layer]:
            component = all_heads[span.heads.start : span.heads.stop]
            block_bytes = component.shape[2]
            length = heads * count * (block_bytes // size)
            tokens = buffer[at : at + length].reshape(heads, count, block_bytes // size)
            at += length
            whole = tokens[:, start * size - span.first : max(start, stop) * size - span.first]
            yield _Parts(
                component,
                indices,
                whole.reshape(heads, max(0, stop - start), block_bytes),
                [
                    (component[:, block].reshape(heads, size, -1)[:, inside], tokens[:, outside])
                    for block, inside, outside in edges
                ],
            )

    def _checked(self, table: Sequence[int], layer: int) -> np.ndarray:
        """A table as an array. Raises ``IndexError``: the copies use raw addresses, unchecked."""
        count = self._layers[layer][0].shape[1]
        if not 0 <= min(table) <= max(table) < count:
            outside = next(block for block in table if not 0 <= block < count)
            raise IndexError(f"block {outside} of {count}")
        return np.asarray(table)

    def _edges(
        self, table: Sequence[int], first: int, end: int
    ) -> Iterator[tuple[int, slice, slice]]:
        """Yield each partly covered block, with its tokens counted within the block and from
        ``first``."""
        size = self._block_size
        for index in sorted({first // size, (end - 1) // size}):
            begin, stop = max(first, index * size), min(end, (index + 1) * size)
            if 0 < stop - begin < size:
                inside = slice(begin - index * size, stop - index * size)
                yield table[index], inside, slice(begin - first, stop - first)
