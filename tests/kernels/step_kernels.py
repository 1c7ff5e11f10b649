"""Lists the Triton kernels of whole models that a GPU would compile in a step, without a GPU:

    python -m tandem.tests.kernels.step_kernels [few]

Compiling takes seconds, so all of it belongs to the start. Models are built on torch's ``meta``
device as a rank builds them, run steps of all kinds, and hand KV over; then their graphs are
captured, and steps in which all rows decode run again. A line for each model; fails if a step
launches a kernel that was not launched before it, or one of a whole model that
``compile_ahead.py`` does not bound. ``few`` models have one of each kind.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

from tandem.benchmarks.node.gpu_engine import SHAPES, write_shape
from tandem.benchmarks.support.gpu_predictions import LLAMA, QWEN
from tandem.kernels.gpu import (
    chunk_trial,
    decode_trial,
    frame_copy_trial,
    fused_trial,
    grouped_experts,
    latent_trial,
    quantized_trial,
    routing_trial,
    skinny_trial,
    step_inputs_trial,
)
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.quantized_linear import ROWS as PRODUCT_ROWS
from tandem.shared.engine.plan import (
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepPlan,
    TokenMasks,
)
from tandem.shared.engine.rank import sampler_choice
from tandem.shared.engine.rank.gpu_sampler import GpuSampler
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.kernels import compile_ahead
from tandem.tests.kernels.launches import recorded
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.packed_kv import packed_bytes
from tandem.tests.support.runners import build_runner

META = torch.device("meta")
GENERATION = 90
# Their results are kept, also from one model to the next.
TRIALS = (
    decode_trial.works,
    chunk_trial.works,
    quantized_trial.works,
    skinny_trial.works,
    grouped_experts.works,
    frame_copy_trial._works,
    fused_trial.norm_works,
    fused_trial.activation_works,
    fused_trial.rope_works,
    step_inputs_trial.works,
    routing_trial._works,
    routing_trial._router_works,
    latent_trial.decodes,
    latent_trial.takes_chunks,
    latent_trial.stores,
    sampler_choice.works,
)
# Of whole models, the kernels that are not compiled ahead, since those of the other are almost the
# same: groups have two heads instead of four; rows of logits have fewer blocks.
ALIKE = {
    QWEN: {"_attend", "_attend_chunks"},
    LLAMA: {"_draw", "_measure", "_narrow", "_gather"},
}
# What rows draw by, in turn.
SAMPLING = (
    RankSampling(temperature=0.0),
    RankSampling(),
    RankSampling(top_k=20, top_p=0.9),
    RankSampling(repetition_penalty=1.1, logprobs=4),
    RankSampling(min_p=0.1, bad_words=((1, 2),), allowed_token_ids=(2, 3)),
)
# Of a step: the tokens before each sequence, and those that it brings.
Rows = Sequence[tuple[int, int]]
STEPS: tuple[Rows, ...] = (
    [(0, 1)],
    [(700, 1)],
    [(7, 1), (5000, 1), (0, 1)],
    [(40 + row, 1) for row in range(17)],
    [(row, 1) for row in range(max(PRODUCT_ROWS))],
    [(row, 1) for row in range(max(PRODUCT_ROWS) + 1)],
    [(0, 5)],
    [(0, 600)],
    [(0, 300), (40, 1), (64, 20), (3, 1)],
    [(40, 3), (90, 1)],
)
# Of graphs; the other numbers of rows are padded.
SIZES = (1, 4, max(map(len, STEPS)))
DECODES = [rows for rows in STEPS if all(count == 1 for _, count in rows)]


FEW = (
    *((QWEN, kv_dtype) for kv_dtype in ("auto", "fp8", "int8")),
    *((name, "auto") for name in ("gemma2", "llama Q4_0", "qwen3_moe", "qwen3_moe Q8_0")),
    *(("deepseek_v3", "int8"), ("gpt_oss", "auto")),
)


def models(root: Path) -> Iterator[tuple[str, Path, str, str]]:
    """Name, folder or file, load format and dtype of the cache."""
    for shape in (SHAPES[QWEN], SHAPES[LLAMA]):
        # All of their layers are alike.
        two_layers = replace(shape, config=shape.config | {"num_hidden_layers": 2})
        folder = write_shape(two_layers, root / shape.name)
        for kv_dtype in ("auto", "fp8", "int8"):
            yield shape.name, folder, "dummy", kv_dtype
    for name in ("mistral", "gemma2", "gemma3", "gemma4", "hunyuan"):
        yield name, tiny_models.cached(name, root), "auto", "auto"
    whole = root / "whole"
    tiny_models.build("llama", whole, hidden_size=256, intermediate_size=512)
    for kind, others in (("Q4_0", {"output": "Q6_K"}), ("Q4_1", {}), ("Q8_0", {}), ("Q6_K", {})):
        file = write_gguf(whole, root / f"{kind}.gguf", kind, others=others)
        yield f"llama {kind}", file, "auto", "auto"
    experts = root / "experts"
    tiny_models.build("qwen3_moe", experts, hidden_size=64, moe_intermediate_size=32)
    yield "qwen3_moe", experts, "auto", "auto"
    latents = root / "latents"
    tiny_models.build("deepseek_v3", latents, hidden_size=64, moe_intermediate_size=32)
    for kv_dtype in ("auto", "fp8", "int8"):
        yield "deepseek_v3", latents, "auto", kv_dtype
    with_sinks = root / "with_sinks"
    tiny_models.build("gpt_oss", with_sinks, hidden_size=64, intermediate_size=32)
    yield "gpt_oss", with_sinks, "auto", "auto"
    yield "qwen3_moe Q8_0", write_gguf(experts, root / "experts.gguf", "Q8_0"), "auto", "auto"


def run(runner: ModelRunner, rows: Rows) -> None:
    """A step: a forward pass, and a draw for each sequence, for some of them with masks."""
    blocks = list(range(400))
    sequences = [
        SequenceStep(number, [5] * count, start, blocks[: (start + count) // 16 + 1], True)
        for number, (start, count) in enumerate(rows)
    ]
    specs = [
        SamplerSpec(number, SAMPLING[number % len(SAMPLING)], number) for number in range(len(rows))
    ]
    if len(rows) % 3 == 0:
        sequences[0] = sequences[0]._replace(masked=True)
        runner.masks.put(TokenMasks(1, {0: bytes(-(-runner.model.spec.vocab_size // 8))}))
    runner.launch(StepPlan.of(1, sequences, specs, list(range(len(rows)))))


def hand_over(runner: ModelRunner, keys: list[str]) -> None:
    """KV out of scattered blocks and into them, as the data plane moves it: a launch for
    consecutive layers of one shape."""
    cache, blocks = runner.cache, (*range(0, 40, 2), *range(99, 80, -1))
    layers = range(len(cache.layers))
    for first, end in ((0, 600), (3, 500), (17, 598)):
        size = sum(packed_bytes(cache, layer, end - first) for layer in layers)
        buffer = torch.empty(size, dtype=torch.uint8, device=META)
        before = len(keys)
        cache.pack_frame(layers, blocks, first, end, buffer)
        cache.scatter_frame(layers, blocks, first, end, buffer)
        shapes = [each.head_bytes for each in cache.layout]
        runs = sum(1 for _ in groupby(shapes))
        assert len(keys) == before + 2 * runs, keys[before:]


def main() -> int:
    failed = False
    with (
        tempfile.TemporaryDirectory() as root,
        torch.inference_mode(),
        recorded(GENERATION) as keys,
    ):
        for case in compile_ahead.cases(GENERATION):
            case.launch()
        bounded = set(keys)
        for name, path, load_format, kv_dtype in models(Path(root)):
            if "few" in sys.argv and (name, kv_dtype) not in FEW:
                continue
            for trial in TRIALS:
                trial.cache_clear()
            keys.clear()
            runner = build_runner(
                path,
                dtype="bfloat16",
                kv_dtype=kv_dtype,
                device=META,
                num_blocks=400,
                load_format=load_format,
            )
            assert isinstance(runner.model.place.operators, GpuOperators) and runner.batched_decode
            assert isinstance(runner.sampler, GpuSampler)
            startup = set(keys)
            keys.clear()
            for rows in STEPS:
                run(runner, rows)
            hand_over(runner, keys)
            late, launches = set(keys) - startup, len(keys)
            if name in ALIKE:
                others = {key for key in keys if key.split(":")[0] not in ALIKE[name]} - bounded
                assert not others, f"{name}, KV {kv_dtype}: not compiled ahead: {sorted(others)}"
            keys.clear()
            # A replay launches no kernel by itself.
            runner.capture_graphs(lambda forward: (lambda: None, forward()), SIZES)
            assert runner.graphs is not None
            startup |= set(keys)
            keys.clear()
            for rows in DECODES:
                run(runner, rows)
            late |= set(keys) - startup
            launches += len(keys)
            print(
                f"{name}, KV {kv_dtype}: {len(startup)} kernels at the start, {launches} launches "
                f"in steps, {len(late)} keys first seen in a step",
                *sorted(late),
                sep="\n  ",
                flush=True,
            )
            failed = failed or bool(late)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
