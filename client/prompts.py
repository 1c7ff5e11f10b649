"""Prompts of ``tandem complete`` from the command line, a JSONL file, or the standard input."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..shared.config.client import CompleteConfig
from ..shared.errors import UsageError

MAX_LINE = 32 << 20
STDIN = "-"
# Members of a line that identify it, and are copied into its result.
IDENTITIES = ("id", "custom_id")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt in its original form, the body of its request, and its identity."""

    text: Any
    body: dict[str, Any]
    identity: dict[str, Any] = field(default_factory=dict)


def read_prompts(config: CompleteConfig, parameters: dict[str, Any]) -> Iterator[PromptLine] | None:
    """The prompts, each with these parameters; ``None`` if the user is to type them. Raises
    ``UsageError``, also during the iteration."""
    options = {"--prompts": config.prompts, "--quick": config.quick, "--input": config.input}
    flags = [flag for flag, value in options.items() if value is not None]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)} are two sources of prompts; give one of them")
    if config.input is not None:
        return _of_file(config.input, config, parameters)
    if config.prompts is not None:
        texts = [text.strip() for text in config.prompts.split("|") if text.strip()]
    elif config.quick is not None:
        texts = [config.quick]
    elif sys.stdin.isatty():
        return None
    else:
        texts = [_standard_input().strip()]
    if not any(texts):
        raise UsageError(f"there is no prompt in {flags[0] if flags else 'the standard input'}")
    return (prompt_of(text, config, parameters) for text in texts)


def _standard_input() -> str:
    try:
        text = sys.stdin.read(MAX_LINE + 1)
    except UnicodeDecodeError:
        raise UsageError("the standard input is not UTF-8") from None
    if len(text) > MAX_LINE:
        raise UsageError(f"the standard input is a prompt of more than {MAX_LINE} characters")
    return text


def prompt_of(text: str, config: CompleteConfig, parameters: dict[str, Any]) -> PromptLine:
    """A prompt from a text; with ``--chat``, from a message."""
    if config.chat:
        return PromptLine(text, {"messages": [{"role": "user", "content": text}], **parameters})
    return PromptLine(text, {"prompt": text, **parameters})


def _of_file(name: str, config: CompleteConfig, parameters: dict[str, Any]) -> Iterator[PromptLine]:
    number = 0
    with _open(name) as file:
        while line := file.readline(MAX_LINE):
            number += 1
            if line.strip():
                yield _of_line(line, f"{name}:{number}", config, parameters)


@contextlib.contextmanager
def _open(name: str) -> Iterator[TextIO]:
    if name == STDIN:
        yield sys.stdin
        return
    try:
        with open(name, encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UsageError(f"--input {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--input {name} is not UTF-8") from None


def _of_line(
    line: str, place: str, config: CompleteConfig, parameters: dict[str, Any]
) -> PromptLine:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{place} is not JSON; each line must be a string or an object") from None
    if isinstance(value, str):
        return prompt_of(value, config, parameters)
    if not isinstance(value, dict) or not ("prompt" in value or "messages" in value):
        raise UsageError(f"{place} must be a string, or an object with prompt or messages")
    identity = {name: value.pop(name) for name in IDENTITIES if name in value}
    if "messages" in value:
        return PromptLine(value["messages"], {**parameters, **value}, identity)
    text = value.pop("prompt")
    if config.chat and isinstance(text, str):
        return PromptLine(text, {**prompt_of(text, config, parameters).body, **value}, identity)
    return PromptLine(text, {**parameters, "prompt": text, **value}, identity)
