"""Launches of Triton's kernels for a GPU that is not here.

The wrappers run as they are, on tensors of torch's ``meta`` device. Triton itself decides from
their arguments what it would compile, as on a GPU; nothing is launched. Only for processes in which
Triton does not interpret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class _Driver:
    """As much of a driver as Triton asks before it launches."""

    generation: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.generation, 32)

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled for each device apart."""
        return self.generation

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def on_gpu(generation: int, run: Callable[..., Any]) -> Iterator[None]:
    """Let Triton find a GPU of ``sm_<generation>``; ``run`` replaces its own launches."""
    replaced = JITFunction.run
    driver.set_active(_Driver(generation))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = replaced
        driver._active = None


@contextmanager
def compiled_for(generation: int, on_compiled: Callable[[str, Any], None]) -> Iterator[None]:
    """Compile for ``sm_<generation>`` what is launched. ``on_compiled`` gets the name of each
    kernel, and the kernel."""
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **kwargs: Any) -> None:
        on_compiled(kernel.fn.__name__, run(kernel, *arguments, **kwargs | {"warmup": True}))

    with on_gpu(generation, compile_only):
        yield


@contextmanager
def recorded(generation: int) -> Iterator[list[str]]:
    """The kernels that are launched on ``sm_<generation>``, each by Triton's own key for it: two
    launches with one key are of one compiled kernel. Nothing is compiled."""
    keys: list[str] = []
    run = JITFunction.run

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        keys.append(f"{fn.name}: {compile['key']}")
        return True  # already done, as far as Triton is concerned

    hook, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, record
    try:
        with on_gpu(generation, lambda *a, **kwargs: run(*a, **kwargs | {"warmup": True})):
            yield keys
    finally:
        triton.knobs.runtime.jit_cache_hook = hook
