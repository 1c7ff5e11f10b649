"""The result of `tandem bench serve`, with the names of vLLM's files."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any

from ..client.measured_response import MeasuredResponse
from .figures import deviation, mean, median, percent_word, percentiles

# A request sent this much later than planned counts as late.
LATE_SECONDS = 0.01
# Names in files, and names and headings in tables.
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "ttft_including_client_queue": ("TTFT incl. Client Queue", "Queue-inclusive TTFT"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures to compute. ``goodput`` has the goals in seconds by metric; ``paced`` is true if
    requests had planned times."""

    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percents: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    paced: bool = False


def serving_result(
    responses: Sequence[MeasuredResponse],
    lengths: Sequence[int],
    duration: float,
    evaluation: Evaluation,
) -> dict[str, Any]:
    """The figures of a run. ``lengths`` are the planned lengths of the prompts, which are used if
    the server does not report its own."""
    inputs = [a.prompt_tokens or length for a, length in zip(responses, lengths, strict=True)]
    outputs = [_output_tokens(response) for response in responses]
    good = [response for response in responses if response.success]
    total_input = sum(n for n, response in zip(inputs, responses, strict=True) if response.success)
    goodput = sum(_is_good(response, evaluation.goodput) for response in good) / duration
    result = {
        "duration": duration,
        "completed": len(good),
        "failed": len(responses) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": sum(outputs),
        "request_throughput": len(good) / duration,
        "request_goodput": goodput if evaluation.goodput else None,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (total_input + sum(outputs)) / duration,
        "input_lens": inputs,
        "output_lens": outputs,
        "ttfts": [response.ttft for response in responses],
        "itls": [response.itl for response in responses],
        "latencies": [response.latency for response in responses],
        "start_times": [response.sent_at for response in responses],
        "queue_times": [response.queue_time for response in responses],
        "generated_texts": [response.text for response in responses],
        "errors": [response.error for response in responses],
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(good),
        "rtfx": 0.0,
        "remote_prefill_tokens": sum(response.remote_tokens for response in good),
    }
    if evaluation.paced:
        result |= _punctuality(responses)
    return result | _distributions(good, evaluation)


def _output_tokens(response: MeasuredResponse) -> int:
    return (response.output_tokens or len(response.times)) if response.success else 0


def seconds_of(metric: str, response: MeasuredResponse) -> list[float]:
    """The values of one response for a metric."""
    if metric == "itl":
        return response.itl
    if metric == "tpot":
        tokens = _output_tokens(response)
        return [(response.latency - response.ttft) / (tokens - 1)] if tokens > 1 else []
    queued = response.queue_time
    return {
        "ttft": [response.ttft],
        "e2el": [response.latency],
        "client_queue_time": [queued],
        "ttft_including_client_queue": [queued + response.ttft],
        "e2el_including_client_queue": [queued + response.latency],
    }[metric]


def _is_good(response: MeasuredResponse, goals: Mapping[str, float]) -> bool:
    """True if a response meets all goals; a single token meets any goal between tokens."""
    return all(max(seconds_of(name, response), default=0.0) <= goals[name] for name in goals)


def _distributions(good: Sequence[MeasuredResponse], evaluation: Evaluation) -> dict[str, float]:
    result: dict[str, float] = {}
    for metric in METRICS:
        if metric not in evaluation.metrics:
            continue
        values = [1000 * value for response in good for value in seconds_of(metric, response)]
        result |= {
            f"mean_{metric}_ms": mean(values),
            f"median_{metric}_ms": median(values),
            f"std_{metric}_ms": deviation(values),
        }
        for percent, value in percentiles(values, evaluation.percents):
            result[f"p{percent_word(percent)}_{metric}_ms"] = value
    return result


def _punctuality(responses: Sequence[MeasuredResponse]) -> dict[str, float]:
    """Delays of the client. Latencies of requests that were sent late are underestimates."""
    delays = [response.queue_time for response in responses]
    return {
        "late_requests": sum(delay > LATE_SECONDS for delay in delays),
        "mean_send_delay_ms": 1000 * mean(delays),
        "max_send_delay_ms": 1000 * max(delays, default=0.0),
    }


def _peak_rate(good: Sequence[MeasuredResponse]) -> float:
    """The maximum number of events with output in one second, counted from the first request."""
    if not good:
        return 0.0
    begin = min(response.sent_at for response in good)
    seconds = Counter(floor(at - begin) for response in good for at in response.arrivals)
    return float(max(seconds.values(), default=0))


def _peak_concurrency(good: Sequence[MeasuredResponse]) -> int:
    """The maximum number of concurrent requests, from sending to the last output."""
    ends = sorted(response.sent_at + response.latency for response in good)
    begins = sorted(response.sent_at for response in good)
    running = [i + 1 - bisect_right(ends, begin) for i, begin in enumerate(begins)]
    return max(running, default=0)
