"""Compiles the Triton kernels to machine code for GPUs of several generations, without one:

    python -m tandem.tests.kernels.compile_ahead

Constants, options and divisibility are those that a GPU's just-in-time compilation has. A line for
each kernel: the generation, types and shape, and what a program takes. Fails where one
spills registers, takes more shared memory than there is, or does not copy asynchronously.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.kernels.fp8 import FP8
from tandem.kernels.gpu import paged_decode, quantized_linear
from tandem.kernels.quantized import QuantizedWeight, grouped_codes

GENERATIONS = (80, 90, 100)
# Every generation's programs may have at least this much, also on consumers' GPUs.
SHARED_BYTES = 99 << 10
# A processor has 65,536 registers: so three programs of 128 threads fit on it.
MOST_REGISTERS = 168
# A word or two that ptxas puts there for Blackwell, where float32 has no tensor cores.
FLOAT32_STACK = 16
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {"table": "*i32", "parts_RHSD": "*fp32", "weights_RHS": "*fp32"}
# Multiples of 16 for every model that is served, so the compiler may load 16 bytes at a time.
STRIDES = ("q_row", "q_head", "cache_head", "cache_slot", "out_row", "out_head", "inputs")
# The wrapper keeps Triton from compiling anew for each value of these.
UNSPECIALIZED = ("splits", "table_stride", "rows", "outputs")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    FP8: "*u8",
}


@dataclass(frozen=True)
class CompiledCase:
    """One kind of attention: dtypes of queries and cache, query heads, KV heads, head dimension."""

    name: str
    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int


CASES = (
    CompiledCase("Qwen3-0.6B", torch.bfloat16, torch.bfloat16, 16, 8, 128),
    CompiledCase("Llama-3-8B", torch.bfloat16, torch.bfloat16, 32, 8, 128),
    CompiledCase("Llama-3-8B", torch.bfloat16, FP8, 32, 8, 128),
    CompiledCase("SmolLM2-135M", torch.float16, torch.float16, 9, 3, 64),
    CompiledCase("Llama-3-8B", torch.float32, torch.float32, 32, 8, 128),
)


@dataclass(frozen=True)
class Resources:
    """Resources of a program, in bytes; registers per thread."""

    registers: int
    stack: int
    local: int
    shared: int
    asynchronous: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.stack} B stack, {self.local} B local, "
            f"{self.shared} B shared, {self.asynchronous} asynchronous copies of 16 B"
        )


def compiled(
    kernel: Any,
    generation: int,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
) -> Resources:
    integers = dict.fromkeys((*STRIDES, *UNSPECIALIZED), "i32")
    known = POINTERS | integers | {"scale": "fp32"} | types
    signature = {p.name: known.get(p.name, "constexpr") for p in kernel.params}
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (index,): divisible
        for index, (name, type_) in enumerate(signature.items())
        if type_.startswith("*") or name in STRIDES
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x10,", made.asm["ptx"])
    return Resources(
        **_resources(made.asm["cubin"]), shared=made.metadata.shared, asynchronous=len(copies)
    )


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "local": found["LOCAL"],
    }


def programs(generation: int) -> Iterator[tuple[str, Resources]]:
    """The kernels of every case, compiled."""
    for case in CASES:
        attend, combine = paged_decode.constants(
            case.q_dtype, case.cache_dtype, case.heads, case.kv_heads, case.dim, None, 16
        )
        q, cache = TYPES[case.q_dtype], TYPES[case.cache_dtype]
        types = {"q_THD": q, "keys_KND": cache, "values_KND": cache, "out_THD": q}
        label = f"{case.name} {q[1:]} {cache[1:]}"
        of_attend = attend, paged_decode.ATTEND_OPTIONS
        yield f"attend {label}", compiled(paged_decode._attend, generation, types, *of_attend)
        if case is CASES[0]:  # the other kernel is nearly the same for all
            of_combine = combine, paged_decode.COMBINE_OPTIONS
            yield (
                f"combine {label}",
                compiled(paged_decode._combine, generation, types, *of_combine),
            )


def products(generation: int) -> Iterator[tuple[str, Resources]]:
    """The product with each format of quantised weights, compiled."""
    for kind in BLOCK_FORMATS.values():
        blocks = torch.zeros(1, kind.nbytes, dtype=torch.uint8)
        weight = grouped_codes(QuantizedWeight(kind, blocks))
        codes = "*u8" if weight.halves else "*i8"
        scales = TYPES[weight.scales.dtype]
        fixed = {"codes": codes, "scales_OS": scales, "minimums_OS": scales}
        for dtype, rows in ((torch.bfloat16, 1), (torch.bfloat16, 64), (torch.float32, 1)):
            types = fixed | {"x_RI": TYPES[dtype], "out_RO": TYPES[dtype]}
            constants = quantized_linear.constants(weight, rows, dtype)
            usage = compiled(
                quantized_linear._multiply,
                generation,
                types,
                constants,
                quantized_linear.OPTIONS,
            )
            yield f"multiply {kind.name} {TYPES[dtype][1:]} {rows}", usage


def check(name: str, usage: Resources) -> list[str]:
    """List the problems of a compiled kernel."""
    wrong = []
    if usage.stack > (FLOAT32_STACK if "fp32" in name else 0) or usage.local:
        wrong.append("spills registers")
    if usage.registers > MOST_REGISTERS:
        wrong.append(f"more than {MOST_REGISTERS} registers a thread")
    if usage.shared > SHARED_BYTES:
        wrong.append(f"more than {SHARED_BYTES} bytes of shared memory")
    if name.startswith("attend") and not usage.asynchronous:
        wrong.append("does not copy keys and values asynchronously")
    return wrong


def main() -> int:
    failed = False
    for generation in GENERATIONS:
        for name, usage in chain(programs(generation), products(generation)):
            wrong = check(name, usage)
            failed = failed or bool(wrong)
            print(generation, f"{name}: {usage}", *(f"FAILED: {each}" for each in wrong), sep="  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
