"""Ready cells become pieces: each once, none too large."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.plane.coverage import Coverage
from tandem.shared.handoff.plane.work_list import CellRange, WorkList
from tandem.tests.shared.handoff.support.memory_cache import layer_of

LAYERS, FIRST, END, CELL = 5, 4, 40, 8
LAYOUT = (layer_of(range(1), CELL // 2),) * LAYERS


@given(
    st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 45), st.integers(1, 30)), max_size=30
    ),
    st.integers(1, 50),
    st.integers(0, 3),
    st.sampled_from([(4, 4, 21, 4, 39), (39, 30, 30, 30, 12), ()]),
)
def test_every_ready_cell_travels_once_in_pieces_that_fit(
    announced: Any, max_cells: int, taken_between: int, firsts: Any
) -> None:
    work = WorkList(LAYOUT, Coverage(LAYERS, FIRST, END, firsts))
    expected: set[Any] = set()
    pieces: list[Any] = []
    starts = firsts or (FIRST,) * LAYERS

    def take(count: int) -> None:
        for _ in range(count):
            piece = work.peek(max_cells * CELL)
            if piece is None:
                return
            work.take(piece)
            assert 0 < piece.cells <= max_cells
            pieces.extend(
                (y, x)
                for y in range(piece.first_layer, piece.end_layer)
                for x in range(piece.first_token, piece.end_token)
            )

    for layer, first, count in announced:
        work.add(layer, layer + 1, first, first + count)
        expected |= {(layer, x) for x in range(max(first, starts[layer]), min(first + count, END))}
        take(taken_between)
    take(10_000)
    assert work.empty
    assert len(pieces) == len(set(pieces))
    assert set(pieces) == expected
    assert work.complete == (len(expected) == sum(END - start for start in starts))


def test_layers_of_a_short_chunk_share_a_frame() -> None:
    work = WorkList(LAYOUT, Coverage(LAYERS, 0, 10))
    for layer in range(LAYERS):
        work.add(layer, layer + 1, 0, 10)
    assert work.peek(1000 * CELL) == CellRange(0, LAYERS, 0, 10)
    assert work.peek(25 * CELL) == CellRange(0, 2, 0, 10)


def test_layers_that_differ_share_no_frame() -> None:
    narrow, wide = layer_of(range(1), 4), layer_of(range(2), 4)
    absent = wide.with_heads(0, 0)
    layout = (narrow, narrow, wide, absent, wide)
    starts = (0, 0, 0, 10, 0)
    work = WorkList(layout, Coverage(len(layout), 0, 10, starts))
    for layer in range(len(layout)):
        work.add(layer, layer + 1, 0, 10)
    assert work.complete
    pieces = []
    while (piece := work.peek(1000)) is not None:
        work.take(piece)
        pieces.append((piece.first_layer, piece.end_layer))
    assert pieces == [(0, 2), (2, 3), (4, 5)]


def test_a_wide_layer_is_cut_by_tokens() -> None:
    work = WorkList(LAYOUT, Coverage(LAYERS, 0, 100))
    work.add(0, 1, 0, 100)
    piece = work.peek(60 * CELL)
    assert piece == CellRange(0, 1, 0, 60)
    work.take(piece)
    assert work.peek(60 * CELL) == CellRange(0, 1, 60, 100)


def test_a_layer_that_the_cache_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="layers \\[4, 6\\)"):
        WorkList(LAYOUT, Coverage(LAYERS, 0, 9)).add(4, 6, 0, 9)
