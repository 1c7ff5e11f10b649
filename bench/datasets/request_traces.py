"""Traces of requests: the arrival times, and the lengths of prompts and outputs.

Mooncake's traces have a hash for each block of a prompt; prompts whose first hashes are equal share
that prefix. Azure's only have lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from ...shared.errors import UsageError
from .data_lines import Place, csv_lines, json_lines
from .planned_request import MAX_LENGTH, PlannedRequest
from .random_prompts import IdPrompts, PromptMaker

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Cached blocks; others are generated again from their hash.
MAX_BLOCKS = 65_536
# Maximum duration of a replay.
MAX_SECONDS = 366 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """Names of a JSONL trace's fields, unit of its timestamps in seconds, tokens of each hash."""

    timestamp: str = "timestamp"
    input_length: str = "input_length"
    output_length: str = "output_length"
    hash_ids: str = "hash_ids"
    seconds: float = 1.0
    block_tokens: int = 16


MOONCAKE = TraceFormat(seconds=0.001, block_tokens=512)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace; ``at`` is absolute."""

    at: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int | str, ...] = ()


def read_jsonl_trace(path: Path, form: TraceFormat) -> list[TracedRequest]:
    """Read a trace in Mooncake's format or a variant of it. Raises ``UsageError``."""
    return [
        TracedRequest(
            place.number(record, form.timestamp) * form.seconds,
            place.whole_number(record, form.input_length, 1, MAX_LENGTH),
            place.whole_number(record, form.output_length, 1, MAX_LENGTH),
            _hashes(place, record, form.hash_ids),
        )
        for place, record in json_lines(path)
    ]


def _hashes(place: Place, record: Mapping[str, Any], field: str) -> tuple[int | str, ...]:
    hashes = record.get(field) or []
    if not isinstance(hashes, list) or not all(isinstance(one, (int, str)) for one in hashes):
        raise place.error(field, "must be a list of numbers")
    return tuple(hashes)


def read_azure_trace(path: Path) -> list[TracedRequest]:
    """Read one of Azure's CSV files of 2023 and 2024. Raises ``UsageError``."""
    return [
        TracedRequest(
            _seconds(place, place.text(record, "TIMESTAMP")),
            place.whole_number(record, "ContextTokens", 1, MAX_LENGTH),
            # Some requests only computed their prompt.
            max(1, place.whole_number(record, "GeneratedTokens", 0, MAX_LENGTH)),
        )
        for place, record in csv_lines(path, AZURE_COLUMNS)
    ]


def _seconds(place: Place, text: str) -> float:
    try:
        when = datetime.fromisoformat(text.strip())
        return when.replace(tzinfo=when.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        raise place.error(
            "TIMESTAMP", f"is {text!r}; a time such as 2023-11-16 18:15:46.680 is expected"
        ) from None


def planned(
    trace: Sequence[TracedRequest],
    prompts: PromptMaker,
    *,
    count: int,
    speed: float,
    seed: int,
    block_tokens: int,
    path: Path,
) -> Iterator[PlannedRequest]:
    """The first ``count`` requests (0: all), at ``speed`` times the original speed."""
    ordered = sorted(trace, key=lambda one: one.at)[: count if count > 0 else None]
    if not ordered:
        raise UsageError(f"--dataset-path {path} has no request")
    span = (ordered[-1].at - ordered[0].at) / speed
    if span > MAX_SECONDS:
        raise UsageError(f"{path} would be replayed for {span / 86_400:,.0f} days; raise --speed")
    texts = _Prompts(prompts, seed, block_tokens)
    for number, one in enumerate(ordered):
        at = (one.at - ordered[0].at) / speed
        yield PlannedRequest(texts.prompt(number, one), one.prompt_tokens, one.output_tokens, at)


class _Prompts:
    """Prompts of a trace. Blocks with the same hash have the same content; tokens after the last
    block, and prompts without hashes, are unique."""

    def __init__(self, maker: PromptMaker, seed: int, block_tokens: int) -> None:
        self._maker, self._seed, self._block_tokens = maker, seed, block_tokens
        self._block = lru_cache(MAX_BLOCKS)(self._make_block)

    def prompt(self, number: int, request: TracedRequest) -> Any:
        shared = [self._block(one) for one in request.hashes]
        own = request.prompt_tokens - len(shared) * self._block_tokens
        if not shared or own > 0:
            shared.append(self._make(f"own {number}", max(own, 1)))
        if isinstance(self._maker, IdPrompts):
            return [token for block in shared for token in block][: request.prompt_tokens]
        words = " ".join(shared).split()
        covered = max(request.prompt_tokens, request.prompt_tokens - own)
        return " ".join(words[: max(1, round(len(words) * request.prompt_tokens / covered))])

    def _make_block(self, name: int | str) -> Any:
        return self._make(f"block {name}", self._block_tokens)

    def _make(self, name: str, tokens: int) -> Any:
        return self._maker.make(Random(f"{self._seed} {name}"), tokens)
