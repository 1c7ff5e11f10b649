"""The content blocks of one streamed message, of which at most one is open."""

from __future__ import annotations

import base64
from typing import Any

from ...shared.text.output import CallDelta
from ..http.encoding import named_event
from ..http.text_template import TextTemplates


class BlockWriter:
    """Writes the events of content blocks; a block ends where output of another kind begins.

    ``signature`` ends a block of reasoning, whose text ``omit_thinking`` leaves out.
    """

    def __init__(self, signature: str, *, omit_thinking: bool) -> None:
        self._signature = signature
        self._omit_thinking = omit_thinking
        self._index = -1
        self._open = ""  # the type of the open block
        self._calls: set[int] = set()  # indices of calls that have started
        self._blank: list[str] = []  # blank text, written only if other text follows
        self._deltas = TextTemplates(_delta)

    def thinking(self, text: str) -> bytes:
        events = self._enter("thinking", {"thinking": "", "signature": ""})
        return events if self._omit_thinking else events + self._delta("thinking", text)

    def text(self, text: str) -> bytes:
        """New text. Blank text between other blocks is dropped."""
        if self._open != "text":
            self._blank.append(text)
            if text.isspace():
                return b""
            text = self._take_blank()
        return self._enter("text", {"text": ""}) + self._delta("text", text)

    def call(self, call: CallDelta) -> bytes:
        """New output of a tool call; its id and name come with the first."""
        events = b""
        if call.index not in self._calls:
            self._calls.add(call.index)
            self._blank.clear()
            events = self._leave() + self._begin("tool_use", tool_use(call.id, call.name, {}))
        if call.arguments:
            events += self._delta("input_json", call.arguments)
        return events

    def close(self) -> bytes:
        """The end of the last block. A message has at least one block, possibly an empty text."""
        if self._index < 0:
            text = self._take_blank()
            events = self._enter("text", {"text": ""})
            return events + (self._delta("text", text) if text else b"") + self._leave()
        return self._leave()

    def _take_blank(self) -> str:
        text = "".join(self._blank)
        self._blank.clear()
        return text

    def _enter(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        return self._leave() + self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        block = {"type": kind, **block}
        return message_event("content_block_start", index=self._index, content_block=block)

    def _leave(self) -> bytes:
        events = b""
        if self._open == "thinking":
            events += self._delta("signature", self._signature)
        if self._open:
            events += message_event("content_block_stop", index=self._index)
        self._open = ""
        return events

    def _delta(self, kind: str, text: str) -> bytes:
        return self._deltas.fill((self._index, kind), text)


def _delta(block: tuple[int, str], text: str) -> bytes:
    """New text of a block, given by its index and the kind of text."""
    index, kind = block
    field = "partial_json" if kind == "input_json" else kind
    delta = {"type": f"{kind}_delta", field: text}
    return message_event("content_block_delta", index=index, delta=delta)


def message_event(name: str, **fields: Any) -> bytes:
    """An event of a stream; its data repeats the name."""
    return named_event(name, {"type": name, **fields})


def tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The block of a tool call that the model itself made."""
    return {
        "type": "tool_use",
        "id": tool_use_id(call_id),
        "name": name,
        "input": arguments,
        "caller": {"type": "direct"},
    }


def tool_use_id(call_id: str) -> str:
    """A tool call's id in the form that Anthropic's clients expect."""
    return f"toolu_{call_id.removeprefix('chatcmpl-tool-').removeprefix('call_')}"


def signature_of(message_id: str) -> str:
    """The signature of reasoning. Clients send it back, and drop blocks without one."""
    return base64.b64encode(message_id.encode()).decode()
