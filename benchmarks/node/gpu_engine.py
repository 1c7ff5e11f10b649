"""The engine on a GPU, compared with predictions and with the GPU's bandwidth and FLOP limits.

    python -m tandem.benchmarks.node.gpu_engine [--out DIR] [--device emulation]

Two shapes with random weights: Qwen3-0.6B and Llama-3-8B, in bfloat16. ``step`` is one step of a
rank in this process, without a head; ``API`` is ``tandem.Engine`` with scheduler and rank process,
greedy. A table of the slowest kernels of one step follows. A copy and a matrix product are measured
first and give the limits: for decoding, the bytes of weights and KV that a step reads over the
bandwidth of the copy; for prefill, the FLOP rate of the product. ``--device emulation`` runs a tiny
shape on the CPU as a smoke test; it measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tandem.benchmarks.engine.against_transformers import CONFIG as QWEN
from tandem.benchmarks.support.gpu_predictions import PREDICTIONS
from tandem.benchmarks.support.report import RESULTS, write

LLAMA: dict[str, Any] = {
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
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
CONTEXT_LIMIT = 16384
BLOCK = 16
WARM_UP = 3
# Number of kernels in a profile.
LISTED = 10
# Tokens of a generation through the API: the difference of two lengths is decoding alone.
SHORT, LONG = 16, 144


@dataclass(frozen=True)
class RowLoad:
    """Workload of a shape: decoding rows and their context, or prompts and their length."""

    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    device: str
    matrix: int
    buffer_bytes: int
    rounds: int


ON_GPU = RowLoad(((1, 128), (32, 1024), (256, 600)), (2048, 8192), "cuda", 8192, 4 << 30, 20)
EMULATED = RowLoad(((1, 20), (4, 40)), (32,), "cpu", 128, 1 << 20, 1)


@dataclass(frozen=True)
class GpuShape:
    """A model's config, and the bytes and FLOP of one of its steps."""

    name: str
    config: dict[str, Any]

    @property
    def layer_parameters(self) -> int:
        c = self.config
        attention = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
        per_layer = c["hidden_size"] * (attention + 3 * c["intermediate_size"])
        return int(per_layer * c["num_hidden_layers"])

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a decode step: all layers and the LM head."""
        head = self.config["vocab_size"] * self.config["hidden_size"]
        return 2 * (self.layer_parameters + head)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of one token."""
        c = self.config
        return int(4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])


def shapes(small: bool) -> list[GpuShape]:
    changes = SMALL if small else {}
    limit = {"max_position_embeddings": CONTEXT_LIMIT}
    every = {"Qwen3-0.6B": QWEN, "Llama-3-8B": LLAMA}
    return [GpuShape(name, config | limit | changes) for name, config in every.items()]


def folder_of(shape: GpuShape, root: Path) -> Path:
    """A model folder whose weights are generated on load."""
    from tandem.shared.builtin_model import builtin_model_path

    folder = root / shape.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model_path() / file, folder)
    return folder


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], Any], device: str, rounds: int) -> float:
    for _ in range(WARM_UP):
        work()
    settle(device)
    elapsed = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        settle(device)
        elapsed.append(time.perf_counter() - start)
    return statistics.median(elapsed)


# ---- what the device can do --------------------------------------------------------------------


