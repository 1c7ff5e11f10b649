"""The result of `tandem bench serve`, under the names that vLLM has in its files."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any

from ..client.measured_response import MeasuredResponse
from .figures import deviation, mean, median, percent_word, percentiles

# A request that is sent this much later than planned counts as late.
LATE_SECONDS = 0.01
# Attribute in files, name and heading in tables.
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
    """The figures that are wanted. ``goodput`` has seconds for each of its metrics; ``paced`` is
    true if requests had times to be sent at."""

    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percents: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    paced: bool = False


def serving_result(
    answers: Sequence[MeasuredResponse], lengths: Sequence[int], duration: float, wanted: Evaluation
) -> dict[str, Any]:
    """The figures of a run. ``lengths`` are the planned lengths of the prompts, which those that
    the server reports replace."""
    inputs = [a.prompt_tokens or length for a, length in zip(answers, lengths, strict=True)]
    outputs = [_output_tokens(answer) for answer in answers]
    good = [answer for answer in answers if answer.success]
    total_input = sum(n for n, answer in zip(inputs, answers, strict=True) if answer.success)
    goodput = sum(_is_good(answer, wanted.goodput) for answer in good) / duration
    result = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": sum(outputs),
        "request_throughput": len(good) / duration,
        "request_goodput": goodput if wanted.goodput else None,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (total_input + sum(outputs)) / duration,
        "input_lens": inputs,
        "output_lens": outputs,
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itl for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.sent for answer in answers],
        "queue_times": [answer.queue_time for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(good),
        "rtfx": 0.0,
        "remote_prefill_tokens": sum(answer.remote_tokens for answer in good),
    }
    if wanted.paced:
        result |= _punctuality(answers)
    return result | _distributions(good, wanted)


def _output_tokens(answer: MeasuredResponse) -> int:
    return (answer.output_tokens or len(answer.times)) if answer.success else 0


def seconds_of(metric: str, answer: MeasuredResponse) -> list[float]:
    """The values that one answer adds to a metric."""
    if metric == "itl":
        return answer.itl
    if metric == "tpot":
        tokens = _output_tokens(answer)
        return [(answer.latency - answer.ttft) / (tokens - 1)] if tokens > 1 else []
    queued = answer.queue_time
    return {
        "ttft": [answer.ttft],
        "e2el": [answer.latency],
        "client_queue_time": [queued],
        "ttft_including_client_queue": [queued + answer.ttft],
        "e2el_including_client_queue": [queued + answer.latency],
    }[metric]


def _is_good(answer: MeasuredResponse, goals: Mapping[str, float]) -> bool:
    """One token has no time between tokens, and meets that goal."""
    return all(max(seconds_of(name, answer), default=0.0) <= goals[name] for name in goals)


def _distributions(good: Sequence[MeasuredResponse], wanted: Evaluation) -> dict[str, float]:
    result: dict[str, float] = {}
    for metric in METRICS:
        if metric not in wanted.metrics:
            continue
        values = [1000 * value for answer in good for value in seconds_of(metric, answer)]
        result |= {
            f"mean_{metric}_ms": mean(values),
            f"median_{metric}_ms": median(values),
            f"std_{metric}_ms": deviation(values),
        }
        for percent, value in percentiles(values, wanted.percents):
            result[f"p{percent_word(percent)}_{metric}_ms"] = value
    return result


def _punctuality(answers: Sequence[MeasuredResponse]) -> dict[str, float]:
    """How far the client kept to its plan; answers of requests that were sent late understate what
    users would have waited."""
    delays = [answer.queue_time for answer in answers]
    return {
        "late_requests": sum(delay > LATE_SECONDS for delay in delays),
        "mean_send_delay_ms": 1000 * mean(delays),
        "max_send_delay_ms": 1000 * max(delays, default=0.0),
    }


def _peak_rate(good: Sequence[MeasuredResponse]) -> float:
    """Events with output in the fullest second, counted from the first request."""
    if not good:
        return 0.0
    begin = min(answer.sent for answer in good)
    seconds = Counter(floor(at - begin) for answer in good for at in answer.arrivals)
    return float(max(seconds.values(), default=0))


def _peak_concurrency(good: Sequence[MeasuredResponse]) -> int:
    """Most requests between sending and their last output at one moment."""
    ends = sorted(answer.sent + answer.latency for answer in good)
    begins = sorted(answer.sent for answer in good)
    running = [i + 1 - bisect_right(ends, begin) for i, begin in enumerate(begins)]
    return max(running, default=0)
