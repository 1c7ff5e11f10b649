"""``[f(key="value"), g()]``: Llama 3.2 and 4, and models with templates for such calls."""

from __future__ import annotations

import re
from collections.abc import Generator

from .json_call import QUOTES, verbatim_text
from .json_text import json_string, scalar
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse

START, END = "<|python_start|>", "<|python_end|>"
MARKERS = (START, END)
MAX_NAME = 256
_NAME = re.compile(r"[^\W\d][\w.-]*")
_MARK = re.compile(r"""[\[\](){},'"]""")
_QUOTE_OR_ESCAPE = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}


def pythonic(reader: Reader, tools: ToolUse) -> Steps:
    """An output that consists of a list of calls, with or without the markers of Llama 4."""
    yield from reader.skip_space_of_content()
    yield from reader.attempt(_calls(reader, tools))
    yield from reader.content_until(ends=MARKERS)


def text_opening(argument: str) -> str:
    """The text before the value of an argument."""
    return f"{argument}={QUOTES}"


def _calls(reader: Reader, tools: ToolUse) -> Steps:
    yield from reader.skip(START)
    yield from reader.expect("[")
    more = True
    while more:
        yield from reader.skip_space()
        more = yield from _call(reader, tools)
    yield from reader.accept("]")
    yield from reader.skip_space()
    yield from reader.accept(END)


def _call(reader: Reader, tools: ToolUse) -> Generator[None, None, bool]:
    """Read a call, whose name must be known, since text in brackets is common. Returns whether
    another follows."""
    name = (yield from reader.capture("(", max_length=MAX_NAME)).strip()
    if name not in tools.schemas:
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return False
    separator, mark = "{", ","
    while mark == ",":
        parts: list[str] = []
        mark = yield from reader.until("=", ",", ")", to=parts.append)
        key = "".join(parts).strip()
        if mark == "=":  # positional arguments are left out
            value, mark = yield from _literal(reader)
            if mark and _NAME.fullmatch(key):
                reader.arguments(f"{separator}{json_string(key)}: {value}")
                separator = ", "
    if mark:
        reader.arguments("{}" if separator == "{" else "}")
    yield from reader.skip_space()
    return (yield from reader.accept(","))


def _literal(reader: Reader) -> Generator[None, None, tuple[str, str]]:
    """Read a literal; return its JSON, and the comma or parenthesis after it, if any. Anything
    else, such as a variable, becomes a string."""
    extent = _Extent()
    parts: list[str] = []
    while (end := extent.end_in(reader.buffer)) is None:
        parts.append(reader.take(len(reader.buffer)))
        if reader.ended:
            return "", ""
        yield
    parts.append(reader.take(end))
    return scalar("".join(parts).strip()), reader.take(1)


class _Extent:
    """Finds the comma or parenthesis after a literal."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """The position of the end in the next piece of text, or ``None``."""
        at = 0
        while at < len(text):
            if self._quote:
                at = self._skip_string(text, at)
                continue
            mark = _MARK.search(text, at)
            if mark is None:
                return None
            if not self._depth and mark[0] in "),":
                return mark.start()
            at = mark.end()
            self._quote = mark[0] if mark[0] in "'\"" else ""
            self._depth += (mark[0] in "([{") - (mark[0] in ")]}")
        return None

    def _skip_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        mark = _QUOTE_OR_ESCAPE[self._quote].search(text, at)
        if mark is None:
            return len(text)
        self._escaped = mark[0] == "\\"
        if not self._escaped:
            self._quote = ""
        return mark.end()
