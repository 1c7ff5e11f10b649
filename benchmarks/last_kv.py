"""Latency from the last KV of a prompt to the client's first token.

    python -m tandem.benchmarks.last_kv

A prefill node on one core and a decode node on the other serve one prompt at a time, alternately on
an idle decode node and beside a stream. The decode node's trace gives the time at which the last KV
was committed, the client the arrival of the first token. The difference is compared with 10 ms plus
one decode step (the median inter-token time of the same round). Beside a stream half a step is
added, because the prompt's last token waits for the running step. The ratio without that half step
is reported too, without a goal.

Each prompt is then sent again. Its KV is now cached on the prefill node but not on the decode node,
which keeps none, so the time is that of moving KV plus the overhead of a transfer. The router's log
gives the queueing and greeting part of that overhead; on the decode node, the overhead is the time
beyond one step after the last KV.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.bench.client.api_server import ApiServer
from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.running_streams import greedy_body, running
from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.random_model import QWEN3_42M, write_random_model
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.benchmarks.support.router_log import RouterLog
from tandem.benchmarks.support.sides import Side, pinned, serving
from tandem.benchmarks.support.streaming import complete, connected
from tandem.tests.end_to_end.support.cluster import until
from tandem.tests.end_to_end.support.collector import Collector, collecting

RESPONSE_TOKENS = 24
STREAM_PROMPT, STREAM_TOKENS = 16, 8000
ALLOWED_SECONDS = 0.01
# All prompts are prefilled remotely, except those of the streams.
FORGETFUL = ("--threads=1", "--no-enable-prefix-caching", "--prefill-threshold=64")
STEPS = {1.0: "a decode step", 1.5: "a decode step and a half"}
IDLE, BESIDE = "on an idle decode node", "beside a stream"


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Timings of one prompt, in seconds."""

    steps: float  # allowance for the first token: its own step, plus half a step of a stream
    step: float  # the median time between two tokens after the first
    after: float  # from the commit of the last KV to the client's first token
    before: float  # queue and greeting
    exposed: float  # KV still in flight when the prompt was computed
    control: float  # the transfer of cached KV without the KV itself
    moving: float  # the KV of that transfer

    def ratio(self, steps: float) -> float:
        """Latency over the allowed steps plus 10 ms."""
        return self.after / (steps * self.step + ALLOWED_SECONDS)

    @property
    def share(self) -> float:
        """Transfer overhead relative to the time for the KV."""
        return self.control / max(self.moving, 1e-9)


