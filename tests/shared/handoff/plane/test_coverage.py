"""Coverage against a plain set of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.plane.coverage import Coverage, OverlapError

LAYERS, FIRST, END = 4, 3, 20
Cells = set[tuple[int, int]]
Rectangle = tuple[int, int, int, int]
# As windows make them, and all alike.
FIRSTS = st.sampled_from([(3, 10, 3, 19), (19, 3, 12, 12), ()])
RECTANGLE = st.tuples(
    st.integers(-1, LAYERS + 1), st.integers(-1, LAYERS + 1), st.integers(0, 24), st.integers(0, 24)
)


def _cells(layer: int, end_layer: int, first: int, end: int) -> Cells:
    return {(y, x) for y in range(layer, end_layer) for x in range(first, end)}


def _inside(firsts: tuple[int, ...]) -> Cells:
    starts = firsts or (FIRST,) * LAYERS
    return {(y, x) for y, start in enumerate(starts) for x in range(start, END)}


@given(st.lists(RECTANGLE, max_size=40), FIRSTS)
def test_each_cell_is_taken_once_and_only_inside(
    rectangles: list[Rectangle], firsts: tuple[int, ...]
) -> None:
    coverage = Coverage(LAYERS, FIRST, END, firsts)
    added_cells: Cells = set()
    inside = _inside(firsts)
    assert coverage.total == len(inside)
    for rectangle in rectangles:
        cells = _cells(*rectangle)
        if cells and cells <= inside and not cells & added_cells:
            coverage.add(*rectangle)
            added_cells |= cells
        else:
            with pytest.raises(OverlapError):
                coverage.add(*rectangle)
        assert coverage.cells == len(added_cells)
        assert coverage.complete == (added_cells == inside)


@given(st.lists(RECTANGLE, max_size=20), st.integers(0, LAYERS - 1), st.integers(0, 24), FIRSTS)
def test_missing_is_just_what_was_not_added(
    rectangles: list[Rectangle], layer: int, first: int, firsts: tuple[int, ...]
) -> None:
    coverage = Coverage(LAYERS, FIRST, END, firsts)
    added_cells: Cells = set()
    for rectangle in rectangles:
        try:
            coverage.add(*rectangle)
        except OverlapError:
            continue
        added_cells |= _cells(*rectangle)
    missing = {(layer, x) for a, b in coverage.missing(layer, first, 24) for x in range(a, b)}
    assert missing == _cells(layer, layer + 1, first, END) & _inside(firsts) - added_cells


def test_a_cell_that_a_window_leaves_out_is_refused_by_its_place() -> None:
    with pytest.raises(OverlapError, match=r"layers \[0, 2\) tokens \[7, 9\) .* from 3 or 8, by"):
        Coverage(2, 3, 9, (3, 8)).add(0, 2, 7, 9)


def test_cells_that_arrive_one_by_one_in_any_order_complete_it() -> None:
    coverage = Coverage(1, 0, 9)
    for token in (3, 1, 2, 8, 0, 5, 7, 6, 4):
        assert not coverage.complete
        coverage.add(0, 1, token, token + 1)
    assert coverage.complete


def test_an_error_names_the_first_tokens_of_all_layers_only_if_they_differ() -> None:
    for firsts, text in ((), "from 3"), ((3, 10, 3, 19), "from 3 or 10 or 19, by layer"):
        with pytest.raises(OverlapError, match=f"{text}$"):
            Coverage(LAYERS, FIRST, END, firsts).add(0, LAYERS + 1, FIRST, END)
