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
def compiled_for(
    generation: int,
    on_kernel: Callable[[JITFunction[Any], str, Any], None],
    is_known: Callable[[JITFunction[Any], str], bool],
) -> Iterator[None]:
    """Compile for ``sm_<generation>`` what is launched, but for what is known. ``on_kernel`` gets
    each kernel, Triton's key for its launch, and the compiled one, or None if it is known."""
    run = JITFunction.run
    keys: dict[int, str] = {}  # of compiled kernels, whose later launches Triton does not announce
    announced: list[str] = []

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        announced.append(str(compile["key"]))
        return is_known(fn.jit_function, announced[-1])

    def compile_only(kernel: Any, *arguments: Any, **kwargs: Any) -> None:
        compiled = run(kernel, *arguments, **kwargs | {"warmup": True})
        key = announced.pop() if announced else keys[id(compiled)]
        keys[id(compiled)] = key
        on_kernel(kernel, key, compiled)

    with announcing(skip), on_gpu(generation, compile_only):
        yield


@contextmanager
def announcing(skip: Callable[..., bool]) -> Iterator[None]:
    """Ask before Triton compiles a kernel; a True means that it need not."""
    hook, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, skip
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = hook


@contextmanager
def recorded(generation: int) -> Iterator[list[str]]:
    """The kernels that are launched on ``sm_<generation>``, each by Triton's own key for it: two
    launches with one key are of one compiled kernel. Nothing is compiled."""
    keys: list[str] = []
    run = JITFunction.run

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        # For Triton, its name is the compiled kernel from now on.
        name = f"{fn.name}: {compile['key']}"
        fn.jit_function.device_caches[generation][0][compile["key"]] = name
        keys.append(name)
        return True

    def record(*arguments: Any, **kwargs: Any) -> None:
        if name := run(*arguments, **kwargs | {"warmup": True}):
            keys.append(name)

    with announcing(skip), on_gpu(generation, record):
        yield keys
