"""The options of `tandem bench serve`, under vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import click

from ..shared.config.sampling_fields import NUMBERS
from ..shared.errors import UsageError
from ..shared.host_port import join_host_port
from .grouped_command import Groups, choice, flag, number, several, text, whole

BACKENDS = ("openai", "openai-chat", "vllm", "sglang", "llama.cpp")
TRACES = ("mooncake", "azure", "timed_trace")
DATASETS = ("random", "sharegpt", "custom", *TRACES)


def server_options() -> list[click.Parameter]:
    """Options of every command that talks to a URL."""
    return [
        text("--base-url", metavar="URL", help="URL of the server; replaces --host and --port."),
        text("--host", default="127.0.0.1", metavar="HOST", help="Host of the server."),
        whole("--port", default=8000, low=1, help="Port of the server."),
        choice(
            "--backend",
            of=BACKENDS,
            default="openai",
            help="API: chat completions for openai-chat, otherwise text completions.",
        ),
        text("--endpoint", metavar="PATH", help="Path of the API (default: that of --backend)."),
        text("--model", metavar="NAME", help="Model (default: the first in the server's list)."),
        text(
            "--served-model-name",
            metavar="NAME",
            help="Model name to send, if it differs from --model.",
        ),
        text(
            "--tokenizer",
            metavar="MODEL",
            help="Count tokens with the tokenizer of this model (a folder, a file or a name) "
            "instead of the server's /tokenize.",
        ),
        several(
            "--header",
            metavar="KEY=VALUE...",
            help="Headers of each request. The environment variable OPENAI_API_KEY sets the key.",
        ),
        flag("--insecure", help="Do not verify the certificate of an https URL."),
        text("--extra-body", metavar="JSON", help="Fields to add to each request."),
    ]


def url_of(values: Mapping[str, Any]) -> str:
    """The URL that the options name."""
    if values["base_url"]:
        return str(values["base_url"])
    return f"http://{join_host_port(values['host'], values['port'])}"


def dataset_options(count: int, *names: str) -> list[click.Parameter]:
    """Options of the datasets ``names``."""
    return [
        choice("--dataset-name", of=names, default="random", help="Source of the requests."),
        text(
            "--dataset-path",
            metavar="FILE",
            help="File with the requests; required unless the dataset is random.",
        ),
        whole(
            "--num-prompts",
            default=count,
            low=0,
            help="Number of requests; 0: the whole file.",
        ),
        whole(
            "--input-len",
            default=None,
            low=1,
            help="Input tokens of random requests; replaces --random-input-len.",
        ),
        whole(
            "--output-len",
            default=None,
            low=1,
            help="Output length of all requests, except those of traces.",
        ),
        whole("--random-input-len", default=1024, low=1, help="Input tokens of a random request."),
        whole("--random-output-len", default=128, low=1, help="Output tokens of a random request."),
        number(
            "--random-range-ratio",
            default=0.0,
            low=0,
            high=1,
            below_high=True,
            help="Lengths are drawn from (1 - X) to (1 + X) times the configured ones.",
        ),
        whole(
            "--random-prefix-len",
            default=0,
            low=0,
            help="Length of a common prefix of all random requests, added to their input.",
        ),
        whole(
            "--sharegpt-output-len",
            default=None,
            low=1,
            help="Output tokens of a ShareGPT request (default: as in the conversation).",
        ),
        whole(
            "--custom-output-len",
            default=256,
            low=-1,
            help="Output tokens of a custom request; -1: output_tokens in its line.",
        ),
        flag(
            "--skip-chat-template", help="Send prompts to text completions without a chat template."
        ),
        flag("--disable-shuffle", help="Keep the order of the dataset file."),
        flag("--no-oversample", help="Send each prompt of the file at most once."),
    ]


def trace_options() -> list[click.Parameter]:
    """Options of traces."""
    return [
        number(
            "--speed",
            default=1.0,
            low=0,
            positive=True,
            help="Replay speed of a trace, relative to its recording.",
        ),
        click.Option(
            ["--self-timed/--no-self-timed"],
            default=True,
            help="Send requests at the times of the trace, or else at --request-rate.",
        ),
        whole(
            "--timed-trace-chunk-hash-size",
            default=16,
            low=1,
            help="Number of tokens in the block of each hash.",
        ),
        number(
            "--timed-trace-sec-multiplier",
            default=1.0,
            low=0,
            positive=True,
            help="Seconds per unit of the timestamps.",
        ),
        text(
            "--timed-trace-label-timestamp",
            default="timestamp",
            metavar="NAME",
            help="Field with the timestamp.",
        ),
        text(
            "--timed-trace-label-input-length",
            default="input_length",
            metavar="NAME",
            help="Field with the input length.",
        ),
        text(
            "--timed-trace-label-output-length",
            default="output_length",
            metavar="NAME",
            help="Field with the output length.",
        ),
        text(
            "--timed-trace-label-hash-ids",
            default="hash_ids",
            metavar="NAME",
            help="Field with the hashes.",
        ),
    ]


def _traffic_options() -> list[click.Parameter]:
    return [
        number(
            "--request-rate",
            default=inf,
            low=0,
            positive=True,
            help="Requests per second; inf: all at once.",
        ),
        number(
            "--burstiness",
            default=1.0,
            low=0,
            positive=True,
            help="1: a Poisson process; below 1: burstier; inf: evenly spaced.",
        ),
        whole(
            "--max-concurrency", default=None, low=1, help="Maximum number of requests in flight."
        ),
        choice(
            "--ramp-up-strategy",
            of=("linear", "exponential"),
            default=None,
            help="Increase the rate over the run; replaces --request-rate.",
        ),
        whole(
            "--ramp-up-start-rps",
            default=None,
            low=0,
            help="Request rate at the start of the ramp.",
        ),
        whole(
            "--ramp-up-end-rps", default=None, low=0, help="Request rate at the end of the ramp."
        ),
        number(
            "--probe-request-rate",
            default=0.0,
            low=0,
            help="Rate of additional one-token requests, which are reported separately.",
        ),
        whole("--seed", default=0, low=0, help="Random seed for prompts and arrival times."),
        whole("--num-warmups", default=0, low=0, help="Number of warm-up requests."),
        whole(
            "--ready-check-timeout-sec",
            default=0,
            low=0,
            help="Seconds to wait until the server is ready; 0: do not check.",
        ),
    ]


def _sampling_options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        flag(
            "--ignore-eos",
            help="Generate the full output length; always set for random requests and traces.",
        ),
        whole(
            "--logprobs", default=None, low=0, help="Number of logprobs to request for each token."
        ),
    ]
    for name, row in NUMBERS.items():
        option, make = "--" + name.replace("_", "-"), whole if row.kind is int else number
        options.append(make(option, default=None, low=int(row.minimum), help=row.help))
    return options


def _result_options() -> list[click.Parameter]:
    return [
        text(
            "--percentile-metrics",
            default="ttft,tpot,itl",
            metavar="NAMES",
            help="Metrics to report: ttft, tpot, itl, e2el, client_queue_time, "
            "ttft_including_client_queue, e2el_including_client_queue.",
        ),
        text(
            "--metric-percentiles",
            default="99",
            metavar="NUMBERS",
            help="Percentiles to report, such as 50,90,99.9.",
        ),
        several(
            "--goodput",
            metavar="KEY:VALUE...",
            help="Goals for ttft, tpot, e2el in milliseconds; requests that meet all are counted.",
        ),
        flag("--save-result", help="Write the result to a JSON file."),
        flag("--save-detailed", help="Include the figures and texts of each request."),
        flag("--append-result", help="Append to the result file instead of replacing it."),
        text(
            "--result-dir",
            metavar="FOLDER",
            help="Directory for result files (default: the current one).",
        ),
        text(
            "--result-filename",
            metavar="NAME",
            help="Name of the result file (default: generated from the settings).",
        ),
        text("--label", metavar="NAME", help="Label of this run in the file and the plot."),
        several("--metadata", metavar="KEY=VALUE...", help="Fields to add to the result file."),
        text(
            "--request-id-prefix", metavar="TEXT", help="Prefix of x-request-id (default: random)."
        ),
        flag("--disable-tqdm", help="Disable the progress bar."),
        text("--plot", metavar="FILE.html", help="Write plots to an HTML page."),
        text(
            "--compare-with",
            metavar="RESULT.json",
            help="Detailed result to plot beside this one.",
        ),
    ]


def serving_groups() -> Groups:
    """All options, by their groups in help."""
    return {
        "server": server_options(),
        "requests": dataset_options(1000, *DATASETS),
        "traces": trace_options(),
        "traffic": _traffic_options(),
        "sampling": _sampling_options(),
        "results": _result_options(),
    }


def json_object(name: str, value: str | None) -> dict[str, Any]:
    """The JSON object of an option. Raises ``UsageError``."""
    try:
        content = json.loads(value or "{}")
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{name} must be a JSON object, not {value}")
    return content


def numbers(name: str, value: str, low: float, high: float) -> list[float]:
    """Numbers separated by commas, within bounds. Raises ``UsageError``."""
    try:
        result = [float(part) for part in value.split(",")]
    except ValueError:
        raise UsageError(f"{name} {value!r} is not a list of numbers such as 50,99") from None
    if not all(low <= one <= high for one in result):
        raise UsageError(f"{name} {value!r}: each number must be from {low:g} to {high:g}")
    return result


def words(name: str, value: str, choices: Sequence[str]) -> list[str]:
    """Words of ``choices``, separated by commas. Raises ``UsageError``."""
    result = [part.strip() for part in value.split(",")]
    wrong = [part for part in result if part not in choices]
    if wrong:
        raise UsageError(f"{name} {wrong[0]!r} is not one of {', '.join(choices)}")
    return result


def goals(items: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    """Goals of --goodput in seconds. Raises ``UsageError``."""
    result = {}
    for item in items:
        name, _, value = item.partition(":")
        if name not in metrics:
            raise UsageError(f"--goodput {item!r}: the metric must be one of {', '.join(metrics)}")
        (milliseconds,) = numbers("--goodput", value, 0, inf)
        result[name] = milliseconds / 1000
    return result


def dataset_path(values: Mapping[str, Any]) -> Path:
    """The path of --dataset-path. Raises ``UsageError`` without the option."""
    if not values["dataset_path"]:
        raise UsageError(f"--dataset-name {values['dataset_name']} needs --dataset-path")
    return Path(values["dataset_path"])
