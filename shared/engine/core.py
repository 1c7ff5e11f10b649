"""The engine's loop: schedule, run, hand out.

One engine serves both kinds of node. It lives in the head process, on one asyncio loop, and talks
to the ranks through an ``Executor``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..errors import RequestError, UnavailableError
from ..kv.block_pool import OutOfBlocksError
from .pace import LEAST, Pace
from .plan import NOT_FINITE, OUT_OF_MEMORY, StepFailure, StepPlan, StepResult
from .scheduler import Scheduler, StepOutput
from .sequence import FinishReason, Phase, Sequence

log = logging.getLogger(__name__)

# So many sequences that fail alone, with no step between them that works: the ranks are broken, and
# a node that answers every request with an error attracts more of them.
MAX_FAILED_IN_A_ROW = 16


@dataclass(slots=True)
class _Stream:
    transfer: tuple[int, int]
    on_start: Callable[[], None]
    open: bool = False


Listener = Callable[[StepOutput], None]


class StepFailedError(Exception):
    """A step raised, on ranks that can go on. ``cause`` is one of plan.py's."""

    def __init__(self, failure: StepFailure) -> None:
        super().__init__(failure.reason)
        self.cause = failure.cause


class ExecutorLostError(Exception):
    """A rank process died: what it held is gone, and the node with it."""


class Executor(Protocol):
    """Runs steps on the ranks."""

    async def step(self, plan: StepPlan, streams: dict[int, tuple[int, int]]) -> StepResult:
        """Compute one step on every rank. ``streams`` maps sequences to the transfer and
        attempt that want their KV as it is computed. Raises ``StepFailedError`` when nothing
        came of it, and ``ExecutorLostError`` when nothing will any more."""
        ...


