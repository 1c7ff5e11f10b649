"""The response to one request, as measured by the client.

All times are in seconds, by ``time.perf_counter``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

MAX_LINE_BYTES = 16 << 20


class StreamError(Exception):
    """An event that is not JSON or that reports an error, or a line without end."""


@dataclass(slots=True)
class MeasuredResponse:
    """The response and its times. ``arrivals`` has an entry for each event with output, ``times``
    one for each token if the server distinguishes them."""

    planned: float = 0.0
    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    remote_tokens: int = 0
    error: str = ""
    finished: bool = False
    _rest: bytes = b""

    @property
    def success(self) -> bool:
        return self.finished and not self.error

    @property
    def ttft(self) -> float:
        """Seconds to the first output; 0 without any, as in vLLM."""
        return self.arrivals[0] - self.sent_at if self.arrivals else 0.0

    @property
    def latency(self) -> float:
        """Seconds to the last output."""
        return self.arrivals[-1] - self.sent_at if self.arrivals else 0.0

    @property
    def itl(self) -> list[float]:
        """Seconds between events with output."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def queue_time(self) -> float:
        """Seconds between the planned and the actual time of sending."""
        return self.sent_at - self.planned

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def feed(self, data: bytes, now: float) -> None:
        """Take a piece of the stream that arrived at ``now``. Raises ``StreamError``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise StreamError(f"an event is longer than {MAX_LINE_BYTES >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise StreamError(f"an event is not JSON: {data[:200]!r}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise StreamError(f"the stream has an error: {data[:1000].decode(errors='replace')}")
        try:
            self._take(event, now)
        except (AttributeError, TypeError, ValueError):
            raise StreamError(f"an event is not OpenAI's: {data[:200]!r}") from None

    def _take(self, event: dict[str, Any], now: float) -> None:
        tokens = sum(map(self._choice, event.get("choices") or ()))
        if tokens:
            self.arrivals.append(now)
            self.times.extend(repeat(now, tokens))
        if usage := event.get("usage"):
            self.prompt_tokens = int(usage.get("prompt_tokens") or self.prompt_tokens)
            self.output_tokens = int(usage.get("completion_tokens") or self.output_tokens)
        if placement := event.get("tandem"):
            self.remote_tokens = int(placement.get("remote_tokens", 0))

    def _choice(self, choice: dict[str, Any]) -> int:
        """The number of tokens in a choice of an event, at least one if it has output."""
        delta = choice.get("delta") or choice
        text = delta.get("text") or delta.get("content") or ""
        if text:
            self.texts.append(str(text))
        ids = choice.get("token_ids")
        if ids is not None:
            return len(ids)
        return 1 if text or _has_output(delta) else 0


def _has_output(delta: dict[str, Any]) -> bool:
    """True for reasoning, tool calls, and a token of a text completion without text yet."""
    if "text" in delta:
        return not delta.get("finish_reason")
    return any(delta.get(name) for name in ("reasoning", "reasoning_content", "tool_calls"))
