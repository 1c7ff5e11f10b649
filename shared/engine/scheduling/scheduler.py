"""The scheduler: plans each step, running decodes first, then prompt chunks, under one budget.

It owns every sequence; the block pool owns every block. There is no torch, no socket and no clock
here. Beside it: ``queues.py`` (the order), ``step_budget.py``, ``block_tables.py``,
``preemption.py`` (which sequence loses its blocks) and ``reservations.py`` (prompts that arrive).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...errors import OverloadedError
from ...kv.block_pool import BlockPool
from ..plan import SequenceStep, StepPlan, StepResult
from ..sequence import FinishReason, Phase, Sequence, StepOutput
from .block_tables import BlockTables
from .plan_rows import sampler_spec, sequence_step
from .preemption import Preemption
from .queues import SequenceQueues
from .reservations import Reservations
from .step_budget import SMALL_PROMPT, StepBudget

# Tokens by which a step may grow again, each step, after one that ran out of memory.
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
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._eos = frozenset(eos_token_ids)
        self._queues = SequenceQueues(policy)
        self._tables = BlockTables(pool)
        self._preemption = Preemption(self._queues, self._tables)
        self._reservations = Reservations(
            self._queues,
            self._tables,
            self._preemption,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._held: set[Sequence] = set()  # prefill-only, computed, blocks not yet given back
        self._in_flight: dict[Sequence, SequenceStep] = {}
        self._cancelled: dict[Sequence, FinishReason] = {}  # while in flight
        self._removed: list[int] = []  # known to the ranks, which drop them in the next step
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
        return len(self._queues.running)

    @property
    def waiting(self) -> int:
        return len(self._queues.waiting) + len(self._reservations)

    @property
    def preemptions(self) -> int:
        return self._preemption.count

    @property
    def queued_prefill_tokens(self) -> int:
        alive = [*self._queues.waiting, *self._queues.running]
        return sum(max(0, s.target - s.computed) for s in alive)

    @property
    def idle(self) -> bool:
        """True if no sequence is alive in any phase."""
        return not (self.has_work or len(self._reservations) or self._held)

    def take_started(self) -> list[Sequence]:
        """The sequences that were scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    # ---- sequences come and go -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ``OverloadedError`` if the queue is full; it never is for a
        private sequence, which goes first."""
        if not sequence.private:
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

    def match_prefix(self, sequence: Sequence) -> None:
        """See ``BlockTables.match_prefix``."""
        self._tables.match_prefix(sequence)

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any phase but RECEIVING (its transfer ends it). Idempotent.

        While a step that computes it is in flight its blocks stay: the step still writes them.
        """
        if sequence.phase is Phase.FINISHED or sequence.phase is Phase.RECEIVING:
            return
        if sequence in self._in_flight:
            self._cancelled.setdefault(sequence, reason)
            return
        self._finish(sequence, reason)

    def release_held(self, sequence: Sequence) -> None:
        """Free the blocks of a prefill-only sequence that is computed: its KV has been sent, or is
        no longer wanted. Idempotent."""
        if sequence in self._held:
            self._held.remove(sequence)
            self._tables.release(sequence)

    # ---- prompts that arrive by a transfer -------------------------------------------------

    @property
    def asking(self) -> bool:
        return self._reservations.asking

    def receive(self, sequence: Sequence, end: int) -> list[int]:
        """Reserve blocks of a new sequence for a transfer up to token ``end``; see ``reserve``."""
        self._queues.arrive(sequence)
        return self._reservations.reserve(sequence, end)

    def ask(self, sequence: Sequence, end: int) -> None:
        """Queue a new sequence for ``next_reservation``: its transfer begins once the sequences
        that go first have their blocks."""
        self._queues.arrive(sequence)
        self._reservations.ask(sequence, end)

    def next_reservation(self) -> tuple[Sequence, list[int]] | None:
        return self._reservations.next_granted()

    def resume_at(self, sequence: Sequence) -> int:
        return self._tables.resume_at(sequence)

    def commit_received(
        self, sequence: Sequence, reserved: list[int], end: int, whole_from: int = 0
    ) -> None:
        """Schedule a sequence whose transfer has filled the blocks up to token ``end``."""
        self._reservations.commit(sequence, reserved, end, whole_from)
        self._queues.wait(sequence)

    def abandon_received(self, sequence: Sequence, reserved: list[int]) -> None:
        """Queue a sequence for prefill here: its transfer failed and no longer writes."""
        self._reservations.drop(sequence, reserved)
        self._queues.wait(sequence)

    def cancel_received(self, sequence: Sequence, reserved: list[int]) -> None:
        """End a sequence whose transfer no longer writes."""
        self._reservations.drop(sequence, reserved)
        self._finish(sequence, FinishReason.CANCELLED)

    # ---- planning a step -------------------------------------------------------------------

    def schedule(self, prompt_tokens: int | None = None) -> StepPlan | None:
        """Plan the next step, or ``None`` if nothing can be computed now.

        ``prompt_tokens`` limits the prompt tokens of a step that decodes as well. The rest of a
        received prompt costs no more than decoding, and does not count.
        """
        if self._in_flight:
            raise RuntimeError("the previous step has not been applied")
        budget = StepBudget(min(self._max_tokens, self._memory_limit))
        if self._retry_suspect(budget):
            return self._plan(budget)
        decodes = [s for s in self._queues.running if s.decoding]
        prompts = [s for s in self._queues.running if not s.decoding]
        for sequence in decodes:
            self._grant(sequence, budget)
        decoding = bool(budget.shares)
        self._admit(budget, only_private=True)
        if decoding and prompt_tokens is not None:
            budget.prompts = prompt_tokens
        for sequence in prompts:
            self._grant(sequence, budget)
        self._admit(budget)
        if not budget.shares and not self._removed:
            return None
        return self._plan(budget)

    def _retry_suspect(self, budget: StepBudget) -> bool:
        """Grant the step to one sequence of a step that failed; its blocks are there."""
        while self._suspects:
            sequence, tokens = self._suspects.popleft()
            if sequence.phase is Phase.RUNNING:
                budget.grant(sequence, min(tokens, budget.left))
                return True
        return False

    def _grant(self, sequence: Sequence, budget: StepBudget) -> None:
        """Give a running sequence its share and the blocks for it."""
        if sequence.phase is not Phase.RUNNING or budget.left <= 0:
            return  # preempted by an earlier one, or the step is full
        tokens = budget.share(sequence.target - sequence.computed)
        if tokens and self._preemption.cover(sequence, sequence.computed + tokens, budget):
            budget.grant(sequence, tokens)

    def _admit(self, budget: StepBudget, *, only_private: bool = False) -> None:
        """Start waiting sequences while slots, tokens and blocks last.

        Stop at the first that does not fit, so that small sequences do not pass a large one for
        ever. Private ones, which never sample, need no slot.
        """
        while self._queues.waiting and budget.left > 0:
            sequence = self._queues.waiting[0]
            if not sequence.private and (only_private or self.running >= self._max_seqs):
                return
            if self._reservations.goes_before(sequence):
                return  # it lacks blocks, and would never get them if others went first
            self._tables.match_prefix(sequence)
            tokens = budget.share(sequence.target - sequence.computed)
            if not tokens or not self._preemption.cover_head(sequence, tokens, budget):
                if not sequence.received:
                    self._tables.release(sequence)
                return
            self._queues.run(sequence)
            if not sequence.preemptions:
                self._started.append(sequence)
            budget.grant(sequence, tokens)

    def _plan(self, budget: StepBudget) -> StepPlan:
        added, rows = [], []
        for sequence, tokens in budget.shares.items():
            row = sequence_step(sequence, tokens)
            if row.sample and not sequence.known_to_ranks:
                added.append(sampler_spec(sequence, self._eos))
                sequence.known_to_ranks = True
            self._in_flight[sequence] = row
            rows.append(row)
        removed, self._removed = self._removed, []
        self._step += 1
        return StepPlan(self._step, rows, added, removed)

    # ---- the result of a step --------------------------------------------------------------

    def apply(self, result: StepResult) -> list[StepOutput]:
        """Account for the step in flight. Returns one output for each touched sequence."""
        rows, cancelled = self._land()
        sampled = {drawn.sequence_id: drawn for drawn in result.sampled}
        outputs = []
        self._memory_limit = min(self._memory_limit + _LIMIT_GROWTH, self._max_tokens)
        for sequence, row in rows.items():
            failure = result.failed.get(sequence.sequence_id)
            if failure is not None:
                self._tables.unpublish(sequence)
            else:
                sequence.computed = row.start + len(row.tokens)
                self._tables.publish(sequence)
            if sequence in cancelled:
                self._finish(sequence, cancelled[sequence])
                continue
            sequence.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.sequence_id, ()))
            output = StepOutput(sequence, [])
            if failure is not None:
                sequence.error = failure
                self._finish(sequence, FinishReason.ERROR)
            elif row.sample:
                drawn = sampled[sequence.sequence_id]
                output.prompt_done = not sequence.outputs
                self._append(sequence, drawn.tokens, output)
                output.logprobs.extend(drawn.logprobs[: len(output.tokens)])
            elif sequence.compute_until is not None and sequence.computed == sequence.target:
                self._finish(sequence, FinishReason.COMPUTED)
            output.finish_reason = sequence.finish_reason
            outputs.append(output)
        return outputs

    def step_failed(self, reason: str, *, memory: bool) -> list[StepOutput]:
        """Discard the step in flight and retry its sequences one at a time.

        One that was alone ends with ``reason``, unless ``memory`` ran out and fewer of its tokens
        can be computed at once. Returns one output for each that ended.
        """
        rows, cancelled = self._land()
        if memory:
            tokens = sum(len(row.tokens) for row in rows.values())
            self._memory_limit = max(1, tokens // 2)
        ended = []
        for sequence, row in rows.items():
            self._remove_from_ranks(sequence)
            tokens = len(row.tokens)
            if sequence in cancelled:
                self._finish(sequence, cancelled[sequence])
            elif len(rows) > 1:
                self._suspects.append((sequence, tokens))
            elif memory and tokens > SMALL_PROMPT:
                self._suspects.appendleft((sequence, tokens // 2))
            else:
                sequence.error = reason
                self._finish(sequence, FinishReason.ERROR)
                ended.append(StepOutput(sequence, [], finish_reason=FinishReason.ERROR))
        return ended

    def fail_step(self, reason: str) -> list[Sequence]:
        """End every sequence of the step in flight, which was lost with its ranks."""
        rows, _ = self._land()
        for sequence in rows:
            sequence.error = reason
            self._finish(sequence, FinishReason.ERROR)
        return list(rows)

    def _land(self) -> tuple[dict[Sequence, SequenceStep], dict[Sequence, FinishReason]]:
        """The step that was in flight: its rows, and the sequences cancelled meanwhile."""
        rows, self._in_flight = self._in_flight, {}
        cancelled, self._cancelled = self._cancelled, {}
        return rows, cancelled

    def _append(self, sequence: Sequence, tokens: list[int], output: StepOutput) -> None:
        """Append a step's tokens until one ends the sequence; drop the rest."""
        reason = None
        for token in tokens:
            sequence.outputs.append(token)
            if self._stops(sequence, token):
                sequence.stop_token = token
                reason = FinishReason.STOP
                break
            output.tokens.append(token)
            full = sequence.length >= self.max_model_len
            if full or len(sequence.outputs) >= sequence.params.max_tokens:
                reason = FinishReason.LENGTH
                break
        if output.prompt_done:
            self._start_siblings(sequence)
        if reason is not None:
            self._finish(sequence, reason)

    def _stops(self, sequence: Sequence, token: int) -> bool:
        params = sequence.params
        return token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)

    def _start_siblings(self, leader: Sequence) -> None:
        """Queue the other choices: they share the full blocks of the prompt, and compute the rest
        of it (at most one block) themselves."""
        for sibling in leader.siblings:
            if sibling.phase is not Phase.FINISHED:
                self._tables.share_prompt(leader, sibling)
                self.enqueue(sibling)
        leader.siblings = []

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._queues.remove(sequence)
        self._reservations.forget(sequence)
        sequence.move(Phase.FINISHED)
        sequence.finish_reason = reason
        self._remove_from_ranks(sequence)
        if reason is FinishReason.COMPUTED:
            self._held.add(sequence)
        else:
            self._tables.release(sequence)

    def _remove_from_ranks(self, sequence: Sequence) -> None:
        """Have the ranks drop their state; they get it again if the sequence samples again."""
        if sequence.known_to_ranks:
            self._removed.append(sequence.sequence_id)
            sequence.known_to_ranks = False
