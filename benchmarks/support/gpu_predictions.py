"""Predictions for the engine on a GPU, made before it ran there, and the bars that it is to pass.

    python -m tandem.benchmarks.support.gpu_predictions

prints them as a table of ``benchmarks/results/GPU.md``; benchmarks print them beside what they
measure. The model of a step: a copy of 3.0 TB/s (4.3 on an H200), products of few rows at 0.92 of
that, attention at 0.70 to 0.87, small kernels 1.5 microseconds each in a graph, and next to no wait
between steps. Good to 30 %. Figures without a prediction have only a bar.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.benchmarks.support.report import holds


@dataclass(frozen=True)
class Prediction:
    """A range, the same number twice where one was given, and the bar, as ``report.holds`` reads
    it; either may be missing."""

    low: float | None
    high: float | None
    unit: str
    bar: str = ""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return ""
        ends = dict.fromkeys(f"{each:,g}" for each in (self.low, self.high))
        return f"{' to '.join(ends)} {self.unit}".rstrip()


def _only(unit: str, bar: str) -> Prediction:
    return Prediction(None, None, unit, bar)


COPY = "copy on the GPU, read and written"
PRODUCT = "bfloat16 product of 8192 x 8192"
# Share of the speed of a copy of as many bytes, launched alike.
FUSED = "fused {}, 256 x 4096"
FUSED_KERNELS = ("norm", "add and norm", "activation", "rope and store", "latent store")
FRAME = "frame of the handoff, {}"
SAMPLING = "sampling 256 x 151,936, {}"
# Share of a copy's speed.
DECODE = "decode attention {}, {}"
# Time in bfloat16 over that in fp8.
FP8_GAIN = "decode attention {}, fp8 over bf16"
# Share of a product's rate.
CHUNKS = "prefill attention 8192, {}"
QWEN, LLAMA, EXPERTS = "Qwen3-0.6B", "Llama-3-8B", "Qwen3-30B-A3B, 12 layers"
CARRIER = "carrier alone: out of the ring, of a copy's speed"
WHOLE = "pack + sums + carrier + sums + scatter"
EXPOSED = "Llama-3-8B, 2048 tokens: KV exposed after the prompt"
MOVED = "Llama-3-8B, 2048 tokens: cached KV of a prompt, with a step"
BETWEEN = "p99 between tokens while KV arrives, over that before"
VICTIM_SPEED = "share of its speed that a stream keeps beside a prompt, pair on one GPU"
VICTIM_GAP = "longest gap of a stream beside a prompt, pair on one GPU"
HTTP = "Qwen3-0.6B, 256 streams over HTTP"

PREDICTIONS: dict[str, Prediction] = {
    COPY: Prediction(3.0, 3.0, "TB/s"),
    PRODUCT: Prediction(790, 790, "TFLOP/s"),
    **{FUSED.format(name): Prediction(0.85, 1.0, "", ">=0.85") for name in FUSED_KERNELS},
    **{FRAME.format(name): Prediction(0.6, 0.9, "") for name in ("packed", "scattered")},
    SAMPLING.format("top-p"): Prediction(0.2, 0.4, "ms", "<0.4"),
    DECODE.format("64 x 4096", "bf16"): Prediction(0.85, 0.9, "", ">=0.85"),
    DECODE.format("64 x 32768", "bf16"): Prediction(0.85, 0.9, "", ">=0.85"),
    FP8_GAIN.format("64 x 4096"): _only("x", ">=1.6"),
    FP8_GAIN.format("64 x 32768"): _only("x", ">=1.6"),
    DECODE.format("1 x 32768 + 255 x 64", "bf16 over equal rows"): _only("x", "<=1.2"),
    CHUNKS.format("bf16"): Prediction(0.4, 0.55, "", ">=0.4"),
    CHUNKS.format("fp8"): Prediction(0.4, 0.55, ""),
    CHUNKS.format("int8"): Prediction(0.25, 0.4, ""),
    f"{QWEN}: capture of graphs": _only("s", "<=5"),
    f"{QWEN} decode 1 x 128: step": Prediction(0.8, 1.0, "ms", "<=1.2"),
    f"{QWEN} decode 64 x 600: step": Prediction(2.5, 3.3, "ms"),
    f"{QWEN} decode 256 x 600: step": Prediction(7.9, 10.3, "ms"),
    f"{QWEN} decode 256 x 600: between steps": _only("us", "<50"),
    f"{QWEN} 1 x 256: API": Prediction(1_000, 1_300, "tok/s"),
    f"{QWEN} 256 x 1024: API": Prediction(24_000, 31_000, "tok/s", ">=22000"),
    f"{LLAMA}: capture of graphs": _only("s", "<=5"),
    f"{LLAMA} decode 1 x 128: step": Prediction(5.8, 6.1, "ms", "<=6.3"),
    f"{LLAMA} decode 64 x 600: step": Prediction(7.8, 8.6, "ms"),
    f"{LLAMA} decode 256 x 600: step": Prediction(16.3, 18.8, "ms"),
    f"{LLAMA} decode 256 x 600: between steps": _only("us", "<50"),
    f"{LLAMA} prefill 2048: step": Prediction(63, 63, "ms"),
    f"{LLAMA} prefill 8192: of a product": Prediction(0.5, 0.65, "", ">=0.5"),
    f"{EXPERTS} decode 32 x 1024: of the roofline": Prediction(0.4, 0.6, "", ">=0.4"),
    CARRIER: Prediction(0.1, 0.15, "", ">=0.1"),
    WHOLE: _only("GB/s", ">=60"),
    EXPOSED: _only("ms", "<=3"),
    BETWEEN: _only("x", "<1.1"),
    HTTP: _only("tok/s", ">=12000"),
}
# On an H200, where that differs.
_H200: dict[str, tuple[float, float]] = {
    COPY: (4.3, 4.3),
    f"{QWEN} decode 1 x 128: step": (0.6, 0.9),
    f"{QWEN} decode 64 x 600: step": (1.8, 2.6),
    f"{QWEN} decode 256 x 600: step": (5.8, 8.0),
    f"{QWEN} 256 x 1024: API": (31_000, 42_000),
    f"{LLAMA} decode 1 x 128: step": (4.2, 4.4),
    f"{LLAMA} decode 64 x 600: step": (5.5, 6.3),
    f"{LLAMA} decode 256 x 600: step": (13.9, 16.2),
}
_H200_BARS = {f"{QWEN} 256 x 1024: API": ">=30000"}


def predictions_for(device: str) -> dict[str, Prediction]:
    """Those for the GPU of this name: for an H100, unless it is an H200."""
    if "H200" not in device:
        return PREDICTIONS
    return {
        metric: replace(one, low=ends[0], high=ends[1], bar=_H200_BARS.get(metric, one.bar))
        if (ends := _H200.get(metric))
        else one
        for metric, one in PREDICTIONS.items()
    }


def predicted_table() -> str:
    """What is predicted for either GPU, as Markdown."""
    lines = ["| figure | bar | predicted, H100 | predicted, H200 |", "|---|---|---|---|"]
    other = predictions_for("H200")
    for metric, one in PREDICTIONS.items():
        bars = dict.fromkeys((one.bar, other[metric].bar))
        bar = ", H200 ".join(bars)
        lines.append(f"| {metric} | {bar} | {one} | {other[metric]} |")
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """What was measured beside its bar and its prediction, then what was not, as Markdown."""
    lines = [
        f"# Measured on {device}",
        "",
        "| figure | measured | bar | passed | predicted | share of the run's copy or product |",
        "|---|---|---|---|---|---|",
    ]
    expected = predictions_for(device)
    for row in rows:
        one = expected.get(row["metric"], Prediction(None, None, ""))
        passed = {None: "", True: "yes", False: "**no**"}[holds(one.bar, row["value"])]
        share = "" if row.get("share") is None else f"{row['share']:.3g}"
        measured = f"{row['value']:,.4g} {row['unit']}".rstrip()
        lines.append(f"| {row['metric']} | {measured} | {one.bar} | {passed} | {one} | {share} |")
    measured_names = {row["metric"] for row in rows}
    lines += [
        f"| {metric} | not measured | {one.bar} | | {one} | |"
        for metric, one in expected.items()
        if metric not in measured_names
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(predicted_table())
