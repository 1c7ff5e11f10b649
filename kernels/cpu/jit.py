"""Setup of numba: its kernels run on torch's threads, and are compiled once on each machine.

Both libraries divide loops with OpenMP. torch's copy of libgomp is loaded first, so numba's loops
bind to it and share its threads: two pools would spin against each other.
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

from ..errors import KernelUnavailableError

# True if the CPU has the registers of AVX-512: 32 of them, each as wide as a panel.
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# numba has no half types: their bits are passed as integers, each half type as another one.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


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
    numba.config.CACHE_DIR = _cache_folder()


def _cache_folder() -> str:
    """A folder for this version of all kernels: numba itself only checks the file that a kernel is
    in, not those that it calls. Empty, which lets numba choose, for a user without a home, as in
    some containers."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    code = b"".join(file.read_bytes() for file in sources) + bytes([WIDE])
    version = hashlib.sha256(code).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(root, "tandem", f"kernels-{version}") if os.path.isabs(root) else ""


def kernel(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile on the first call with arguments of these types, and keep the code on disk if there
    is a folder for it.

    Sums may be reordered, so that they are vectorised; NaN and infinity are preserved.
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
    """Return whether kernels read and write tensors of this dtype."""
    return dtype == torch.float32 or dtype in _AS_INTEGERS


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory as kernels take it: contiguous, half types as integers."""
    x = x.contiguous()
    bits = _AS_INTEGERS.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()
