"""The engine on a GPU, with random weights in bfloat16.

    python -m tandem.benchmarks.node.gpu_engine [--shape Qwen3-0.6B] [--out DIR]
        [--device emulation]

``step`` is one step of a rank in this process, without a head: rows that decode, replayed from a
graph and planned on top of the step before, as the engine does; or a prompt. ``between steps`` is
how long the GPU has nothing to do between two steps, under the profiler, which also prints a step's
slowest kernels. ``API`` is ``tandem.Engine`` with scheduler and rank process, greedy, prompts
included. A step's share is that of its roofline: the bytes of weights and KV that it reads, over
the speed of this run's copy, or the FLOP of a prompt, over the rate of this run's product.

The shapes are Qwen3-0.6B, Llama-3-8B, and 12 of the 48 layers of Qwen3-30B-A3B.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from tandem.benchmarks.engine.against_transformers import CONFIG as QWEN_CONFIG
from tandem.benchmarks.support.gpu_figures import Figure, figure, limits_of_run, parser, run
from tandem.benchmarks.support.gpu_predictions import EXPERTS, LLAMA, QWEN
from tandem.benchmarks.support.gpu_timing import DEVICE, EMULATED, limits, release
from tandem.benchmarks.support.random_model import write_tokenizer
from tandem.shared.engine.plan import (
    PLACEHOLDER,
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepPlan,
)
from tandem.shared.engine.rank.graphs import Capture, cuda_capture, graph_sizes
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.process.frame_room import with_frame_room
from tandem.shared.process.garbage import collect_rarely

CONTEXT_LIMIT = 16384
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
EXPERTS_CONFIG: dict[str, Any] = QWEN_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
SMALL_CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BLOCK = 16
# Kernels in a profile; steps of a measurement and of a profile.
LISTED = 14
STEPS, PROFILED, REPEATS = (2, 2, 1) if EMULATED else (25, 10, 5)
GREEDY = RankSampling(temperature=0.0)


@dataclass(frozen=True)
class GpuShape:
    """A model's config; rows that decode and their context; lengths of prompts; and rows, prompt
    and generated tokens through the API."""

    name: str
    config: dict[str, Any]
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...] = ()
    api: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_mixture(self) -> bool:
        return "num_experts" in self.config

    @property
    def attention_parameters(self) -> int:
        c = self.config
        heads = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
        return int(c["hidden_size"] * heads * c["num_hidden_layers"])

    def feed_forward_parameters(self, rows: int) -> float:
        """Parameters that a step of ``rows`` rows reads; they choose experts evenly."""
        c, layers = self.config, self.config["num_hidden_layers"]
        if not self.is_mixture:
            return float(3 * c["hidden_size"] * c["intermediate_size"] * layers)
        count, chosen = c["num_experts"], c["num_experts_per_tok"]
        read = count * (1 - (1 - chosen / count) ** rows)
        return float(3 * c["hidden_size"] * c["moe_intermediate_size"] * layers * read)

    def weight_bytes(self, rows: int) -> float:
        """Bytes of weights read by a decode step: all layers and the LM head."""
        head = self.config["vocab_size"] * self.config["hidden_size"]
        return 2 * (self.attention_parameters + self.feed_forward_parameters(rows) + head)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of one token."""
        c = self.config
        return int(4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])

    def decode_bytes(self, rows: int, context: int) -> float:
        return self.weight_bytes(rows) + rows * context * self.kv_bytes

    def prompt_operations(self, tokens: int) -> float:
        """Operations of the products for a prompt, in a model without experts."""
        c = self.config
        heads = c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"]
        weights = self.attention_parameters + self.feed_forward_parameters(1)
        return 2 * tokens * weights + 2 * heads * tokens**2

    def small(self) -> GpuShape:
        """The same kinds of work, small enough to take a moment."""
        config = self.config | SMALL_CONFIG | (SMALL_EXPERTS if self.is_mixture else {})
        api = tuple((2, 20, 4) for _ in self.api[:1])
        return GpuShape(self.name, config, ((1, 20), (3, 40)), self.prompts and (32,), api)


ROWS = ((1, 128), (64, 600), (256, 600))
SHAPES = {
    shape.name: shape
    for shape in (
        GpuShape(
            QWEN,
            QWEN_CONFIG,
            ROWS,
            (2048, 8192),
            ((1, 128, 256), (64, 536, 128), (256, 64, 1024)),
        ),
        GpuShape(LLAMA, LLAMA_CONFIG, ROWS, (2048, 8192), ((1, 128, 128), (256, 536, 128))),
        GpuShape(EXPERTS, EXPERTS_CONFIG, ((1, 1024), (32, 1024))),
    )
}


def write_shape(shape: GpuShape, folder: Path) -> Path:
    """A model folder whose weights are generated on load, and whose tokens are all words."""
    folder.mkdir()
    config = shape.config | {"max_position_embeddings": CONTEXT_LIMIT}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    return folder