def limits(load: RowLoad) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and FLOP a second of a bfloat16 product."""
    source = torch.ones(load.buffer_bytes, dtype=torch.uint8, device=load.device)
    target = torch.empty_like(source)
    copied = (
        2
        * load.buffer_bytes
        / median_seconds(lambda: target.copy_(source), load.device, load.rounds)
    )
    wide = torch.randn(2, load.matrix, load.matrix, device=load.device).bfloat16()
    product = (
        2 * load.matrix**3 / median_seconds(lambda: wide[0] @ wide[1], load.device, load.rounds)
    )
    return copied, product


# ---- one rank's steps --------------------------------------------------------------------------


def step_seconds(folder: Path, load: RowLoad) -> Iterator[tuple[str, float]]:
    """Yield the name and the duration of each kind of step."""
    from tandem.tests.support.runners import build_runner

    rows, context = max(load.decodes, key=lambda each: each[0] * each[1])
    blocks = max(rows * (context // BLOCK + 2), max(load.prompts) // BLOCK + 1)
    with torch.inference_mode():
        runner = build_runner(
            folder, device=load.device, num_blocks=blocks, block_size=BLOCK, load_format="dummy"
        )
    for rows, context in load.decodes:
        step = _step(runner, rows, context, 1)
        yield f"decode {rows} x {context}", median_seconds(step, load.device, load.rounds)
    for length in load.prompts:
        step = _step(runner, 1, 0, length)
        yield f"prefill {length}", median_seconds(step, load.device, load.rounds)
    print(profile(_step(runner, *load.decodes[-1], 1), load.device), flush=True)


def _step(runner: Any, rows: int, start: int, count: int) -> Callable[[], Any]:
    """A step in which each row computes ``count`` tokens after a context of ``start``. Repeatable:
    it writes the same slots again."""
    from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan

    each = (start + count) // BLOCK + 1
    sequences = [
        SequenceStep(row, [7] * count, start, list(range(row * each, (row + 1) * each)), True)
        for row in range(rows)
    ]
    greedy = RankSampling(temperature=0.0)
    runner.execute(StepPlan(0, [], [SamplerSpec(row, greedy, 0) for row in range(rows)]))
    return lambda: runner.execute(StepPlan(1, sequences, []))


def profile(step: Callable[[], Any], device: str) -> str:
    """The slowest kernels in one step of the largest batch, and the GPU's idle time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = device == "cuda"
    step()
    settle(device)
    # Only kernels on a GPU: recording the launches would slow them down.
    with profiler(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        start = time.perf_counter()
        step()
        settle(device)
        elapsed = (time.perf_counter() - start) * 1e6

    def of(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    kernels = sorted(record.key_averages(), key=of, reverse=True)
    busy = sum(map(of, kernels))
    lines = [
        f"one step under the profiler: {elapsed:.0f} us, {elapsed - busy:.0f} of it between kernels"
    ]
    lines += [f"{of(each):8.0f} us  {each.count:5}x  {each.key[:90]}" for each in kernels[:LISTED]]
    return "\n".join(lines)


# ---- the Python API ----------------------------------------------------------------------------


def api_rates(folder: Path, load: RowLoad) -> Iterator[tuple[str, float]]:
    """Tokens a second through ``tandem.Engine``."""
    from tandem import Engine, EngineConfig, SamplingParams

    max_rows = max(rows for rows, _ in load.decodes)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device=load.device,
        max_num_seqs=max_rows,
        max_model_len=max(*load.prompts, *(context + LONG for _, context in load.decodes)) + 2,
        enable_prefix_caching=False,
    )
    with Engine(config) as engine:

        def seconds(rows: int, length: int, tokens: int) -> float:
            prompts = [[1 + row % 99, *range(length - 1)] for row in range(rows)]
            wrapped = [[token % 255 for token in prompt] for prompt in prompts]
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            engine.generate_sync(wrapped, params)
            return time.perf_counter() - start

        seconds(max_rows, 8, 4)
        for length in load.prompts:
            elapsed = statistics.median(seconds(1, length, 1) for _ in range(3))
            yield f"prefill {length}", length / elapsed
        for rows, context in load.decodes:
            length = max(2, context - LONG // 2)
            elapsed = seconds(rows, length, LONG) - seconds(rows, length, SHORT)
            yield f"decode {rows} x {context}", rows * (LONG - SHORT) / elapsed


# ---- the run -----------------------------------------------------------------------------------


def measure(load: RowLoad, small: bool) -> Iterator[dict[str, Any]]:
    """Yield rows for ``report.write`` as they are measured."""
    copied, product = limits(load)
    yield _row("copy on the GPU, read and written", copied / 1e12, "TB/s")
    yield _row("bfloat16 product of 8192 x 8192", product / 1e12, "TFLOP/s")
    with tempfile.TemporaryDirectory() as root:
        for shape in shapes(small)[: 1 if small else None]:
            folder = folder_of(shape, Path(root))
            limit = {
                **{
                    f"decode {rows} x {context}": rows
                    / ((shape.weight_bytes + rows * context * shape.kv_bytes) / copied)
                    for rows, context in load.decodes
                },
                **{f"prefill {n}": product / (2 * shape.layer_parameters) for n in load.prompts},
            }
            for name, seconds in step_seconds(folder, load):
                yield _row(f"{shape.name} {name}: step", seconds * 1e3, "ms")
            if load.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()  # the API's rank is another process
            if find_spec("msgspec") is None:
                print(f"{shape.name}: not measured through the API: needs msgspec")
                continue
            for name, rate in api_rates(folder, load):
                yield _row(f"{shape.name} {name}: API", rate, "tok/s", limit[name])


def _row(metric: str, value: float, unit: str, limit: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"metric": metric, "value": value, "unit": unit}
    parts = [] if limit is None else [f"limit of {limit:.0f} {unit}"]
    if metric in PREDICTIONS:
        parts.append(f"predicted {PREDICTIONS[metric]}")
    if limit is not None:
        row["ratio"] = value / limit
    return row | {"against": ", ".join(parts)}


def main() -> int:
    parser = argparse.ArgumentParser("gpu_engine", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cuda", "emulation"), default="cuda")
    options = parser.parse_args()
    emulated = options.device == "emulation"
    if not emulated and not torch.cuda.is_available():
        print("gpu_engine: there is no CUDA device here, so there is nothing to measure")
        return 1
    rows = []
    for row in measure(EMULATED if emulated else ON_GPU, emulated):
        print(f"{row['metric']}: {row['value']:.4g} {row['unit']}  {row['against']}", flush=True)
        rows.append(row)
        # Printed at once, so that a failure or a time limit loses no earlier result.
        if not emulated:
            write("gpu_engine", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
