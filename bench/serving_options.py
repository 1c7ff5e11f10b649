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
    """Of every command that talks to a URL."""
    return [
        text("--base-url", metavar="URL", help="Of the server; instead of --host and --port."),
        text("--host", default="127.0.0.1", metavar="HOST", help="Host of the server."),
        whole("--port", default=8000, low=1, help="Port of the server."),
        choice(
            "--backend",
            of=BACKENDS,
            default="openai",
            help="API: text completions under any name but openai-chat.",
        ),
        text("--endpoint", metavar="PATH", help="Path of the API (default: that of --backend)."),
        text("--model", metavar="NAME", help="Model (default: the first that the server lists)."),
        text("--served-model-name", metavar="NAME", help="Its name in requests, if another."),
        text(
            "--tokenizer",
            metavar="MODEL",
            help="Folder, file or name of a model whose tokenizer is used instead of the server's "
            "/tokenize.",
        ),
        several(
            "--header",
            metavar="KEY=VALUE...",
            help="Headers of each request. The variable OPENAI_API_KEY is sent as the key.",
        ),
        flag("--insecure", help="Do not check the certificate of an https URL."),
        text("--extra-body", metavar="JSON", help="Fields that are added to each request."),
    ]


def url_of(values: Mapping[str, Any]) -> str:
    """The URL that the options name."""
    if values["base_url"]:
        return str(values["base_url"])
    return f"http://{join_host_port(values['host'], values['port'])}"


def dataset_options(count: int, *names: str) -> list[click.Parameter]:
    """The datasets of ``names``, as the commands that run them have them."""
    return [
        choice("--dataset-name", of=names, default="random", help="Kind of the requests."),
        text("--dataset-path", metavar="FILE", help="File of the requests; not for random."),
        whole(
            "--num-prompts",
            default=count,
            low=0,
            help="Number of requests; 0: all of the file.",
        ),
        whole("--input-len", default=None, low=1, help="Input length of random requests."),
        whole("--output-len", default=None, low=1, help="Output length, for all but traces."),
        whole("--random-input-len", default=1024, low=1, help="Input tokens of random requests."),
        whole("--random-output-len", default=128, low=1, help="Their output tokens."),
        number(
            "--random-range-ratio",
            default=0.0,
            low=0,
            high=1,
            below_high=True,
            help="r: lengths are drawn from (1 - r) to (1 + r) times those given.",
        ),
        whole(
            "--random-prefix-len",
            default=0,
            low=0,
            help="Tokens in front of them that all requests share.",
        ),
        whole(
            "--sharegpt-output-len",
            default=None,
            low=1,
            help="Output tokens (default: those of the conversation).",
        ),
        whole(
            "--custom-output-len",
            default=256,
            low=-1,
            help="Output tokens; -1: output_tokens of each line.",
        ),
        flag("--skip-chat-template", help="Send prompts of a file to completions as they are."),
        flag("--disable-shuffle", help="Keep the order of the file."),
        flag("--no-oversample", help="Use no prompt twice."),
    ]


def trace_options() -> list[click.Parameter]:
    """Of traces."""
    return [
        number(
            "--speed",
            default=1.0,
            low=0,
            positive=True,
            help="Replay a trace this many times as fast as it was recorded.",
        ),
        click.Option(
            ["--self-timed/--no-self-timed"],
            default=True,
            help="Send at the trace's times, or by --request-rate.",
        ),
        whole("--timed-trace-chunk-hash-size", default=16, low=1, help="Tokens of a hash."),
        number(
            "--timed-trace-sec-multiplier",
            default=1.0,
            low=0,
            positive=True,
            help="Seconds of a unit of its timestamps.",
        ),
        text(
            "--timed-trace-label-timestamp",
            default="timestamp",
            metavar="NAME",
            help="Name of the field.",
        ),
        text(
            "--timed-trace-label-input-length",
            default="input_length",
            metavar="NAME",
            help="Name of the field.",
        ),
        text(
            "--timed-trace-label-output-length",
            default="output_length",
            metavar="NAME",
            help="Name of the field.",
        ),
        text(
            "--timed-trace-label-hash-ids",
            default="hash_ids",
            metavar="NAME",
            help="Name of the field.",
        ),
    ]