class EngineCore:
    """Runs sequences to their end, and tells each one's listener what every step gave it.

    ``on_lost`` is called once when the ranks are gone. ``pace`` says how long prompts may keep
    streams waiting.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        on_lost: Callable[[str], None] = lambda reason: None,
        pace: Pace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._pace = pace or Pace()
        self._executor = executor
        self._on_lost = on_lost
        self._listeners: dict[Sequence, Listener] = {}
        self._streams: dict[Sequence, _Stream] = {}
        self._asking: dict[Sequence, asyncio.Future[list[int]]] = {}
        self._wake = asyncio.Event()
        self._next_id = 0
        self._failed_in_a_row = 0
        self._cut: int | None = None  # tokens that the step in flight may compute of prompts
        self._held_up = 0.0  # seconds of steps that went without prompts since the last chunk
        self._lost = ""
        self.stepping = False  # a step is under way, and the executor watches it
        self.steps = 0
        self.step_seconds = 0.0
        self.prefill_tokens_per_second = 0.0
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cache_queries = 0  # prompt tokens that were looked up in the prefix index
        self.cache_hits = 0
        self.on_started: Callable[[float], None] = lambda seconds: None  # after this time queued
        self.failed_steps: Counter[str] = Counter()
        self.failed_sequences: Counter[str] = Counter()

    # ---- sequences -------------------------------------------------------------------------

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def check_ranks(self) -> None:
        """Raises ``UnavailableError`` when the ranks are lost: no step will run here any more."""
        if self._lost:
            raise UnavailableError(f"this node has lost its ranks: {self._lost}")

    def admit(self, prompt_tokens: int, max_tokens: int, *, private: bool = False) -> None:
        """Refuse what cannot run. Raises one of the request's errors. A ``private`` sequence goes
        first, however full the queue is."""
        self.check_ranks()
        if not private:
            self.scheduler.check_room()
        limit = self.scheduler.max_model_len
        if prompt_tokens + 1 > limit or prompt_tokens + max_tokens > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but the prompt has "
                f"{prompt_tokens} and {max_tokens} were asked for. Shorten one of them.",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def submit(self, sequence: Sequence, listener: Listener) -> None:
        """Queue a sequence (its siblings wait with it). Raises ``OverloadedError``."""
        self.scheduler.add(sequence)
        self.listen(sequence, listener)
        self.queue(sequence)

    def listen(self, sequence: Sequence, listener: Listener) -> None:
        """Tell ``listener`` about every step of the sequence and of its siblings."""
        for one in (sequence, *sequence.siblings):
            self._listeners[one] = listener

    def stream(
        self, sequence: Sequence, transfer: tuple[int, int], on_start: Callable[[], None]
    ) -> None:
        """Send the sequence's KV to this transfer and attempt, layer by layer, as it is computed.

        ``on_start`` is called once its blocks are known, before the first step that fills them.
        """
        self._streams[sequence] = _Stream(transfer, on_start)

    def unstream(self, sequence: Sequence) -> None:
        self._streams.pop(sequence, None)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that is not receiving; its listener hears nothing more."""
        self._listeners.pop(sequence, None)
        for sibling in sequence.siblings:
            self.cancel_waiting_sibling(sibling)
        self.scheduler.cancel(sequence)
        self._wake.set()

    def cancel_waiting_sibling(self, sibling: Sequence) -> None:
        """End a choice that has not started: it is in no queue and holds no block."""
        self._listeners.pop(sibling, None)
        if sibling.phase is Phase.WAITING:
            sibling.move(Phase.FINISHED)
            sibling.finish_reason = FinishReason.CANCELLED

    def queue(self, sequence: Sequence) -> None:
        """The sequence can be scheduled from now on."""
        sequence.queued_at = time.monotonic()
        self._wake.set()

    def wake(self) -> None:
        """Something outside changed what can be scheduled (a transfer ended, blocks returned)."""
        self._wake.set()

    def reserve(self, sequence: Sequence, end: int) -> list[int] | None:
        """Park the sequence for a transfer, or ``None`` when blocks are short."""
        try:
            return self.scheduler.receive(sequence, end)
        except OutOfBlocksError:
            return None

    async def reserve_in_turn(self, sequence: Sequence, end: int) -> list[int]:
        """As ``reserve``, but wait until the sequences that go first have their blocks.

        When cancelled, the sequence is finished. Raises ``UnavailableError`` without ranks.
        """
        self.check_ranks()
        if not self.scheduler.asking and (reserved := self.reserve(sequence, end)) is not None:
            return reserved
        granted = asyncio.get_running_loop().create_future()
        self._asking[sequence] = granted
        self.scheduler.ask(sequence, end)
        self._wake.set()
        try:
            return await granted
        except asyncio.CancelledError:
            if self._asking.pop(sequence, None) is not None:
                self.scheduler.cancel(sequence)
            elif not granted.cancelled() and granted.exception() is None:
                self.scheduler.cancel_received(sequence, granted.result())
            self._wake.set()
            raise

    def _grant_reservations(self) -> None:
        while (next_one := self.scheduler.next_reservation()) is not None:
            sequence, reserved = next_one
            granted = self._asking.pop(sequence)
            if granted.done():  # cancelled, and its owner has not run since
                self.scheduler.cancel_received(sequence, reserved)
            else:
                granted.set_result(reserved)

    # ---- the loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled. Ends by itself only when the ranks are lost."""
        while True:
            plan = self._schedule()
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._note_started()
            self.stepping, begun = True, time.perf_counter()
            try:
                result = await self._executor.step(plan, self._open_streams(plan))
            except ExecutorLostError as error:
                self._fail(str(error))
                return
            except StepFailedError as error:
                self._step_failed(error)
                if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
                    self._fail(f"{self._failed_in_a_row} sequences failed in a row: {error}")
                    return
                continue
            finally:
                self.stepping = False
            self._account(plan, result, time.perf_counter() - begun)
            for output in self.scheduler.apply(result):
                self._hand_out(output)

    def _note_started(self) -> None:
        for sequence in self.scheduler.take_started():
            sequence.started_at = time.monotonic()
            if sequence.queued_at:  # not one that shares its leader's prompt
                self.on_started(sequence.started_at - sequence.queued_at)
                if not sequence.private:
                    self.cache_queries += len(sequence.prompt)
                    self.cache_hits += sequence.cached

    def _step_failed(self, error: StepFailedError) -> None:
        """The step's sequences are tried again; one that failed alone ends."""
        self.failed_steps[error.cause] += 1
        ended = self.scheduler.step_failed(str(error), memory=error.cause == OUT_OF_MEMORY)
        log.warning("a step failed, and %d sequences with it: %s", len(ended), error)
        self.failed_sequences[error.cause] += len(ended)
        self._failed_in_a_row += len(ended)
        for output in ended:
            self._hand_out(output)

    def _schedule(self) -> StepPlan | None:
        self._grant_reservations()
        if not self.scheduler.has_work:
            return None
        self._cut = self._pace.prompt_tokens
        return self.scheduler.schedule(self._cut)

    def _open_streams(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """The transfers that this step feeds; those that it feeds first are opened."""
        planned = {row.sequence_id for row in plan.sequences}
        fed = {}
        for sequence, stream in self._streams.items():
            if sequence.sequence_id in planned:
                if not stream.open:
                    stream.open = True
                    stream.on_start()
                fed[sequence.sequence_id] = stream.transfer
        return fed

    def _hand_out(self, output: StepOutput) -> None:
        sequence = output.sequence
        listener = self._listeners.get(sequence)
        if sequence.finish_reason is not None:
            self._listeners.pop(sequence, None)
        if listener is None:
            return
        listener(output)
        if sequence.finish_reason is FinishReason.ERROR:
            for sibling in sequence.siblings:
                self._end_with_error(sibling, sequence.error)

    def _account(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """``seconds`` are those of the step as streams feel them, the ranks' answers included."""
        self.steps += 1
        self.step_seconds += result.seconds
        self.generated_tokens += len(result.sampled)
        chunk = sum(len(row.tokens) for row in plan.sequences if len(row.tokens) > 1)
        decoded = sum(len(row.tokens) == 1 for row in plan.sequences)
        self._pace.measured(seconds, decoded=decoded, prompt_tokens=chunk)
        self.prompt_tokens += chunk
        self.failed_sequences[NOT_FINITE] += len(result.failed)
        if plan.sequences:
            self._failed_in_a_row = 0
        self._measure_prefill(chunk, result.seconds)

    def _measure_prefill(self, chunk: int, seconds: float) -> None:
        """A chunk that is cut because others decode takes the steps that go without one besides."""
        if not chunk and self._cut == 0:
            self._held_up += seconds
        # A short prompt alone tells of the step rather than of its tokens.
        if seconds > 0 and (chunk >= 64 or (self._cut is not None and chunk >= LEAST)):
            rate = chunk / (seconds + self._held_up)
            known = self.prefill_tokens_per_second
            self.prefill_tokens_per_second = 0.7 * known + 0.3 * rate if known else rate
        if chunk:
            self._held_up = 0.0

    def _fail(self, reason: str) -> None:
        log.error("the ranks are lost: %s", reason)
        self._lost = reason
        self.scheduler.fail_step(reason)
        for granted in self._asking.values():
            if not granted.done():
                granted.set_exception(UnavailableError(f"this node has lost its ranks: {reason}"))
        self._asking.clear()
        for sequence in list(self._listeners):
            self._end_with_error(sequence, reason)
        self._on_lost(reason)

    def _end_with_error(self, sequence: Sequence, reason: str) -> None:
        listener = self._listeners.pop(sequence, None)
        if sequence.phase is not Phase.FINISHED and sequence.phase is not Phase.RECEIVING:
            self.scheduler.cancel(sequence, FinishReason.ERROR)
        sequence.finish_reason = FinishReason.ERROR
        sequence.error = sequence.error or reason
        if listener is not None:
            listener(StepOutput(sequence, [], finish_reason=FinishReason.ERROR))
