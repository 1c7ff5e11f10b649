"""Outputs of models in each format of tool calls, with the calls that they contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, Any]]

# The tools of all recorded outputs.
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "place": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Recorded:
    """One output; ``content`` is its text beside the calls."""

    parser: str
    text: str
    calls: Calls
    content: str = ""


PARIS: tuple[str, Any] = ("get_weather", {"city": 'Paris, "FR" {x}', "days": 2})
NOW: tuple[str, Any] = ("now", {})

OUTPUTS = (
    Recorded(
        "hermes",
        'I look it up.\n\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris, \\"FR\\" {x}", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [PARIS, NOW],
        "I look it up.",
    ),
    Recorded(
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Oslo\\"}", "id": 7, "name": "get_weather"}'
        "</tool_call> Done.\n",
        [("get_weather", {"city": "Oslo"})],
        " Done.",
    ),
    Recorded("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    # Without the last brace.
    Recorded("hermes", '<tool_call>{"name": "now", "arguments": {}\n</tool_call>', [NOW]),
)

# Texts that promise a call and contain none: all of it stays content.
MALFORMED = (
    ("hermes", "a <tool_call> b </tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call> x'),
    ("hermes", '<tool_call>{"name": "now'),
    ("hermes", "1 < 2 <tool"),
)
