"""Large bodies: the same values and errors as from ``json``, without stopping other threads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.http import json_body
from tandem.router.http.json_body import (
    LEAST_MAX_ITEMS,
    MAX_BYTES_IN_C,
    MAX_CONTAINERS,
    MAX_CONTEXTS,
    parse_json,
    parse_pieces,
)
from tandem.shared.errors import RequestError

CONTEXT = 10_000
MOST = MAX_CONTEXTS * CONTEXT
SPACES = st.sampled_from(["", " ", "\n\t"])
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


def large(body: str) -> Any:
    """The value of a body that spaces make large."""
    return parse_json(body.encode() + b" " * MAX_BYTES_IN_C, CONTEXT)


@given(VALUES, SPACES, SPACES, st.booleans())
def test_a_large_body_has_the_value_that_it_has_for_json(
    value: Any, before: str, after: str, ascii_only: bool
) -> None:
    separators = f"{before},{after}", f"{before}:{after}"
    assert large(json.dumps(value, separators=separators, ensure_ascii=ascii_only)) == value


@given(st.text() | st.text(alphabet='é🙂\n"\\u\x00 d83'), st.booleans())
def test_a_long_string_is_read_in_pieces(value: str, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_PIECE", 3)
        patch.setattr(json_body, "_UNITS", json_body._units(3))
        assert large(json.dumps([value] * 2, ensure_ascii=ascii_only)) == [value] * 2


@given(st.text(alphabet='[]{},:" 01-.eEtruefalsn\\u', max_size=12))
def test_what_json_refuses_is_refused_in_a_large_body(body: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_PIECE", 3)
        patch.setattr(json_body, "_UNITS", json_body._units(3))
        try:
            expected = json.loads(body)
        except ValueError:
            with pytest.raises(RequestError):
                large(body)
        else:
            assert large(body) == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[1,]", "trailing comma"),
        ("[,1]", "not valid JSON"),
        ("[1,,2]", "not valid JSON"),
        ("[1,2", "not valid JSON"),
        ("[1,NaN,2]", "NaN is not a JSON number"),
        ('["a", "\t", 1]', "not valid JSON"),
        ('["\\ud800"]', "unpaired surrogate"),
        ('{"\\udc00": 1}', "unpaired surrogate"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 50_000, "nested too deeply"),
        (array(array("[]", 9), MAX_CONTAINERS // 10 + 1), "100000 arrays and objects"),
        (array("1", MOST + 1), "array or object of more than 40000 items"),
        (array(json.dumps("x" * 50), MOST + 1), "array or object of more than 40000 items"),
        (json.dumps(dict.fromkeys(map(str, range(MOST + 1)))), "more than 40000 items"),
        (f"[{'1' * 10_000}]", "more than 8192 digits"),
        (f'{{"a": -{"1" * 10_000}}}', "more than 8192 digits"),
        ("1" * 10_000, "more than 8192 digits"),
        ('{"a": 1,}', "property name"),
        ('{"a" 1}', "Expecting ':' delimiter"),
        ('{"a": 1 "b": 2}', "Expecting ',' delimiter"),
        ('{"a": }', "Expecting value"),
        ('["abc', "Unterminated string"),
        ('["\\u12"]', "Invalid .*escape"),
    ],
)
def test_a_large_body_that_is_not_json(body: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        large(body)


@pytest.mark.parametrize("body", [b'["\xc3"]', b'["\xe4\xbd", "\xa0"]', b'{"\xff": 1}'])
def test_a_large_body_has_to_be_utf_8(body: bytes) -> None:
    with pytest.raises(RequestError, match="not valid UTF-8"):
        parse_json(body + b" " * MAX_BYTES_IN_C, CONTEXT)


def test_white_space_is_skipped_in_pieces() -> None:
    space = " \n" * 100_000
    body = space.join(["", '{"a"', ":", "[", "1", ",", "{", "}", ",", '""', "]", "}", ""])
    assert large(body) == {"a": [1, {}, ""]}
    with pytest.raises(RequestError, match="trailing comma"):
        large(f"[1,{space}]")


def test_pieces_may_be_cut_anywhere() -> None:
    for count in (1, 50_000):
        body = json.dumps({"a": ["é🙂\n"] * count}, ensure_ascii=False).encode()
        pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
        assert parse_pieces(pieces, CONTEXT * count) == json.loads(body)


def test_one_string_may_not_be_the_whole_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_STRING", 50_000)
    assert large(json.dumps(["é" * 20_000], ensure_ascii=False)) == ["é" * 20_000]
    with pytest.raises(RequestError, match="a string of more than 50000 bytes"):
        large(json.dumps({"é" * 30_000: 1}, ensure_ascii=False))


def test_an_array_may_be_longer_than_a_short_context() -> None:
    items = [0] * LEAST_MAX_ITEMS
    assert parse_json(json.dumps({"a": items}).encode() + b" " * MAX_BYTES_IN_C, 64) == {"a": items}


class InC:
    """The parser in C, and the longest text that it parsed, during which no other thread runs."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, text: str) -> Any:
        self.longest = max(self.longest, len(text))
        return json.loads(text)


@pytest.mark.parametrize("unit", ["12345", '"text"', '{"role":"user"}', "[1,2,3]", "1e5", "null"])
def test_a_large_body_is_never_parsed_in_one_go(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = InC()
    monkeypatch.setattr(json_body, "_C_DECODER", in_c)
    count = 60_000
    body = array(unit, count)
    assert parse_json(body.encode(), count) == json.loads(body)
    assert in_c.longest <= 4096 * len(f"{unit},") + 2
    assert len(body) > 2 * in_c.longest
