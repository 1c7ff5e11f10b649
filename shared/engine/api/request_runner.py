"""Requests of the Python API on the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ...errors import UnavailableError
from ...text.tokenizer import Tokenizer
from ..request import build_sequences
from ..sequence import StepOutput
from ..start import NodeEngine
from .prompts import Request
from .sequence_text import SequenceText
from .types import Completion


class RequestRunner:
    """Runs requests on the core. Every method runs on the engine's loop.

    At most ``max_alive`` sequences are in the scheduler at once; further requests wait here.
    """

    def __init__(self, engine: NodeEngine, tokenizer: Tokenizer, max_alive: int) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._max_alive = max_alive
        self._alive = 0
        self._room = asyncio.Condition()

    async def generate_all(self, requests: list[Request], timeout: float) -> list[list[Completion]]:
        """Run all requests at once; the first failure cancels the others."""
        tasks = [asyncio.create_task(self.generate(request, timeout)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, request: Request, timeout: float) -> list[Completion]:
        """Run one request, from waiting for room to its last token."""
        try:
            async with asyncio.timeout(timeout), self._slots(request.params.n):
                return await self._run(request)
        except TimeoutError:
            raise UnavailableError(
                f"the request took longer than {timeout:g} s; see timeout="
            ) from None

    @contextlib.asynccontextmanager
    async def _slots(self, n: int) -> AsyncIterator[None]:
        async with self._room:
            await self._room.wait_for(lambda: not self._alive or self._alive + n <= self._max_alive)
            self._alive += n
        try:
            yield
        finally:
            self._alive -= n
            async with self._room:
                self._room.notify_all()

    async def _run(self, request: Request) -> list[Completion]:
        core = self.engine.core
        core.admit(len(request.tokens), request.params.max_tokens)
        sequences = build_sequences(
            core, request.tokens, request.params, vocab_size=self.engine.spec.vocab_size
        )
        choices = [SequenceText(sequence, self.tokenizer) for sequence in sequences]
        # Bounded by n x max_tokens outputs.
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        core.submit(sequences[0], outputs.put_nowait)
        try:
            while not all(choice.finish_reason for choice in choices):
                output = await outputs.get()
                choice = choices[output.sequence.index]
                for delta in choice.push(output):
                    request.on_delta(delta)
                if choice.finish_reason:
                    core.cancel(choice.sequence)
            return [choice.completion(sequences[0]) for choice in choices]
        finally:
            for sequence in sequences:
                core.cancel(sequence)
