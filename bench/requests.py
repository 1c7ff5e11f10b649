"""Requests of a benchmark, by the options of a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..shared.errors import UsageError
from .client.api_server import ApiServer
from .datasets.planned_request import PlannedRequest
from .datasets.prompt_files import Selection, read_custom, read_sharegpt
from .datasets.random_prompts import PromptMaker, find_prompt_maker
from .datasets.random_requests import RandomLengths, random_requests
from .datasets.request_traces import (
    MOONCAKE,
    TraceFormat,
    planned,
    read_azure_trace,
    read_jsonl_trace,
)
from .datasets.text_tokens import LocalTokens, ServerTokens, TextTokens
from .serving_options import TRACES, dataset_path

Values = Mapping[str, Any]


async def requests_for_server(
    values: Values, server: ApiServer, local: LocalTokens | None
) -> Iterable[PlannedRequest]:
    """The requests of any dataset. Raises ``UsageError`` and ``BenchmarkError``."""
    name = values["dataset_name"]
    if name == "random":
        check_no_path(values)
        return random_of(values, await find_prompt_maker(server, local))
    if name in TRACES:
        make = _trace(values)  # report a broken file before contacting the server
        return make(await find_prompt_maker(server, local))
    tokens = local or ServerTokens(server)
    if name == "sharegpt":
        return await sharegpt_of(values, tokens)
    template = not server.is_chat and not values["skip_chat_template"]
    return await custom_of(values, tokens if template else None)


def check_no_path(values: Values) -> None:
    """Raise ``UsageError`` if random requests have a file."""
    if values["dataset_path"]:
        raise UsageError(
            f"--dataset-path {values['dataset_path']} is not used with --dataset-name random; "
            "give the file's format as the dataset's name"
        )
    if not values["num_prompts"]:
        raise UsageError("--num-prompts 0 means a whole file; random requests need a number")


def random_of(values: Values, maker: PromptMaker) -> Iterator[PlannedRequest]:
    """Random requests."""
    lengths = RandomLengths(
        input_len=values["input_len"] or values["random_input_len"],
        output_len=values["output_len"] or values["random_output_len"],
        range_ratio=values["random_range_ratio"],
        prefix_len=values["random_prefix_len"],
    )
    return random_requests(maker, lengths, values["num_prompts"], values["seed"])


async def sharegpt_of(values: Values, tokens: TextTokens) -> list[PlannedRequest]:
    """Prompts of ShareGPT's conversations."""
    output_len = values["output_len"] or values["sharegpt_output_len"]
    return await read_sharegpt(_selection(values), tokens, output_len)


async def custom_of(values: Values, template: TextTokens | None) -> list[PlannedRequest]:
    """Prompts of a JSONL file."""
    output_len = values["output_len"] or values["custom_output_len"]
    if output_len == 0:
        raise UsageError("--custom-output-len must be at least 1, or -1 for each line's own")
    return await read_custom(_selection(values), output_len, template)


def _selection(values: Values) -> Selection:
    return Selection(
        path=dataset_path(values),
        count=values["num_prompts"],
        seed=values["seed"],
        shuffle=not values["disable_shuffle"],
        oversample=not values["no_oversample"],
    )


def _trace(values: Values) -> partial[Iterator[PlannedRequest]]:
    """``planned`` with all arguments except the prompt maker."""
    path, form = dataset_path(values), _format(values)
    read = (
        partial(read_azure_trace, path) if form is None else partial(read_jsonl_trace, path, form)
    )
    return partial(
        _planned, read(), values, path, form.block_tokens if form else MOONCAKE.block_tokens
    )


def _planned(
    trace: Any, values: Values, path: Path, block_tokens: int, maker: PromptMaker
) -> Iterator[PlannedRequest]:
    return planned(
        trace,
        maker,
        count=values["num_prompts"],
        speed=values["speed"],
        seed=values["seed"],
        block_tokens=block_tokens,
        path=path,
    )


def _format(values: Values) -> TraceFormat | None:
    """The format of a JSONL trace; ``None`` for Azure's, which are CSV."""
    if values["dataset_name"] == "azure":
        return None
    if values["dataset_name"] == "mooncake":
        return MOONCAKE
    return TraceFormat(
        timestamp=values["timed_trace_label_timestamp"],
        input_length=values["timed_trace_label_input_length"],
        output_length=values["timed_trace_label_output_length"],
        hash_ids=values["timed_trace_label_hash_ids"],
        seconds=values["timed_trace_sec_multiplier"],
        block_tokens=values["timed_trace_chunk_hash_size"],
    )
