"""Parse a request body as JSON.

The parser holds the GIL, so all streams wait for it: 40 ms for a body of 8 MiB with a million token
ids, but half a second or more for one with empty arrays. So the number of arrays, objects and
fields, which take longest, is limited. ``json`` takes twice as long for integers, and six times for
decimals.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import invalid

# Arrays, objects and fields of one body; this many are parsed within 50 ms.
MAX_PARTS = 200_000
# More than any schema has. Recursive readers of a value use several frames of the stack per level.
MAX_DEPTH = 128

Body = bytes | bytearray


def parse_json(body: Body) -> Any:
    """Parse strict JSON: no NaN, no lone surrogates, at most ``MAX_DEPTH`` levels and ``MAX_PARTS``
    parts. Raises ``RequestError``."""
    if body.startswith(codecs.BOM_UTF8):  # RFC 8259, 8.1, allows to ignore it
        body = body.removeprefix(codecs.BOM_UTF8)
    if _parts(body) > MAX_PARTS:
        raise invalid(f"The body has more than {MAX_PARTS} arrays, objects and fields.")
    try:
        return _parse(body)
    except UnicodeError:
        raise invalid("The body is not valid UTF-8.") from None
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.") from None


def parse_text(text: str) -> Any:
    """Parse the JSON in a string of a body, such as the arguments of a tool call, within the same
    limits. Raises ``ValueError``."""
    body = text.encode()
    if _parts(body) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} arrays, objects and fields")
    return _parse(body)


def values_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it, including names of fields."""
    stack = [value]
    while stack:
        item = stack.pop()
        yield item
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())


def _parse(body: Body) -> Any:
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
    """The number of arrays, objects and fields. Stops counting over ``MAX_PARTS``."""
    count = _marks(body, 0, len(body))
    if count <= MAX_PARTS:
        return count
    # The marks may be inside of strings: count again outside of them.
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
