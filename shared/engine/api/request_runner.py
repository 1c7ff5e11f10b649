"""Requests of the Python API on the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from ...errors import UnavailableError
from ...text.tokenizer import Tokenizer
from ..hidden_states import check_result_size
from ..request import build_sequences, pooling_sequence
from ..sequence import FinishReason, Sequence, StepOutput
from ..start import NodeEngine
from ..work import Pool
from .embeddings import PoolingRequest
from .prompts import Request
from .sequence_text import SequenceText
from .types import Completion

T = TypeVar("T")


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
        return await _all([self.generate(request, timeout) for request in requests])

    async def generate(self, request: Request, timeout: float) -> list[Completion]:
        """Run one request, from waiting for room to its last token."""
        async with self._slots(request.params.n, timeout):
            return await self._generate(request)

    async def pool_all(self, requests: list[PoolingRequest], timeout: float) -> list[Sequence]:
        """Run all requests at once; the first failure cancels the others."""
        return await _all([self._pool_in_turn(request, timeout) for request in requests])

    async def _pool_in_turn(self, request: PoolingRequest, timeout: float) -> Sequence:
        async with self._slots(1, timeout):
            return await self._pool(request)

    @contextlib.asynccontextmanager
    async def _slots(self, n: int, timeout: float) -> AsyncIterator[None]:
        """Room for ``n`` sequences. ``timeout`` covers the wait for it and the work in it."""
        try:
            async with asyncio.timeout(timeout):
                async with self._room:
                    await self._room.wait_for(lambda: self._fits(n))
                    self._alive += n
                try:
                    yield
                finally:
                    self._alive -= n
                    async with self._room:
                        self._room.notify_all()
        except TimeoutError:
            raise UnavailableError(
                f"the request took longer than {timeout:g} s; see timeout="
            ) from None

    def _fits(self, n: int) -> bool:
        return not self._alive or self._alive + n <= self._max_alive

    async def _generate(self, request: Request) -> list[Completion]:
        core = self.engine.core
        params, spec = request.params, self.engine.spec
        self.engine.check_generates()
        core.admit(len(request.tokens), params.max_tokens)
        sequences = build_sequences(
            core,
            request.tokens,
            params,
            vocab_size=spec.vocab_size,
            rules=await self.engine.grammars.rules(params.structured_outputs, params.thinking),
            eos_token_ids=spec.eos_token_ids,
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

    async def _pool(self, request: PoolingRequest) -> Sequence:
        core, spec = self.engine.core, self.engine.spec
        size = len(self.engine.scorer().labels) if request.classify else spec.vector_size
        check_result_size(self.engine.resolved.max_num_seqs, size)
        core.admit(len(request.tokens), 0)
        work = Pool(request.pooling, request.classify, request.second_text)
        sequence = pooling_sequence(core, request.tokens, work, vocab_size=spec.vocab_size)
        # Bounded by one output for each chunk.
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        core.submit(sequence, outputs.put_nowait)
        try:
            while (output := await outputs.get()).finish_reason is None:
                pass
            if output.finish_reason is FinishReason.ERROR:
                raise UnavailableError(f"the computation failed: {sequence.error}")
            return sequence
        finally:
            core.cancel(sequence)
            core.release_blocks(sequence)


async def _all(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
