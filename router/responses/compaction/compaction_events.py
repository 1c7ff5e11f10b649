"""A response that is a summary, because its input ends in a ``compaction_trigger``."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ...generation import ChoiceDelta, Usage
from ...http.long_events import EventParts
from ..response_events import ResponseEvents
from .summary import checked_summary


class CompactionEvents(ResponseEvents):
    """Formats a response whose only item is the summary. It appears whole, at the end."""

    def _begin(self) -> None:
        super()._begin()
        self._summary = StringIO()

    def _items(self, delta: ChoiceDelta) -> EventParts:
        self._take(len(delta.text))
        self._summary.write(delta.text)
        return []

    def _end(self, usage: Usage) -> tuple[EventParts, dict[str, Any]]:
        events = self._compacted(checked_summary(self._summary))
        body = self._body("completed", self._output, usage)
        self._store(body, self._bytes)
        return events, body
