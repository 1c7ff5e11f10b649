"""Decoding with steps planned ahead (--async-scheduling on) against steps planned in turn (off).

    python -m tandem.benchmarks.node.async_scheduling [--device cuda] [--threads 1 2]

Both engines run in the same process, each with its own rank: a round measures one after the other
in alternating order, and the ratio is the median of the ratios of the rounds. The models are the
built-in one, whose short steps make the scheduler's share large, and one of 42 million random
weights. On a two-core CPU a rank has one thread, which leaves a core to the head, or two, which
leave none. The head's CPU time per step is reported beside the rank's: it is the most that planning
ahead can save, and varies little on a busy machine. ``--rounds 0`` reports only these times.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from tandem import Engine, EngineConfig, SamplingParams
from tandem.benchmarks.support.random_model import QWEN3_42M, write_random_model
from tandem.benchmarks.support.report import benchmark_parser, publish

BATCHES = (1, 8, 32)
PROMPT, TOKENS = 16, 64
CPU_ROUNDS = 4
ON, OFF = "on", "off"


def engine(model: str, device: str, threads: int | None, setting: str) -> Engine:
    return Engine(
        EngineConfig(
            model=model,
            device=device,
            threads=threads,
            max_model_len=256,
            max_num_seqs=max(BATCHES),
            enable_prefix_caching=False,
            itl_target=0,  # streams of a batch start together
            async_scheduling=setting,
        )
    )


def rate(one: Engine, batch: int) -> float:
    """Tokens per second of a batch of streams, from their start to their end."""
    prompts = [[1 + stream, *range(1, PROMPT)] for stream in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    start = time.perf_counter()
    one.generate_sync(prompts, params)
    return batch * TOKENS / (time.perf_counter() - start)


def compare(engines: dict[str, Engine], batch: int, rounds: int) -> tuple[float, float, float]:
    """Medians of tokens per second with and without planning ahead, and of their ratio."""
    rates: dict[str, list[float]] = {ON: [], OFF: []}
    for each in engines.values():
        rate(each, batch)
    for number in range(rounds):
        for setting in (ON, OFF) if number % 2 else (OFF, ON):
            rates[setting].append(rate(engines[setting], batch))
    ratios = [on / off for on, off in zip(rates[ON], rates[OFF], strict=True)]
    return statistics.median(rates[ON]), statistics.median(rates[OFF]), statistics.median(ratios)


def speed_row(engines: dict[str, Engine], batch: int, rounds: int, name: str) -> dict[str, Any]:
    ahead, in_turn, ratio = compare(engines, batch, rounds)
    print(f"{name}, {batch} streams: {ahead:.0f} / {in_turn:.0f} = {ratio:.3f}", flush=True)
    return {
        "metric": f"decoding {batch} streams with steps planned ahead, {name}",
        "value": ahead,
        "unit": "tok/s",
        "against": f"planned in turn ({in_turn:.0f} tok/s)",
        "ratio": ratio,
    }


def cpu_row(one: Engine, batch: int, name: str) -> dict[str, Any]:
    """The head's CPU time per step without planning ahead, against the rank's."""
    assert one._thread is not None
    core = one._thread.runner.engine.core
    own = psutil.Process()
    ranks = [p for p in own.children() if "tandem.shared.engine.rank.process" in p.cmdline()]

    def costs() -> tuple[float, float, int]:
        seconds = [sum(process.cpu_times()[:2]) for process in (own, *ranks)]
        return seconds[0], sum(seconds[1:]), core.counters.steps

    before = costs()
    for _ in range(CPU_ROUNDS):
        rate(one, batch)
    head, rank, steps = (after - was for after, was in zip(costs(), before, strict=True))
    return {
        "metric": f"CPU time of the head in a step of {batch} streams, {name}",
        "value": 1e3 * head / steps,
        "unit": "ms",
        "against": f"its rank's ({1e3 * rank / steps:.1f} ms)",
        "ratio": head / rank,
    }


def rows_of(
    name: str, model: str, device: str, threads: int | None, rounds: int
) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        engines = {
            setting: stack.enter_context(engine(model, device, threads, setting))
            for setting in (ON, OFF)
        }
        where = "GPU" if threads is None else f"{threads} threads" if threads > 1 else "1 thread"
        for batch in BATCHES:
            if rounds:
                yield speed_row(engines, batch, rounds, f"{name}, {where}")
            if threads == 1:
                yield cpu_row(engines[OFF], batch, name)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), QWEN3_42M)
        for name, model in (("built-in model", "builtin"), ("42M random weights", folder)):
            for threads in args.threads if args.device == "cpu" else [None]:
                rows += rows_of(name, model, args.device, threads, args.rounds)
    suffix = "_gpu" if args.device == "cuda" else ""
    publish(f"node/async_scheduling{suffix}", rows, dry=args.dry)


if __name__ == "__main__":
    main()
