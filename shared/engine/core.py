"""The engine's loop: schedule, run, hand out; and the one door to everything inside.

One engine serves both kinds of node. It lives in the head process, on one asyncio loop, and talks
to the ranks through an ``Executor``. The scheduler and the block pool are private to this package:
nodes call ``EngineCore``, which wakes its own loop when a call makes something schedulable.

A step goes through seven functions::

    EngineCore._submit_steps   a step is planned while the ranks may get another one
    Scheduler.schedule         decodes, then prompts, under one budget: a StepPlan
    Executor.submit            the plan goes to every rank, with the transfers that it feeds
    ModelRunner.launch         in each rank: the forward pass, then the draws
    ModelRunner.collect        the step's StepResult, once a GPU has computed it
    Scheduler.apply            tokens and KV are accounted for, sequences end: StepOutputs
    EngineCore._hand_out       each output goes to the listener of its sequence
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RequestError, UnavailableError
from ..kv.block_pool import OutOfBlocksError, PoolCounts
from ..kv.published import Changes
from .counters import EngineCounters, PrefillRate
from .executor import Executor, ExecutorLostError, StepFailedError
from .first_steps import FirstSteps
from .messages import KVSending
from .plan import OUT_OF_MEMORY, StepPlan, StepResult
from .reception import Reception
from .scheduling.prefill_pacer import PrefillPacer
from .scheduling.scheduler import Scheduler
from .scheduling.step_budget import StepCounts
from .scheduling.steps_in_flight import StepInFlight
from .sequence import FinishReason, Phase, Sequence, StepOutput
from .structured.step_masks import StepMasks

log = logging.getLogger(__name__)

# The ranks count as broken once this many sequences have failed alone without a successful step in
# between. A node that fails every request at once would look idle and attract more of them.
MAX_CONSECUTIVE_FAILURES = 16


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of the queues and of the block pool. ``running`` and ``waiting`` are clients'
    sequences, ``preemptions`` counts since the start."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    preemptions: int
    num_blocks: int
    block_size: int
    blocks: PoolCounts

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences own or have reserved, 0 to 1."""
        return (self.blocks.owned + self.blocks.reserved) / max(1, self.num_blocks)


@dataclass(slots=True)
class _KVSending:
    """A transfer that takes a sequence's KV as it is computed."""

    transfer: tuple[int, int]
    on_start: Callable[[], None]
    open: bool = False


Listener = Callable[[StepOutput], None]


