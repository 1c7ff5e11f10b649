"""`tandem bench throughput`: many requests, as fast as the engine runs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...shared.engine.api.engine import Engine
from ...shared.engine.sampling_params import SamplingParams
from ...shared.text.tokenizer import Tokenizer
from ..chosen_requests import check_no_path, custom_of, random_of, sharegpt_of
from ..datasets.planned_request import PlannedRequest
from ..datasets.random_prompts import WORDS, IdPrompts
from ..datasets.text_tokens import LocalTokens
from ..report.result_file import check_writable, write_result
from .engine_options import engine_config

LONGEST_SECONDS = 24 * 3600.0


def run_throughput(values: Mapping[str, Any]) -> None:
    """The whole command."""
    check_writable(values["output_json"])
    config = engine_config(values, waiting=values["num_prompts"] * values["n"])
    values = {**values, "seed": config.seed}
    with Engine(config) as engine:
        requests = asyncio.run(_requests(values, engine.tokenizer))
        params = [
            SamplingParams(n=values["n"], max_tokens=one.output_tokens, ignore_eos=True)
            for one in requests
        ]
        begin = time.perf_counter()
        answers = engine.generate_sync(
            [one.prompt for one in requests], params, timeout=LONGEST_SECONDS
        )
        seconds = time.perf_counter() - begin
    result = throughput_result(
        seconds,
        prompt_tokens=sum(choices[0].prompt_tokens for choices in answers),
        output_tokens=sum(len(one.tokens) for choices in answers for one in choices),
        requests=len(requests),
    )
    output_rate = result["total_output_tokens"] / seconds
    click.echo(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {output_rate:.2f} output tokens/s"
    )
    click.echo(f"Total num prompt tokens:  {result['total_prompt_tokens']}")
    click.echo(f"Total num output tokens:  {result['total_output_tokens']}")
    if values["output_json"]:
        write_result(Path(values["output_json"]), result)


async def _requests(values: Mapping[str, Any], tokenizer: Tokenizer) -> Sequence[PlannedRequest]:
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
    """The figures under vLLM's names."""
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
