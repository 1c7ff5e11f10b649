"""Compares which compiled kernel ``direct`` launches with the one that Triton looks up:

    python -m tandem.tests.kernels.direct_launches

Arguments of all kinds are launched twice. Prints how many launches there were, and how many of them
went past Triton; fails if one was not of the kernel that Triton would have launched, or had other
arguments. Nothing is compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl

from tandem.kernels.gpu import launch
from tandem.tests.kernels.launches import on_gpu

GRID = (3, 2)
NUMBERS = (1, 16, 17, 1 << 31, -5)
DTYPES = (torch.float32, torch.bfloat16)
# Bytes from an aligned address.
OFFSETS = (0, 4)


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["any_place"])
def _kernel(
    x: tl.tensor,
    any_place: tl.tensor,
    eps: tl.tensor,
    plain: tl.tensor,
    special: tl.tensor,
    SIZE: tl.constexpr,
    IS_LAST: tl.constexpr,
) -> None:
    tl.store(x, tl.load(any_place) + eps + plain + special + SIZE)


@dataclass
class Compiled:
    """What Triton has compiled for a key; ``launches`` are those of all."""

    key: str
    launches: list[tuple[str, tuple[Any, ...]]]
    function = 7
    packed_metadata = (4, 1, 0)

    def run(self, *arguments: Any) -> None:
        self.launches.append((self.key, arguments))


class Triton:
    """Triton's own look-up; notes what it would have launched."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.look_up = triton.runtime.jit.JITFunction.run

    def run(self, kernel: Any, *arguments: Any, **named: Any) -> Compiled:
        """In the place of ``JITFunction.run``."""
        self.asked.append(self.key(kernel, *arguments, **named))
        return Compiled(self.asked[-1], self.launches)

    def key(self, kernel: Any, *arguments: Any, **named: Any) -> str:
        keys = []

        def note(*, compile: dict[str, Any], **_: Any) -> bool:
            keys.append(compile["key"])
            return True  # already done, as far as Triton is concerned

        triton.knobs.runtime.jit_cache_hook = note
        self.look_up(kernel, *arguments, **named | {"warmup": True})
        (key,) = keys
        return str(key)


def arguments() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of ``_kernel``, and its constants."""
    kinds = product(DTYPES, OFFSETS, OFFSETS, NUMBERS, NUMBERS, (8, 16), (True, False))
    for dtype, offset, other_offset, plain, special, size, last in kinds:
        x = torch.empty(64, dtype=dtype)[offset // dtype.itemsize :]
        other = torch.empty(64, dtype=torch.float32)[other_offset // 4 :]
        yield (x, other, 0.5, plain, special), {"SIZE": size, "IS_LAST": last, "num_warps": 2}


def main() -> int:
    known = Triton()
    kernel = launch.direct(_kernel)
    launch._device = lambda x: 0
    count = past = 0
    # Triton calls it as a method of the kernel.
    with on_gpu(90, lambda *given, **named: known.run(*given, **named)):
        for (given, constants), _ in product(arguments(), range(2)):
            known.asked.clear()
            known.launches.clear()
            kernel[GRID](*given, **constants)
            count += 1
            if known.asked:
                continue
            past += 1
            ((key, launched),) = known.launches
            assert key == known.key(_kernel, *given, grid=GRID, **constants), (given, constants)
            addresses = [each.data_ptr() for each in given[:2]]
            values = constants["SIZE"], constants["IS_LAST"]
            expected = *GRID, 1, 0, 7, (4, 1, 0), None, None, None, *addresses, *given[2:], *values
            assert launched == expected, (launched, expected)
    print(f"{count} launches, {past} past Triton {triton.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
