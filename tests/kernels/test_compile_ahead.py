"""The Triton kernels compiled for a GPU that is not here: their resources, their instructions, and
that no step compiles any."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tandem.tests.kernels.compile_ahead import Compiled, check, count_instructions
from tandem.tests.kernels.triton_process import check_compiled, check_steps

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00000a0000017a02 */
                                                            /* 0x000fe40000000f00 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   ISETP.GE.AND P0, PT, R2, R3, PT ;
        /*0030*/              @!P0 BRA 0x10 ;
        /*0040*/               @P1 BRA 0x60 ;
        /*0050*/                   BRA 0x20 ;
        /*0060*/                   EXIT ;
        /*0070*/                   BRA 0x70;
"""


def test_kernels_fit_the_gpu_whose_instructions_are_counted() -> None:
    check_compiled(90)


def test_no_step_compiles_a_kernel() -> None:
    check_steps()


def test_the_longest_loop_is_counted() -> None:
    assert count_instructions(SASS) == 4
    inner = (
        "/*0050*/ IADD3 R3, R3, 0x1, RZ ; /*0060*/ BRA 0x50 ; /*0070*/ BRA 0x0 ; /*0080*/ EXIT ;"
    )
    assert count_instructions(inner) == 2
    assert count_instructions("/*0000*/ MOV R1, R2 ; /*0010*/ EXIT ; /*0020*/ BRA 0x20 ;") == 2


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("attend M bfloat16 fp8", {}, []),
        ("attend M bfloat16 bfloat16", {"stack": 8}, ["spills registers"]),
        ("attend M bfloat16 fp8", {"stack": 8}, ["spills registers"]),
        ("rope_store M bfloat16 int8", {"registers": 32, "stack": 8}, ["spills registers"]),
        ("attend_latents M bfloat16 int8", {"stack": 96}, []),
        ("multiply IQ3_S bfloat16 8", {"stack": 16}, []),
        ("multiply IQ3_S bfloat16 8", {"stack": 24}, ["spills registers"]),
        ("attend M bfloat16 fp8", {"local": 8}, ["spills registers"]),
        ("attend M bfloat16 fp8", {"registers": 180}, ["more than 170 registers a thread"]),
        ("attend M bfloat16 fp8", {"shared": 100 << 10}, ["more than 101376 bytes of shared"]),
        ("attend M bfloat16 fp8", {"asynchronous": 0}, ["does not copy keys and values"]),
        ("attend M bfloat16 fp8", {"slots": 0.61}, ["issues too many instructions"]),
        ("attend_chunks M bfloat16", {"shared": 227 << 10, "async_products": 4, "slots": 1.5}, []),
        ("attend_chunks M bfloat16", {"shared": 228 << 10}, ["more than", "does not multiply"]),
        ("attend_latents odd bfloat16", {"asynchronous": 4}, ["copies 16 bytes at a time from"]),
        ("attend_latents odd bfloat16", {"asynchronous": 0}, []),
        ("copy_frame 128 bf16 in", {}, ["moves less than 16 bytes at a time"]),
        ("copy_frame 128 bf16 in", {"vectors": 64 << 10}, []),
        ("copy_frame 128 int8 odd in", {"vectors": 32 << 10}, []),
        ("rms_norm 4096 bfloat16", {"registers": 32}, []),
        ("rms_norm 4096 bfloat16", {"registers": 32, "smallest": 8}, ["reads or writes less than"]),
        ("rope_store M bfloat16 fp8", {"registers": 32, "smallest": 8}, []),
        ("rope_store M bfloat16 fp8", {"registers": 32, "smallest": 4}, ["reads or writes less"]),
        ("rope_store M bfloat16 int8", {"registers": 32, "smallest": 4}, []),
        ("attend M bfloat16 fp8", {"moved": 3 << 10}, ["has few bytes on their way"]),
        ("attend M bfloat16 fp8", {"moved": 3 << 10, "num_warps": 2}, []),
        ("attend_latents M bfloat16 fp8", {"moved": 3 << 10}, ["has few bytes on their way"]),
        ("multiply IQ3_S bfloat16 8", {"slots": 1.3}, []),
        ("multiply IQ3_S bfloat16 8", {"slots": 1.4}, ["issues too many instructions"]),
    ],
)
def test_problems_of_a_kernel_are_reported(
    name: str, changes: dict[str, int], expected: list[str]
) -> None:
    good = {"num_warps": 4, "registers": 96, "stack": 0, "local": 0, "shared": 1024}
    good |= {"asynchronous": 8, "async_products": 0, "smallest": 16, "instructions": 0}
    frame = {"moved": 64 << 10, "vectors": 32 << 10, "slots": 0.5}
    kernel = "_" + name.split()[0]
    usage = Compiled(kernel=kernel, **{**good, **frame, **changes})  # type: ignore[arg-type]
    problems = check(name, usage, 90)
    assert len(problems) == len(expected)
    assert all(each.startswith(start) for each, start in zip(problems, expected, strict=True))
