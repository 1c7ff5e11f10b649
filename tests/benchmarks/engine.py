"""The engine on a CPU against transformers: Qwen3-0.6B's shape, random weights, bf16, two threads.

``python -m tandem.tests.benchmarks.engine``. Each side runs in a process of its own; the sides
alternate, and each figure is the median of its runs. The limits (bf16 products, reads) are measured
by the same processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import write

THREADS = 2
ROUNDS = 3
CONTEXT = 128
STEPS = 8
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}
PARAMETERS = 596e6
WEIGHT_BYTES = 2 * PARAMETERS
PREFILL_GOALS = {512: ">=1.4", 2048: ">=1.4"}
DECODE_GOALS = {1: ">=1.8", 8: ">=2.3", 32: ">=3"}


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure_tandem(folder: str) -> dict[str, float]:
    """Tokens per second of the model runner, without processes around it."""
    from ...shared.engine.plan import SamplerSpec, SamplingParams, SequenceStep, StepPlan
    from ...shared.engine.runner import build_runner

    runner = build_runner(folder, dtype="bfloat16", num_blocks=600, load_format="dummy")
    size, step = runner.cache.block_size, iter(range(1, 1 << 20))
    greedy = SamplingParams(temperature=0, max_tokens=1 << 20)

    def prefill(length: int, sequence: int = 0, first_block: int = 0) -> None:
        table = list(range(first_block, first_block + -(-(length + 64) // size)))
        for start in range(0, length, 512):
            tokens = list(range(start, min(start + 512, length)))
            row = SequenceStep(sequence, tokens, start, table, False)
            runner.execute(StepPlan(next(step), [row]))

    figures = {}
    prefill(64)
    for length in PREFILL_GOALS:
        figures[f"prefill {length}"] = length / seconds(lambda length=length: prefill(length))
    for batch in DECODE_GOALS:
        blocks = -(-(CONTEXT + 64) // size)
        for sequence in range(batch):
            prefill(CONTEXT, sequence, sequence * blocks)
        specs = [SamplerSpec(i, greedy, 0, (1,)) for i in range(batch)]

        def decode(
            position: int, added: Any = (), batch: int = batch, blocks: int = blocks
        ) -> None:
            rows = [
                SequenceStep(i, [7], position, list(range(i * blocks, (i + 1) * blocks)), True)
                for i in range(batch)
            ]
            runner.execute(StepPlan(next(step), rows, list(added)))

        decode(CONTEXT, specs)
        spent = seconds(lambda decode=decode: [decode(CONTEXT + i) for i in range(1, STEPS + 1)])
        figures[f"decode {batch}"] = batch * STEPS / spent
        runner.execute(StepPlan(next(step), [], [], list(range(batch))))
    return figures


def measure_transformers(folder: str) -> dict[str, float]:
    """Tokens per second of the same shape in transformers, with its default cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def forward(ids: Any, cache: Any = None) -> Any:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    figures = {}
    forward(torch.arange(64)[None])
    for length in PREFILL_GOALS:
        ids = torch.arange(length)[None]
        figures[f"prefill {length}"] = length / seconds(lambda ids=ids: forward(ids))
    for batch in DECODE_GOALS:
        cache = forward(torch.arange(CONTEXT).repeat(batch, 1))
        token = torch.full((batch, 1), 7)
        cache = forward(token, cache)
        spent = seconds(
            lambda token=token, cache=cache: [forward(token, cache) for _ in range(STEPS)]
        )
        figures[f"decode {batch}"] = batch * STEPS / spent
    return figures


def measure_limits(folder: str) -> dict[str, float]:
    """GFLOP/s of a large bf16 product, GB/s of a read larger than the caches."""
    import torch

    a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    buffer = torch.ones(1 << 28)
    product = min(seconds(lambda: a @ b) for _ in range(5))
    read = min(seconds(buffer.sum) for _ in range(5))
    return {"GFLOP/s": 2 * 2048**3 / product / 1e9, "GB/s": buffer.nbytes / read / 1e9}


SIDES = {
    "tandem": measure_tandem,
    "transformers": measure_transformers,
    "limits": measure_limits,
}


def run_side(side: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tandem.tests.benchmarks.engine", side, folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    limits, rows = medians["limits"], []
    for kind, goals in (("prefill", PREFILL_GOALS), ("decode", DECODE_GOALS)):
        for size, goal in goals.items():
            name = f"{kind} {size}"
            value, peer = medians["tandem"][name], medians["transformers"][name]
            rows.append(
                {
                    "metric": f"{name} on Qwen3-0.6B's shape, bf16, {THREADS} threads",
                    "value": value,
                    "unit": "tok/s",
                    "goal": goal,
                    "against": f"transformers ({peer:.1f} tok/s)",
                    "ratio": value / peer,
                }
            )
            compute = limits["GFLOP/s"] * 1e9 / (2 * PARAMETERS)
            reads = limits["GB/s"] * 1e9 / WEIGHT_BYTES * (size if kind == "decode" else 1e9)
            limit = min(compute, reads)
            rows.append(
                {
                    "metric": f"{name}, share of the machine's limit",
                    "value": value,
                    "unit": "tok/s",
                    "against": f"limit of {limit:.0f} tok/s",
                    "ratio": value / limit,
                }
            )
    return rows


def main() -> None:
    if len(sys.argv) == 3:
        import torch

        torch.set_num_threads(THREADS)
        print(json.dumps(SIDES[sys.argv[1]](sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        runs = [{side: run_side(side, folder) for side in SIDES} for _ in range(ROUNDS)]
    medians = {
        side: {name: statistics.median(run[side][name] for run in runs) for name in runs[0][side]}
        for side in SIDES
    }
    print(write("engine", rows_of(medians)).read_text())


if __name__ == "__main__":
    main()
