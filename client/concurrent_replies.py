"""Answers to many prompts at once, each streamed, taken in the order of the prompts."""

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

# Answers that may wait until those before them are taken, for each request at once.
AHEAD = 4


class PendingReply:
    """One answer, which a thread fetches and another one takes."""

    def __init__(self, number: int, prompt: PromptLine, server: OpenAIServer) -> None:
        self.number = number
        self.prompt = prompt
        self.error = ""
        self._stream = ReplyStream(server, {"model": server.model, **prompt.body})
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._cancelled = False
        self._taken: list[Piece] = []

    @property
    def stats(self) -> ReplyStats:
        return self._stream.stats

    def fetch(self) -> None:
        """Fetch the answer; an error becomes a part of it."""
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
        """The pieces as they come."""
        while (piece := self._pieces.get()) is not None:
            self._taken.append(piece)
            yield piece

    def result(self) -> dict[str, Any]:
        """The answer as a line of JSONL, after its pieces."""
        stats, reasoning = self.stats, self._text(aside=True)
        found: dict[str, Any] = {
            "index": self.number,
            **self.prompt.identity,
            "prompt": self.prompt.text,
            "text": self._text(aside=False),
            "finish_reason": stats.finish_reason or None,
            "usage": {"prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.tokens},
        }
        if reasoning:
            found["reasoning"] = reasoning
        return found | ({"error": self.error} if self.error else {})

    def _text(self, *, aside: bool) -> str:
        return "".join(piece.text for piece in self._taken if piece.aside == aside)


def answers(
    prompts: Iterable[PromptLine], server: OpenAIServer, concurrency: int
) -> Generator[PendingReply, None, None]:
    """The answers in the order of the prompts; ``concurrency`` of them are fetched at once. The
    first one is given out at once, and the next ones when the one before was taken."""
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
        for answer in waiting:
            answer.cancel()
        threads.stop()
