"""The engine on a CPU against transformers: Qwen3-0.6B's shape, random weights, bf16, two threads.

    python -m tandem.benchmarks.engine.against_transformers

Tandem is measured through its Python API, including the scheduler, the rank process and the
sampler, with compiled kernels and with torch operators (the default). transformers is measured by
its forward pass alone; before decoding its cache is filled without a prefill. Each side runs in its
own process; the sides alternate, and each figure is the median of its rounds (figures that take
longer than a minute are measured in one round only). A prompt is computed several times a round;
the first run allocates memory and compiles kernels, so it is discarded unless prompts are too slow
to repeat. The same processes measure the limits (matrix products, memory reads): products in the
faster of bf16 and fp32, because not every CPU has bf16 instructions.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tandem.benchmarks.support.engine_rates import decode_rate
from tandem.benchmarks.support.report import publish

THREADS = 2
ROUNDS = 3
ONCE_ABOVE_SECONDS = 60.0
PREFILLS = 3
WARM_ABOVE_SECONDS = 10.0
CONTEXT = 128
STEPS = 12
CONFIG: dict[str, Any] = {
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
# Only the last token of a prompt needs logits.
PREFILL_PARAMETERS = PARAMETERS - CONFIG["vocab_size"] * CONFIG["hidden_size"]
WEIGHT_BYTES = 2 * PARAMETERS
PREFILL_GOALS = {512: ">=1.4", 2048: ">=1.4"}
DECODE_GOALS = {1: ">=1.8", 8: ">=2.3", 32: ">=3"}

Figures = Iterator[tuple[str, float]]


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def warm_seconds(work: Callable[[], Any]) -> float:
    """Median of a few timings, without the first unless that one was too long to repeat."""
    first = seconds(work)
    if first > WARM_ABOVE_SECONDS:
        return first
    return statistics.median(seconds(work) for _ in range(PREFILLS))


def measure_tandem(kernels: str, folder: str, names: set[str]) -> Figures:
    """Tokens per second through the Python API; nothing is cached between prompts."""
    from tandem import Engine, EngineConfig, SamplingParams

    config = EngineConfig(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        threads=THREADS,
        cpu_kernels=kernels,
        max_model_len=2560,
        max_num_seqs=32,
        num_blocks=640,
        enable_prefix_caching=False,
        itl_target=0,  # streams of a batch start together
    )
    with Engine(config) as engine:

        def prefill(length: int) -> None:
            one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            engine.generate_sync([list(range(length))], one)

        prefill(64)
        for length in PREFILL_GOALS:
            name = f"prefill {length}"
            if name in names:
                yield name, length / warm_seconds(partial(prefill, length))
        for batch in DECODE_GOALS:
            if f"decode {batch}" in names:
                prompts = [[1 + stream, *range(CONTEXT - 1)] for stream in range(batch)]
                yield f"decode {batch}", decode_rate(engine, prompts, STEPS)


def measure_transformers(folder: str, names: set[str]) -> Figures:
    """Tokens per second of the same shape in transformers, with its default cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(THREADS)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.original_inv_freq = 1e6 ** (
        -torch.arange(0, 128, 2).float() / 128
    )

    @torch.inference_mode()
    def forward(ids: Any, cache: Any = None) -> None:
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    forward(torch.arange(64)[None])
    for length in PREFILL_GOALS:
        name, ids = f"prefill {length}", torch.arange(length)[None]
        if name in names:
            yield name, length / warm_seconds(partial(forward, ids))
    for batch in DECODE_GOALS:
        name = f"decode {batch}"
        if name not in names:
            continue
        cache, token = DynamicCache(), torch.full((batch, 1), 7)
        for layer in range(config.num_hidden_layers):
            filled = torch.randn(batch, 8, CONTEXT, 128).bfloat16()
            cache.update(filled, filled.clone(), layer)
        forward(token, cache)
        elapsed = sum(seconds(partial(forward, token, cache)) for _ in range(STEPS))
        yield name, batch * STEPS / elapsed