class EngineCore:
    """Runs sequences to their end and hands each step's output to their listeners.

    ``on_lost`` is called once when the ranks are gone. ``pacer`` limits how long prompts may delay
    streams. ``max_steps`` is the number of steps that may be in flight: with two, the next step is
    planned while one runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        on_lost: Callable[[str], None] = lambda reason: None,
        pacer: PrefillPacer | None = None,
        *,
        max_steps: int = 1,
    ) -> None:
        self._scheduler = scheduler
        scheduler.reservations.on_ended = self._on_reception_end
        self._max_steps = max_steps
        self._busy_since = 0.0  # when the oldest step in flight began to count
        self._pacer = pacer or PrefillPacer()
        self._executor = executor
        self._masks = StepMasks(executor.send_masks)
        self._on_lost = on_lost
        self._listeners: dict[Sequence, Listener] = {}
        self._first_steps = FirstSteps()
        self._sending: dict[Sequence, _KVSending] = {}
        self._reserving: dict[Sequence, asyncio.Future[Reception]] = {}
        self._schedulable = asyncio.Event()
        self._next_id = 0
        self._consecutive_failures = 0
        self._lost_reason = ""
        self._prefill_rate = PrefillRate()
        self.counters = EngineCounters()
        # Called when a sequence's first step starts, with the seconds that it waited.
        self.on_started: Callable[[float], None] = lambda seconds: None

    # ---- state, for placement and metrics --------------------------------------------------

    def load(self) -> EngineLoad:
        """The queues and the block pool as they are now."""
        scheduler = self._scheduler
        return EngineLoad(
            running=scheduler.running,
            waiting=scheduler.waiting,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            preemptions=scheduler.preemptions,
            num_blocks=scheduler.pool.num_blocks,
            block_size=scheduler.pool.block_size,
            blocks=scheduler.pool.counts(),
        )

    @property
    def stepping(self) -> bool:
        """True while a step is in flight."""
        return bool(self._scheduler.in_flight)

    @property
    def prefill_tokens_per_second(self) -> float:
        """The measured rate of prompt tokens; 0 until known."""
        return self._prefill_rate.tokens_per_second

    @property
    def min_prefill_tokens_per_second(self) -> float:
        """A lower bound of this rate, which is known sooner; 0 until then."""
        return self._prefill_rate.lower_bound

    def prefix_changes(self, version: int) -> Changes | None:
        """Changes of the prefix index since ``version`` (0: all of it); ``None`` without one."""
        pool = self._scheduler.pool
        return pool.index.published.since(version) if pool.keeps_prefixes else None

    def check_ranks(self) -> None:
        """Raise ``UnavailableError`` when the ranks are lost: no further step will run here."""
        if self._lost_reason:
            raise UnavailableError(f"this node has lost its ranks: {self._lost_reason}")

    # ---- sequences -------------------------------------------------------------------------

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def admit(self, prompt_tokens: int, max_tokens: int, *, goes_first: bool = False) -> None:
        """Reject a request that cannot run. Raises ``UnavailableError``, ``OverloadedError`` or
        ``RequestError``.

        ``max_tokens`` is 0 if only the prompt is computed. ``goes_first``, for private and
        mid-stream sequences, skips the check of the queue's length.
        """
        self.check_ranks()
        if not goes_first:
            self._scheduler.check_room()
        limit = self._scheduler.max_model_len
        if prompt_tokens + max_tokens > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but the prompt has "
                f"{prompt_tokens} and {max_tokens} were requested. Shorten one of them.",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def submit(self, sequence: Sequence, listener: Listener) -> None:
        """Queue a new sequence (its siblings wait with it). Raises ``OverloadedError``."""
        self._scheduler.add(sequence)
        self.listen(sequence, listener)
        self._queued(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that was admitted earlier, whatever the queue's length."""
        self._scheduler.enqueue(sequence)
        self._queued(sequence)

    def listen(self, sequence: Sequence, listener: Listener) -> None:
        """Pass every output of the sequence and of its siblings to ``listener``."""
        for one in (sequence, *sequence.siblings):
            self._listeners[one] = listener

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that is not receiving; its listener is not called again. Idempotent."""
        self._listeners.pop(sequence, None)
        self._first_steps.forget(sequence)
        for sibling in sequence.siblings:
            self._cancel_waiting_sibling(sibling)
        self._scheduler.cancel(sequence)
        self._wake()

    def _cancel_waiting_sibling(self, sibling: Sequence) -> None:
        """End a choice that has not started: it is in no queue and holds no block."""
        self._listeners.pop(sibling, None)
        if sibling.phase is Phase.WAITING:
            sibling.move(Phase.FINISHED)
            sibling.finish_reason = FinishReason.CANCELLED

    def release_blocks(self, sequence: Sequence) -> None:
        """Free the blocks of a prefill-only sequence that is computed. Idempotent."""
        self._scheduler.release_blocks(sequence)
        self._wake()

    def _queued(self, sequence: Sequence, wait_seconds: float = 0.0) -> None:
        self._first_steps.queued(sequence, wait_seconds)
        self._wake()

    def _wake(self) -> None:
        self._schedulable.set()

    # ---- KV to send: a transfer takes it as it is computed here ------------------------------

    def send_kv(
        self, sequence: Sequence, transfer: tuple[int, int], on_start: Callable[[], None]
    ) -> None:
        """Send the sequence's KV to this transfer and attempt, layer by layer, as it is computed.

        ``on_start`` is called once its blocks are known, before the first step that fills them.
        """
        self._sending[sequence] = _KVSending(transfer, on_start)

    def stop_sending_kv(self, sequence: Sequence) -> None:
        self._sending.pop(sequence, None)

    # ---- KV to receive: a transfer fills reserved blocks -------------------------------------

    def match_prefix(self, sequence: Sequence) -> None:
        """Give a new sequence the longest cached prefix of its prompt."""
        self._scheduler.tables.match_prefix(sequence)

    def reserve(self, sequence: Sequence, end: int) -> Reception | None:
        """Reserve blocks for a transfer up to token ``end``; ``None`` when blocks are short."""
        try:
            return self._scheduler.reservations.reserve(sequence, end)
        except OutOfBlocksError:
            return None

    async def reserve_in_turn(self, sequence: Sequence, end: int) -> Reception:
        """Reserve like ``reserve``, once the sequences that go first have their blocks.

        There is no timeout of its own. Cancelling the wait finishes the sequence. Raises
        ``UnavailableError`` when the ranks are lost.
        """
        self.check_ranks()
        reservations = self._scheduler.reservations
        if not reservations.asking and (reception := self.reserve(sequence, end)) is not None:
            return reception
        grant: asyncio.Future[Reception] = asyncio.get_running_loop().create_future()
        start = time.monotonic()
        self._reserving[sequence] = grant
        reservations.ask(sequence, end)
        self._wake()
        try:
            reception = await grant
        except asyncio.CancelledError:
            if self._reserving.pop(sequence, None) is not None:
                self._scheduler.cancel(sequence)
                self._wake()
            elif not grant.cancelled() and grant.exception() is None:
                grant.result().cancel()
            raise
        reception.wait_seconds = time.monotonic() - start
        return reception

    def _grant_reservations(self) -> None:
        while (reception := self._scheduler.reservations.next_granted()) is not None:
            grant = self._reserving.pop(reception.sequence)
            if grant.done():  # cancelled, and its owner has not run since
                reception.cancel()
            else:
                grant.set_result(reception)

    def _on_reception_end(self, reception: Reception) -> None:
        if reception.sequence.phase is Phase.WAITING:  # not cancelled
            self._queued(reception.sequence, reception.wait_seconds)
        self._wake()

    # ---- the loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled. Returns only when the ranks are lost."""
        while True:
            self._submit_steps()
            if not self._scheduler.in_flight:
                self._schedulable.clear()
                await self._schedulable.wait()
                continue
            try:
                await self._end_step()
            except ExecutorLostError as error:
                self._fail(str(error))
                return

    def _submit_steps(self) -> None:
        """Plan steps while the ranks may get another one."""
        while len(self._scheduler.in_flight) < self._max_steps:
            plan = self._schedule(self._pacer.limit)
            if plan is None:
                return
            self._note_started()
            if not plan.ahead:
                self._busy_since = time.perf_counter()
            self._executor.submit(plan, self._sending_in(plan))
            self._begin_masks()

    async def _end_step(self) -> None:
        """Hand out the result of the oldest step. Raises ``ExecutorLostError``."""
        try:
            result = await self._executor.result()
        except StepFailedError as error:
            await self._step_failed(error)
            return
        self._account(self._scheduler.in_flight.oldest, result)
        for output in self._scheduler.apply(result):
            self._hand_out(output)
        self._begin_masks()

    def _begin_masks(self) -> None:
        """Compute the masks of the oldest step, which is the next to draw tokens."""
        if self._scheduler.in_flight:
            oldest = self._scheduler.in_flight.oldest
            self._masks.begin(oldest.plan, oldest.rows)

    def _schedule(self, prompt_limit: int | None) -> StepPlan | None:
        self._grant_reservations()
        return self._scheduler.schedule(prompt_limit) if self._scheduler.has_work else None

    def _note_started(self) -> None:
        for sequence in self._scheduler.take_started():
            wait_seconds = self._first_steps.started(sequence)
            if wait_seconds is not None:
                self.on_started(wait_seconds)
                if not sequence.work.private:
                    self.counters.cache_queries += len(sequence.prompt)
                    self.counters.cache_hits += sequence.cached

    def _sending_in(self, plan: StepPlan) -> list[KVSending]:
        """The transfers that this step feeds. Opens those that it feeds first."""
        if not self._sending:
            return []
        planned = set(plan.columns.sequence_id)
        fed = []
        for sequence, sending in self._sending.items():
            if sequence.sequence_id in planned:
                if not sending.open:
                    sending.open = True
                    sending.on_start()
                fed.append(KVSending(sequence.sequence_id, *sending.transfer))
        return fed

    def _account(self, step: StepInFlight, result: StepResult) -> None:
        if step.rows:
            self._consecutive_failures = 0
        counts = StepCounts.of(step.plan.columns.count)
        self._pacer.measured(self._seconds(), counts)
        self._prefill_rate.measured(result.seconds, counts, limit=step.prompt_limit)
        self.counters.step(result, counts)

    def _seconds(self) -> float:
        """The duration of an ended step as streams see it: includes the ranks' replies, but not the
        wait for the step before."""
        start, self._busy_since = self._busy_since, time.perf_counter()
        return self._busy_since - start

    def _hand_out(self, output: StepOutput) -> None:
        sequence = output.sequence
        listener = self._listeners.get(sequence)
        if output.prompt_done or output.finish_reason is not None:
            output.started_at = self._first_steps.forget(sequence)
        if sequence.finish_reason is not None:
            self._listeners.pop(sequence, None)
        if listener is None:
            return
        listener(output)
        if sequence.finish_reason is FinishReason.ERROR:
            for sibling in sequence.siblings:
                sibling.unfollowable = sequence.unfollowable
                self._end_with_error(sibling, sequence.error)

    # ---- failures --------------------------------------------------------------------------

    async def _step_failed(self, error: StepFailedError) -> None:
        """Retry the step's sequences; one that failed alone ends. Raises ``ExecutorLostError``."""
        await self._end_void_steps()
        outputs = self._scheduler.step_failed(str(error), memory=error.cause == OUT_OF_MEMORY)
        log.warning("a step failed, and %d sequences with it: %s", len(outputs), error)
        self.counters.step_failed(error.cause, sequences=len(outputs))
        if error.cause != OUT_OF_MEMORY:  # smaller requests may still work
            self._consecutive_failures += len(outputs)
        for output in outputs:
            self._hand_out(output)
        if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            count = self._consecutive_failures
            raise ExecutorLostError(f"{count} sequences failed in a row: {error}")

    async def _end_void_steps(self) -> None:
        """Await the ranks' replies to the steps planned on top of one that failed."""
        for step in self._scheduler.in_flight.ahead:
            self._masks.skip(step.plan)
            with contextlib.suppress(StepFailedError):
                await self._executor.result()

    def _fail(self, reason: str) -> None:
        log.error("the ranks are lost: %s", reason)
        self._lost_reason = reason
        self._scheduler.fail_steps(reason)
        for grant in self._reserving.values():
            if not grant.done():
                grant.set_exception(UnavailableError(f"this node has lost its ranks: {reason}"))
        self._reserving.clear()
        for sequence in list(self._listeners):
            self._end_with_error(sequence, reason)
        self._on_lost(reason)

    def _end_with_error(self, sequence: Sequence, reason: str) -> None:
        listener = self._listeners.pop(sequence, None)
        self._first_steps.forget(sequence)
        if sequence.phase is not Phase.FINISHED and sequence.phase is not Phase.RECEIVING:
            self._scheduler.cancel(sequence, FinishReason.ERROR)
        sequence.finish_reason = FinishReason.ERROR
        sequence.error = sequence.error or reason
        if listener is not None:
            listener(StepOutput(sequence, [], finish_reason=FinishReason.ERROR))