class Commits:
    """The decode node's transfer traces."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._read = 0

    def next(self) -> float:
        """Commit time of the next transfer, by ``time.perf_counter``."""
        until(lambda: len(self._all()) > self._read, "the trace of the transfer")
        at = self._all()[self._read] / 1e9
        self._read += 1
        return at - time.time() + time.perf_counter()

    def _all(self) -> list[int]:
        spans = [span for span in self._collector.spans if span.name == "transfer"]
        return sorted(span.events["committed"] for span in spans)


@dataclass(frozen=True, slots=True)
class Measured:
    """The cluster, and its records of each prompt."""

    server: ApiServer
    log: RouterLog
    commits: Commits


async def ask(
    cluster: Measured, seed: str, tokens: int, stream: MeasuredResponse | None
) -> PromptTimes:
    """Send one prompt; returns its timings."""
    prompt = random.Random(seed).choices(range(QWEN3_42M.vocab), k=tokens)
    response = await complete(cluster.server, prompt, RESPONSE_TOKENS)
    phases = await asyncio.to_thread(cluster.log.next)
    committed = await asyncio.to_thread(cluster.commits.next)
    times = response.times if stream is None else stream.times[-RESPONSE_TOKENS:]
    step = statistics.median(later - earlier for earlier, later in pairwise(times))
    await complete(cluster.server, prompt, 1)
    cached = await asyncio.to_thread(cluster.log.next)
    await asyncio.to_thread(cluster.commits.next)
    return PromptTimes(
        steps=1.0 if stream is None else 1.5,
        step=step,
        after=response.arrivals[0] - committed,
        before=_sum(phases, "queue", "greet"),
        exposed=_sum(phases, "transfer"),
        control=_sum(cached, "queue", "greet") + max(0.0, _sum(cached, "step") - step),
        moving=_sum(cached, "prefill", "transfer"),
    )


def _sum(phases: dict[str, float], *names: str) -> float:
    """Sum of the phases; the log omits phases of zero duration."""
    return sum(phases.get(name, 0.0) for name in names)


async def take_turns(
    port: int, log: RouterLog, commits: Commits, tokens: int, rounds: int
) -> dict[str, list[PromptTimes]]:
    """Alternate prompts on an idle node and beside a stream. The first of each is a warm-up."""
    responses: dict[str, list[PromptTimes]] = {IDLE: [], BESIDE: []}
    with connected(port) as server:
        cluster = Measured(server, log, commits)
        for number in range(rounds + 1):
            responses[IDLE].append(await ask(cluster, f"idle {number}", tokens, None))
            prompt = list(range(number, number + STREAM_PROMPT))
            body = greedy_body(server, prompt, STREAM_TOKENS)
            async with running(
                server, [body], warm_tokens=RESPONSE_TOKENS, remedy="raise STREAM_TOKENS"
            ) as streams:
                beside = await ask(cluster, f"beside {number}", tokens, streams.responses[0])
            responses[BESIDE].append(beside)
    return {name: several[1:] for name, several in responses.items()}


def apart(collector: Collector) -> Side:
    """A prefill and a decode node on one core each; the decode node traces its transfers."""
    traced = (*FORGETFUL, f"--otlp-endpoint={collector.url}")
    return Side("apart", (("prefill-node", (0,), ("--threads=1",)), ("decode-node", (1,), traced)))


def rows(responses: dict[str, list[PromptTimes]], about: str) -> list[dict[str, Any]]:
    """Rows of the report: medians in milliseconds."""
    results = []
    for where, several in responses.items():
        steps = several[0].steps
        step, allowed = 1e3 * statistics.median(one.step for one in several), 1e3 * ALLOWED_SECONDS
        after = 1e3 * statistics.median(one.after for one in several)
        results += [
            {
                "metric": f"last KV to the client's first token ({about}), {where}",
                "value": after,
                "unit": "ms",
                "goal": "<=1" if count == steps else "",
                "against": f"{STEPS[count]} and 10 ms ({count * step + allowed:.1f} ms)",
                "ratio": statistics.median(one.ratio(count) for one in several),
            }
            for count in sorted({1.0, steps})
        ]
        moving = 1e3 * statistics.median(one.moving for one in several)
        results += [
            {
                "metric": f"queue and greeting ({about}), {where}",
                "value": 1e3 * statistics.median(one.before for one in several),
                "unit": "ms",
            },
            {
                "metric": f"KV still on its way once the prompt is computed ({about}), {where}",
                "value": 1e3 * statistics.median(one.exposed for one in several),
                "unit": "ms",
            },
            {
                "metric": f"all of a transfer but its KV ({about}), {where}",
                "value": 1e3 * statistics.median(one.control for one in several),
                "unit": "ms",
                "goal": "<=1",
                "against": f"its KV, from the prefill node's cache ({moving:.1f} ms)",
                "ratio": statistics.median(one.share for one in several),
            },
        ]
    return results


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=15)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    options = parser.parse_args()
    cores = two_cores()
    with tempfile.TemporaryDirectory() as folder, pinned(cores):
        model, logs = Path(folder, "model"), Path(folder, "logs")
        count = write_random_model(model, QWEN3_42M)
        with (
            collecting() as collector,
            serving(apart(collector), cores, model, logs, "--cpu-kernels=compiled") as port,
        ):
            log, commits = RouterLog(logs / "router.log"), Commits(collector)
            responses = asyncio.run(
                take_turns(port, log, commits, options.prompt_tokens, options.rounds)
            )
    about = f"{count / 1e6:.0f} M parameters, prompts of {options.prompt_tokens:,} tokens"
    publish("last_kv", rows(responses, about), dry=options.dry)


if __name__ == "__main__":
    main()
