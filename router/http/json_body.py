"""Parse a request body as JSON without stopping the other threads.

``json`` parses in C and holds the GIL until it is done: in any thread, 32 MiB of short numbers or
empty arrays stop all streams for seconds. So a large body is parsed by the library's own Python
version of that parser, which other threads can interrupt. It visits arrays and objects one by one;
strings and runs of short items still go through C.

Nor is a large body decoded in one go, which takes up to 70 ms for 32 MiB: it is parsed as text of
one character for each byte, whose strings are decoded one by one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from json import decoder, scanner
from typing import Any

from ...shared.errors import RequestError
from ..errors import invalid

# Up to this size C takes a few milliseconds.
MAX_BYTES_IN_C = 128 * 1024
# More than any request can use; a garbage collection of millions would stop all threads.
MAX_CONTAINERS = 100_000
# More than any schema has. What reads a value recursively needs some of the stack's 1,000 frames.
MAX_DEPTH = 128
# Limits on the items of an array or object: a few contexts full of tokens, so that the error for a
# prompt slightly too long has its number of tokens, and at least enough for messages and the like.
MAX_CONTEXTS = 4
LEAST_MAX_ITEMS = 16_384
# A run of numbers, constants and short strings of an array, each with its comma, for C to parse at
# once.
_SHORT_ITEMS = re.compile(
    r"""(?:[ \t\n\r]{0,40}(?:[-+.\w]{1,40}|"[^"\\]{0,40}")[ \t\n\r]{0,40},){1,4096}""", re.ASCII
)
# Far more than Python converts to an integer.
MAX_DIGITS = 8192
# Of one string, which is copied in one go. A prompt as long has millions of tokens.
MAX_STRING = 8 << 20
# Bytes and escapes of a string for C to parse at once.
_PIECE = 16_384


def _units(most: int) -> re.Pattern[str]:
    """A pattern for at most that many, which splits no escape and no pair of surrogates."""
    return re.compile(
        r"""(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}"""
        rf"""|\\[^u]){{1,{most}}}"""
    )


_UNITS = _units(_PIECE)
# White space to skip at once.
_SPACES = 64 * 1024
_SPACE = re.compile(rf"[ \t\n\r]{{0,{_SPACES}}}")
_NUMBER_STARTS = frozenset("-0123456789")
_DIGITS = re.compile(rf"[-+.0-9eE]{{{MAX_DIGITS}}}")

# From a text and a start to the value that begins there, and its end.
Scan = Callable[[str, int], tuple[Any, int]]


def parse_json(body: bytes, context: int) -> Any:
    """``parse_pieces`` of one."""
    return parse_pieces((body,), context)


def parse_pieces(body: Sequence[bytes], context: int) -> Any:
    """Parse strict JSON: no NaN, no lone surrogates, bounded nesting. In a large body no array or
    object may be much longer than the model's ``context``, in tokens."""
    most = max(MAX_CONTEXTS * context, LEAST_MAX_ITEMS)
    if body and body[0].startswith(codecs.BOM_UTF8):  # RFC 8259, 8.1: it may be ignored
        body = (body[0].removeprefix(codecs.BOM_UTF8), *body[1:])
    try:
        if sum(map(len, body)) > MAX_BYTES_IN_C:
            value = _InterruptibleDecoder(most).parse(body)
        else:
            # Decoded here, because json accepts encoded surrogates.
            value = _in_c(b"".join(body).decode("utf-8"))
    except UnicodeError:
        raise invalid("The body is not valid UTF-8, or has an unpaired surrogate.") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise invalid(f"The body is not valid JSON: {why}.") from None
    return value


def parse_text(text: str) -> Any:
    """Parse JSON inside of a string of a body, such as the arguments of a call. Raises
    ``ValueError``."""
    try:
        if len(text) <= MAX_BYTES_IN_C:
            return _in_c(text)
        return _InterruptibleDecoder(MAX_CONTAINERS).parse((text.encode(),))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except RequestError as error:
        raise ValueError(str(error)) from None


def _in_c(text: str) -> Any:
    value = _C_DECODER.decode(text)
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value)
    if "\\u" in text:
        _check_text(value)
    return value


