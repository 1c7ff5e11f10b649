"""Prints the digests of a kernel in several files: ``python -m tandem.tests.kernels.digests_of FILE
...``. Each file has a Triton kernel ``_kernel`` of one tensor and a constant ``BLOCK_N``."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch

from tandem.tests.kernels.compiled_kernels import digest, ignore_lines
from tandem.tests.kernels.launches import compiled_for


def main() -> None:
    ignore_lines()
    x = torch.empty(64, device="meta")

    def show(kernel: Any, key: str, compiled: object) -> None:
        print(digest(kernel, key, 90))

    for path in sys.argv[1:]:
        spec = spec_from_file_location("kernels", path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        with compiled_for(90, show, lambda kernel, key: True):
            module._kernel[1,](x, BLOCK_N=64)


if __name__ == "__main__":
    main()
