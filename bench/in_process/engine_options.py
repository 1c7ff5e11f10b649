"""The options of the benchmarks that run the engine in this process, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from ...commands.part_command import is_given, with_full_name
from ...shared.config import EngineConfig, HubConfig
from ...shared.config.command_line import command_options, fill
from ...shared.errors import UsageError
from ..grouped_command import Groups, flag, text, whole
from ..serving_options import dataset_options

# vLLM's older spelling, which its throughput benchmark keeps.
_OTHER_NAMES = {"--random-prefix-len": "--prefix-len"}


def latency_groups() -> Groups:
    """All options of `tandem bench latency`."""
    return {
        "requests": [
            whole("--input-len", default=32, low=1, help="Tokens of each prompt."),
            whole("--output-len", default=128, low=1, help="Tokens of each answer."),
            whole("--batch-size", default=8, low=1, help="Prompts at once."),
            whole("--n", default=1, low=1, help="Answers of each prompt."),
            whole("--num-iters-warmup", default=10, low=0, help="Batches that do not count."),
            whole("--num-iters", default=30, low=1, help="Batches that count."),
        ],
        "results": _result_options(),
        "engine": _without_prefix_caching(command_options(EngineConfig, HubConfig)),
    }


def throughput_groups() -> Groups:
    """All options of `tandem bench throughput`."""
    requests = dataset_options(1000, "random", "sharegpt", "custom")
    for option in requests:
        option.opts += [_OTHER_NAMES[name] for name in option.opts if name in _OTHER_NAMES]
    return {
        "requests": [*requests, whole("--n", default=1, low=1, help="Answers of each prompt.")],
        "results": _result_options(),
        "engine": command_options(EngineConfig, HubConfig),
    }


def startup_groups() -> Groups:
    """All options of `tandem bench startup`."""
    return {
        "starts": [
            whole("--num-iters-cold", default=3, low=0, help="With empty caches of kernels."),
            whole("--num-iters-warmup", default=1, low=0, help="That fill them, and do not count."),
            whole("--num-iters-warm", default=3, low=0, help="With full ones."),
        ],
        "results": _result_options(),
        "engine": command_options(EngineConfig, HubConfig),
    }


def _result_options() -> list[click.Parameter]:
    return [
        text("--output-json", metavar="FILE", help="Write the result to a JSON file."),
        flag("--disable-tqdm", help="Show no progress bar."),
    ]


def _without_prefix_caching(options: list[click.Parameter]) -> list[click.Parameter]:
    """As in vLLM: the prompts of a batch come again and again, and would not be computed."""
    for option in options:
        if option.name == "enable_prefix_caching":
            option.default = False
    return options


def engine_config(values: Mapping[str, Any], *, waiting: int = 0) -> EngineConfig:
    """The engine's options; its queue holds ``waiting`` sequences at least. Raises
    ``UsageError``."""
    given, values = values.get("positional"), dict(values)
    if given is not None:
        if is_given("model"):
            raise UsageError(f"the model is given twice: {given!r} and {values['model']!r}")
        values["model"] = given
    config = fill(EngineConfig, with_full_name(values))
    return replace(config, max_waiting=max(config.max_waiting, waiting))
