"""`tandem bench serve`: requests to a URL, and the figures of their responses."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import click

from ..shared.config.sampling_fields import NUMBERS
from ..shared.errors import BenchmarkError, UsageError
from .arrivals import Traffic, arrival_times
from .client.api_server import ApiServer, api_server, key_values
from .client.measured_response import MeasuredResponse
from .datasets.text_tokens import LocalTokens
from .open_loop import send_all
from .probes import probe_result, probing
from .progress_bar import progress_bar
from .report.plot import write_plot
from .report.result_file import DETAILS, check_writable, default_name, read_detailed, write_result
from .report.result_table import result_table
from .report.serving_result import GOODPUT_METRICS, METRICS, Evaluation, serving_result
from .requests import requests_for_server
from .serving_options import TRACES, goals, json_object, numbers, url_of, words

Values = Mapping[str, Any]

# All requests are built before the first is sent, so that none is delayed by it.
MAX_BYTES = 2 << 30
MAX_ERRORS = 10


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request as bytes, with its planned lengths and time."""

    body: bytes
    prompt_tokens: int
    output_tokens: int
    at: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The name of the model, and the result; if ``interrupted`` by Ctrl-C, only of the complete
    responses."""

    model: str
    result: dict[str, Any]
    interrupted: bool


def run_serving(values: Values) -> None:
    """Run the command. Raises ``UsageError`` and ``BenchmarkError``."""
    evaluation, other = _evaluation(values), None
    if values["compare_with"]:
        if not values["plot"]:
            raise UsageError("--compare-with needs --plot FILE.html")
        other = read_detailed(Path(values["compare_with"]))
    if values["probe_request_rate"] == inf:
        raise UsageError("--probe-request-rate must be finite")
    check_writable(values["plot"], _result_path(values, "x", "x") if _is_saved(values) else None)
    metadata = key_values("--metadata", values["metadata"])
    server = server_of(values, ignore_eos=_ignores_eos(values))
    prefix = values["request_id_prefix"] or f"bench-{secrets.token_hex(4)}-"
    server.client.request("POST", "/", b"", {"x-request-id": prefix})  # checks the header
    measured = asyncio.run(_measure(values, server, evaluation, prefix))
    model, result = measured.model, measured.result
    click.echo(result_table(result, evaluation, values["request_rate"], values["max_concurrency"]))
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    full = _settings(values, model, now) | metadata | result
    if _is_saved(values):
        saved = full if values["save_detailed"] else _without_details(full)
        path = Path(_result_path(values, model, now))
        write_result(path, saved, append=values["append_result"])
    if values["plot"]:
        write_plot(Path(values["plot"]), [full, other] if other else [full])
    if measured.interrupted:
        raise KeyboardInterrupt
    if not result["completed"]:
        raise BenchmarkError(f"all {result['failed']} requests failed")


def _is_saved(values: Values) -> bool:
    return bool(values["save_result"] or values["append_result"])


def _result_path(values: Values, model: str, now: str) -> str:
    name = values["result_filename"] or default_name(values, model, now)
    return os.path.join(values["result_dir"] or ".", name)


def server_of(values: Values, **more: Any) -> ApiServer:
    """The server of the options."""
    sampling = {name: values[name] for name in NUMBERS if values.get(name) is not None}
    return api_server(
        url=url_of(values),
        backend=values["backend"],
        endpoint=values["endpoint"],
        header=values["header"],
        insecure=values["insecure"],
        model=values["served_model_name"] or values["model"],
        extra_body={
            **sampling,
            **_logprobs(values),
            **json_object("--extra-body", values["extra_body"]),
        },
        **more,
    )


def _logprobs(values: Values) -> dict[str, Any]:
    count = values.get("logprobs")
    if count is None:
        return {}
    is_chat = values["backend"] == "openai-chat"
    return {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}


def _ignores_eos(values: Values) -> bool:
    """True if outputs must have their full length, as in random requests and traces."""
    return bool(values["ignore_eos"]) or values["dataset_name"] in ("random", *TRACES)


def _traffic(values: Values) -> Traffic:
    return Traffic(
        request_rate=values["request_rate"],
        burstiness=values["burstiness"],
        ramp_up=values["ramp_up_strategy"],
        first_rate=values["ramp_up_start_rps"],
        last_rate=values["ramp_up_end_rps"],
    )


def _self_timed(values: Values) -> bool:
    return values["dataset_name"] in TRACES and values["self_timed"]


def _evaluation(values: Values) -> Evaluation:
    traffic = _traffic(values)
    return Evaluation(
        metrics=words("--percentile-metrics", values["percentile_metrics"], tuple(METRICS)),
        percents=numbers("--metric-percentiles", values["metric_percentiles"], 0, 100),
        goodput=goals(values["goodput"], GOODPUT_METRICS),
        paced=traffic.paced or _self_timed(values),
    )


async def _measure(
    values: Values, server: ApiServer, evaluation: Evaluation, prefix: str
) -> Measured:
    with closing(server.client):
        return await _measure_open(values, server, evaluation, prefix)


async def _measure_open(
    values: Values, server: ApiServer, evaluation: Evaluation, prefix: str
) -> Measured:
    server.model = server.model or await server.first_model()
    local = LocalTokens.load(values["tokenizer"]) if values["tokenizer"] else None
    requests = ready(server, await requests_for_server(values, server, local))
    if _self_timed(values):
        times: Sequence[float] = [request.at or 0.0 for request in requests]
    else:
        times = arrival_times(_traffic(values), len(requests), values["seed"])
    if seconds := values["ready_check_timeout_sec"]:
        await server.wait_ready(requests[0].body, seconds)
    await _warm_up(values, server, requests[0].body)

    completed: dict[int, MeasuredResponse] = {}

    async def send(index: int, response: MeasuredResponse) -> None:
        await server.ask(requests[index].body, response, f"{prefix}{index}")
        completed[index] = response

    if not values["disable_tqdm"]:
        click.echo(_outlook(requests, times), err=True)
    interrupted = False
    _freeze_requests()
    with progress_bar("Requests", len(requests), hidden=values["disable_tqdm"]) as advance:
        async with probing(server, values["probe_request_rate"]) as probes:
            begin = time.perf_counter()
            try:
                await send_all(
                    times, send, lambda _: advance(), max_concurrency=values["max_concurrency"]
                )
            except asyncio.CancelledError:  # Ctrl-C
                if not completed:
                    raise
                interrupted = True
            duration = time.perf_counter() - begin
    if interrupted:
        click.echo(
            f"tandem: interrupted; the result is of the {len(completed):,} complete responses to "
            f"{len(requests):,} requests",
            err=True,
        )
    order = sorted(completed)
    responses = [completed[index] for index in order]
    show_errors(responses)
    lengths = [requests[index].prompt_tokens for index in order]
    result = serving_result(responses, lengths, duration, evaluation)
    return Measured(server.model, result | probe_result(probes), interrupted)


def _outlook(requests: Sequence[ReadyRequest], times: Sequence[float]) -> str:
    """A line about the requests to be sent, and the time that takes."""
    prompt = sum(request.prompt_tokens for request in requests) / len(requests)
    output = sum(request.output_tokens for request in requests) / len(requests)
    last = max(times)
    period = "all at once" if last < 1 else f"over {_duration(last)}"
    return (
        f"{len(requests):,} requests of {prompt:,.0f} + {output:,.0f} tokens on average are sent "
        f"{period}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def ready(server: ApiServer, planned: Any) -> list[ReadyRequest]:
    """All requests as bytes. Raises ``UsageError`` if they take too much memory."""
    requests: list[ReadyRequest] = []
    size = 0
    for one in planned:
        body = server.body(one.prompt, one.output_tokens)
        size += len(body)
        if size > MAX_BYTES:
            raise UsageError(
                f"the first {len(requests)} requests take {MAX_BYTES >> 30} GiB; lower "
                "--num-prompts"
            )
        requests.append(ReadyRequest(body, one.prompt_tokens, one.output_tokens, one.at))
    return requests


def _freeze_requests() -> None:
    """Exempt the requests from garbage collection, which would delay the reading of responses."""
    gc.collect()
    gc.freeze()


async def _warm_up(values: Values, server: ApiServer, body: bytes) -> None:
    count = values["num_warmups"]
    if not count:
        return
    with progress_bar("Warm-up", count, hidden=values["disable_tqdm"]) as advance:
        responses = await send_all(
            [0.0] * count,
            lambda _, response: server.ask(body, response),
            lambda _: advance(),
            max_concurrency=values["max_concurrency"],
        )
    if not any(response.success for response in responses):
        raise BenchmarkError(f"all warm-up requests failed: {responses[0].error}")


def show_errors(responses: Sequence[MeasuredResponse]) -> None:
    """Print the first errors and their counts to stderr."""
    counts: dict[str, int] = {}
    for response in responses:
        if not response.success:
            counts[response.error] = counts.get(response.error, 0) + 1
    for error, count in list(counts.items())[:MAX_ERRORS]:
        click.echo(f"tandem: {count} of {len(responses)} requests failed: {error}", err=True)


def _settings(values: Values, model: str, now: str) -> dict[str, Any]:
    """The fields before the result in vLLM's files."""
    rate, burstiness = values["request_rate"], values["burstiness"]
    settings = {
        "date": now,
        "endpoint_type": values["backend"],
        "backend": values["backend"],
        "label": values["label"],
        "model_id": values["model"] or model,
        "tokenizer_id": values["tokenizer"] or values["model"] or model,
        "num_prompts": values["num_prompts"],
        "request_rate": "inf" if rate == inf else rate,
        "burstiness": "inf" if burstiness == inf else burstiness,
        "max_concurrency": values["max_concurrency"],
    }
    if values["ramp_up_strategy"]:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        settings |= {name: values[name] for name in names}
    return settings


def _without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in DETAILS}
