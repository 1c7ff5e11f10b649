"""Long events: the same bytes as in one go, written in small pieces."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.http import encoding
from tandem.router.http.encoding import WRITE_BYTES, EncodedArray, dump, pieces_of
from tandem.router.http.long_events import Events, LongEvent, joined, written
from tandem.router.http.sse import data_event, long_data_event, long_event, named_event

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@given(VALUES, st.integers(0, 20))
def test_pieces_add_up_to_the_json(value: Any, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "AT_ONCE", at_once)
        patch.setattr(encoding, "ITEMS_PIECE", 2)
        patch.setattr(encoding, "TEXT_PIECE", 3)
        assert b"".join(pieces_of(value)) == dump(value)


@pytest.mark.parametrize(
    "value",
    [
        "é" * 1_000_000,
        {"x" * 200_000: 1},
        [0] * 500_000,
        [{"a": [1, 2]}] * 50_000,
        {str(i): "y" * 50 for i in range(50_000)},
        {"a": [[["z" * 100_000]]]},
    ],
    ids=["text", "name", "numbers", "objects", "names", "nested"],
)
def test_no_piece_is_large(value: Any) -> None:
    pieces = list(pieces_of(value))
    assert b"".join(pieces) == dump(value)
    assert max(map(len, pieces)) <= 4 * encoding.TEXT_PIECE


def test_the_logprobs_of_a_wide_token_are_encoded_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def recorded(value: Any) -> bytes:
        sizes.append(len(value) if isinstance(value, (list, dict)) else 1)
        return dump(value)

    entries = [{"token": "x", "top_logprobs": [{"token": str(i)} for i in range(20_000)]}]
    monkeypatch.setattr(encoding, "dump", recorded)
    made = EncodedArray(entries)
    made.extend(entries)
    assert max(sizes) <= encoding.ITEMS_PIECE
    assert b"".join(made.pieces()) == dump(entries * 2)


def parts() -> Events:
    large = {"numbers": array("I", range(30_000)), "text": StringIO("x" * 200_000)}
    return joined(
        [
            named_event("a", {"n": 1}),
            [long_event("b", large), long_data_event({"small": True})],
            [LongEvent(b"data: ", lambda: {"thread": threading.current_thread().name}, b"\n\n")],
            b"",
            data_event({"last": 1}),
        ]
    )


async def test_events_are_written_in_pieces_of_a_size() -> None:
    pieces = [piece async for piece in written(parts())]
    assert len(pieces) > 4 and max(map(len, pieces)) < 4 * WRITE_BYTES
    text = b"".join(pieces).decode()
    blocks = text.split("\n\n")
    assert [block.partition("data: ")[2][:8] for block in blocks[:3]] == [
        '{"n":1}', '{"number', '{"small"',
    ]  # fmt: skip
    # A function runs in a thread.
    assert json.loads(blocks[3].removeprefix("data: "))["thread"] != "MainThread"
    assert text.startswith("event: a\n") and text.endswith('data: {"last":1}\n\n')


def test_events_without_long_ones_are_bytes() -> None:
    assert joined([b"a", b"", b"b"]) == b"ab"
    assert joined([b"a", []]) == b"a"


async def test_other_tasks_run_while_a_long_event_is_written() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async for _ in written([LongEvent(b"", [{"a": i} for i in range(200_000)], b"")]):
        pass
    counting.cancel()
    assert turns > 3