# ---- one rank's steps --------------------------------------------------------------------------


def build(shape: GpuShape, folder: Path) -> ModelRunner:
    """A rank's runner, whose cache is full of random KV."""
    tokens = max([rows * (context + BLOCK) for rows, context in shape.decodes] + [*shape.prompts])
    blocks = tokens // BLOCK + max(rows for rows, _ in shape.decodes) + 1
    options: dict[str, Any] = {"num_blocks": blocks, "block_size": BLOCK, "load_format": "dummy"}
    if EMULATED:
        from triton.runtime import interpreter

        from tandem.tests.support.emulated_gpu import emulated_runner, use_kernels
        from tandem.tests.support.quick_interpreter import make_quick

        use_kernels(setattr)
        make_quick(interpreter)
        runner = emulated_runner(folder, **options)
    else:
        from tandem.tests.support.runners import build_runner

        runner = build_runner(folder, device=DEVICE, **options)
    for layer in runner.cache.layers:
        for side in layer:
            side.normal_()
    return runner


def capture() -> Capture:
    if not EMULATED:
        return cuda_capture()
    from tandem.tests.support.graph_emulator import emulated_capture

    return emulated_capture


def captured(shape: GpuShape, runner: ModelRunner) -> Iterator[Figure]:
    """The time and the memory of the graphs of all steps that are measured."""
    free, _ = torch.cuda.mem_get_info()
    start = time.perf_counter()
    runner.capture_graphs(capture(), graph_sizes(max(rows for rows, _ in shape.decodes)))
    torch.cuda.synchronize()
    yield figure(f"{shape.name}: capture of graphs", time.perf_counter() - start, "s")
    used = (free - torch.cuda.mem_get_info()[0]) / (1 << 20)
    yield figure(f"{shape.name}: memory of graphs", used, "MiB")


class Decoding:
    """Steps in which the same rows decode, each planned on top of the one before. They write the
    same slots again, so that all steps are alike."""

    def __init__(self, runner: ModelRunner, rows: int, context: int) -> None:
        self._runner, self._rows, self._context = runner, rows, context
        each = context // BLOCK + 1
        order = torch.randperm(rows * each).tolist()
        first = [
            SequenceStep(row, [1 + row], context, order[row * each : (row + 1) * each], True)
            for row in range(rows)
        ]
        specs = [SamplerSpec(row, GREEDY, row) for row in range(rows)]
        self._number = 1
        result = runner.execute(StepPlan.of(1, first, specs))
        assert not result.failed, result.failed

    def plan(self) -> StepPlan:
        self._number += 1
        rows = [
            SequenceStep(row, [PLACEHOLDER], self._context, [], True) for row in range(self._rows)
        ]
        return StepPlan.of(self._number, rows, ahead=True)

    def run(self, count: int) -> tuple[float, float]:
        """Seconds of a step, and of its launch on the host; one step is launched ahead."""
        runner, launching = self._runner, 0.0
        step = runner.launch(self.plan())
        start = time.perf_counter()
        for _ in range(count):
            plan = self.plan()
            before = time.perf_counter()
            following = runner.launch(plan)
            launching += time.perf_counter() - before
            runner.collect(step)
            step = following
        elapsed = time.perf_counter() - start
        runner.collect(step)
        return elapsed / count, launching / count

    def end(self) -> None:
        self._runner.execute(StepPlan.of(self._number + 1, [], removed=list(range(self._rows))))


def decoded(shape: GpuShape, runner: ModelRunner) -> Iterator[Figure]:
    """Steps of rows that decode, and what the GPU does in them."""
    for rows, context in shape.decodes:
        steps = Decoding(runner, rows, context)
        steps.run(3)
        timings = [steps.run(STEPS) for _ in range(REPEATS)]
        step, launch = (statistics.median(each) for each in zip(*timings, strict=True))
        share = shape.decode_bytes(rows, context) / limits().copy / step
        name = f"{shape.name} decode {rows} x {context}"
        yield figure(f"{name}: step", step * 1e3, "ms", share)
        yield figure(f"{name}: launch on the host", launch * 1e3, "ms")
        if shape.is_mixture:
            yield figure(f"{name}: of the roofline", share, "", share)
        spans, table = profile(partial(steps.run, PROFILED - 1), PROFILED)
        yield figure(f"{name}: between steps", 1e6 * longest_gap(spans), "us")
        print(table, flush=True)
        steps.end()


