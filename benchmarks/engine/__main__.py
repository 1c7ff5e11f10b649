"""Benchmarks of the engine through the Python API, with the options of `tandem serve`:

    python -m tandem.benchmarks.engine latency MODEL --input-len 512 --output-len 32 --batch-size 4
    python -m tandem.benchmarks.engine throughput MODEL --num-prompts 100 --output-json FILE
    python -m tandem.benchmarks.engine startup MODEL --cpu-kernels compiled

Their own options and the names of the figures are those of `vllm bench`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import click

from tandem.bench.datasets.planned_request import PlannedRequest
from tandem.bench.datasets.random_prompts import WORDS, IdPrompts
from tandem.bench.datasets.text_tokens import LocalTokens
from tandem.bench.grouped_command import text, whole
from tandem.bench.report.figures import deviation, mean, percent_word, percentiles
from tandem.bench.report.result_file import check_writable, write_result
from tandem.bench.requests import check_no_path, custom_of, random_of, sharegpt_of
from tandem.bench.serving_options import dataset_options
from tandem.commands.failures import exit_with
from tandem.commands.part_command import part_command
from tandem.shared.config import EngineConfig
from tandem.shared.config.command_line import fill
from tandem.shared.engine.api.engine import Engine
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.errors import BenchmarkError
from tandem.shared.text.tokenizer import Tokenizer

Values = Mapping[str, Any]
PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
# Token ids below which real tokenizers keep their special tokens.
MAX_TOKEN_IDS = 10_000
MAX_SECONDS = 24 * 3600.0


def engine_config(values: Values, *, waiting: int = 0) -> EngineConfig:
    """Engine options with a queue of at least ``waiting`` sequences."""
    config = fill(EngineConfig, dict(values))
    return replace(config, max_waiting=max(config.max_waiting, waiting))


def percentiles_by_word(values: list[float]) -> dict[str, float]:
    """Percentiles keyed by strings, as in vLLM's result files."""
    return {percent_word(percent): value for percent, value in percentiles(values, PERCENTS)}


# ---- latency -----------------------------------------------------------------------------------


def run_latency(values: Values) -> dict[str, Any]:
    """Time one batch of requests, by default without prefix caching because the batch is
    repeated."""
    batch = values["batch_size"]
    config = engine_config(values, waiting=batch * values["n"])
    params = SamplingParams(n=values["n"], max_tokens=values["output_len"], ignore_eos=True)
    with Engine(config) as engine:
        random = Random(config.seed)
        ids = range(min(engine.tokenizer.base_vocab_size, MAX_TOKEN_IDS))
        prompts = [random.choices(ids, k=values["input_len"]) for _ in range(batch)]

        def seconds() -> float:
            start = time.perf_counter()
            engine.generate_sync(prompts, params, timeout=MAX_SECONDS)
            return time.perf_counter() - start

        for _ in range(values["num_iters_warmup"]):
            seconds()
        return latency_result([seconds() for _ in range(values["num_iters"])])


def latency_result(latencies: list[float]) -> dict[str, Any]:
    return {
        "avg_latency": mean(latencies),
        "std_latency": deviation(latencies),
        "latencies": latencies,
        "percentiles": percentiles_by_word(latencies),
    }


# ---- throughput --------------------------------------------------------------------------------


def run_throughput(values: Values) -> dict[str, Any]:
    """Run many requests as fast as the engine can."""
    config = engine_config(values, waiting=values["num_prompts"] * values["n"])
    with Engine(config) as engine:
        requests = asyncio.run(_requests({**values, "seed": config.seed}, engine.tokenizer))
        params = [
            SamplingParams(n=values["n"], max_tokens=one.output_tokens, ignore_eos=True)
            for one in requests
        ]
        prompts = [one.prompt for one in requests]
        start = time.perf_counter()
        outputs = engine.generate_sync(prompts, params, timeout=MAX_SECONDS)
        seconds = time.perf_counter() - start
    return throughput_result(
        seconds,
        prompt_tokens=sum(choices[0].prompt_tokens for choices in outputs),
        output_tokens=sum(len(one.tokens) for choices in outputs for one in choices),
        requests=len(requests),
    )


async def _requests(values: Values, tokenizer: Tokenizer) -> Sequence[PlannedRequest]:
    tokens = LocalTokens(tokenizer)
    if values["dataset_name"] == "sharegpt":
        return await sharegpt_of(values, tokens)
    if values["dataset_name"] == "custom":
        return await custom_of(values, None if values["skip_chat_template"] else tokens)
    check_no_path(values)
    pool = sorted(set(await tokens.encode(" ".join(WORDS))))
    return list(random_of(values, IdPrompts(pool)))


