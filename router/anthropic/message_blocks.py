"""The content blocks of one streamed message: at most one is open at a time."""

from __future__ import annotations

import base64
from typing import Any

from ...shared.text.output import CallDelta
from ..http.encoding import named_event
from ..http.text_template import TextTemplates


class BlockWriter:
    """Writes the events of content blocks; a block ends where output of another kind begins.

    ``signature`` comes at the end of reasoning, which ``omit_thinking`` leaves out of its block.
    """

    def __init__(self, signature: str, *, omit_thinking: bool) -> None:
        self._signature = signature
        self._omit_thinking = omit_thinking
        self._index = -1
        self._open = ""  # the type of the open block
        self._calls: set[int] = set()  # those that have begun
        self._blank: list[str] = []  # blank text that is written only if more follows
        self._deltas = TextTemplates(_delta)

    def thinking(self, text: str) -> bytes:
        events = self._enter("thinking", {"thinking": "", "signature": ""})
        return events if self._omit_thinking else events + self._delta("thinking", text)

    def text(self, text: str) -> bytes:
        """New text. Blank text between other blocks is no block."""
        if self._open != "text":
            self._blank.append(text)
            if text.isspace():
                return b""
            text = self._take_blank()
        return self._enter("text", {"text": ""}) + self._delta("text", text)

    def call(self, call: CallDelta) -> bytes:
        """New output of a call; its id and name come with the first."""
        events = b""
        if call.index not in self._calls:
            self._calls.add(call.index)
            self._blank.clear()
            events = self._leave() + self._begin("tool_use", tool_use(call.id, call.name, {}))
        if call.arguments:
            events += self._delta("input_json", call.arguments)
        return events

    def close(self) -> bytes:
        """The end of the last block. A message has one at least, an empty text if need be."""
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
    """New text of a block: its number, and the kind of text."""
    index, kind = block
    field = "partial_json" if kind == "input_json" else kind
    delta = {"type": f"{kind}_delta", field: text}
    return message_event("content_block_delta", index=index, delta=delta)


def message_event(name: str, **fields: Any) -> bytes:
    """An event of a stream; its data repeats its name."""
    return named_event(name, {"type": name, **fields})


def tool_use(call_id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The block of a call with these arguments, which the model itself made."""
    called = {"id": tool_use_id(call_id), "name": name, "input": given}
    return {"type": "tool_use", **called, "caller": {"type": "direct"}}


def tool_use_id(call_id: str) -> str:
    """The id of a call as Anthropic's clients know it."""
    return f"toolu_{call_id.removeprefix('chatcmpl-tool-').removeprefix('call_')}"


def signature_of(message_id: str) -> str:
    """The signature of reasoning: clients send it back, and drop blocks without one."""
    return base64.b64encode(message_id.encode()).decode()
