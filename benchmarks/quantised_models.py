"""Whole GGUF models against llama.cpp, on a CPU with int8 dot products.

    python -m tandem.benchmarks.quantised_models FILE ... --llama-python PYTHON

PYTHON is an interpreter that has llama-cpp-python; ``support/random_gguf.py`` writes files of
random weights. The figures and goals of a file depend on its weights (``plan_of``). Tandem is
measured through its Python API, including head process, scheduler and sampler; llama.cpp by
``llama_decode`` and an argmax over the logits. Both cache KV in float16, llama.cpp's default. Both
sides keep the file loaded and alternate figure by figure, because the machine is shared: a figure
is the median of its rounds, a ratio the median over the pairs. llama.cpp's threads spin while they
wait, so it needs all of its cores, and each side begins after a pause in which the other's go to
sleep. ``--share`` measures the share of matrix products in a decode
step, in a separate process without a head, alternating between the model's products and the
runner's steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.benchmarks.support.engine_rates import decode_rate, prefill_rate
from tandem.benchmarks.support.llama_process import LlamaProcess
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.models.registry import spec_of
from tandem.shared.models.spec import QUANTIZED, MoESpec
from tandem.shared.weights.source import open_source

BATCHES = (1, 8, 32)
PREFILLS = (128, 512)
CONTEXT = 128
# Steps of each stream, without those during which other streams start.
STEPS = {1: 60, 8: 30, 32: 12}
ROOM = 512
# OpenMP's threads spin for some milliseconds after their work.
PAUSE_SECONDS = 0.2
# Files of at least this hidden size hold only some layers of a large model.
LARGE = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """The goal of each figure's ratio."""

    batches: dict[int, str]
    prefills: dict[int, str]


def plan_of(file: str) -> Plan:
    """The figures to measure for a file, by the kind of its weights."""
    spec = spec_of(open_source(file).config())
    ahead = dict.fromkeys(BATCHES, ">1.0")
    if any(isinstance(layer.mlp, MoESpec) for layer in spec.layers):
        return Plan(ahead, {})
    if spec.hidden_size >= LARGE:
        return Plan({1: ">=1.0"}, {})
    if spec.dtype != QUANTIZED:
        return Plan(ahead, dict.fromkeys(PREFILLS, ">1.0"))
    return Plan({1: ">=0.9", 8: ">=1.6", 32: ">=2.0"}, dict.fromkeys(PREFILLS, ">=2.0"))


def after_pause(rate: Callable[..., float], *arguments: object) -> float:
    """A rate that the other side's threads no longer disturb."""
    time.sleep(PAUSE_SECONDS)
    return rate(*arguments)


