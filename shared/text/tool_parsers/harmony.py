"""``<|channel|>final<|message|>text<|end|>``: the messages of gpt-oss, of which some are reasoning,
some content, and some calls."""

from __future__ import annotations

import re

from .json_call import text_opening, verbatim_text
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = " to="
CONSTRAIN = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
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
    """One message. The prompt may end with the role, after which a recipient may follow."""
    for opening in (START, CHANNEL, RECIPIENT):
        if (yield from reader.accept(opening)):
            break
    else:
        raise NotACallError
    header = opening + (yield from reader.capture(MESSAGE, most=MAX_HEADER))
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    to = reader.content
    if recipient and recipient[1] in tools.schemas:
        reader.begin_call(recipient[1])
        argument = tools.verbatim.get(recipient[1], "")
        if argument and (yield from reader.accept(text_opening(argument))):
            yield from verbatim_text(reader, argument)
            return
        to = reader.arguments
    elif channel and channel[1] == "analysis":
        to = reader.reasoning
    reader.thinking = to == reader.reasoning
    reader.recognised()
    yield from reader.until(END, CALL, RETURN, to=to)
    reader.thinking = False
