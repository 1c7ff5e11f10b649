"""Compiles the decode kernels to machine code for GPUs of several generations, without one:

    python -m tandem.tests.kernels.compile_ahead

Prints a line for each: the generation, the kernel, its types and the shared memory that it takes.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.kernels import paged_decode

GENERATIONS = (80, 90, 100)
# Every generation's programs may have at least so much; of consumers' GPUs, too.
SHARED_BYTES = 99 << 10
STRIDES = {"q_row", "q_head", "cache_head", "cache_slot", "out_row", "out_head"}
POINTERS = {"table": "*i32", "parts_RHSD": "*fp32", "weights_RHS": "*fp32", "scale": "fp32"}
SHAPE = {"WINDOW": 0, "LEAST": 512, "MOST": 64, "DIM": 128, "WIDE": 128}
ATTEND = SHAPE | {"BLOCK": 16, "GROUP": 4, "GROUPS": 16}


def compiled(kernel: Any, generation: int, types: dict[str, str], constants: dict[str, Any]) -> int:
    """Bytes of shared memory that a program takes."""
    integers = dict.fromkeys(STRIDES | {"splits", "table_stride"}, "i32")
    known = POINTERS | integers | types
    signature = {p.name: known.get(p.name, "constexpr") for p in kernel.params}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", generation, 32)
    made = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2})
    assert made.asm["cubin"]
    return int(made.metadata.shared)


def main() -> int:
    for generation in GENERATIONS:
        taken = {}
        for q, cache, tile in (("bf16", "bf16", 64), ("bf16", "u8", 64), ("fp32", "fp32", 32)):
            types = {"q_THD": f"*{q}", "keys_KND": f"*{cache}", "values_KND": f"*{cache}"}
            constants = ATTEND | {"TILE": tile, "PACKED": cache == "u8"}
            name = f"attend {q} {cache}"
            taken[name] = compiled(paged_decode._attend, generation, types, constants)
        constants = SHAPE | {"PARTS": 16}
        taken["weigh"] = compiled(paged_decode._weigh, generation, {"out_THD": "*bf16"}, constants)
        for name, shared in taken.items():
            print(generation, name, shared)
            assert shared <= SHARED_BYTES, (generation, name, shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
