"""One item of a response's output while it is written."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ..http.encoding import EncodedArray
from .input_items import encoded
from .tools import custom_input

PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "mcp_call": "mcp",
}
# The middle of the names of an item's events.
EVENTS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
    "mcp_call": "mcp_call_arguments",
}


@dataclass(slots=True, kw_only=True)
class OutputItem:
    """``written`` is its text or its arguments; ``about`` has the other fields of a call."""

    kind: str
    index: int
    about: dict[str, Any] = field(default_factory=dict)
    logprobs: EncodedArray = field(default_factory=EncodedArray)
    encrypts: bool = False
    written: StringIO = field(default_factory=StringIO)
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
        """Where the events of this item belong."""
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return place if self.is_call else place | {"content_index": 0}

    def input(self) -> str:
        """The input of a custom tool."""
        return custom_input(self.written.getvalue())

    def part(self) -> dict[str, Any]:
        """The only part of the content."""
        text = self.written.getvalue()
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part = {"type": "output_text", "text": text, "annotations": []}
        return part | {"logprobs": self.logprobs}

    def empty_part(self) -> dict[str, Any]:
        """The part while its item begins."""
        text = {"text": ""}
        if self.kind == "reasoning":
            return {"type": "reasoning_text"} | text
        return {"type": "output_text"} | text | {"annotations": [], "logprobs": []}

    def body(self, status: str) -> dict[str, Any]:
        """The item; its content is empty while it begins."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.is_custom:
            written = "" if status == "in_progress" else self.input()
            return item | {"input": written} | self.about
        if self.is_call:
            return item | {"arguments": self.written.getvalue()} | self.about
        item["content"] = [] if status == "in_progress" else [self.part()]
        if self.kind == "message":
            return item | {"role": "assistant"}
        item["summary"] = []
        if self.encrypts:
            item["encrypted_content"] = encoded(self.written.getvalue())
        return item
