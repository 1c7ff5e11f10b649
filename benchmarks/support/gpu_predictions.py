"""Predictions for the engine on an H100, made before the first run, next to measurements.

    python -m tandem.benchmarks.support.gpu_predictions > benchmarks/results/GPU.md

The model: a copy of 3.0 TB/s, products of 790 TFLOP/s, decode attention at 0.70 of the copy's
speed, products of few rows at 0.95, small kernels 2.5 to 3 microseconds each, 4 to 6 ms of
launching a step hidden behind the GPU where that takes longer, then the part in which the GPU
waits. Attention over fp8 and int8 follows from ``tests/kernels/compile_ahead.py``: its instructions
take 0.57 and 1.0 of the time of its bytes if one is issued in every clock. Those of chunks take 0.9
of the time of their products, with which few of them overlap. Good to 30 %.
``gpu_engine``, ``gpu_attention`` and ``handoff_cuda_ipc`` measure. Launches took four to five times
as long as predicted: one from Python takes 10 to 20 microseconds on the machine that was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """A range, the same number twice where one was given, what the hardware would allow, and what
    is to be reached as the code is."""

    low: float
    high: float
    unit: str
    limit: float | None = None
    goal: str = ""

    def __str__(self) -> str:
        return f"{_number(self.low, self.high)} {self.unit}"


def _number(low: float, high: float) -> str:
    return f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"


# Rate of a copy on the GPU.
CARRIER = "carrier alone: out of the ring, of a copy's speed"
# Over 64 sequences of 8,192 tokens; of a copy on the GPU.
ATTENTION = "decode attention 64 x 8192"
# Of a prompt; of a product on the GPU.
CHUNKS = "prefill attention 8192"
PREDICTIONS: dict[str, Prediction] = {
    "copy on the GPU, read and written": Prediction(3.0, 3.0, "TB/s"),
    "bfloat16 product of 8192 x 8192": Prediction(790, 790, "TFLOP/s"),
    "Qwen3-0.6B decode 1 x 128: step": Prediction(4, 6, "ms"),
    "Qwen3-0.6B decode 1 x 128: API": Prediction(155, 220, "tok/s", 2_500),
    "Qwen3-0.6B decode 32 x 1024: step": Prediction(4, 6, "ms"),
    "Qwen3-0.6B decode 32 x 1024: API": Prediction(4_600, 6_400, "tok/s", 19_500),
    "Qwen3-0.6B decode 256 x 600: step": Prediction(11, 11, "ms"),
    "Qwen3-0.6B decode 256 x 600: API": Prediction(15_000, 17_000, "tok/s", 41_000),
    "Qwen3-0.6B prefill 2048: API": Prediction(230_000, 230_000, "tok/s"),
    "Llama-3-8B decode 1 x 128: step": Prediction(6.7, 6.7, "ms"),
    "Llama-3-8B decode 1 x 128: API": Prediction(130, 145, "tok/s", 200),
    "Llama-3-8B decode 32 x 1024: step": Prediction(8.5, 8.5, "ms"),
    "Llama-3-8B decode 32 x 1024: API": Prediction(3_300, 3_300, "tok/s", 5_000),
    "Llama-3-8B decode 256 x 600: step": Prediction(18, 19, "ms"),
    "Llama-3-8B decode 256 x 600: API": Prediction(11_000, 11_000, "tok/s", 22_000),
    "Llama-3-8B prefill 2048: step": Prediction(72, 72, "ms"),
    "Llama-3-8B prefill 2048: API": Prediction(28_000, 28_000, "tok/s"),
    f"{ATTENTION}, bf16": Prediction(0.6, 0.8, "", 1),
    f"{ATTENTION}, fp8": Prediction(0.5, 0.7, "", 1),
    f"{ATTENTION}, int8": Prediction(0.3, 0.5, "", 1),
    f"{CHUNKS}, bf16": Prediction(0.4, 0.55, "", 1, ">=0.4"),
    f"{CHUNKS}, fp8": Prediction(0.4, 0.55, "", 1),
    f"{CHUNKS}, int8": Prediction(0.25, 0.4, "", 1),
    # Copies one frame at a time and waits for each, so no better rate is expected.
    CARRIER: Prediction(0.1, 0.15, "", 1, ">=0.1"),
}
UNMEASURED = "to be measured"


def table(values: Mapping[str, float]) -> str:
    """Predictions and measurements as a Markdown table."""
    lines = [
        "# The engine on a GPU: predicted for one H100, and measured",
        "",
        "| figure | predicted | goal | limit | measured |",
        "|---|---|---|---|---|",
    ]
    for metric, one in PREDICTIONS.items():
        limit = "" if one.limit is None else f"{one.limit:,g} {one.unit}"
        value = values.get(metric)
        text = UNMEASURED if value is None else f"{value:,.4g} {one.unit}".strip()
        lines.append(f"| {metric} | {str(one).strip()} | {one.goal} | {limit.strip()} | {text} |")
    rest = {metric: value for metric, value in values.items() if metric not in PREDICTIONS}
    lines += [f"| {metric} | | | | {value:,.4g} |" for metric, value in rest.items()]
    return "\n".join(lines) + "\n"


def products_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What ``gpu_products`` measured as Markdown: microseconds, and the share of a copy's speed."""
    by_name: dict[str, dict[str, str]] = {}
    for row in rows:
        name, _, count = row["metric"].partition(", ")
        if count.endswith(" rows"):
            figure = f"{row['value']:.0f} us, {row['ratio']:.2f}"
            by_name.setdefault(name, {})[count.removesuffix(" rows")] = figure
    counts = sorted({count for each in by_name.values() for count in each}, key=int)
    if not by_name:
        return ""
    lines = [
        "",
        "The time of a product by rows, and its share of the speed at which a copy moves a weight:",
        "",
        f"| weights | {' | '.join(counts)} |",
        f"|---|{'---|' * len(counts)}",
    ]
    for name, each in by_name.items():
        lines.append(f"| {name} | {' | '.join(each.get(count, '') for count in counts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table({}))