class _InterruptibleDecoder(json.JSONDecoder):
    """Parses one body in Python, as text in which each character stands for a byte."""

    def __init__(self, max_items: int) -> None:
        super().__init__(parse_constant=_no_constant)
        self._max_items = max_items
        self._containers = 0
        self.parse_array = self._array
        self.parse_string = _string
        self.parse_object = self._object
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def parse(self, body: Sequence[bytes]) -> Any:
        """The value of a body. Raises ``RequestError``, ``ValueError`` or ``RecursionError``."""
        text = "".join([piece.decode("latin-1") for piece in body])
        _check_number(text, _after_space(text, 0))
        value = self.decode(text, _Space)
        _check_depth(value)
        return value

    def _object(
        self, place: tuple[str, int], strict: bool, scan_once: Scan, *rest: Any
    ) -> tuple[dict[str, Any], int]:
        """The items and the end of an object. The library's function would parse a key in C,
        however long it is, and as text."""
        self._count()
        text, end = place
        scan = self._limited(scan_once, self._max_items)
        items: dict[str, Any] = {}
        end = _after_space(text, end)
        while text[end : end + 1] != "}" or items:
            if text[end : end + 1] != '"':
                message = "Expecting property name enclosed in double quotes"
                raise json.JSONDecodeError(message, text, end)
            key, end = _string(text, end + 1, strict)
            end = _after(":", text, end)
            try:
                items[key], end = scan(text, _after_space(text, end))
            except StopIteration as error:
                raise json.JSONDecodeError("Expecting value", text, error.value) from None
            end = _after_space(text, end)
            if text[end : end + 1] == "}":
                break
            end = _after_space(text, _after(",", text, end))
        return items, end + 1

    def _array(self, place: tuple[str, int], scan_once: Scan) -> tuple[list[Any], int]:
        """The items and the end of an array; ``place`` is the text and the array's start."""
        self._count()
        text, end = place
        items: list[Any] = []
        while (run := _SHORT_ITEMS.match(text, end)) is not None:
            items += _C_DECODER.decode(f"[{_utf8(run[0][:-1])}]")
            end = run.end()
            self._check(len(items))
        if items and text[(close := _after_space(text, end)) : close + 1] == "]":
            raise json.JSONDecodeError("Illegal trailing comma before end of array", text, end)
        scan = self._limited(scan_once, self._max_items - len(items))
        others, end = decoder.JSONArray((text, end), scan, _Space)  # type: ignore[attr-defined]
        return items + others, end

    def _limited(self, scan_once: Scan, room: int) -> Scan:
        """A scanner for the values of one array or object, of which ``room`` more may follow."""
        seen = 0

        def scan(text: str, start: int) -> tuple[Any, int]:
            nonlocal seen
            seen += 1
            if seen > room:
                self._check(self._max_items + 1)
            _check_number(text, start)
            return scan_once(text, start)

        return scan

    def _count(self) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise invalid(f"The body has more than {MAX_CONTAINERS} arrays and objects.")

    def _check(self, items: int) -> None:
        if items > self._max_items:
            raise invalid(
                f"The body has an array or object of more than {self._max_items} items, which is "
                f"far beyond this model's context length in tokens."
            )


def _string(text: str, begin: int, strict: bool = True) -> tuple[str, int]:
    """The string whose first byte is at ``begin``, and its end, as in ``json``."""
    parts, end = [], begin
    decode = codecs.getincrementaldecoder("utf-8")().decode
    while units := _UNITS.match(text, end):
        if units.end() - begin > MAX_STRING:
            raise invalid(f"The body has a string of more than {MAX_STRING} bytes.")
        piece = decode(units[0].encode("latin-1"))
        parts.append(decoder.scanstring(piece + '"', 0, strict)[0])  # type: ignore[attr-defined]
        if "\\u" in piece:
            parts[-1].encode()  # fails for half a pair
        end = units.end()
    if text[end : end + 1] != '"':  # which raises the error
        decoder.scanstring(text[end : end + 8], 0, strict)  # type: ignore[attr-defined]
    decode(b"", True)
    return "".join(parts), end + 1


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("latin-1").decode()


class _Space:
    """White space from a position on, in the place of a match in the library's functions."""

    def __init__(self, text: str, at: int) -> None:
        self._end = _after_space(text, at)

    def end(self) -> int:
        return self._end


def _after_space(text: str, at: int) -> int:
    while (found := _SPACE.match(text, at)) and found.end() - at == _SPACES:
        at = found.end()
    assert found is not None, "it matches nothing too"
    return found.end()


def _after(delimiter: str, text: str, at: int) -> int:
    """The position after white space and a delimiter."""
    at = _after_space(text, at)
    if text[at : at + 1] != delimiter:
        raise json.JSONDecodeError(f"Expecting '{delimiter}' delimiter", text, at)
    return at + 1


def _check_number(text: str, at: int) -> None:
    """Raise ``ValueError`` for a number that C would read in one go."""
    if text[at : at + 1] in _NUMBER_STARTS and _DIGITS.match(text, at):
        raise json.JSONDecodeError(f"Number of more than {MAX_DIGITS} digits", text, at)


def _check_depth(value: Any) -> None:
    """Raise ``RecursionError`` for arrays and objects that are nested too deeply."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 2):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise RecursionError


def _check_text(value: Any) -> None:
    """Raise ``UnicodeError`` for strings with half a surrogate pair, which escapes can express."""
    for item in values_in(value):
        if isinstance(item, str):
            item.encode()


def values_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all inside of it, names of objects included."""
    left = [value]
    while left:
        item = left.pop()
        yield item
        if isinstance(item, list):
            left.extend(item)
        elif isinstance(item, dict):
            left.extend(item)
            left.extend(item.values())


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_C_DECODER = json.JSONDecoder(parse_constant=_no_constant)
