"""Grammars of messages in channels (gpt-oss), with tool calls among them.

``{"calls": [{"name": ..., ...}], "required": ...}``: the output is reasoning and comments, and at
last one of the calls or, unless a call is required, a final message. The content of a call is as in
``calls_in_text``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...text.tool_parsers.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from .grammar_text import GrammarText


def calls_in_channels(grammar: GrammarText, spec: Any, write: Callable[[Any], str]) -> str:
    """The expression of an output. The prompt ends with a message's marker and role."""
    calls = [_tool_call(grammar, call, write) for call in spec["calls"]]
    again = _one_of([f"{end} {grammar.literal(START + 'assistant')}" for end in _ends(grammar)])
    other = _one_of([_header(grammar, channel) for channel in ("analysis", "commentary", "final")])
    last = [*calls] if spec["required"] else [*calls, f"{other} {grammar.text()}"]
    return f"({other} {again})* {_one_of(last)}" + ("" if spec["required"] else "?")


def _header(grammar: GrammarText, channel: str) -> str:
    return f"{grammar.literal(CHANNEL + channel)} {grammar.space()} {grammar.literal(MESSAGE)}"


def _ends(grammar: GrammarText) -> list[str]:
    """Text up to a marker that ends a message. Markers that end an output are not part of it."""
    return [grammar.text_until(marker) for marker in (END, CALL, RETURN)]


def _tool_call(grammar: GrammarText, call: Any, write: Callable[[Any], str]) -> str:
    """A call; its recipient is written after the channel, or with the role."""
    to, literal, space = f" to=functions.{call['name']}", grammar.literal, grammar.space()
    channel = _one_of([literal(CHANNEL + name) for name in ("commentary", "analysis")])
    header = _one_of([f"{channel} {literal(to)}", f"{literal(to)} {channel}"])
    layout = _one_of([f"{literal(CONSTRAIN)} {literal('json')}", literal("json")])
    return f"{header} {space} ({layout} {space})? {literal(MESSAGE)} {write(call)}"


def _one_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"