def measure_limits(folder: str, names: set[str]) -> Figures:
    """GFLOP/s of a large product, GB/s of a read larger than the caches."""
    import torch

    torch.set_num_threads(THREADS)
    wide = [torch.randn(2048, 2048) for _ in range(2)]
    buffer = torch.ones(1 << 28)
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (x.to(dtype) for x in wide)
        small = min(seconds(partial(torch.matmul, a[:256], b.T)) for _ in range(3))
        if small < 1.0:  # otherwise the CPU has no products of this dtype
            elapsed = min(seconds(partial(torch.matmul, a, b.T)) for _ in range(5))
            best = max(best, 2 * 2048**3 / elapsed / 1e9)
    yield "GFLOP/s", best
    yield "GB/s", buffer.nbytes / min(seconds(buffer.sum) for _ in range(5)) / 1e9


SIDES: dict[str, Callable[[str, set[str]], Figures]] = {
    "tandem": partial(measure_tandem, "compiled"),
    "default": partial(measure_tandem, "torch"),
    "transformers": measure_transformers,
    "limits": measure_limits,
}
NAMES = {f"prefill {n}" for n in PREFILL_GOALS} | {f"decode {n}" for n in DECODE_GOALS}


def run_side(side: str, folder: str, names: set[str]) -> dict[str, tuple[float, float]]:
    """Run a side; returns each figure and the seconds its measurement took."""
    command = [
        sys.executable,
        "-m",
        "tandem.benchmarks.engine.against_transformers",
        side,
        folder,
        *names,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def print_side(side: str, folder: str, names: set[str]) -> None:
    """Entry point of a side's own process."""
    figures, start = {}, time.perf_counter()
    for name, value in SIDES[side](folder, names):
        figures[name] = (value, time.perf_counter() - start)
        start = time.perf_counter()
        print(f"{side}: {name}: {value:.1f}", file=sys.stderr, flush=True)
    print(json.dumps(figures))


def measure_all(folder: str) -> dict[str, dict[str, float]]:
    """The median of each side's figures over the rounds."""
    figures_by_side: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    names = {side: set(NAMES) for side in SIDES}
    for _ in range(ROUNDS):
        for side in SIDES:
            if not names[side]:
                continue
            for name, (value, elapsed) in run_side(side, folder, names[side]).items():
                figures_by_side[side].setdefault(name, []).append(value)
                if elapsed > ONCE_ABOVE_SECONDS:
                    names[side].discard(name)
    return {
        side: {name: statistics.median(values) for name, values in figures.items()}
        for side, figures in figures_by_side.items()
    }


def rows_of(medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    limits, rows = medians["limits"], []
    for kind, goals in (("prefill", PREFILL_GOALS), ("decode", DECODE_GOALS)):
        for size, goal in goals.items():
            name = f"{kind} {size}"
            value, peer = medians["tandem"][name], medians["transformers"][name]
            row = {"unit": "tok/s", "against": f"transformers ({peer:.1f} tok/s)"}
            shape = f"{name} on Qwen3-0.6B's shape, bf16, {THREADS} threads"
            rows.append(
                {"metric": shape, "value": value, "goal": goal, "ratio": value / peer} | row
            )
            default = medians["default"][name]
            rows.append(
                {"metric": f"{name}, torch's operators", "value": default, "ratio": default / peer}
                | row
            )
            multiplied = PREFILL_PARAMETERS if kind == "prefill" else PARAMETERS
            compute = limits["GFLOP/s"] * 1e9 / (2 * multiplied)
            reads = limits["GB/s"] * 1e9 / WEIGHT_BYTES * (size if kind == "decode" else 1e9)
            limit = min(compute, reads)
            rows.append(
                {
                    "metric": f"{name}, share of the machine's limit",
                    "value": value,
                    "unit": "tok/s",
                    "against": f"limit of {limit:.0f} tok/s "
                    f"({limits['GFLOP/s']:.0f} GFLOP/s, {limits['GB/s']:.1f} GB/s)",
                    "ratio": value / limit,
                }
            )
    return rows


def main() -> None:
    if len(sys.argv) > 2:
        print_side(sys.argv[1], sys.argv[2], set(sys.argv[3:]))
        return
    from tandem.shared.builtin_model import builtin_model_path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin_model_path() / file, folder)
        publish("engine/against_transformers", rows_of(measure_all(folder)))


if __name__ == "__main__":
    main()
