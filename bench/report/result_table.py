"""The table of `tandem bench serve`, with vLLM's lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from .figures import percent_word
from .serving_result import LATE_SECONDS, METRICS, Evaluation

WIDTH = 50


def heading(title: str, fill: str = "=") -> str:
    return f"{title:{fill}^{WIDTH}}"


def line(label: str, value: float) -> str:
    """A line with an integer, or a number with two decimals."""
    number = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label:<40} {number}"


def result_table(
    result: Mapping[str, Any],
    evaluation: Evaluation,
    request_rate: float,
    max_concurrency: int | None,
) -> str:
    """All lines of the table."""
    lines = [heading(" Serving Benchmark Result ")]
    lines += _totals(result, request_rate, max_concurrency)
    lines += _probe_lines(result)
    lines += _distribution_lines(result, evaluation)
    lines += _client_lines(result)
    return "\n".join([*lines, "=" * WIDTH])


def _totals(
    result: Mapping[str, Any], request_rate: float, max_concurrency: int | None
) -> Iterator[str]:
    yield line("Successful requests:", result["completed"])
    yield line("Failed requests:", result["failed"])
    if max_concurrency is not None:
        yield line("Maximum request concurrency:", max_concurrency)
    if request_rate != inf:
        yield line("Request rate configured (RPS):", float(request_rate))
    yield line("Benchmark duration (s):", float(result["duration"]))
    yield line("Total input tokens:", result["total_input_tokens"])
    yield line("Total generated tokens:", result["total_output_tokens"])
    yield line("Request throughput (req/s):", float(result["request_throughput"]))
    if result["request_goodput"] is not None:
        yield line("Request goodput (req/s):", float(result["request_goodput"]))
    yield line("Output token throughput (tok/s):", float(result["output_throughput"]))
    yield line("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"]))
    yield line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield line("Total token throughput (tok/s):", float(result["total_token_throughput"]))
    if result["remote_prefill_tokens"]:
        yield line("Input tokens prefilled remotely:", result["remote_prefill_tokens"])


def _probe_lines(result: Mapping[str, Any]) -> Iterator[str]:
    if "probe_completed" in result:
        yield heading("Probe Requests", "-")
        yield line("Probe requests completed:", result["probe_completed"])
        yield line("Probe requests failed:", result["probe_failed"])
        yield line("Median probe E2EL (ms):", float(result["probe_median_e2el_ms"]))
        yield line("P99 probe E2EL (ms):", float(result["probe_p99_e2el_ms"]))
        yield line("Max probe E2EL (ms):", float(result["probe_max_e2el_ms"]))


def _distribution_lines(result: Mapping[str, Any], evaluation: Evaluation) -> Iterator[str]:
    for metric, (name, title) in METRICS.items():
        if metric not in evaluation.metrics:
            continue
        yield heading(title, "-")
        yield line(f"Mean {name} (ms):", float(result[f"mean_{metric}_ms"]))
        yield line(f"Median {name} (ms):", float(result[f"median_{metric}_ms"]))
        for percent in evaluation.percents:
            word = percent_word(percent)
            yield line(f"P{word} {name} (ms):", float(result[f"p{word}_{metric}_ms"]))


def _client_lines(result: Mapping[str, Any]) -> Iterator[str]:
    if "late_requests" in result:
        yield heading("Client", "-")
        yield line(f"Sent over {1000 * LATE_SECONDS:.0f} ms late:", result["late_requests"])
        yield line("Longest send delay (ms):", float(result["max_send_delay_ms"]))
