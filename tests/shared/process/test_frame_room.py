"""Room for frames."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest

from tandem.shared.process.frame_room import with_frame_room

CALLS, DEEPEST = 200, 300


def faults_of_calls() -> int:
    """Pages that this thread touches for the first time in some calls."""

    def nothing() -> None:
        pass

    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def at_depth(depth: int, function: Callable[[], Any]) -> Any:
    return at_depth(depth - 1, function) if depth else function()


def most_faults() -> int:
    return max(at_depth(depth, faults_of_calls) for depth in range(DEEPEST))


def test_calls_map_no_memory_at_any_depth() -> None:
    assert most_faults() >= CALLS, "CPython no longer frees a chunk at once: remove frame_room.py"
    assert with_frame_room(most_faults) < CALLS // 2


def test_results_and_errors_pass_through() -> None:
    assert with_frame_room(lambda: 7) == 7
    with pytest.raises(IndexError):
        with_frame_room(lambda: [][0])
