"""The layout of one part of a transfer: what two ranks exchange of each layer.

A cell is one token in one layer, of the heads of the part. Layers may differ in heads and bytes; a
part may have no head of some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kv.layout import LayerLayout
from ..wire.head_parts import HeadRun
from .coverage import Coverage
from .messages import Expect, OpenSend

Layout = tuple[LayerLayout, ...]
# Parts with different heads and dtypes that a rank remembers; a pair of ranks has one.
MAX_REMEMBERED = 256


class PartLayouts:
    """Makes the layouts of parts from that of a rank, and remembers them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[tuple[str, tuple[HeadRun, ...]], Layout] = {}

    def of(self, heads: tuple[HeadRun, ...], dtype: str) -> Layout:
        """Some heads of each layer in ``dtype``. Raises ``PeerRefusedError`` for a dtype that is
        not known, ``ValueError`` for heads that are not all on this rank."""
        found = self._known.get((dtype, heads))
        if found is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            found = self._known[dtype, heads] = self._made(heads, dtype)
        return found

    def _made(self, heads: tuple[HeadRun, ...], dtype: str) -> Layout:
        # Equal layers are one object: comparing them is then cheap.
        equal: dict[LayerLayout, LayerLayout] = {}
        made: list[LayerLayout] = []
        for layer, run in zip(self._layout, self._each(heads), strict=True):
            first, end = run.first_head, run.end_head
            if first != end and not layer.first_head <= first < end <= layer.end_head:
                raise ValueError(
                    f"heads [{first}, {end}) of layer {len(made)} are not all here; this rank has "
                    f"[{layer.first_head}, {layer.end_head})"
                )
            part = layer.as_dtype(dtype).with_heads(first, end)
            made.append(equal.setdefault(part, part))
        if not any(layer.heads for layer in made):
            raise ValueError("a part without heads")
        return tuple(made)

    def _each(self, heads: tuple[HeadRun, ...]) -> list[HeadRun]:
        """A run for each layer."""
        count = sum(run.layers for run in heads)
        if count != len(self._layout):
            raise ValueError(f"heads of {count} layers; this rank has {len(self._layout)}")
        return [run for run in heads for _ in range(run.layers)]


def coverage_of(command: Expect | OpenSend, layout: Layout) -> Coverage:
    """The cells of a part. A layer of which it has no bytes has none."""
    end = command.end_token
    firsts: Sequence[int] = command.first_tokens or [command.first_token] * len(layout)
    wanted = [
        first if layer.token_bytes else end for first, layer in zip(firsts, layout, strict=True)
    ]
    return Coverage(len(layout), command.first_token, end, wanted)
