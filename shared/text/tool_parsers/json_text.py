"""JSON as models write it, read in pieces and passed on as valid JSON.

Valid JSON passes unchanged. Anything else is repaired where possible: control characters and quotes
in strings are escaped, unquoted words become strings, misplaced characters are left out, and open
brackets are closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from enum import Enum, auto
from typing import Any

from ..markers import first_of, partial_marker
from .python_literal import literal_to_json
from .reader import MAX_SPACE, Reader, Sink, Steps

MAX_DEPTH = 500
# Numbers and unquoted words; longer ones are split.
MAX_WORD = 1024
MAX_MARKER = 64
_SPACE = " \t\r\n"
_CLOSED_BY = {"{": "}", "[": "]"}
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_AFTER_STRING = (",", ":", "}", "]")
_KEY = re.compile(r'[^\s"{}\[\],:]+')


class _Place(Enum):
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()  # after a value


class JsonText:
    """Reads one value and passes it ``to`` a sink. It also ends before one of ``ends``. Strings may
    also be verbatim between ``quote`` markers."""

    def __init__(
        self, reader: Reader, to: Sink, *, ends: tuple[str, ...] = (), quote: str = ""
    ) -> None:
        self._reader = reader
        self._to = to
        self._ends = ends
        self._quote = quote
        self._markers = (*ends, quote) if quote else ends  # that end a word
        self._open: list[str] = []  # brackets
        self._filled: list[bool] = []  # whether they contain something
        self._place = _Place.VALUE
        self._gap = ""  # white space since the last output, with at most one comma
        self._in_string = False
        self._done = False

    def read(self) -> Generator[None, None, bool]:
        """Read the value. Returns false if the text ends in it, or if what comes next cannot belong
        to it."""
        reader = self._reader
        while not self._done:
            self._read_space()
            if (yield from reader.at_end()):
                return False
            if reader.buffer[0].isspace():
                continue
            if self._ends and (yield from reader.next_is(*self._ends)):
                return False
            if self._quote and (yield from reader.accept(self._quote)):
                if not (yield from self._verbatim_string()):
                    return False
            elif not reader.buffer or not (yield from self._next()):
                return False
        return True

    def close(self) -> None:
        """Close the value."""
        if self._in_string:
            self._end_string()
        while self._open:
            self._close_one()

    def _next(self) -> Generator[None, None, bool]:
        """Read a mark, a string or a word. Returns false if the text ends in it, or if it does not
        belong to the value."""
        character = self._reader.buffer[0]
        if not self._open and character in "}],:":
            return False
        if character not in '{}[],:"':
            return (yield from self._word())
        self._reader.take(1)
        if character == '"':
            return (yield from self._string())
        if character in _CLOSED_BY:
            self._begin(character)
        elif character == ",":
            self._comma()
        elif character == ":":
            if self._place is _Place.COLON:
                self._colon()
        else:
            self._close(character)
        return True

    # -- structure --------------------------------------------------------------------------------

    def _read_space(self) -> None:
        buffer = self._reader.buffer
        space = self._reader.take(len(buffer) - len(buffer.lstrip()))
        room = max(0, MAX_SPACE - len(self._gap))
        self._gap += "".join(character for character in space if character in _SPACE)[:room]

    def _begin(self, bracket: str) -> None:
        self._go_to_item()
        if self._place is _Place.KEY or len(self._open) == MAX_DEPTH:
            return
        self._write(bracket)
        self._open.append(bracket)
        self._filled.append(False)
        self._place = _Place.KEY if bracket == "{" else _Place.VALUE

    def _close(self, bracket: str) -> None:
        """Close the matching bracket and all within it; drop a bracket that matches none."""
        if bracket not in map(_CLOSED_BY.__getitem__, self._open):
            return
        while self._close_one() != bracket:
            pass

    def _close_one(self) -> str:
        self._fill_in()
        bracket = _CLOSED_BY[self._open.pop()]
        self._filled.pop()
        self._to(self._gap.replace(",", "") + bracket)
        self._gap = ""
        self._end_value()
        return bracket

    def _comma(self) -> None:
        self._fill_in()
        if self._place is _Place.NEXT:
            self._gap += ","
            self._go_to_item()

    def _colon(self) -> None:
        self._to(self._gap + ":")
        self._gap = ""
        self._place = _Place.VALUE

    def _go_to_item(self) -> None:
        """Go to where a key or value may begin, even if a mark before it is missing."""
        if self._place is _Place.COLON:
            self._colon()
        elif self._place is _Place.NEXT:
            self._place = _Place.KEY if self._open[-1] == "{" else _Place.VALUE

    def _fill_in(self) -> None:
        """Write null for a missing value."""
        if self._place is _Place.COLON:
            self._colon()
        if self._place is _Place.VALUE and self._open[-1] == "{":
            self._write("null")
            self._end_value()

    def _write(self, text: str) -> None:
        """Write the beginning of a key or value, after a comma where it needs one."""
        follows = bool(self._filled) and self._filled[-1]
        if self._place is _Place.VALUE and self._open and self._open[-1] == "{":
            follows = False
        gap = self._gap
        if not follows:
            gap = gap.replace(",", "")
        elif "," not in gap:
            gap = "," + gap
        self._gap = ""
        self._to(gap + text)

    def _end_value(self) -> None:
        self._place = _Place.NEXT
        if self._filled:
            self._filled[-1] = True
        self._done = not self._open

    # -- strings and words ------------------------------------------------------------------------

    def _string(self) -> Generator[None, None, bool]:
        """Read a string after its opening quote. Returns false if the text ends in it."""
        self._go_to_item()
        self._write('"')
        self._in_string = True
        ended = yield from self._escaped_text()
        if ended:
            self._end_string()
        return ended

    def _verbatim_string(self) -> Generator[None, None, bool]:
        """Like ``_string``, between markers, which models may repeat."""
        reader, quote, to = self._reader, self._quote, self._to
        self._go_to_item()
        self._write('"')
        self._in_string = True
        after = (*_AFTER_STRING, *self._ends)
        while (yield from reader.next_is(quote)):
            while (closes := reader.followed_by(len(quote), *after, repeated=quote)) is None:
                if reader.ended:
                    reader.take(len(reader.buffer))
                    return False
                yield
            if closes:
                break
            reader.take(len(quote))
        if not (yield from reader.until(quote, to=lambda text: to(escape(text)))):
            return False
        yield from reader.skip(quote)
        self._end_string()
        return True

    def _end_string(self) -> None:
        self._in_string = False
        self._to('"')
        self._end_item()

    def _end_item(self) -> None:
        if self._place is _Place.KEY:
            self._place = _Place.COLON
        else:
            self._end_value()

    def _escaped_text(self) -> Generator[None, None, bool]:
        reader = self._reader
        while not (yield from reader.at_end()):
            run = _RUN.match(reader.buffer)
            if run is not None:
                self._to(reader.take(run.end()))
            elif reader.buffer[0] == "\\":
                yield from self._escape()
            elif reader.buffer[0] != '"':
                self._to(escape(reader.take(1)))
            else:
                while (closes := self._closes()) is None:
                    if reader.ended:
                        reader.take(len(reader.buffer))
                        return False
                    yield
                reader.take(1)
                if closes:
                    return True
                self._to('\\"')
        return False

    def _escape(self) -> Steps:
        """Read a backslash, which is literal unless it begins an escape."""
        reader = self._reader
        while _BEGUN_ESCAPE.fullmatch(reader.buffer) and not reader.ended:
            yield
        if escape := _ESCAPE.match(reader.buffer):
            self._to(reader.take(escape.end()))
        elif _BEGUN_ESCAPE.fullmatch(reader.buffer):
            reader.take(len(reader.buffer))
        else:
            reader.take(1)
            self._to("\\\\")

    def _closes(self) -> bool | None:
        """True if the next quote ends its string, judged by the text after it, as models forget to
        escape quotes. ``None`` if more text is needed."""
        buffer = self._reader.buffer
        closes = self._ends_string(buffer[1 : 1 + MAX_SPACE].lstrip()) if self._open else True
        return True if closes is None and len(buffer) > MAX_SPACE else closes

    def _ends_string(self, after: str) -> bool | None:
        if not after or any(end != after and end.startswith(after) for end in self._ends):
            return None
        if after.startswith(self._ends):
            return True
        if self._place is _Place.KEY:
            return after[0] == ":"
        if after[0] != "," or self._open[-1] == "[":
            return after[0] in "}],"
        return _begins_with_key(after[1:])

    def _word(self) -> Generator[None, None, bool]:
        """Read a number, a constant or an unquoted text, up to the mark that ends it. Returns false
        if the text ends first."""
        self._go_to_item()
        is_key = self._place is _Place.KEY
        marks = (*('":,{}[]' if is_key else '",}]'), *self._markers)
        reader = self._reader
        while (end := self._end_of_word(marks)) is None:
            if reader.ended:
                reader.take(len(reader.buffer))
                return False
            yield
        word = reader.buffer[:end].rstrip()
        reader.take(len(word))
        self._write(json_string(word) if is_key else scalar(word))
        self._end_item()
        return True

    def _end_of_word(self, marks: tuple[str, ...]) -> int | None:
        """The place of the first mark, unless it may belong to a marker; ``None`` if more text is
        needed."""
        buffer = self._reader.buffer
        match = first_of(buffer[: MAX_WORD + MAX_MARKER], marks)
        if match is not None and match[0] < MAX_WORD:
            marker_start = len(buffer) - partial_marker(buffer, self._markers)
            return match[0] if match[0] < marker_start or self._reader.ended else None
        return MAX_WORD if len(buffer) >= MAX_WORD + MAX_MARKER else None


def repair_object(text: str) -> str:
    """Repair the JSON of an object; an empty one if the text is not an object."""
    parts: list[str] = []
    reader = Reader()
    reader.buffer, reader.ended = text.lstrip(), True
    if not reader.buffer.startswith("{"):
        return "{}"
    value = JsonText(reader, parts.append)
    ended = next(value.read(), None)
    assert ended is None, "a reader that has ended waits for nothing"
    value.close()
    return "".join(parts)


def scalar(word: str) -> str:
    """The JSON of a word: the word itself, a Python literal converted, or else a string."""
    try:
        json.loads(word, parse_constant=_reject)
        return word
    except (ValueError, RecursionError):
        pass
    try:
        return literal_to_json(word)
    except ValueError:
        return json_string(word)


def escape(text: str) -> str:
    """Escape text for the inside of a JSON string."""
    return json_string(text)[1:-1]


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _begins_with_key(text: str) -> bool | None:
    """True if the text after a comma may continue an object; ``None`` if it is too short to
    tell."""
    text = text.lstrip()
    if not text:
        return None
    if text[0] in '"}]':
        return True
    key = _KEY.match(text)
    if key is None:
        return False
    rest = text[key.end() :].lstrip()
    return rest[0] == ":" if rest else None


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not in JSON")
