"""What of a transfer is computed and not yet sent, cut into pieces the size of a frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .coverage import Coverage


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of cells that travels as one frame."""

    first_layer: int
    end_layer: int
    first_token: int
    end_token: int

    @property
    def cells(self) -> int:
        return (self.end_layer - self.first_layer) * (self.end_token - self.first_token)


class WorkList:
    """Ready rectangles, first come first served.

    Consecutive layers of the same tokens grow together while they wait, so a short chunk travels as
    a few full frames; a wide layer is cut by tokens. What was announced before is dropped, because
    a prefill that was preempted computes its chunks again; so is what a layer's window leaves out.
    """

    def __init__(
        self, num_layers: int, first_token: int, end_token: int, first_tokens: Sequence[int] = ()
    ) -> None:
        self._ready = Coverage(num_layers, first_token, end_token, first_tokens)
        self._pieces: deque[Piece] = deque()

    @property
    def complete(self) -> bool:
        """Every cell of the transfer has been announced."""
        return self._ready.complete

    @property
    def empty(self) -> bool:
        return not self._pieces

    def add(self, first_layer: int, end_layer: int, first_token: int, end_token: int) -> None:
        if not 0 <= first_layer < end_layer <= self._ready.num_layers:
            raise ValueError(
                f"layers [{first_layer}, {end_layer}) of a cache with {self._ready.num_layers}"
            )
        for layer in range(first_layer, end_layer):
            for first, end in self._ready.missing(layer, first_token, end_token):
                self._ready.add(layer, layer + 1, first, end)
                self._append(Piece(layer, layer + 1, first, end))

    def _append(self, piece: Piece) -> None:
        last = self._pieces[-1] if self._pieces else None
        if (
            last is not None
            and last.end_layer == piece.first_layer
            and (last.first_token, last.end_token) == (piece.first_token, piece.end_token)
        ):
            self._pieces[-1] = Piece(
                last.first_layer, piece.end_layer, piece.first_token, piece.end_token
            )
        else:
            self._pieces.append(piece)

    def peek(self, max_cells: int) -> Piece | None:
        """The next piece of at most ``max_cells``; ``take`` removes it."""
        if not self._pieces:
            return None
        head = self._pieces[0]
        tokens = head.end_token - head.first_token
        if tokens <= max_cells:
            end_layer = min(head.end_layer, head.first_layer + max_cells // tokens)
            return Piece(head.first_layer, end_layer, head.first_token, head.end_token)
        end_token = head.first_token + max_cells
        return Piece(head.first_layer, head.first_layer + 1, head.first_token, end_token)

    def take(self, piece: Piece) -> None:
        """Remove what ``peek`` returned."""
        head = self._pieces.popleft()
        if piece.end_layer < head.end_layer:
            self._pieces.appendleft(
                Piece(piece.end_layer, head.end_layer, head.first_token, head.end_token)
            )
        if piece.end_token < head.end_token:
            self._pieces.appendleft(
                Piece(head.first_layer, piece.end_layer, piece.end_token, head.end_token)
            )