def throughput_result(
    seconds: float, *, prompt_tokens: int, output_tokens: int, requests: int
) -> dict[str, Any]:
    total = prompt_tokens + output_tokens
    return {
        "elapsed_time": seconds,
        "num_requests": requests,
        "total_num_tokens": total,
        "requests_per_second": requests / seconds,
        "tokens_per_second": total / seconds,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
    }


# ---- startup -----------------------------------------------------------------------------------


def run_startup(values: Values) -> dict[str, Any]:
    """Time engine startup until it accepts requests, in separate processes.

    Cold starts use empty folders for compiled kernels. Weights may be in the page cache; the first
    start may also read them from disk.
    """
    config = engine_config(values)
    cold = [_cold_start(config) for _ in range(values["num_iters_cold"])]
    for _ in range(values["num_iters_warmup"]):
        _start(config, {})
    warm = [_start(config, {}) for _ in range(values["num_iters_warm"])]
    return startup_result("cold", cold) | startup_result("warm", warm)


def startup_result(phase: str, seconds: list[float]) -> dict[str, Any]:
    """Result in vLLM's format, without its compilation figures (Tandem has no such phase)."""
    return {
        f"avg_{phase}_startup_time": mean(seconds),
        f"{phase}_startup_times": seconds,
        f"{phase}_startup_percentiles": percentiles_by_word(seconds),
    }


def _cold_start(config: EngineConfig) -> float:
    """Start without compiled kernels; the Hugging Face cache is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    models = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    with tempfile.TemporaryDirectory(prefix="tandem-cold-") as empty:
        return _start(
            config,
            {"XDG_CACHE_HOME": empty, "TRITON_CACHE_DIR": f"{empty}/triton", "HF_HOME": models},
        )


def _start(config: EngineConfig, environment: Mapping[str, str]) -> float:
    """Startup time in seconds of an engine in its own process. Raises ``BenchmarkError``."""
    limit = config.start_timeout
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.benchmarks.engine.one_start"],
            input=json.dumps(asdict(config)),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        return float(done.stdout)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"the engine did not start within {limit:g} s") from None
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchmarkError(f"the engine did not start: {last or done.returncode}") from None


# ---- the commands ------------------------------------------------------------------------------


def _command(
    name: str, run: Callable[[Values], dict[str, Any]], *options: click.Parameter
) -> click.Command:
    """Build a command that prints the figures of ``run`` and optionally writes them to a file."""
    output = text("--output-json", metavar="FILE", help="Write the result to a JSON file.")

    def benchmark(values: dict[str, Any]) -> None:
        check_writable(values["output_json"])
        result = run(values)
        for figure, value in result.items():
            click.echo(f"{figure}: {value}")
        if values["output_json"]:
            write_result(Path(values["output_json"]), result)

    benchmark.__doc__ = run.__doc__
    return part_command(name, benchmark, EngineConfig, others=[*options, output])


def commands() -> click.Group:
    """All benchmarks."""
    choices = whole("--n", default=1, low=1, help="Answers of each prompt.")
    latency = _command(
        "latency",
        run_latency,
        whole("--input-len", default=32, low=1, help="Tokens of each prompt."),
        whole("--output-len", default=128, low=1, help="Tokens of each answer."),
        whole("--batch-size", default=8, low=1, help="Prompts at once."),
        choices,
        whole("--num-iters-warmup", default=10, low=0, help="Batches that do not count."),
        whole("--num-iters", default=30, low=1, help="Batches that count."),
    )
    for option in latency.params:
        if option.name == "enable_prefix_caching":
            option.default = False
    requests = dataset_options(1000, "random", "sharegpt", "custom")
    throughput = _command("throughput", run_throughput, *requests, choices)
    startup = _command(
        "startup",
        run_startup,
        whole("--num-iters-cold", default=3, low=0, help="With empty caches of kernels."),
        whole("--num-iters-warmup", default=1, low=0, help="That fill them, and do not count."),
        whole("--num-iters-warm", default=3, low=0, help="With full ones."),
    )
    return click.Group("engine", [latency, throughput, startup])


def main() -> None:
    try:
        commands().main(prog_name="python -m tandem.benchmarks.engine", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        exit_with(error, sys.argv[1:])


if __name__ == "__main__":
    main()
