"""numba, set up so that its kernels run on torch's threads, and are compiled once a machine.

Both libraries divide loops with OpenMP. torch's copy of libgomp is loaded first, so numba's loops
bind to its functions, that is to its threads: two pools would spin against each other.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Whether the CPU has the registers of AVX-512: 32 of them, each as wide as a panel.
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# numba knows neither of the half types: their bits are passed as integers, whose type says which.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


class Unavailable(Exception):
    """Why nothing can be compiled here, and what to do."""


@cache
def prepare() -> None:
    """To be called once torch knows its threads, before any kernel is imported. Raises
    ``Unavailable``."""
    # numba reads the count when it is imported, and tells OpenMP, that is torch, when it starts.
    os.environ["NUMBA_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        import numba

        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        raise Unavailable(f"numba, or its OpenMP layer, is missing ({error})") from None
    numba.config.THREADING_LAYER = "omp"
    numba.config.CACHE_DIR = _cache_folder()


def _cache_folder() -> str:
    """numba would take code for current as long as the one file that it was written in is, whatever
    has become of those that it calls. So each version of all of them has a folder of its own.
    Empty, which lets numba look for one, for a user without a home, as in some containers."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    code = b"".join(file.read_bytes() for file in sources) + bytes([WIDE])
    version = hashlib.sha256(code).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(root, "tandem", f"kernels-{version}") if os.path.isabs(root) else ""


def kernel(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile when first called with arguments of these types, and keep the code on disk if there
    is a place for it.

    Sums may be reordered, so that they are vectorised; NaN and infinity keep their meaning.
    """
    import numba

    options: dict[str, Any] = {
        "parallel": parallel,
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    }

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written to
            return numba.njit(**options)(function)

    return compiled


def castable(dtype: torch.dtype) -> bool:
    """Whether kernels read and write tensors of this type."""
    return dtype == torch.float32 or dtype in _AS_INTEGERS


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory as kernels take it: in order, without gaps."""
    x = x.contiguous()
    bits = _AS_INTEGERS.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()
