"""Triton's interpreter without what it does again and again, or for nothing.

A kernel takes half the time, and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def make_quick(interpreter: Any) -> None:
    """Change the module ``triton.runtime.interpreter`` for the rest of the process."""
    _patch_once(interpreter)
    # The sums of integers are computed a second time in 64 bits, and compared, for an assertion
    # that only a debugger's run makes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


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
