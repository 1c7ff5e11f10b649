"""Messages of servers that would take long to parse, or to check."""

from __future__ import annotations

import json
from typing import Any

import mcp_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.mcp.message_bounds import (
    CONTAINER_COST,
    MAX_ITEMS,
    MessageCost,
    bounded,
)

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,[{\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


def cost_of(value: Any) -> int:
    """By the values instead of their JSON."""
    if not isinstance(value, (list, dict)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return CONTAINER_COST + max(0, len(value) - 1) + sum(map(cost_of, inner))


@settings(max_examples=50)
@given(VALUES, st.integers(1, 9), st.sampled_from([None, 1]))
def test_only_what_is_outside_of_strings_costs(value: Any, piece: int, indent: int | None) -> None:
    data = json.dumps(value, indent=indent).encode()
    cost = MessageCost()
    for start in range(0, len(data), piece):
        cost.add(data[start : start + piece])
    assert cost.cost == cost_of(value)


def test_each_event_has_a_cost_of_its_own() -> None:
    event = b': a "comment"\ndata: {"a": [1, 2]}\n\n'
    own = 2 * CONTAINER_COST + 1
    cost = MessageCost(events=True)
    assert [cost.add(event) for _ in range(3)] == [own] * 3
    assert cost.add(event * 2) == own
    assert cost.take_bytes() > 5 * own * 10
    # An open string in a comment does not hide what follows.
    assert cost.add(b': "\ndata: [1,2,3]') == CONTAINER_COST + 2


def response(result: Any) -> Any:
    text = json.dumps({"jsonrpc": "2.0", "id": 1, "result": result})
    return mcp_types.jsonrpc_message_adapter.validate_json(text, by_name=False)


def items_of(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(items_of, value.values()))
    return len(value) + sum(map(items_of, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize(
    "result",
    [
        {"content": [{}] * 5000},
        {"content": [{"type": "text", "text": ""}] * 5000},
        {"content": [{"type": "text", "text": "", "annotations": {"audience": [1] * 99}}] * 99},
        {"tools": [{"name": "a", "inputSchema": {}, "icons": [{}] * 100}] * 100},
    ],
)
def test_few_items_of_a_result_are_checked(result: Any) -> None:
    message = response(result)
    assert bounded(message)
    assert items_of(message.result) <= MAX_ITEMS


def test_values_that_nobody_checks_stay() -> None:
    given = {"structuredContent": {"rows": [1] * 5000}, "content": []}
    message = response(given)
    assert bounded(message) and message.result == given


def test_long_messages_of_a_servers_own_are_left_out() -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": [[]] * 400}}
    adapter = mcp_types.jsonrpc_message_adapter
    assert bounded(adapter.validate_python(note))
    assert bounded(adapter.validate_python(note | {"params": None}))
    note["params"] = {"data": [[1]] * 800}
    assert not bounded(adapter.validate_python(note))
