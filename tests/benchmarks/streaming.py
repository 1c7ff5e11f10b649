"""A streaming client that costs little: it shares the cores with what it measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

READ_SECONDS = 60.0
_LINE_BYTES = 1 << 20


@dataclass(slots=True)
class Received:
    """One request's tokens as they came: ``times`` has one entry a token, in monotonic seconds."""

    asked: float
    times: list[float] = field(default_factory=list)
    remote_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.asked


async def complete(
    port: int, prompt: list[int], max_tokens: int, received: Received | None = None
) -> Received:
    """Stream a greedy completion to its end. ``received`` grows while it runs."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    received = received or Received(time.monotonic())
    async with aclosing(events_of(port, "/v1/completions", body)) as events:
        async for event in events:
            for choice in event["choices"]:
                received.times += [time.monotonic()] * len(choice.get("token_ids", ()))
            received.remote_tokens = event.get("tandem", {}).get("remote_tokens", 0)
    if len(received.times) != max_tokens:
        raise RuntimeError(f"{len(received.times)} tokens of {max_tokens} came")
    return received


async def events_of(
    port: int, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The server-sent events that answer a POST, up to ``[DONE]`` or the end of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_BYTES)
    try:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = await _line(reader)
        if status.split()[1:2] != [b"200"]:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()}")
        # An event is one line of one HTTP chunk; the chunks' own lines are skipped with the rest.
        while line := await _line(reader):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                return
    finally:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the line, and all
    # streams of a batch get theirs at the same moment.
    async with asyncio.timeout(READ_SECONDS):
        return await reader.readline()
