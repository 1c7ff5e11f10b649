"""Coverage against a plain set of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.coverage import Coverage, OverlapError

LAYERS, FIRST, END = 4, 3, 20
RECTANGLE = st.tuples(
    st.integers(-1, LAYERS + 1), st.integers(-1, LAYERS + 1), st.integers(0, 24), st.integers(0, 24)
)


def _cells(layer, end_layer, first, end):
    return {(y, x) for y in range(layer, end_layer) for x in range(first, end)}


@given(st.lists(RECTANGLE, max_size=40))
def test_each_cell_is_taken_once_and_only_inside(rectangles):
    coverage, taken = Coverage(LAYERS, FIRST, END), set()
    inside = _cells(0, LAYERS, FIRST, END)
    for rectangle in rectangles:
        cells = _cells(*rectangle)
        if cells and cells <= inside and not cells & taken:
            coverage.add(*rectangle)
            taken |= cells
        else:
            with pytest.raises(OverlapError):
                coverage.add(*rectangle)
        assert coverage.cells == len(taken)
        assert coverage.complete == (taken == inside)


@given(st.lists(RECTANGLE, max_size=20), st.integers(0, LAYERS - 1), st.integers(0, 24))
def test_missing_is_just_what_was_not_added(rectangles, layer, first):
    coverage, taken = Coverage(LAYERS, FIRST, END), set()
    for rectangle in rectangles:
        try:
            coverage.add(*rectangle)
        except OverlapError:
            continue
        taken |= _cells(*rectangle)
    missing = {(layer, x) for a, b in coverage.missing(layer, first, 24) for x in range(a, b)}
    assert missing == _cells(layer, layer + 1, max(first, FIRST), END) - taken


def test_cells_that_arrive_one_by_one_in_any_order_complete_it():
    coverage = Coverage(1, 0, 9)
    for token in (3, 1, 2, 8, 0, 5, 7, 6, 4):
        assert not coverage.complete
        coverage.add(0, 1, token, token + 1)
    assert coverage.complete
