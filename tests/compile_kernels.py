"""Compile the CPU kernels that many tests run, so that their processes find them on disk.

    .venv/bin/python -P -m tandem.tests.compile_kernels

Otherwise each worker that needs one would compile it, several of them the same one at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import torch

from tandem.kernels.attention_metadata import AttentionConfig, AttentionParams
from tandem.kernels.cpu import jit
from tandem.kernels.fp8 import FP8
from tandem.kernels.scaled import INT8

# Dtypes of the cache. Whole layers are compiled for some, which are those of models in tests.
ALONE = (torch.bfloat16, FP8, INT8)
WITH_LAYERS = (torch.float32, torch.float16)


def compile_attention(caches: Sequence[torch.dtype]) -> None:
    """Rotation, attention and what lies between products."""
    torch.set_num_threads(1)
    jit.prepare()
    from tandem.kernels.cpu import operators

    cpu, compiled = torch.device("cpu"), operators.CompiledOperators()
    for cache in caches:
        params = AttentionParams(scale=1.0)
        config = AttentionConfig(cpu, torch.float32, cache, 3, 1, 8, 4, params)
        compiled.prepare_batched_decode(config)


def compile_layers() -> None:
    """Attention, and layers in one call."""
    compile_attention(WITH_LAYERS)
    from tandem.kernels.cpu import operators

    operators._compile_pointwise(torch.float32)
    if not jit.multiplies_bytes():
        return
    operators._compile_panels()
    for cache in WITH_LAYERS:
        operators._compile_layer(cache, experts=False)
    operators._compile_expert_layer()
    operators._compile_layer(torch.float32, experts=True)


if __name__ == "__main__" and find_spec("numba") is not None:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = pool.submit(compile_layers), pool.submit(compile_attention, ALONE)
        for job in jobs:
            job.result()
