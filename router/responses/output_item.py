"""One output item of a response while the model writes it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ..http.encoding import EncodedArray
from .input_items import encode_reasoning
from .tools import custom_input

PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "mcp_call": "mcp",
}
# The middle part of the names of an item's events.
EVENTS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
    "mcp_call": "mcp_call_arguments",
}


@dataclass(slots=True, kw_only=True)
class OutputItem:
    """An item. ``text`` is its text or its arguments; ``fields`` are a tool call's other fields."""

    kind: str
    index: int
    fields: dict[str, Any] = field(default_factory=dict)
    logprobs: EncodedArray = field(default_factory=EncodedArray)
    encrypts: bool = False
    text: StringIO = field(default_factory=StringIO)
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    @property
    def is_call(self) -> bool:
        return self.kind in ("function_call", "custom_tool_call", "mcp_call")

    @property
    def is_custom(self) -> bool:
        return self.kind == "custom_tool_call"

    @property
    def place(self) -> dict[str, Any]:
        """The fields of an event that refer to this item."""
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return place if self.is_call else place | {"content_index": 0}

    def input(self) -> str:
        """The input of a custom tool."""
        return custom_input(self.text.getvalue())

    def part(self) -> dict[str, Any]:
        """The content part; an item has only one."""
        text = self.text.getvalue()
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part = {"type": "output_text", "text": text, "annotations": []}
        return part | {"logprobs": self.logprobs}

    def empty_part(self) -> dict[str, Any]:
        """The content part of an item that begins."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def body(self, status: str) -> dict[str, Any]:
        """The item as JSON; its content is empty while it is in progress."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.is_custom:
            text = "" if status == "in_progress" else self.input()
            return item | {"input": text} | self.fields
        if self.is_call:
            return item | {"arguments": self.text.getvalue()} | self.fields
        item["content"] = [] if status == "in_progress" else [self.part()]
        if self.kind == "message":
            return item | {"role": "assistant"}
        item["summary"] = []
        if self.encrypts:
            item["encrypted_content"] = encode_reasoning(self.text.getvalue())
        return item
