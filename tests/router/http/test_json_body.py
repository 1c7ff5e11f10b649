"""Bodies: parsed like ``json``, but strictly, and with limits on the time that they take."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.http import json_body
from tandem.router.http.json_body import MAX_DEPTH, MAX_PARTS, parse_json, parse_text
from tandem.shared.errors import RequestError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def array(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def parts(value: Any) -> int:
    """Arrays, objects and fields."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = isinstance(value, (list, dict)) + (len(value) if isinstance(value, dict) else 0)
    return own + sum(map(parts, inner))


@given(VALUES, st.booleans())
def test_a_body_has_the_value_that_it_has_for_json(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(bytearray(text.encode())) == parse_text(text) == value
    assert parse_json(b"\xef\xbb\xbf" + text.encode()) == value


@given(st.text(alphabet='[]{},:" 01-.eEtruefalsn\\u', max_size=12))
def test_json_is_parsed_as_by_the_standard_library(body: str) -> None:
    try:
        expected = json.loads(body)
    except ValueError:
        with pytest.raises(RequestError):
            parse_json(body.encode())
    else:
        assert parse_json(body.encode()) == expected


@given(VALUES, st.integers(0, 12))
def test_parts_are_bounded_but_not_those_in_texts(value: Any, max_parts: int) -> None:
    body = json.dumps(value, separators=(",", ":")).encode()
    text = json.dumps('\\"[{:' * 9 + body.decode()).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MAX_PARTS", max_parts)
        assert parse_json(text) == json.loads(text)
        if parts(value) <= max_parts:
            assert parse_json(body) == value
        else:
            with pytest.raises(
                RequestError, match=f"more than {max_parts} arrays, objects and fields"
            ):
                parse_json(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[1,]", "trailing comma"),
        (b"[1,2", "it ends early"),
        (b"[1,NaN,2]", "^The body is not valid JSON: invalid character \\(byte 3\\)."),
        (b"[-Infinity]", "not valid JSON"),
        (b"[1e999]", "^The body is not valid JSON: number out of range."),
        (b'["a", "\t", 1]', "not valid JSON"),
        (rb'["\ud800"]', "surrogate pair"),
        (rb'{"\udc00": 1}', "surrogate pair"),
        (b'["\xed\xa0\x80"]', "not valid UTF-8"),
        (b'["\xe4\xbd", "\xa0"]', "not valid UTF-8"),
        (b'{"\xff": 1}', "not valid UTF-8"),
        (b"[" * 100_000, "^The body is not valid JSON: it is nested too deeply."),
        (b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2), "nested too deeply"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (array("[]", MAX_PARTS).encode(), f"more than {MAX_PARTS} arrays, objects and fields"),
        (f"[{'1' * 10_000}]".encode(), "^The body is not valid JSON: integer value out of range."),
    ],
)
def test_a_body_that_is_not_served(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_json(body)
    text = body.decode(errors="surrogateescape")
    with pytest.raises(ValueError):
        parse_text(text)
