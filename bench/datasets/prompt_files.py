"""Prompts from files: ShareGPT's conversations, and custom JSONL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ...shared.errors import UsageError
from ..client.api_server import Prompt
from .data_lines import Place, json_lines, json_list
from .planned_request import MAX_LENGTH, PlannedRequest
from .text_tokens import TextTokens

# Limits of vLLM for the conversations of ShareGPT, in tokens.
MIN_PROMPT, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
OUTPUT_OF_LINE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Number and order of the prompts used from a file; ``count`` 0 means all."""

    path: Path
    count: int
    seed: int = 0
    shuffle: bool = True
    oversample: bool = True

    def order(self, items: list[Any]) -> list[Any]:
        if self.shuffle:
            Random(self.seed).shuffle(items)
        return items

    def complete(self, requests: list[PlannedRequest]) -> list[PlannedRequest]:
        """``count`` requests: if there are fewer, with ``oversample`` some are repeated."""
        if not requests:
            raise UsageError(f"--dataset-path {self.path} has no usable prompt")
        missing = self.count - len(requests)
        if missing > 0 and self.oversample:
            requests += Random(self.seed).choices(requests, k=missing)
        return requests

    def is_complete(self, requests: list[PlannedRequest]) -> bool:
        return 0 < self.count <= len(requests)


async def read_sharegpt(
    selection: Selection, tokens: TextTokens, output_len: int | None
) -> list[PlannedRequest]:
    """The first prompt of each conversation, and the length of the reply to it. Very short or long
    conversations are skipped, as in vLLM. Raises ``UsageError``."""
    turns = [pair for place, item in json_list(selection.path) if (pair := _turns(place, item))]
    requests: list[PlannedRequest] = []
    for prompt, reply in selection.order(turns):
        if selection.is_complete(requests):
            break
        length = len(await tokens.encode(prompt))
        output = output_len or len(await tokens.encode(reply))
        too_short = min(length, output if output_len is None else MIN_PROMPT) < MIN_PROMPT
        if not too_short and length <= MAX_PROMPT and length + output <= MAX_TOTAL:
            requests.append(PlannedRequest(prompt, length, output))
    return selection.complete(requests)


def _turns(place: Place, item: Mapping[str, Any]) -> tuple[str, str] | None:
    turns = item.get("conversations")
    if turns is None or (isinstance(turns, list) and len(turns) < 2):
        return None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns[:2]):
        raise place.error("conversations", "must be a list of objects")
    texts = [turn.get("value") for turn in turns[:2]]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise place.error(f"conversations[{index}].value", "must be a text")
    return texts[0], texts[1]


async def read_custom(
    selection: Selection, output_len: int, render: TextTokens | None
) -> list[PlannedRequest]:
    """Lines with ``prompt``: a text, token ids, or the messages of a chat. An ``output_len`` of -1
    means the line's ``output_tokens``. ``render`` applies the chat template to texts. Raises
    ``UsageError``."""
    lines = [
        (_prompt(place, record), _output_tokens(place, record, output_len))
        for place, record in json_lines(selection.path)
    ]
    requests: list[PlannedRequest] = []
    for prompt, output in selection.order(lines):
        if selection.is_complete(requests):
            break
        if render and isinstance(prompt, str):
            prompt = await render.render(prompt)
        ids = isinstance(prompt, list) and isinstance(prompt[0], int)
        requests.append(PlannedRequest(prompt, len(prompt) if ids else 0, output))
    return selection.complete(requests)


def _output_tokens(place: Place, record: Mapping[str, Any], output_len: int) -> int:
    if output_len != OUTPUT_OF_LINE:
        return output_len
    return place.whole_number(record, "output_tokens", 1, MAX_LENGTH)


def _prompt(place: Place, record: Mapping[str, Any]) -> Prompt:
    value = record.get("prompt")
    if isinstance(value, list) and value:
        if all(type(item) is int and item >= 0 for item in value):
            return value
        if all(isinstance(item, dict) and "role" in item for item in value):
            return value
        raise place.error("prompt", "must be a text, a list of token ids or a list of messages")
    return place.text(record, "prompt")
