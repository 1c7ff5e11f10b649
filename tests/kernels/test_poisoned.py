"""The memory that tests of kernels give to wrappers."""

from __future__ import annotations

from types import FunctionType

import torch


def test_only_what_kernels_allocate_is_poisoned() -> None:
    code = (lambda: torch.zeros(3).new_empty(3)).__code__
    for module in ("tandem.kernels.gpu.norm", "tandem.shared"):
        scope = {"__name__": module, "torch": torch}
        allocated = FunctionType(code, scope)()
        assert allocated.isnan().all() == (module == "tandem.kernels.gpu.norm")
