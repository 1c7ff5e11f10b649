"""Lines of input files: what is wrong with one, and with all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.batches import input_lines
from tandem.router.batches.input_lines import MAX_CUSTOM_ID, LineChecker
from tandem.tests.router.batches.batch_client import CHAT, EMBEDDINGS, jsonl, line

LONGEST = 2000
# A line, or its value, and the code and parameter of its error.
WRONG: tuple[tuple[Any, str, str | None], ...] = (
    (b"{]", "invalid_json_line", None),
    (b"[]", "invalid_json_line", None),
    (b"\xff", "invalid_json_line", None),
    ({"custom_id": "x"}, "missing_required_parameter", "method"),
    (line(1) | {"custom_id": None}, "missing_required_parameter", "custom_id"),
    (line(1) | {"custom_id": 1}, "invalid_type", "custom_id"),
    (line(1) | {"body": 1}, "invalid_type", "body"),
    (line(1) | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
    (line(1) | {"custom_id": "x" * (MAX_CUSTOM_ID + 1)}, "invalid_custom_id", "custom_id"),
    (line(1) | {"method": "GET"}, "invalid_method", "method"),
    (line(1, url=EMBEDDINGS), "mismatched_endpoint", "url"),
    (line(1, user="x" * LONGEST), "line_too_long", None),
    (line(0), "duplicate_custom_id", "custom_id"),
)


def encoded(value: Any) -> bytes:
    return value if isinstance(value, bytes) else jsonl(value)[:-1]


async def test_each_wrong_line_has_an_error() -> None:
    checker = LineChecker(CHAT, LONGEST)
    longest_id = line(1, model="tiny") | {"custom_id": "x" * MAX_CUSTOM_ID}
    lines = [(1, encoded(line(0))), (2, encoded(longest_id))]
    valid = await checker.check(lines)
    assert [(one.line, one.custom_id) for one in valid] == [(1, "r0"), (2, "x" * MAX_CUSTOM_ID)]
    numbered = [(number, encoded(value)) for number, (value, *_) in enumerate(WRONG, 3)]
    assert await checker.check(numbered) == []
    checker.finish()
    assert [(error["line"], error["code"], error["param"]) for error in checker.errors] == [
        (number, code, param) for number, (_, code, param) in enumerate(WRONG, 3)
    ]
    assert checker.model == "tiny" and checker.total == 2 + len(WRONG)


async def test_files_are_neither_empty_nor_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = LineChecker(CHAT, LONGEST)
    empty.finish()
    assert [error["code"] for error in empty.errors] == ["empty_file"]
    monkeypatch.setattr(input_lines, "MAX_REQUESTS", 2)
    lines = [(number, encoded(line(number))) for number in range(4)]
    for count, codes in ((2, []), (3, ["too_many_tasks"]), (4, ["too_many_tasks"])):
        checker = LineChecker(CHAT, LONGEST)
        assert len(await checker.check(lines[:count])) == 2
        checker.finish()
        assert [error["code"] for error in checker.errors] == codes
        assert all("2 requests" in error["message"] for error in checker.errors)
