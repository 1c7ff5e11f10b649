"""``[f(key="value"), g()]``: Llama 3.2 and 4, and models with templates for such calls."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from .json_call import QUOTES, verbatim_text
from .python_literal import literal_to_json
from .reader import MAX_BUFFERED, NotACallError, Reader, Steps
from .tool_use import ToolUse

START, END = "<|python_start|>", "<|python_end|>"
MARKERS = (START, END)
MAX_NAME = 256
_NAME = re.compile(r"[^\W\d][\w.-]*")
_MARK = re.compile(r"""[\[\](){},'"]""")
_QUOTE_OR_ESCAPE = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}


def pythonic(reader: Reader, tools: ToolUse) -> Steps:
    """An answer that consists of a list of calls, in the markers of Llama 4 or without them."""
    yield from reader.skip_space_of_content()
    yield from reader.attempt(_calls(reader, tools))


def text_opening(argument: str) -> str:
    """What comes before the text of an argument."""
    return f"{argument}={QUOTES}"


def _calls(reader: Reader, tools: ToolUse) -> Steps:
    yield from reader.accept(START)
    yield from reader.skip_space()
    yield from reader.expect("[")
    yield from reader.skip_space()
    yield from _call(reader, tools)
    while (yield from reader.accept(",")):
        yield from reader.skip_space()
        yield from _call(reader, tools)
    yield from reader.accept("]")
    yield from reader.skip_space()
    yield from reader.accept(END)


def _call(reader: Reader, tools: ToolUse) -> Steps:
    """One call, whose name must be known: text in brackets is common."""
    name = (yield from reader.capture("(", most=MAX_NAME)).strip()
    if name not in tools.schemas:
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return
    separator = "{"
    yield from reader.skip_space()
    while not (yield from reader.accept(")")):
        key = (yield from reader.capture("=", most=MAX_NAME)).strip()
        if not _NAME.fullmatch(key):
            raise NotACallError
        value = yield from _literal(reader)
        reader.arguments(f"{separator}{json.dumps(key)}: {value}")
        separator = ", "
        if (yield from reader.accept(",")):
            yield from reader.skip_space()
    reader.arguments("{}" if separator == "{" else "}")
    yield from reader.skip_space()


def _literal(reader: Reader) -> Generator[None, None, str]:
    """The JSON of a literal; the comma or parenthesis after it stays. What is no literal, such as
    a variable, is a string."""
    extent = _Extent()
    parts: list[str] = []
    length = 0
    while True:
        end = extent.end_in(reader.held)
        parts.append(reader.take(len(reader.held) if end is None else end))
        length += len(parts[-1])
        if length > MAX_BUFFERED or (end is None and reader.ended):
            raise NotACallError
        if end is not None:
            break
        yield
    text = "".join(parts)
    try:
        return literal_to_json(text)
    except ValueError:
        return json.dumps(text.strip(), ensure_ascii=False)


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