def _traffic_options() -> list[click.Parameter]:
    return [
        number(
            "--request-rate",
            default=inf,
            low=0,
            positive=True,
            help="Requests a second; inf: all at once.",
        ),
        number(
            "--burstiness",
            default=1.0,
            low=0,
            positive=True,
            help="1: a Poisson process; less: more bursts; inf: perfectly regular.",
        ),
        whole("--max-concurrency", default=None, low=1, help="Most requests at a time."),
        choice(
            "--ramp-up-strategy",
            of=("linear", "exponential"),
            default=None,
            help="Let the rate grow, instead of --request-rate.",
        ),
        whole("--ramp-up-start-rps", default=None, low=0, help="Its first requests a second."),
        whole("--ramp-up-end-rps", default=None, low=0, help="Its last requests a second."),
        number(
            "--probe-request-rate",
            default=0.0,
            low=0,
            help="Requests of one token a second that are sent besides, and reported apart.",
        ),
        whole("--seed", default=0, low=0, help="Of prompts and times."),
        whole("--num-warmups", default=0, low=0, help="Requests before, which do not count."),
        whole(
            "--ready-check-timeout-sec",
            default=0,
            low=0,
            help="Wait so long for the server to answer; 0: do not check.",
        ),
    ]


def _sampling_options() -> list[click.Parameter]:
    made: list[click.Parameter] = [
        flag("--ignore-eos", help="Generate the full length. Always with random and traces."),
        whole("--logprobs", default=None, low=0, help="Logprobs that are asked for."),
    ]
    for name, about in NUMBERS.items():
        option, make = "--" + name.replace("_", "-"), whole if about.kind is int else number
        made.append(make(option, default=None, low=int(about.least), help=about.help))
    return made


def _result_options() -> list[click.Parameter]:
    return [
        text(
            "--percentile-metrics",
            default="ttft,tpot,itl",
            metavar="NAMES",
            help="Reported: ttft, tpot, itl, e2el, client_queue_time, "
            "ttft_including_client_queue, e2el_including_client_queue.",
        ),
        text("--metric-percentiles", default="99", metavar="NUMBERS", help="As in 50,90,99.9."),
        several(
            "--goodput",
            metavar="KEY:VALUE...",
            help="Goals in milliseconds for ttft, tpot, e2el; requests that meet all are counted.",
        ),
        flag("--save-result", help="Write the result to a JSON file."),
        flag("--save-detailed", help="With the figures and texts of each request."),
        flag("--append-result", help="Append to the file instead of replacing it."),
        text("--result-dir", metavar="FOLDER", help="Of result files (default: this one)."),
        text("--result-filename", metavar="NAME", help="Of the file (default: by the settings)."),
        text("--label", metavar="NAME", help="Of this run, in file and plot."),
        several("--metadata", metavar="KEY=VALUE...", help="Fields that are added to the file."),
        text("--request-id-prefix", metavar="TEXT", help="Of x-request-id (default: random)."),
        flag("--disable-tqdm", help="Show no progress bar."),
        text("--plot", metavar="FILE.html", help="Write a page with plots."),
        text(
            "--compare-with",
            metavar="RESULT.json",
            help="A detailed result that the plots show beside this one.",
        ),
    ]


def serving_groups() -> Groups:
    """All options, under the headings that help has."""
    return {
        "server": server_options(),
        "requests": dataset_options(1000, *DATASETS),
        "traces": trace_options(),
        "traffic": _traffic_options(),
        "sampling": _sampling_options(),
        "results": _result_options(),
    }


def json_object(name: str, value: str | None) -> dict[str, Any]:
    """The object in an option's text. Raises ``UsageError``."""
    try:
        found = json.loads(value or "{}")
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} must be a JSON object, not {value}")
    return found


def numbers(name: str, value: str, low: float, high: float) -> list[float]:
    """Numbers between commas, within bounds. Raises ``UsageError``."""
    try:
        found = [float(part) for part in value.split(",")]
    except ValueError:
        raise UsageError(f"{name} {value!r} is not a list of numbers such as 50,99") from None
    if not all(low <= one <= high for one in found):
        raise UsageError(f"{name} {value!r}: each number must be from {low:g} to {high:g}")
    return found


def words(name: str, value: str, known: Sequence[str]) -> list[str]:
    """Known words between commas. Raises ``UsageError``."""
    found = [part.strip() for part in value.split(",")]
    wrong = [part for part in found if part not in known]
    if wrong:
        raise UsageError(f"{name} {wrong[0]!r} is not one of {', '.join(known)}")
    return found


def goals(items: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """Goals of --goodput in seconds. Raises ``UsageError``."""
    found = {}
    for item in items:
        name, _, value = item.partition(":")
        if name not in known:
            raise UsageError(f"--goodput {item!r}: the metric must be one of {', '.join(known)}")
        (milliseconds,) = numbers("--goodput", value, 0, inf)
        found[name] = milliseconds / 1000
    return found


def existing_path(values: Mapping[str, Any]) -> Path:
    """--dataset-path. Raises ``UsageError`` if it is not given."""
    if not values["dataset_path"]:
        raise UsageError(f"--dataset-name {values['dataset_name']} needs --dataset-path")
    return Path(values["dataset_path"])
