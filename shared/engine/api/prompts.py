"""Prompts and parameters as callers pass them, checked and tokenized."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError
from ...text.chat_template import flatten_content
from ...text.tokenizer import Tokenizer
from ..sampling_params import SamplingParams, check_params
from .types import Delta, Message, Messages, Prompt


@dataclass(slots=True, eq=False)
class Request:
    """A tokenized prompt, and the callback for its deltas."""

    tokens: list[int]
    params: SamplingParams
    on_delta: Callable[[Delta], None] = lambda delta: None


def paired(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. Raises ``RequestError``."""
    check_list(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(
            f"there are {len(prompts)} prompts and {len(params)} SamplingParams; give one for "
            f"each, or one for all",
            param="params",
        )
    return list(zip(prompts, params, strict=True))


def check_list(prompts: Sequence[Prompt]) -> None:
    """Raise ``RequestError`` for a single prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Message, Mapping))):
        raise RequestError(
            "a list of prompts is expected, but got a single one; put it in a list",
            param="prompts",
        )


def request_of(tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams) -> Request:
    """Raises ``RequestError``."""
    stops = [None] if isinstance(params.stop, str) else params.stop
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(
            f"stop is {params.stop!r}; it must be a tuple of strings that are not empty",
            param="stop",
        )
    check_params(params)
    return Request(token_ids(tokenizer, prompt), params)


def plain(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages in the form that chat templates expect: content is text, and the arguments of
    earlier tool calls are objects, as the server passes them. Raises ``RequestError``."""
    return [_plain(item, f"messages[{i}]") for i, item in enumerate(messages)]


def _plain(message: Message | Mapping[str, Any], param: str) -> Mapping[str, Any]:
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    if not isinstance(message.get("role"), str):
        raise RequestError(f"'{param}' must have a 'role', which is a string.", param=param)
    content = message.get("content")
    converted = {**message, "content": ""}
    if content is not None:
        converted["content"] = flatten_content(content, param=f"{param}.content")
    if tool_calls := message.get("tool_calls"):
        converted["tool_calls"] = [
            _plain_tool_call(tool_call, f"{param}.tool_calls") for tool_call in tool_calls
        ]
    return converted


def _plain_tool_call(tool_call: Any, param: str) -> dict[str, Any]:
    function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"'{param}' must have a 'function' with a 'name'.", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {"type": "function", **tool_call, "function": {**function, "arguments": arguments}}


def token_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The tokens of a prompt. Raises ``RequestError``."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    items = list(prompt)
    if all(isinstance(item, int) for item in items):
        return items  # type: ignore[return-value]
    if all(isinstance(item, (Message, Mapping)) for item in items):
        return tokenizer.encode_chat(plain(items))  # type: ignore[arg-type]
    raise RequestError(
        "a prompt must be a string, a list of token ids, or a list of messages", param="prompt"
    )
