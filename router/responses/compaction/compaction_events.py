"""A response that is a summary, because its input ends in a ``compaction_trigger``."""

from __future__ import annotations

import uuid
from io import StringIO
from typing import Any

from ...generation import ChoiceDelta, Usage
from ..input_items import compaction_item
from ..response_events import ResponseEvents
from .summary import encoded_summary


class CompactionEvents(ResponseEvents):
    """Formats a response whose only item is the summary. It appears whole, at the end."""

    def _begin(self) -> None:
        super()._begin()
        self._summary = StringIO()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        self._take(len(delta.text))
        self._summary.write(delta.text)
        return b""

    def _end(self, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        item = compaction_item(f"cmp_{uuid.uuid4().hex}", encoded_summary(self._summary))
        self._output.append(item)
        events = b""
        for name in ("added", "done"):
            kind = f"response.output_item.{name}"
            events += self._event(kind, long=True, output_index=0, item=item)
        body = self._body("completed", self._output, usage)
        self._store(body, self._bytes)
        return events, body
