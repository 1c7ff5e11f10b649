"""The layout of one part of a transfer: the heads of each layer that two ranks exchange.

A cell is one token in one layer, for the heads of the part. Layers may differ in heads and bytes,
and a part may have no heads in some layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kv.layout import LayerLayout
from ..wire.head_parts import HeadRun
from .coverage import Coverage
from .messages import Expect, OpenSend

Layout = tuple[LayerLayout, ...]
# The limit of cached parts with different heads and dtypes; a pair of ranks has one.
MAX_REMEMBERED = 256


class PartLayouts:
    """Builds the layouts of parts from a rank's layout, and caches them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._cache: dict[tuple[str, tuple[HeadRun, ...]], Layout] = {}

    def of(self, heads: tuple[HeadRun, ...], dtype: str) -> Layout:
        """Some heads of each layer in ``dtype``. Raises ``PeerRefusedError`` for an unknown dtype,
        ``ValueError`` for heads that are not on this rank."""
        layout = self._cache.get((dtype, heads))
        if layout is None:
            if len(self._cache) >= MAX_REMEMBERED:
                self._cache.clear()
            layout = self._cache[dtype, heads] = self._build(heads, dtype)
        return layout

    def _build(self, heads: tuple[HeadRun, ...], dtype: str) -> Layout:
        # Equal layers share one object, which makes comparing them cheap.
        equal: dict[LayerLayout, LayerLayout] = {}
        layouts: list[LayerLayout] = []
        for layer, run in zip(self._layout, self._each(heads), strict=True):
            first, end = run.first_head, run.end_head
            if first != end and not layer.first_head <= first < end <= layer.end_head:
                raise ValueError(
                    f"heads [{first}, {end}) of layer {len(layouts)} are not here; this rank has "
                    f"[{layer.first_head}, {layer.end_head})"
                )
            part = layer.as_dtype(dtype).with_heads(first, end)
            layouts.append(equal.setdefault(part, part))
        if not any(layer.heads for layer in layouts):
            raise ValueError("a part without heads")
        return tuple(layouts)

    def _each(self, heads: tuple[HeadRun, ...]) -> list[HeadRun]:
        """A run for each layer."""
        count = sum(run.layers for run in heads)
        if count != len(self._layout):
            raise ValueError(f"heads of {count} layers; this rank has {len(self._layout)}")
        return [run for run in heads for _ in range(run.layers)]


def coverage_of(command: Expect | OpenSend, layout: Layout) -> Coverage:
    """The cells of a part; layers without bytes in it contribute none."""
    end = command.end_token
    firsts: Sequence[int] = command.first_tokens or [command.first_token] * len(layout)
    starts = [
        first if layer.token_bytes else end for first, layer in zip(firsts, layout, strict=True)
    ]
    return Coverage(len(layout), command.first_token, end, starts)
