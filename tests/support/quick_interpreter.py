"""Triton's interpreter without what it does again and again, or for nothing: a kernel takes half
the time, and computes the same. And with its programs in another order than that of their numbers,
as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

ORDER_SEED = 0


def make_quick(interpreter: Any) -> None:
    """Change the module ``triton.runtime.interpreter`` for the rest of the process."""
    _patch_once(interpreter)
    # The sums of integers are computed a second time in 64 bits, and compared, for an assertion
    # that only a debugger's run makes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


def run_in_any_order(interpreter: Any) -> None:
    """Let the programs of a launch run in an order that depends on their number and ``ORDER_SEED``
    only, so that a failure can be repeated alone. For the rest of the process."""
    builder = interpreter.InterpreterBuilder
    set_index = builder.set_grid_idx

    def set_another_index(self: Any, *index: int) -> None:
        set_index(self, *_order(self.grid_dim, ORDER_SEED)[index])

    builder.set_grid_idx = set_another_index


@cache
def _order(grid: tuple[int, int, int], seed: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The program that takes the turn of each, over all axes."""
    programs = list(product(*map(range, grid)))
    shuffled = Random(seed).sample(programs, len(programs))  # two change places
    return dict(zip(programs, shuffled, strict=True))


def _patch_once(interpreter: Any) -> None:
    """Triton's language is made one of Python at each launch and at each call of a function in the
    kernel, by a search through all that the language has, and made Triton's again after the launch.
    Once for each function is enough: what this process runs is interpreted, and kernels are
    compiled in others."""
    patch = interpreter._patch_lang
    patched: set[Callable[..., Any]] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember the results for each of Triton's types, whose names tell them apart."""
    results: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        if dtype.name not in results:
            results[dtype.name] = dtype_of(dtype)
        return results[dtype.name]

    return remembered
