"""Copies of KV as it is between a cache in a CPU's memory and buffers in the canonical layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...kernels.operators import BlockCopies

# Blocks [heads, blocks, bytes of a block], which of them, and their copy.
_Copy = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class HostCopies:
    """``layers`` are the components of each layer as bytes, [heads, blocks, bytes of a block]."""

    def __init__(
        self, layers: Sequence[Sequence[np.ndarray]], block_size: int, copies: BlockCopies
    ) -> None:
        self._layers = layers
        self._block_size = block_size
        self._copies = copies

    def pack(
        self,
        layer: int,
        heads: range,
        table: Sequence[int],
        first: int,
        end: int,
        out: np.ndarray,
    ) -> None:
        """Copy tokens first to end of these of the cache's heads to ``out``, all of it."""

        def edge(held: np.ndarray, buffer: np.ndarray) -> None:
            buffer[:] = held

        self._copy(self._copies.gather, edge, layer, heads, table, first, end, out)

    def scatter(
        self,
        layer: int,
        heads: range,
        table: Sequence[int],
        first: int,
        end: int,
        data: np.ndarray,
    ) -> None:
        """The inverse of ``pack``."""

        def edge(held: np.ndarray, buffer: np.ndarray) -> None:
            held[:] = buffer

        self._copy(self._copies.scatter, edge, layer, heads, table, first, end, data)

    def _copy(
        self,
        whole_blocks: _Copy,
        edge: Callable[[np.ndarray, np.ndarray], None],
        layer: int,
        heads: range,
        table: Sequence[int],
        first: int,
        end: int,
        buffer: np.ndarray,
    ) -> None:
        size = self._block_size
        start, stop = -(-first // size), end // size
        blocks = self._checked(table[start:stop], layer) if start < stop else None
        edges = list(self._edges(table, first, end))
        at = 0
        for component in self._layers[layer]:
            held = component[heads.start : heads.stop]
            token_bytes = held.shape[2] // size
            length = len(heads) * (end - first) * token_bytes
            tokens = buffer[at : at + length].reshape(len(heads), end - first, token_bytes)
            at += length
            if blocks is not None:
                whole = tokens[:, start * size - first : stop * size - first]
                whole_blocks(held, blocks, whole.reshape(len(heads), len(blocks), held.shape[2]))
            for block, inside, outside in edges:
                cells = held[:, block].reshape(len(heads), size, token_bytes)
                edge(cells[:, inside], tokens[:, outside])

    def _checked(self, table: Sequence[int], layer: int) -> np.ndarray:
        """Raises ``IndexError``: copies go to addresses."""
        count = self._layers[layer][0].shape[1]
        if not 0 <= min(table) <= max(table) < count:
            outside = next(block for block in table if not 0 <= block < count)
            raise IndexError(f"block {outside} of {count}")
        return np.asarray(table)

    def _edges(
        self, table: Sequence[int], first: int, end: int
    ) -> Iterator[tuple[int, slice, slice]]:
        """Yield blocks of which only some tokens are meant: these within the block, and counted
        from ``first``."""
        size = self._block_size
        for index in sorted({first // size, (end - 1) // size}):
            begin, stop = max(first, index * size), min(end, (index + 1) * size)
            if 0 < stop - begin < size:
                inside = slice(begin - index * size, stop - index * size)
                yield table[index], inside, slice(begin - first, stop - first)
