"""The outputs of one request's choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..shared.engine.core import EngineCore
from ..shared.engine.sequence import Sequence, StepOutput


class Choices:
    """The n sequences of a request, which owns them and calls ``cancel`` however it ends.

    Outputs are first read one by one (``next``), then passed to a callback (``deliver``)."""

    def __init__(self, core: EngineCore, sequences: list[Sequence]) -> None:
        self.leader = sequences[0]
        self._core = core
        self._sequences = sequences
        self._open = {sequence.index: sequence for sequence in sequences}
        # Bounded by n x max_tokens small messages, so a slow reader cannot grow it further.
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()
        self._take: Callable[[StepOutput], None] | None = None
        self._done: asyncio.Future[None]

    def listen(self) -> None:
        self._core.listen(self.leader, self._on_output)

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

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        """Call ``take`` with each further output, within the step that produced it, until all
        choices have ended. Raises what ``take`` raises."""
        self._take = take
        self._done = asyncio.get_running_loop().create_future()
        while not self._outputs.empty():
            if (output := self._outputs.get_nowait()) is not None:
                self._pass_on(output, take)
        self._check_done()
        await self._done

    def _on_output(self, output: StepOutput) -> None:
        if self._take is None:
            self._outputs.put_nowait(output)
        else:
            self._pass_on(output, self._take)

    def _pass_on(self, output: StepOutput, take: Callable[[StepOutput], None]) -> None:
        index = output.sequence.index
        if index not in self._open or self._done.done():
            return
        if output.finish_reason is not None:
            del self._open[index]
        try:
            take(output)
        except Exception as error:  # fails the request, not the engine's loop
            self._done.set_exception(error)
        self._check_done()

    def _check_done(self) -> None:
        if not self._open and not self._done.done():
            self._done.set_result(None)

    def stop(self, index: int) -> None:
        """Stop one choice; the others continue.

        No-op if it has finished, or while the prompt, which all choices share, is prefilling.
        """
        if not self.leader.has_drawn:
            return
        sequence = self._open.pop(index, None)
        if sequence is None:
            return
        self._core.cancel(sequence)
        if self._take is None:
            self._outputs.put_nowait(None)  # wake `next`: no choice may be left
        else:
            self._check_done()

    def cancel(self) -> None:
        """End all choices and free their blocks. Idempotent."""
        for sequence in self._sequences:
            self._core.cancel(sequence)
            self._core.release_blocks(sequence)  # blocks kept for hidden states
