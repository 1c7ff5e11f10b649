"""Parse a request body as JSON without stopping the other threads.

``json`` parses in C and holds the GIL until it is done: in any thread, 32 MiB of short numbers or
empty arrays stop all streams for seconds. So a large body is parsed by the library's own Python
version of that parser, which other threads can interrupt. It visits arrays and objects one by one;
strings and runs of short items still go through C.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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
    r"""(?:[ \t\n\r]*(?:[-+.\w]{1,40}|"[^"\\]{0,40}")[ \t\n\r]*,){1,4096}""", re.ASCII
)
# Characters and escapes of a string for C to parse at once.
_PIECE = 16_384


def _units(most: int) -> re.Pattern[str]:
    """A pattern for at most that many, which splits no escape and no pair of surrogates."""
    return re.compile(
        r"""(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}"""
        rf"""|\\[^u]){{1,{most}}}"""
    )


_UNITS = _units(_PIECE)
_CLOSING = re.compile(r"[ \t\n\r]*\]")

# From a text and a start to the value that begins there, and its end.
Scan = Callable[[str, int], tuple[Any, int]]


def parse_json(body: bytes, context: int) -> Any:
    """Parse strict JSON: no NaN, no lone surrogates, bounded nesting. In a large body no array or
    object may be much longer than the model's ``context``, in tokens."""
    most = max(MAX_CONTEXTS * context, LEAST_MAX_ITEMS)
    try:
        # Decoded here, because json accepts encoded surrogates.
        text = body.decode("utf-8")
        value = _decoded(text, most)
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
        return _decoded(text, MAX_CONTAINERS)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except RequestError as error:
        raise ValueError(str(error)) from None


def _decoded(text: str, most: int) -> Any:
    in_c = len(text) <= MAX_BYTES_IN_C
    value = (_C_DECODER if in_c else _InterruptibleDecoder(most)).decode(text)
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value)
    if "\\u" in text:
        _check_text(value)
    return value


class _InterruptibleDecoder(json.JSONDecoder):
    """Parses one body in Python."""

    def __init__(self, max_items: int) -> None:
        super().__init__(parse_constant=_no_constant)
        self._max_items = max_items
        self._containers = 0
        self.parse_array = self._array
        self.parse_string = _string
        self.parse_object = self._object
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _object(self, place: tuple[str, int], strict: bool, scan_once: Scan, *rest: Any) -> Any:
        self._count()
        scan = self._limited(scan_once, self._max_items)
        return decoder.JSONObject(place, strict, scan, *rest)  # type: ignore[attr-defined]

    def _array(self, place: tuple[str, int], scan_once: Scan) -> tuple[list[Any], int]:
        """The items and the end of an array; ``place`` is the text and the array's start."""
        self._count()
        text, end = place
        items: list[Any] = []
        while (run := _SHORT_ITEMS.match(text, end)) is not None:
            items += _C_DECODER.decode(f"[{run[0][:-1]}]")
            end = run.end()
            self._check(len(items))
        if items and _CLOSING.match(text, end):
            raise json.JSONDecodeError("Illegal trailing comma before end of array", text, end)
        scan = self._limited(scan_once, self._max_items - len(items))
        others, end = decoder.JSONArray((text, end), scan)  # type: ignore[attr-defined]
        return items + others, end

    def _limited(self, scan_once: Scan, room: int) -> Scan:
        """A scanner for the values of one array or object, of which ``room`` more may follow."""
        seen = 0

        def scan(text: str, start: int) -> tuple[Any, int]:
            nonlocal seen
            seen += 1
            if seen > room:
                self._check(self._max_items + 1)
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
    """The string whose first character is at ``begin``, and its end, as in ``json``."""
    parts = []
    while (units := _UNITS.match(text, begin)) and len(units[0]) >= _PIECE:
        parts.append(decoder.scanstring(units[0] + '"', 0, strict)[0])  # type: ignore[attr-defined]
        begin = units.end()
    last, end = decoder.scanstring(text, begin, strict)  # type: ignore[attr-defined]
    return "".join((*parts, last)), end


def _check_depth(value: Any) -> None:
    """Raise ``RecursionError`` for arrays and objects that are nested too deeply."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
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
