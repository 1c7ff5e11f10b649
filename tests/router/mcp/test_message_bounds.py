"""Messages of servers that would take long to validate."""

from __future__ import annotations

import json
from typing import Any

import mcp_types
import pytest

from tandem.router.mcp.message_bounds import MAX_ITEMS, bounded


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
    fields = {"structuredContent": {"rows": [1] * 5000}, "content": []}
    message = response(fields)
    assert bounded(message) and message.result == fields


def test_long_messages_of_a_servers_own_are_left_out() -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": [[]] * 400}}
    adapter = mcp_types.jsonrpc_message_adapter
    assert bounded(adapter.validate_python(note))
    assert bounded(adapter.validate_python(note | {"params": None}))
    note["params"] = {"data": [[1]] * 800}
    assert not bounded(adapter.validate_python(note))
