"""`tandem bench latency`: the time of one batch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import click

from ...shared.engine.api.engine import Engine
from ...shared.engine.sampling_params import SamplingParams
from ..progress_bar import progress_bar
from ..report.figures import deviation, mean, percent_word, percentiles
from ..report.result_file import check_writable, write_result
from .engine_options import engine_config

PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
# Tokens that no tokenizer of real models keeps for special purposes.
MOST_TOKEN_IDS = 10_000
LONGEST_SECONDS = 24 * 3600.0


def run_latency(values: Mapping[str, Any]) -> None:
    """The whole command."""
    check_writable(values["output_json"])
    batch = values["batch_size"]
    config = engine_config(values, waiting=batch * values["n"])
    params = SamplingParams(n=values["n"], max_tokens=values["output_len"], ignore_eos=True)
    with Engine(config) as engine:
        random = Random(config.seed)
        ids = range(min(engine.tokenizer.base_vocab_size, MOST_TOKEN_IDS))
        prompts = [random.choices(ids, k=values["input_len"]) for _ in range(batch)]

        def once(title: str, count: int) -> list[float]:
            with progress_bar(title, count, hidden=values["disable_tqdm"]) as advance:
                return [_timed(engine, prompts, params, advance) for _ in range(count)]

        once("Warm-up", values["num_iters_warmup"])
        latencies = once("Batches", values["num_iters"])
    result = latency_result(latencies)
    click.echo(f"Avg latency: {result['avg_latency']} seconds")
    click.echo(f"Std latency: {result['std_latency']} seconds")
    for percent, value in result["percentiles"].items():
        click.echo(f"{percent}% percentile latency: {value} seconds")
    if values["output_json"]:
        write_result(Path(values["output_json"]), result)


def latency_result(latencies: list[float]) -> dict[str, Any]:
    """The figures under vLLM's names."""
    return {
        "avg_latency": mean(latencies),
        "std_latency": deviation(latencies),
        "latencies": latencies,
        "percentiles": percentiles_by_word(latencies),
    }


def percentiles_by_word(values: list[float]) -> dict[str, float]:
    """As in the files of vLLM, whose keys are texts."""
    return {percent_word(percent): value for percent, value in percentiles(values, PERCENTS)}


def _timed(engine: Engine, prompts: Any, params: SamplingParams, advance: Any) -> float:
    begin = time.perf_counter()
    engine.generate_sync(prompts, params, timeout=LONGEST_SECONDS)
    seconds = time.perf_counter() - begin
    advance()
    return seconds