def measure(file: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The report's rows for a file."""
    from tandem import Engine, EngineConfig

    plan = plan_of(file)
    longest = max(plan.prefills, default=0)
    # Prompts of streams are prefilled in the first round; no two others share a prefix.
    blocks = (max(plan.batches) + 2) * ROOM // 16
    config = EngineConfig(
        model=file,
        threads=options.threads,
        cpu_kernels="compiled",
        kv_cache_dtype="float16",
        max_model_len=ROOM + 64,
        max_num_seqs=max(BATCHES),
        num_blocks=blocks,
        itl_target=0,  # streams of a batch start together
    )
    results = []
    llama = LlamaProcess(
        options.llama_python,
        file,
        threads=options.threads,
        streams=max(BATCHES),
        context=ROOM,
        kv_dtype="float16",
    )
    with Engine(config) as engine:
        prefill_rate(engine, 64, 0)
        # llama.cpp clears its cache at its start; a thread does that for ours during the first
        # prompts.
        for number in range(blocks * 16 // longest if longest else 0):
            prefill_rate(engine, longest, 2000 + number)
        for length, goal in plan.prefills.items():
            pairs = [
                (
                    after_pause(prefill_rate, engine, length, length + number),
                    after_pause(llama.rate, "prefill", length),
                )
                for number in range(options.rounds)
            ]
            results.append(_row(f"prefill of {length} tokens", file, goal, pairs))
        for streams, goal in plan.batches.items():
            prompts = [[1 + stream, *range(100, 99 + CONTEXT)] for stream in range(streams)]
            decode_rate(engine, prompts, 1)
            llama.rate("decode", streams, CONTEXT, 1)
            pairs = [
                (
                    after_pause(decode_rate, engine, prompts, STEPS[streams]),
                    after_pause(llama.rate, "decode", streams, CONTEXT, STEPS[streams]),
                )
                for _ in range(options.rounds)
            ]
            results.append(_row(f"decoding at batch {streams}", file, goal, pairs))
    llama.close()
    return results


def _row(name: str, file: str, goal: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Print a figure and return its row for the report."""
    ours, theirs = map(statistics.median, zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    row = {
        "metric": f"{name}, {Path(file).stem}",
        "value": ours,
        "unit": "tok/s",
        "goal": goal,
        "against": f"llama.cpp ({theirs:.0f} tok/s)",
        "ratio": statistics.median(ratios),
    }
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(
        f"{row['metric']}: {ours:.0f} / {theirs:.0f}, ratio {row['ratio']:.2f} ({spread}), "
        f"goal {goal}",
        file=sys.stderr,
        flush=True,
    )
    return row


def share_of_products(file: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The share of a rank's step spent in matrix products, measured alternately with whole
    steps."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tandem.benchmarks.quantised_models", file),
            *("--print-share", f"--threads={options.threads}", f"--rounds={options.rounds}"),
        ],
        env=_environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    results = []
    for line in done.stdout.splitlines():
        streams, step, products = line.split()
        results.append(
            {
                "metric": f"products in a step of {streams} rows, {Path(file).stem}",
                "value": float(products) * 1e3,
                "unit": "ms",
                "against": f"the rank's step ({float(step) * 1e3:.2f} ms)",
                "ratio": float(products) / float(step),
            }
        )
    return results


def _environment() -> dict[str, str]:
    from tandem.shared.engine.executor import ENVIRONMENT

    return os.environ | ENVIRONMENT


def print_share(file: str, options: argparse.Namespace) -> None:
    """Entry point of the process that measures the share without a head."""
    import torch

    torch.set_num_threads(options.threads)
    from tandem.shared.engine.device import operators_for
    from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
    from tandem.tests.support.runners import build_runner

    blocks = ROOM // 16
    runner = build_runner(
        file,
        dtype="float32",
        num_blocks=max(BATCHES) * blocks,
        kv_dtype="float16",
        operators=operators_for(torch.device("cpu"), cpu_kernels="compiled"),
    )
    layers: Any = runner.model.layers
    methods = [
        (each.method, each.method.parts[0].inputs[0])
        for layer in layers
        for each in (layer.attention.qkv, layer.attention.o, layer.mlp.up, layer.mlp.down)
        if hasattr(each.method, "parts")
    ]
    greedy = RankSampling(temperature=0.0)
    specs = [SamplerSpec(stream, greedy, stream) for stream in range(max(BATCHES))]
    runner.execute(StepPlan.of(0, [], specs))
    number = 0
    for streams in BATCHES:
        tables = [list(range(at * blocks, (at + 1) * blocks)) for at in range(streams)]
        inputs = [(method, torch.randn(streams, width)) for method, width in methods]
        last = torch.randn(streams, runner.model.spec.hidden_size)
        steps, products = [], []
        for turn in range(options.rounds * 10):
            number += 1
            rows = [
                SequenceStep(at, [100 + at], CONTEXT + turn % 64, table, True)
                for at, table in enumerate(tables)
            ]
            start = time.perf_counter()
            runner.execute(StepPlan.of(number, rows))
            stepped = time.perf_counter()
            for method, x in inputs:
                method(x)
            runner.model.logits(last)
            steps.append(stepped - start)
            products.append(time.perf_counter() - stepped)
        print(streams, statistics.median(steps), statistics.median(products), flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", action="store_true", help="of a step that its products take")
    parser.add_argument("--print-share", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.print_share:
        print_share(options.files[0], options)
        return
    if not options.llama_python:
        parser.error("--llama-python is missing")
    results = []
    for file in options.files:
        results += measure(file, options)
        if options.share:
            results += share_of_products(file, options)
    publish("quantised_models", results, dry=options.dry)


if __name__ == "__main__":
    main()
