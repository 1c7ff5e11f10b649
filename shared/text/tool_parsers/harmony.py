"""``<|channel|>final<|message|>text<|end|>``: the messages of gpt-oss, which are reasoning, content
or calls."""

from __future__ import annotations

import re

from .json_call import call_arguments
from .reader import NotACallError, Reader, Steps, discard
from .tool_use import ToolUse

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = " to="
CONSTRAIN = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
# At the beginning of a header or after the role.
_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
MAX_HEADER = 1024
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/@$-]+)")
_ENDS = (END, CALL, RETURN)


def harmony(reader: Reader, tools: ToolUse) -> Steps:
    """Messages, each with a header. Text without a header is content."""
    opening = yield from reader.next_is(RECIPIENT)  # the prompt may end with the role
    reader.take(len(opening))
    opening = opening or (yield from reader.content_until(START, CHANNEL, ends=_ENDS))
    while opening:
        yield from reader.attempt(_message(reader, tools, opening), after=opening)
        opening = yield from reader.content_until(START, CHANNEL, ends=_ENDS)


def _message(reader: Reader, tools: ToolUse, opening: str) -> Steps:
    """Read a message."""
    text, marker = yield from reader.capture_to(MESSAGE, *_ENDS, max_length=MAX_HEADER)
    if marker != MESSAGE:
        raise NotACallError
    header = opening + text
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient and _is_call(recipient, tools):
        reader.begin_call(recipient[2])
        yield from reader.skip(MESSAGE)
        yield from call_arguments(reader, tools, recipient[2], *_ENDS, START, CHANNEL)
        to = discard
    else:
        reader.thinking = channel is not None and channel[1] == "analysis"
        to = reader.reasoning if reader.thinking else reader.content
        reader.recognise()
        reader.marked = False
        while (yield from reader.accept(MESSAGE)):
            pass
    marker = yield from reader.until(*_ENDS, START, CHANNEL, to=to)
    reader.thinking, reader.marked = False, True
    if marker not in _ENDS:
        reader.give_back(marker)


def _is_call(recipient: re.Match[str], tools: ToolUse) -> bool:
    """True if a message is addressed to a function, known or not. Other recipients, such as python,
    are built-in tools that the request does not have."""
    is_function = recipient[1] is not None and bool(tools.schemas)
    return is_function or recipient[2] in tools.schemas
