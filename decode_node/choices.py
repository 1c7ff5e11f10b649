"""The outputs of one request's choices."""

from __future__ import annotations

import asyncio

from ..shared.engine.core import EngineCore
from ..shared.engine.sequence import Sequence, StepOutput


class Choices:
    """The n sequences of a request. The RPC owns them, and calls ``cancel`` however it ends."""

    def __init__(self, core: EngineCore, sequences: list[Sequence]) -> None:
        self.leader = sequences[0]
        self._core = core
        self._sequences = sequences
        self._open = dict(enumerate(sequences))
        # Bounded by n x max_tokens small messages, so a slow reader cannot grow it further.
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()

    def listen(self) -> None:
        self._core.listen(self.leader, self._outputs.put_nowait)

    async def next(self) -> StepOutput | None:
        """The next output of a choice that has not ended; ``None`` once all have."""
        while self._open:
            output = await self._outputs.get()
            if output is None or output.sequence.index not in self._open:
                continue
            if output.finish_reason is not None:
                del self._open[output.sequence.index]
            return output
        return None

    def stop(self, index: int) -> None:
        """Stop one choice; the others continue.

        No-op if it has finished, or while the prompt, which all choices share, is prefilling.
        """
        if not self.leader.outputs:
            return
        sequence = self._open.pop(index, None)
        if sequence is not None:
            self._core.cancel(sequence)
            self._outputs.put_nowait(None)  # it may have been the last

    def cancel(self) -> None:
        """End all choices and free their blocks. Idempotent."""
        for sequence in self._sequences:
            self._core.cancel(sequence)
            self._core.release_held(sequence)  # of one that was computed for its hidden states
