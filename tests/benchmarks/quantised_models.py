"""Whole models in a quantised GGUF file beside llama.cpp, on a CPU that multiplies bytes.

    python -m tandem.tests.benchmarks.quantised_models FILE ... --llama-python PYTHON

PYTHON is an interpreter that has llama-cpp-python. Tandem is measured through its Python API, with
the head's process, the scheduler and the sampler in the figures; llama.cpp by ``llama_decode`` and
a search for the largest logit. Both sides have the file loaded and take turns, one figure at a
time, as others use the machine, too: a figure is the median of its rounds, and a ratio that of the
ratios of the pairs. How much of a decoding step products take is measured in a process by itself,
without a head: the model's products one after the other against the runner's steps, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tandem.tests.benchmarks.support.decode_rate import decode_rate
from tandem.tests.benchmarks.support.report import add_dry, publish

BATCHES = (1, 8, 32)
PREFILLS = (128, 512)
CONTEXT = 128
# Of each stream, without those in which other streams begin.
STEPS = {1: 100, 8: 40, 32: 15}
ROOM = 512


def prefill_rate(engine: Any, length: int, seed: int) -> float:
    """Tokens a second of a prompt that no other begins like."""
    from tandem import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    begun = time.perf_counter()
    engine.generate_sync([[100 + (at + seed) % 4000 for at in range(length)]], one)
    return length / (time.perf_counter() - begun)


class Llama:
    """llama.cpp's process (``support/llama_side.py``)."""

    def __init__(self, python: str, file: str, threads: int) -> None:
        script = Path(__file__).parent / "support" / "llama_side.py"
        numbers = map(str, (threads, max(BATCHES), ROOM))
        self._process = subprocess.Popen(
            [python, str(script), file, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def rate(self, *question: object) -> float:
        """The answer to a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"llama.cpp's process ended with {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure(file: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The report's rows for a file."""
    from tandem import Engine, EngineConfig

    config = EngineConfig(
        model=file,
        threads=options.threads,
        cpu_kernels="compiled",
        max_model_len=ROOM + 64,
        max_num_seqs=max(BATCHES),
        num_blocks=max(BATCHES) * ROOM // 16,
        enable_prefix_caching=False,
        itl_target=0,  # all streams of a batch shall begin soon after each other
    )
    pairs: dict[str, list[tuple[float, float]]] = {}
    llama = Llama(options.llama_python, file, options.threads)
    with Engine(config) as engine:
        prefill_rate(engine, 64, 0)
        for number in range(options.rounds):
            for length in options.prefills:
                ours = prefill_rate(engine, length, number)
                name = f"prefill of {length} tokens"
                pairs.setdefault(name, []).append((ours, llama.rate("prefill", length)))
            for streams in options.batches:
                prompts = [[1 + stream, *range(100, 99 + CONTEXT)] for stream in range(streams)]
                ours = decode_rate(engine, prompts, STEPS[streams])
                theirs = llama.rate("decode", streams, CONTEXT, STEPS[streams])
                pairs.setdefault(f"decoding at batch {streams}", []).append((ours, theirs))
                print(f"{file} {streams}: {ours:.0f} {theirs:.0f}", file=sys.stderr, flush=True)
    llama.close()
    made = []
    for name, found in pairs.items():
        ours, theirs = map(statistics.median, zip(*found, strict=True))
        made.append(
            {
                "metric": f"{name}, {Path(file).stem}",
                "value": ours,
                "unit": "tok/s",
                "goal": ">=0.9",
                "against": f"llama.cpp ({theirs:.0f} tok/s)",
                "ratio": statistics.median(a / b for a, b in found),
            }
        )
    return made


def share_of_products(file: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """How much of a rank's step its products take, by themselves and in turns with it."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tandem.tests.benchmarks.quantised_models", file, "--share"),
            *(f"--threads={options.threads}", f"--rounds={options.rounds}"),
            *("--batches", *map(str, options.batches)),
        ],
        env=_environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    made = []
    for line in done.stdout.splitlines():
        streams, step, products = line.split()
        made.append(
            {
                "metric": f"products in a step of {streams} rows, {Path(file).stem}",
                "value": float(products) * 1e3,
                "unit": "ms",
                "against": f"the rank's step ({float(step) * 1e3:.2f} ms)",
                "ratio": float(products) / float(step),
            }
        )
    return made


def _environment() -> dict[str, str]:
    from tandem.shared.engine.executor import ENVIRONMENT

    return os.environ | ENVIRONMENT


def print_share(file: str, options: argparse.Namespace) -> None:
    """Entry point of the process that computes without a head."""
    import torch

    torch.set_num_threads(options.threads)
    from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
    from tandem.shared.engine.rank.device import operators_for
    from tandem.tests.support.runners import build_runner

    blocks = ROOM // 16
    runner = build_runner(
        file,
        dtype="float32",
        num_blocks=max(options.batches) * blocks,
        operators=operators_for(torch.device("cpu"), cpu_kernels="compiled"),
    )
    layers: Any = runner.model.layers
    methods = [
        (each.method, each.method.parts[0].inputs[0])
        for layer in layers
        for each in (layer.attention.qkv, layer.attention.o, layer.mlp.up, layer.mlp.down)
        if hasattr(each.method, "parts")
    ]
    for stream in range(max(options.batches)):
        runner.sampler.add(SamplerSpec(stream, RankSampling(temperature=0.0), stream))
    number = 0
    for streams in options.batches:
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
            begun = time.perf_counter()
            runner.execute(StepPlan(number, rows))
            stepped = time.perf_counter()
            for method, x in inputs:
                method(x)
            runner.model.logits(last)
            steps.append(stepped - begun)
            products.append(time.perf_counter() - stepped)
        print(streams, statistics.median(steps), statistics.median(products), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, choices=BATCHES)
    parser.add_argument("--prefills", type=int, nargs="*", default=PREFILLS, choices=PREFILLS)
    parser.add_argument("--share", action="store_true", help=argparse.SUPPRESS)
    add_dry(parser)
    options = parser.parse_args()
    if options.share:
        print_share(options.files[0], options)
        return
    if not options.llama_python:
        parser.error("--llama-python is missing")
    made = []
    for file in options.files:
        made += measure(file, options)
        made += share_of_products(file, options)
    publish("quantised_models", made, dry=options.dry)


if __name__ == "__main__":
    main()