def prefilled(shape: GpuShape, runner: ModelRunner) -> Iterator[Figure]:
    """Whole prompts in one step."""
    for length in shape.prompts:
        table = torch.randperm(-(-length // BLOCK)).tolist()
        tokens = torch.randint(0, shape.config["vocab_size"], (length,)).tolist()
        plan = StepPlan.of(
            1, [SequenceStep(0, tokens, 0, table, True)], [SamplerSpec(0, GREEDY, 0)]
        )
        durations = []
        for _ in range(2 + REPEATS):
            start = time.perf_counter()
            result = runner.execute(plan)
            durations.append(time.perf_counter() - start)
            assert not result.failed, result.failed
        step = statistics.median(durations[1:])
        share = shape.prompt_operations(length) / limits().product / step
        yield figure(f"{shape.name} prefill {length}: step", step * 1e3, "ms", share)
        yield figure(f"{shape.name} prefill {length}: of a product", share, "", share)
        print(profile(partial(runner.execute, plan), 1)[1], flush=True)
    runner.execute(StepPlan.of(2, [], removed=[0]))


Span = tuple[float, float]


def profile(run: Callable[[], Any], steps: int) -> tuple[list[Span], str]:
    """The times at which kernels ran in ``steps`` steps, in seconds, and the slowest kernels."""
    # Only kernels on a GPU: recording the launches would slow them down.
    activity = ProfilerActivity.CPU if EMULATED else ProfilerActivity.CUDA
    with profiler(activities=[activity]) as record:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        elapsed = (time.perf_counter() - start) * 1e6 / steps

    def of(event: Any) -> float:
        time_total = event.self_cpu_time_total if EMULATED else event.self_device_time_total
        return float(time_total) / steps

    kernels = sorted(record.key_averages(), key=of, reverse=True)
    busy = sum(map(of, kernels))
    lines = [f"a step under the profiler: {elapsed:.0f} us, the GPU is busy for {busy:.0f}"]
    lines += [
        f"{of(each):8.1f} us {each.count / steps:6.1f}x  {each.key[:90]}"
        for each in kernels[:LISTED]
    ]
    where = DeviceType.CPU if EMULATED else DeviceType.CUDA
    times = [event.time_range for event in record.events() if event.device_type == where]
    return [(each.start / 1e6, each.end / 1e6) for each in times], "\n".join(lines)


def longest_gap(spans: list[Span]) -> float:
    """The usual longest time without a kernel in a step: the median of as many longest gaps as
    there are steps, less one."""
    gaps, end = [], None
    for first, last in sorted(spans):
        if end is not None:
            gaps.append(max(0.0, first - end))
        end = last if end is None else max(end, last)
    return statistics.median(sorted(gaps)[1 - PROFILED :]) if gaps else 0.0


# ---- the Python API ----------------------------------------------------------------------------


def api_rates(shape: GpuShape, folder: Path) -> Iterator[Figure]:
    """Tokens a second through ``tandem.Engine``."""
    from tandem import Engine, EngineConfig, SamplingParams

    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device=DEVICE.type,
        max_num_seqs=max(rows for rows, _, _ in shape.api),
        max_model_len=max(prompt + tokens for _, prompt, tokens in shape.api) + 2,
        enable_prefix_caching=False,
    )
    with Engine(config) as engine:

        def seconds(rows: int, length: int, tokens: int) -> float:
            vocabulary = shape.config["vocab_size"]
            prompts = torch.randint(0, vocabulary, (rows, length)).tolist()
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            engine.generate_sync(prompts, params)
            return time.perf_counter() - start

        seconds(shape.api[-1][0], 8, 4)
        for rows, prompt, tokens in shape.api:
            elapsed = seconds(rows, prompt, tokens)
            context = prompt + tokens // 2
            least = tokens * shape.decode_bytes(rows, context) / limits().copy
            rate = rows * tokens / elapsed
            yield figure(f"{shape.name} {rows} x {tokens}: API", rate, "tok/s", least / elapsed)


# ---- the run -----------------------------------------------------------------------------------


def measure(shape: GpuShape) -> Iterator[Figure]:
    """All figures of a shape."""
    yield from limits_of_run()
    with tempfile.TemporaryDirectory() as root:
        folder = write_shape(shape, Path(root, "model"))
        with torch.inference_mode():
            start = time.perf_counter()
            runner = build(shape, folder)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            yield figure(f"{shape.name}: load and trials of kernels", seconds, "s")
            yield from captured(shape, runner)
            collect_rarely()  # from here on, as a rank
            for part in (decoded, prefilled):
                yield from part(shape, runner)
            del runner
        release()  # the API's rank is another process
        if shape.api and find_spec("msgspec") is None:
            print(f"{shape.name}: not measured through the API: needs msgspec")
        elif shape.api:
            yield from api_rates(shape, folder)


def main() -> int:
    options = parser("gpu_engine", __doc__)
    options.add_argument("--shape", choices=SHAPES, default=QWEN)
    chosen = options.parse_args()
    shape = SHAPES[chosen.shape].small() if EMULATED else SHAPES[chosen.shape]
    name = re.sub(r"[^\w.-]+", "_", shape.name)
    return with_frame_room(lambda: run(f"gpu_engine_{name}", chosen, measure(shape)))


if __name__ == "__main__":
    sys.exit(main())
