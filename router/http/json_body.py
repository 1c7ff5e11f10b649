"""Parse a request body as JSON.

The parser is in C and holds the GIL until it is done, so that streams wait meanwhile: 40 ms for a
body of 8 MiB with a million token ids, but half a second or more for one of empty arrays. So what
takes longest to parse, arrays, objects and their fields, is bounded. ``json`` takes twice as long
for numbers, six times for decimals.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import invalid

# Arrays, objects and fields of one body; as many are parsed within 50 ms.
MAX_PARTS = 200_000
# More than any schema has. What reads a value recursively needs some of the stack's 1,000 frames.
MAX_DEPTH = 128

Body = bytes | bytearray


def parse_json(body: Body) -> Any:
    """Parse strict JSON: no NaN, no lone surrogates, at most ``MAX_DEPTH`` levels and ``MAX_PARTS``
    parts. Raises ``RequestError``."""
    if body.startswith(codecs.BOM_UTF8):  # RFC 8259, 8.1: it may be ignored
        body = body.removeprefix(codecs.BOM_UTF8)
    if _parts(body) > MAX_PARTS:
        raise invalid(f"The body has more than {MAX_PARTS} arrays, objects and fields.")
    try:
        return _parsed(body)
    except UnicodeError:
        raise invalid("The body is not valid UTF-8.") from None
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.") from None


def parse_text(text: str) -> Any:
    """Parse JSON inside of a string of a body, such as the arguments of a call, in the same way.
    Raises ``ValueError``."""
    body = text.encode()
    if _parts(body) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} arrays, objects and fields")
    return _parsed(body)


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


def _parsed(body: Body) -> Any:
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        why = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
        if why == "Input data was truncated":
            why = "it ends early, or in half of a surrogate pair"
        raise ValueError(why[0].lower() + why[1:]) from None
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 2):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _parts(body: Body) -> int:
    """Arrays, objects and fields, of which too many are not all counted."""
    count = _marks(body, 0, len(body))
    if count <= MAX_PARTS:
        return count
    # A text may have as many of their marks inside.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    count, at = 0, 0
    while count <= MAX_PARTS:
        begin = plain.find(b'"', at)
        if begin < 0:
            return count + _marks(plain, at, len(plain))
        count += _marks(plain, at, begin)
        at = plain.find(b'"', begin + 1) + 1
        if not at:
            return count
    return count


def _marks(text: Body, start: int, end: int) -> int:
    return (
        text.count(b"{", start, end) + text.count(b"[", start, end) + text.count(b":", start, end)
    )
