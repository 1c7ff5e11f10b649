"""The n choices of one request: what the engine says of them, until each has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ..shared.engine.core import EngineCore
from ..shared.engine.sequence import Sequence, StepOutput


class Choices:
    """Owned by the call that asked for them, which ``cancel``s them however it ends."""

    def __init__(self, core: EngineCore, sequences: list[Sequence]) -> None:
        self.leader = sequences[0]
        self._core = core
        self._sequences = sequences
        self._open = dict(enumerate(sequences))
        # Bounded by n x max_tokens small messages, so a reader that stalls cannot grow it further.
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()

    def listen(self) -> None:
        self._core.listen(self.leader, self._outputs.put_nowait)

    async def outputs(self) -> AsyncIterator[StepOutput]:
        """What every step did to a choice that has not ended, until all have."""
        while self._open:
            output = await self._outputs.get()
            if output is None or output.sequence.index not in self._open:
                continue
            if output.finish_reason is not None:
                del self._open[output.sequence.index]
            yield output

    def end(self, index: int) -> None:
        """Nobody wants more of this choice; the others go on. Nothing for one that has ended, or
        before the prompt, which is all of theirs, is computed."""
        if not self.leader.outputs:
            return
        sequence = self._open.pop(index, None)
        if sequence is not None:
            self._core.cancel(sequence)
            self._outputs.put_nowait(None)  # it may have been the last

    def cancel(self) -> None:
        """Free what any of them holds. Idempotent on what has ended by itself."""
        for sequence in self._sequences:
            self._core.cancel(sequence)
