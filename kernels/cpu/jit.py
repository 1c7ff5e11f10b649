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
    from .kept_code import KernelStore

log = logging.getLogger("tandem.kernels")

Given = TypeVar("Given")
Made = TypeVar("Made")

# True if the CPU has the registers of AVX-512: 32 of them, each as wide as a panel.
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# numba has no half types and no fp8: their bits are passed as integers, each type as another one.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, FP8: torch.uint8}


@cache
def prepare() -> None:
    """Set numba up. Call it once torch's threads are set, before any kernel is imported. Raises
    ``KernelUnavailableError``."""
    # numba reads the count when it is imported, and sets it in OpenMP, that is in torch, as well.
    os.environ["NUMBA_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        import numba

        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        raise KernelUnavailableError(f"numba, or its OpenMP layer, is missing ({error})") from None
    numba.config.THREADING_LAYER = "omp"


@cache
def multiplies_bytes() -> bool:
    """True if kernels are compiled for a CPU with AVX-512 VNNI. After ``prepare``."""
    return {"avx512vnni", "avx512bw"} <= _features()


@cache
def multiplies_pairs() -> bool:
    """True if kernels are compiled for a CPU that multiplies bf16. After ``prepare``."""
    return "avx512bf16" in _features()


@cache
def moves_bits() -> bool:
    """True if kernels are compiled for a CPU with AVX-512 VBMI. After ``prepare``."""
    return "avx512vbmi" in _features()


def _features() -> set[str]:
    from numba.core.registry import cpu_target

    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return {each[1:] for each in features if each.startswith("+")}


@cache
def _store() -> KernelStore | None:
    """The place of compiled code; ``None`` for a user without one, as in some containers."""
    from .kept_code import KernelStore  # imports numba

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
    """Compile on the first call with arguments of these types, and keep the code on disk if there
    is a folder for it (``kept_code.py``).

    Sums may be reordered, so that they are vectorised, unless ``exact``; NaN and infinity are
    preserved. What a function has from around it has to be told by a ``variant``.
    """
    import numba

    from .kept_code import KernelCache

    options: dict[str, Any] = {
        "parallel": parallel,
        "nogil": True,
        "error_model": "numpy",
        # Said for each function: without a word, numba gives a function its caller's.
        "fastmath": False if exact else {"reassoc", "contract", "nsz", "arcp"},
    }

    def compiled(function: Callable[..., Any]) -> Any:
        made = numba.njit(**options)(function)
        # The sources of other functions are not in the version of the kernels.
        if function.__module__.startswith(f"{__package__}.") and (store := _store()) is not None:
            made._cache = KernelCache(function, store, variant)  # as numba does for cache=True
        return made

    return compiled


def compile_address(
    function: Callable[..., None], arguments: int, *, variant: str = ""
) -> tuple[int, object]:
    """The address of a function of integers, for a kernel to call, and what has to be kept as long.
    So the kernel is compiled once for functions that differ."""
    from numba.core.ccallback import CFunc
    from numba.types import intp, void

    from .kept_code import KernelCache

    options = {"nogil": True, "error_model": "numpy", "fastmath": False}
    made: Any = CFunc(function, ((intp,) * arguments, void), {}, options)
    if (store := _store()) is not None:
        made._cache = KernelCache(function, store, variant)
    made.compile()
    return made.address, made


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory as kernels take it: contiguous, half types and fp8 as integers."""
    x = x.contiguous()
    bits = _AS_INTEGERS.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()


class Same(Generic[Given, Made]):
    """What is made of things that are given again and again, as all layers are given the arrays of
    a step: a conversion takes a microsecond."""

    def __init__(self, make: Callable[[Given], Made]) -> None:
        self._make = make
        self._given: tuple[Given, ...] = ()
        self._made: tuple[Made, ...] = ()

    def __call__(self, *given: Given) -> tuple[Made, ...]:
        """What is made of each."""
        if len(given) != len(self._given) or not all(map(is_, given, self._given)):
            self._given, self._made = given, tuple(map(self._make, given))
        return self._made
