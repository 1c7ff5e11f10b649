"""Kernels that others call by their address."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tandem.kernels.cpu import jit

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)
jit.prepare()

import numba  # noqa: E402

from tandem.kernels.cpu.callees import Callee, call_callee, callee_of  # noqa: E402


@numba.njit
def double(x: np.ndarray, place: int) -> None:
    if place < 0:
        raise ValueError("a place is missing")
    x[place] *= 2


@numba.njit
def call(callee: Callee, x: np.ndarray, place: Any) -> None:
    call_callee(callee, (x, place))


@numba.njit(parallel=True)
def call_for_all(callee: Callee, x: np.ndarray) -> None:
    for place in numba.prange(len(x)):
        call_callee(callee, (x, np.int64(place)))


def test_a_loop_calls_a_kernel_for_each_task() -> None:
    x = np.arange(7.0)
    call_for_all(callee_of(double, x, 0), x)
    assert x.tolist() == [0, 2, 4, 6, 8, 10, 12]


def test_its_errors_are_raised() -> None:
    x = np.arange(7.0)
    with pytest.raises(ValueError, match="a place is missing"):
        call(callee_of(double, x, 0), x, -1)


def test_a_kernel_gets_no_arguments_of_other_types() -> None:
    x, others = np.arange(7.0), np.arange(7)
    callee = callee_of(double, x, 0)
    for wrong in ((others, 1), (x[::2], 1), (x, np.int32(1))):
        with pytest.raises(TypeError, match="was not compiled for"):
            call(callee, *wrong)
    assert x.tolist() == others.tolist() == [0, 1, 2, 3, 4, 5, 6]
