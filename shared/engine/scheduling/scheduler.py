"""The scheduler: plans each step, running decodes first, then prompt chunks, under one budget.

It owns every sequence; the block pool owns every block. There is no torch, no socket and no clock
here. Beside it: ``queues.py`` (the order), ``step_budget.py``, ``block_tables.py``,
``preemption.py`` (which sequence loses its blocks) and ``reservations.py`` (prompts received by
transfers, whose owners hold a ``Reception``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ...errors import OverloadedError
from ...kv.block_pool import BlockPool
from ..plan import PRIVATE_SEQS, SequenceStep, StepPlan, StepResult
from ..sampling_params import SamplingParams
from ..sequence import FinishReason, Phase, Sequence, StepOutput
from ..work import Generate
from .block_tables import BlockTables
from .plan_rows import sampler_spec, sequence_step
from .preemption import Preemption
from .queues import SequenceQueues, is_background
from .reservations import Reservations
from .step_budget import SMALL_PROMPT, StepBudget
from .steps_in_flight import BlocksInFlightError, StepInFlight, StepsInFlight

# Tokens by which the limit of a step grows back, each step, after one that ran out of memory.
_LIMIT_GROWTH = 8


class Scheduler:
    """Sequences in, step plans out.

    ``max_num_batched_tokens`` bounds a step's tokens, ``max_num_seqs`` the running sequences,
    ``max_waiting`` the queue. ``eos_token_ids`` end a sequence unless it asks to ignore them.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        max_waiting: int,
        policy: str = "fcfs",
        eos_token_ids: Iterable[int] = (),
        whole_prompts: bool = False,
    ) -> None:
        """``whole_prompts``: compute each prompt in one step, for bidirectional attention."""
        self.pool = pool
        self.max_model_len = max_model_len
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._eos = frozenset(eos_token_ids)
        self._whole_prompts = whole_prompts
        self._queues = SequenceQueues(policy)
        self.tables = BlockTables(pool)
        self._preemption = Preemption(self._queues, self.tables, self._remove_from_ranks)
        self.reservations = Reservations(
            self._queues,
            self.tables,
            self._preemption,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._holding: set[Sequence] = (
            set()
        )  # computed prefill-only sequences that still hold blocks
        self.in_flight = StepsInFlight()
        self._sent_blocks: dict[Sequence, int] = {}  # of the sequences that ranks know
        self._removed: list[int] = []  # to be dropped by the ranks in the next step
        self._started: list[Sequence] = []
        self._suspects: deque[tuple[Sequence, int]] = deque()  # to retry alone, and their tokens
        self._memory_limit = max_num_batched_tokens  # lower after a step ran out of memory
        self._step = 0

    # ---- state -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._queues.waiting or self._queues.running)

    @property
    def running(self) -> int:
        """Clients' sequences that run. A router would take private ones for another router's."""
        return sum(not s.work.private for s in self._queues.running)

    @property
    def waiting(self) -> int:
        """Clients' sequences that wait, or receive their prompt."""
        waiting = (*self._queues.waiting, *self.reservations.sequences())
        return sum(not s.work.private for s in waiting)

    @property
    def preemptions(self) -> int:
        return self._preemption.count

    @property
    def queued_prefill_tokens(self) -> int:
        alive = [*self._queues.waiting, *self._queues.running]
        return sum(max(0, s.target - s.placeholders - s.computed) for s in alive)

    @property
    def idle(self) -> bool:
        """True if no sequence is alive in any phase, and no step is in flight."""
        alive = self.has_work or len(self.reservations) or self._holding
        return not (alive or self.in_flight)

    def take_started(self) -> list[Sequence]:
        """The sequences that were scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    # ---- sequences come and go -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ``OverloadedError`` if the queue is full, unless the
        sequence is private or mid-stream."""
        if not (sequence.work.private or sequence.mid_stream):
            self.check_room()
        self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that was admitted earlier, whatever the queue's length."""
        self._queues.arrive(sequence)
        self._queues.wait(sequence)

    def check_room(self) -> None:
        """Raise ``OverloadedError`` if no further sequence may wait."""
        if self.waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.waiting} requests are waiting and the limit is {self._max_waiting}; "
                f"try again later"
            )

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any phase but RECEIVING (its transfer ends it). Idempotent.

        Its blocks stay while a step in flight writes them.
        """
        if sequence.phase is not Phase.FINISHED and sequence.phase is not Phase.RECEIVING:
            self._finish(sequence, reason)

    def release_blocks(self, sequence: Sequence) -> None:
        """Free the blocks of a computed prefill-only sequence, whose KV is sent or no longer
        needed. Idempotent."""
        if sequence in self._holding:
            self._holding.remove(sequence)
            self.tables.release(sequence)

    # ---- planning a step -------------------------------------------------------------------

    def schedule(self, prompt_tokens: int | None = None) -> StepPlan | None:
        """Plan the next step, or ``None`` if nothing can be computed now.

        One step may be in flight. A step planned on top of it neither preempts nor retries a
        sequence: both wait for the result of the step in flight.

        ``prompt_tokens`` limits the prompt tokens of a step that also decodes. The rest of a
        received prompt is as cheap as decoding, and does not count.
        """
        if self.in_flight.full:
            raise RuntimeError("no result of the steps in flight has been applied")
        budget = StepBudget(min(self._max_tokens, self._memory_limit))
        if self.in_flight:
            return self._schedule_ahead(budget, prompt_tokens)
        if not self._retry_suspect(budget):
            self._share_out(budget, prompt_tokens)
        return self._plan(budget, prompt_tokens) if budget.shares or self._removed else None

    def _schedule_ahead(self, budget: StepBudget, prompt_tokens: int | None) -> StepPlan | None:
        if self._suspects:
            return None
        try:
            self._share_out(budget, prompt_tokens)
        except BlocksInFlightError:
            return None
        return self._plan(budget, prompt_tokens) if budget.shares else None

    def _share_out(self, budget: StepBudget, prompt_tokens: int | None) -> None:
        """Grant shares of the budget: to decodes, then to prompts. Mid-stream prompts, whose client
        is already reading, go before running ones."""
        decodes = [s for s in self._queues.running if s.decoding]
        prompts = [s for s in self._queues.running if not s.decoding]
        for sequence in decodes:
            self._grant(sequence, budget)
        decoding = bool(budget.shares)
        self._admit(budget, lambda sequence: sequence.work.private)
        if decoding and prompt_tokens is not None:
            budget.prompts = prompt_tokens
        self._admit(budget, lambda sequence: sequence.mid_stream)
        for sequence in prompts:
            self._grant(sequence, budget)
        self._admit(budget)

    def _retry_suspect(self, budget: StepBudget) -> bool:
        """Grant the step to one sequence of a failed step; it still has its blocks."""
        while self._suspects:
            sequence, tokens = self._suspects.popleft()
            if sequence.phase is Phase.RUNNING:
                whole = self._whole_prompts
                budget.grant(sequence, tokens if whole else min(tokens, budget.remaining))
                return True
        return False

    def _grant(self, sequence: Sequence, budget: StepBudget) -> None:
        """Give a running sequence its share and the blocks for it."""
        if sequence.phase is not Phase.RUNNING or budget.remaining <= 0:
            return  # preempted by an earlier sequence, or the step is full
        more = sequence.placeholders
        if more and self._is_full(sequence, sequence.generation.params, more):
            return  # the step in flight draws its last token
        tokens = self._share(budget, sequence.target - sequence.planned)
        if tokens and self._preemption.cover(sequence, sequence.planned + tokens, budget):
            budget.grant(sequence, tokens)

    def _share(self, budget: StepBudget, missing: int) -> int:
        """The tokens of a step that a sequence may compute."""
        if not self._whole_prompts:
            return budget.share(missing)
        # Alone, a prompt may be longer than a step.
        return missing if missing <= budget.remaining or not budget.shares else 0

    def _admit(
        self, budget: StepBudget, accepts: Callable[[Sequence], bool] = lambda sequence: True
    ) -> None:
        """Start waiting sequences that ``accepts`` allows while slots, tokens and blocks last.

        Stop at the first that does not fit, so that small sequences cannot pass a large one
        forever. Private sequences have a few slots of their own. Background sequences leave half of
        the others free, since no sequence gives up its slot to a later one.
        """
        while self._queues.waiting and budget.remaining > 0:
            sequence = self._queues.waiting[0]
            if not accepts(sequence) or self.running >= self._slots(sequence):
                return
            if self.reservations.goes_before(sequence):
                return  # others would take the blocks that the reservation waits for
            self.tables.match_prefix(sequence)
            tokens = self._share(budget, sequence.target - sequence.computed)
            if not tokens or not self._preemption.cover_head(sequence, tokens, budget):
                return  # with its prefix, unless another sequence needs the blocks
            self._queues.run(sequence)
            if not sequence.preemptions:
                self._started.append(sequence)
            budget.grant(sequence, tokens)

    def _slots(self, sequence: Sequence) -> int:
        """The number of running sequences beside which no further one like this starts."""
        if sequence.work.private:
            return self._max_seqs + PRIVATE_SEQS
        return max(1, self._max_seqs // 2) if is_background(sequence) else self._max_seqs

    def _plan(self, budget: StepBudget, prompt_limit: int | None) -> StepPlan:
        sent = self._sent_blocks
        rows = {
            sequence: sequence_step(sequence, tokens, sent.get(sequence, 0))
            for sequence, tokens in budget.shares.items()
        }
        added = []
        for sequence in rows:
            if sequence not in sent and isinstance(sequence.work, Generate):
                added.append(sampler_spec(sequence, self._eos))
            sent[sequence] = len(sequence.block_table)
        removed, self._removed = self._removed, []
        self._step += 1
        plan = StepPlan.of(self._step, rows.values(), added, removed, ahead=bool(self.in_flight))
        self.in_flight.begin(StepInFlight(plan, rows, prompt_limit))
        return plan

    # ---- the result of a step --------------------------------------------------------------

    def apply(self, result: StepResult) -> list[StepOutput]:
        """Account for the oldest step in flight. Returns one output for each of its sequences that
        has not ended in the meantime."""
        step = self.in_flight.end()
        self._memory_limit = min(self._memory_limit + _LIMIT_GROWTH, self._max_tokens)
        outputs = []
        for sequence, row in step.rows.items():
            self._account_kv(sequence, row, result.failed.get(sequence.sequence_id, ""))
            if sequence.phase is Phase.FINISHED:
                self._release_ended(sequence)
            else:
                sequence.prompt_logprobs += result.prompt_logprobs.get(sequence.sequence_id, ())
                if row.pool is not None and row.pool.hidden is not None:
                    sequence.hidden.append(result.hidden[sequence.sequence_id])
                outputs.append(self._output(sequence, row, result))
        return outputs

    def _account_kv(self, sequence: Sequence, row: SequenceStep, failure: str) -> None:
        """Account for the KV of a row. It enters the prefix index unless this row or an earlier one
        had values that are not finite."""
        if failure:
            sequence.error = failure
            self.tables.unpublish(sequence)
            self._preemption.take_from_waiting(sequence.block_table)
        elif not sequence.error:
            # A placeholder's token is missing if the sequence ended before it was drawn.
            sequence.computed = min(row.start + len(row.tokens), sequence.length)
            self.tables.publish(sequence)

    def _output(self, sequence: Sequence, row: SequenceStep, result: StepResult) -> StepOutput:
        output, work = StepOutput(sequence, []), sequence.work
        if isinstance(work, Generate) and work.constraint is not None and not sequence.error:
            sequence.error = work.constraint.failure
            sequence.unfollowable = work.constraint.unfollowable
        if sequence.error:
            self._finish(sequence, FinishReason.ERROR)
        elif row.sample:
            tokens = result.sampled[sequence.sequence_id]
            if sequence.in_flight and len(tokens) != 1:
                raise RuntimeError("the step planned on top of this one expects one token")
            output.prompt_done = not sequence.has_drawn
            self._append(sequence, tokens, output)
            if logprobs := result.logprobs.get(sequence.sequence_id):
                output.add_logprobs(logprobs)
        elif not isinstance(work, Generate) and sequence.computed == sequence.target:
            self._finish(sequence, FinishReason.COMPUTED)
        output.finish_reason = sequence.finish_reason
        return output

    def step_failed(self, reason: str, *, memory: bool) -> list[StepOutput]:
        """Discard the oldest step in flight and the one planned on top of it. Its sequences are
        retried one at a time.

        A sequence that was alone ends with ``reason``, unless ``memory`` ran out and fewer of its
        tokens can be computed at once. Returns one output for each sequence that ended.
        """
        rows = self.in_flight.end().rows
        self._void_steps()
        if memory:
            tokens = sum(len(row.tokens) for row in rows.values())
            self._memory_limit = max(1, tokens // 2)
        outputs = []
        for sequence, row in rows.items():
            self._remove_from_ranks(sequence)
            tokens = len(row.tokens)
            if sequence.phase is Phase.FINISHED:
                self._release_ended(sequence)
            elif len(rows) > 1:
                self._suspects.append((sequence, tokens))
            elif memory and tokens > SMALL_PROMPT and not self._whole_prompts:
                self._suspects.appendleft((sequence, tokens // 2))
            else:
                sequence.error = reason
                self._finish(sequence, FinishReason.ERROR)
                outputs.append(StepOutput(sequence, [], finish_reason=FinishReason.ERROR))
        return outputs

    def _void_steps(self) -> None:
        """Discard the steps in flight, which ranks do not run. Their sequences are removed from the
        ranks and sent again."""
        while self.in_flight:
            step = self.in_flight.end()
            self._removed += step.plan.removed
            for sequence in step.rows:
                self._remove_from_ranks(sequence)
                self._release_ended(sequence)

    def fail_steps(self, reason: str) -> None:
        """End every sequence of the steps in flight, which are lost with the ranks."""
        while self.in_flight:
            for sequence in self.in_flight.end().rows:
                if sequence.phase is not Phase.FINISHED:
                    sequence.error = reason
                    self._finish(sequence, FinishReason.ERROR)
                self._release_ended(sequence)

    def _append(self, sequence: Sequence, tokens: list[int], output: StepOutput) -> None:
        """Append a step's tokens until one ends the sequence; drop the rest."""
        work = sequence.generation
        params, constraint = work.params, work.constraint
        complete = constraint is not None and constraint.complete  # no further token
        reason = FinishReason.STOP if complete else None
        for token in [] if complete else tokens:
            sequence.outputs.append(token)
            if self._stops(params, token):
                sequence.stop_token = token
                reason = FinishReason.STOP
                break
            output.tokens.append(token)
            if self._is_full(sequence, params):
                reason = FinishReason.LENGTH
                break
        if output.prompt_done:
            self._start_siblings(sequence)
        if reason is not None:
            self._finish(sequence, reason)

    def _is_full(self, sequence: Sequence, params: SamplingParams, more: int = 0) -> bool:
        """True if the sequence has reached its length with ``more`` tokens."""
        outputs = len(sequence.outputs) + more
        full = len(sequence.prompt) + outputs >= self.max_model_len
        return full or outputs >= params.max_tokens

    def _stops(self, params: SamplingParams, token: int) -> bool:
        return token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)

    def _start_siblings(self, leader: Sequence) -> None:
        """Queue the other choices: they share the full blocks of the prompt, and compute the rest
        of it (at most one block) themselves."""
        for sibling in leader.siblings:
            if sibling.phase is not Phase.FINISHED:
                self.tables.share_prompt(leader, sibling)
                self.enqueue(sibling)
        leader.siblings = []

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._queues.remove(sequence)
        self.reservations.forget(sequence)
        sequence.move(Phase.FINISHED)
        sequence.finish_reason = reason
        self._remove_from_ranks(sequence)
        if reason is FinishReason.COMPUTED:
            self._holding.add(sequence)
        else:
            self._release_ended(sequence)

    def _release_ended(self, sequence: Sequence) -> None:
        """Release the blocks of an ended sequence, unless a step in flight uses them.
        Idempotent."""
        if sequence.phase is Phase.FINISHED and not sequence.in_flight:
            self.tables.release(sequence)

    def _remove_from_ranks(self, sequence: Sequence) -> None:
        """Let ranks forget the sequence; its next row sends it again as a whole."""
        if self._sent_blocks.pop(sequence, None) is not None:
            self._removed.append(sequence.sequence_id)
