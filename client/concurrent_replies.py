"""Concurrent streamed replies, in the order of their prompts."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from ..shared.errors import TandemError
from .openai_server import OpenAIServer
from .prompts import PromptLine
from .reply_stream import Piece, ReplyStats, ReplyStream
from .worker_threads import WorkerThreads

# Replies that may wait for earlier ones, for each concurrent request.
AHEAD = 4


class PendingReply:
    """A reply that one thread fetches and another reads."""

    def __init__(self, number: int, prompt: PromptLine, server: OpenAIServer) -> None:
        self.number = number
        self.prompt = prompt
        self.error = ""
        self._stream = ReplyStream(server, {"model": server.model, **prompt.body})
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._cancelled = False
        self._read: list[Piece] = []

    @property
    def stats(self) -> ReplyStats:
        return self._stream.stats

    def fetch(self) -> None:
        """Fetch the reply; an error becomes a part of it."""
        try:
            for piece in self._stream.pieces():
                if self._cancelled:
                    return
                self._pieces.put(piece)
        except TandemError as error:
            self.error = str(error)
        finally:
            self._pieces.put(None)

    def cancel(self) -> None:
        """Stop fetching at the next piece."""
        self._cancelled = True

    def pieces(self) -> Iterator[Piece]:
        """The pieces as they arrive."""
        while (piece := self._pieces.get()) is not None:
            self._read.append(piece)
            yield piece

    def result(self) -> dict[str, Any]:
        """The reply as a line of JSONL; call it after ``pieces`` has ended."""
        stats, reasoning = self.stats, self._text(aside=True)
        result: dict[str, Any] = {
            "index": self.number,
            **self.prompt.identity,
            "prompt": self.prompt.text,
            "text": self._text(aside=False),
            "finish_reason": stats.finish_reason or None,
            "usage": {"prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.tokens},
        }
        if reasoning:
            result["reasoning"] = reasoning
        return result | ({"error": self.error} if self.error else {})

    def _text(self, *, aside: bool) -> str:
        return "".join(piece.text for piece in self._read if piece.aside == aside)


def concurrent_replies(
    prompts: Iterable[PromptLine], server: OpenAIServer, concurrency: int
) -> Generator[PendingReply, None, None]:
    """The replies in the order of the prompts, of which ``concurrency`` are fetched at a time. Each
    is yielded while it is still being fetched."""
    threads = WorkerThreads(concurrency)
    waiting: deque[PendingReply] = deque()
    try:
        for number, prompt in enumerate(prompts):
            waiting.append(PendingReply(number, prompt, server))
            threads.submit(waiting[-1].fetch)
            if len(waiting) > AHEAD * concurrency:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for reply in waiting:
            reply.cancel()
        threads.stop()
