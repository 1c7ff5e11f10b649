"""Setup of numba: its kernels run on torch's threads, and are compiled once on each machine.

Both libraries divide loops with OpenMP. torch's copy of libgomp is loaded first, so numba's loops
bind to it and share its threads: two pools would spin against each other.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from ..errors import KernelUnavailableError
from ..fp8 import FP8

if TYPE_CHECKING:
    from .code_store import KernelStore

log = logging.getLogger("tandem.kernels")

In = TypeVar("In")
Out = TypeVar("Out")

# True if the CPU has the registers of AVX-512: 32 of them, each as wide as a panel.
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# numba has no half types and no fp8: their bits are passed as integers, each type as another one.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, FP8: torch.uint8}


@cache
def prepare() -> None:
    """Set up numba. Call after torch's threads are set and before importing any kernel. Raises
    ``KernelUnavailableError``."""
    # numba reads the count on import, and sets it in OpenMP, which it shares with torch.
    os.environ["NUMBA_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        import numba

        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        raise KernelUnavailableError(f"numba, or its OpenMP layer, is missing ({error})") from None
    numba.config.THREADING_LAYER = "omp"


@cache
def multiplies_bytes() -> bool:
    """True if kernels are compiled for a CPU with AVX2, FMA and F16C. After ``prepare``."""
    return {"avx2", "fma", "f16c"} <= _features()


@cache
def multiplies_lines() -> bool:
    """True if kernels are compiled for a CPU with AVX-512 VNNI. After ``prepare``."""
    return {"avx512vnni", "avx512bw", "avx512vl"} <= _features()


@cache
def multiplies_half_lines() -> bool:
    """True if kernels are compiled for a CPU with the VNNI of AVX or of AVX-512. After
    ``prepare``."""
    return "avxvnni" in _features() or multiplies_lines()


@cache
def multiplies_pairs() -> bool:
    """True if kernels are compiled for a CPU that multiplies bf16. After ``prepare``."""
    return "avx512bf16" in _features()


@cache
def moves_bits() -> bool:
    """True if kernels are compiled for a CPU with AVX-512 VBMI and VNNI. After ``prepare``."""
    return "avx512vbmi" in _features() and multiplies_lines()


def _features() -> set[str]:
    from numba.core.registry import cpu_target

    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return {each[1:] for each in features if each.startswith("+")}


@cache
def _store() -> KernelStore | None:
    """The place of compiled code; ``None`` for a user without one, as in some containers."""
    from .code_store import KernelStore  # imports numba

    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        return None
    store = KernelStore(Path(root) / "tandem", settings=WIDE)
    try:
        store.create()
    except OSError as error:
        log.warning("kernels are compiled at each start: %s", error)
        return None
    return store


def kernel(
    *, parallel: bool = False, exact: bool = False, variant: str = ""
) -> Callable[[Callable[..., Any]], Any]:
    """Compile on the first call with arguments of these types, and store the code on disk if there
    is a folder for it (``code_store.py``).

    Sums may be reordered for vectorisation unless ``exact``; NaN and infinity are preserved.
    ``variant`` must identify everything that a function captures from its surroundings.
    """
    import numba

    from .code_store import KernelCache

    options: dict[str, Any] = {
        "parallel": parallel,
        "nogil": True,
        "error_model": "numpy",
        # Set for each function: by default numba uses the caller's setting.
        "fastmath": False if exact else {"reassoc", "contract", "nsz", "arcp"},
    }

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        # The version of the kernels does not cover functions from elsewhere.
        if function.__module__.startswith(f"{__package__}.") and (store := _store()) is not None:
            dispatcher._cache = KernelCache(
                function, store, variant
            )  # as numba does for cache=True
        return dispatcher

    return compiled


def compile_address(
    function: Callable[..., None], arguments: int, *, variant: str = ""
) -> tuple[int, object]:
    """The address of a function of integers for a kernel to call, and an object that keeps it
    valid. The kernel is compiled only once for all such functions."""
    from numba.core.ccallback import CFunc
    from numba.types import intp, void

    from .code_store import KernelCache

    options = {"nogil": True, "error_model": "numpy", "fastmath": False}
    c_function: Any = CFunc(function, ((intp,) * arguments, void), {}, options)
    if (store := _store()) is not None:
        c_function._cache = KernelCache(function, store, variant)
    c_function.compile()
    return c_function.address, c_function


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory for kernels: contiguous, with half types and fp8 as integers."""
    x = x.contiguous()
    bits = _AS_INTEGERS.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()


class Same(Generic[In, Out]):
    """Caches conversions of the last inputs. All layers get the same arrays of a step, and each
    conversion takes a microsecond."""

    def __init__(self, make: Callable[[In], Out]) -> None:
        self._make = make
        self._inputs: tuple[In, ...] = ()
        self._outputs: tuple[Out, ...] = ()

    def __call__(self, *inputs: In) -> tuple[Out, ...]:
        """The converted inputs."""
        if len(inputs) != len(self._inputs) or not all(map(is_, inputs, self._inputs)):
            self._inputs, self._outputs = inputs, tuple(map(self._make, inputs))
        return self._outputs
