"""``<|channel|>final<|message|>text<|end|>``: the messages of gpt-oss, of which some are reasoning,
some content, and some calls."""

from __future__ import annotations

import re

from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>")
# After the marker of a channel, at the begin or after the role.
_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
MAX_HEADER = 1024
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/@$-]+)")


def harmony(reader: Reader, tools: ToolUse) -> Steps:
    """Messages, each with a header. Text without a header is content."""
    while not (yield from reader.at_end()):
        if not (yield from reader.attempt(_message(reader, tools))):
            return


def _message(reader: Reader, tools: ToolUse) -> Steps:
    opened = (yield from reader.accept(START)) or (yield from reader.accept(CHANNEL))
    if not opened:
        raise NotACallError
    header = CHANNEL + (yield from reader.capture(MESSAGE, most=MAX_HEADER))
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    to = reader.content
    if recipient and recipient[1] in tools.schemas:
        reader.begin_call(recipient[1])
        to = reader.arguments
    elif channel and channel[1] == "analysis":
        to = reader.reasoning
    reader.thinking = to == reader.reasoning
    reader.recognised()
    yield from reader.until(END, CALL, RETURN, to=to)
    reader.thinking = False
