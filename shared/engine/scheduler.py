"""Decides what each step computes: running decodes first, then prompt chunks, under one budget.

The scheduler owns every sequence; the block pool owns every block. When blocks run out, the
sequence that would run last gives its own back and is computed again later (its tokens stay),
whether it is running or waits with blocks (a received prompt, a further choice). So the one that
runs first always proceeds, nothing deadlocks, and what waits takes nothing from what runs. It knows
no torch, no sockets, no clock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from ..errors import OverloadedError
from ..kv.block_pool import BlockPool, OutOfBlocksError
from ..kv.prefix_keys import chain_keys
from .plan import RankSampling, SamplerSpec, SequenceStep, StepPlan, StepResult
from .sampling_params import SamplingParams
from .sequence import FinishReason, Phase, Sequence, StepOutput

# Shortest-first: how many tokens of advantage one arrival is worth. A later, shorter sequence can
# pass an older one only a bounded number of times, so nothing starves.
AGING_TOKENS = 64
# Nobody can take blocks back from a transfer that fills them. So a reservation leaves each running
# sequence room to grow by so many tokens, about what it generates while a prompt is received.
GROWTH_TOKENS = 32
# Tokens that are not a chunk: they cost about what a decoding row does.
SMALL_PROMPT = 16
# Tokens by which a step may grow again, each step, after one that ran out of memory.
_LIMIT_GROWTH = 8

_POLICIES: dict[str, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": lambda s: (s.arrival,),
    "priority": lambda s: (s.priority, s.arrival),
    "shortest-first": lambda s: (len(s.prompt) + AGING_TOKENS * s.arrival, s.arrival),
}
POLICIES = tuple(_POLICIES)


class _StepBudget:
    """The tokens one step may compute and the shares granted so far. Dies with the step."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.prompts: int | None = None  # of these, for prompts; None: all
        self.shares: dict[Sequence, int] = {}

    def share(self, missing: int) -> int:
        """How many of the tokens that a sequence lacks it may compute."""
        if self.prompts is None or missing <= SMALL_PROMPT:
            return min(missing, self.left)
        return min(missing, self.left, self.prompts)

    def grant(self, sequence: Sequence, tokens: int) -> None:
        self.left -= tokens
        if self.prompts is not None and tokens > SMALL_PROMPT:
            self.prompts -= tokens
        self.shares[sequence] = tokens

    def take_back(self, sequence: Sequence) -> None:
        tokens = self.shares.pop(sequence, 0)
        self.left += tokens
        if self.prompts is not None and tokens > SMALL_PROMPT:
            self.prompts += tokens


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
        by_policy = _POLICIES[policy]
        # A private sequence (a canary) goes first: it is short, and what waits behind it may be the
        # very work that the peer under test is there to take.
        self._key: Callable[[Sequence], tuple[int, ...]] = lambda s: (not s.private, *by_policy(s))
        self._eos = frozenset(eos_token_ids)
        self._waiting: list[Sequence] = []  # sorted by policy
        self._running: list[Sequence] = []  # sorted by policy
        self._asking: list[tuple[Sequence, int]] = []  # for a reservation; sorted by policy
        self._receiving: set[Sequence] = set()
        self._held: set[Sequence] = set()  # prefill-only, computed, blocks not yet given back
        self._in_flight: dict[Sequence, SequenceStep] = {}
        self._cancelled: dict[Sequence, FinishReason] = {}  # while in flight
        self._forget: list[int] = []
        self._started: list[Sequence] = []
        self.preemptions = 0
        self._suspects: deque[tuple[Sequence, int]] = deque()  # to try alone, with how many tokens
        self._memory_limit = max_num_batched_tokens  # lower after a step ran out of memory
        self._step = 0
        self._arrivals = 0

    # ---- what others may ask ---------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._asking) + len(self._receiving)

    @property
    def queued_prefill_tokens(self) -> int:
        return sum(max(0, s.target - s.computed) for s in [*self._waiting, *self._running])

    def take_started(self) -> list[Sequence]:
        """The sequences that were scheduled for the first time since this was last asked."""
        started, self._started = self._started, []
        return started

    @property
    def idle(self) -> bool:
        """No sequence is alive in any phase."""
        alive = self._waiting or self._running or self._asking or self._receiving or self._held
        return not alive

    # ---- sequences come and go -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ``OverloadedError`` when the queue is full; for a private
        one, which goes first, it never is."""
        if not sequence.private:
            self.check_room()
        self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that was admitted earlier, whatever the queue's length."""
        self._stamp(sequence)
        self._enqueue(sequence)

    def check_room(self) -> None:
        """Raise ``OverloadedError`` when no further sequence may wait."""
        if self.waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.waiting} requests are waiting and the limit is {self._max_waiting}; "
                f"try again later"
            )

    def match_prefix(self, sequence: Sequence) -> None:
        """Give a sequence without blocks the longest cached prefix of its tokens.

        The last token is never taken from the cache: its logits are needed, and a sequence with
        nothing left to compute would be a case of its own everywhere. Neither is anything
        when prompt logprobs are wanted, because they need every position's logits.
        """
        wants_prompt = sequence.params.prompt_logprobs is not None and not sequence.outputs
        if sequence.block_table or sequence.private or wants_prompt:
            return
        size = self.pool.block_size
        self._extend_keys(sequence)
        usable = sequence.keys[: (sequence.target - 1) // size]
        sequence.block_table = self.pool.match(usable)
        sequence.computed = len(sequence.block_table) * size
        sequence.published = len(sequence.block_table)
        if not sequence.preemptions:
            sequence.cached = sequence.computed

    def receive(self, sequence: Sequence, end: int) -> list[int]:
        """Park a new sequence while a transfer fills its blocks up to token ``end``.

        Returns the reserved blocks. Raises ``OutOfBlocksError`` (nothing is kept but the prefix),
        also when those that run or go first would soon lack the blocks.
        """
        self._stamp(sequence)
        return self._reserve(sequence, end)

    def ask(self, sequence: Sequence, end: int) -> None:
        """Queue a new sequence for ``next_reservation``: a transfer to fill its blocks up to token
        ``end`` begins when those that go first have theirs."""
        self._give_back(sequence)  # what is cached is looked up again then
        self._stamp(sequence)
        insort(self._asking, (sequence, end), key=lambda asked: self._key(asked[0]))

    @property
    def asking(self) -> bool:
        """Whether a sequence is queued for a reservation."""
        return bool(self._asking)

    def next_reservation(self) -> tuple[Sequence, list[int]] | None:
        """Do as ``receive`` does for the first sequence that asks, if there is room by now."""
        if not self._asking:
            return None
        sequence, end = self._asking[0]
        self.match_prefix(sequence)
        needed = self._missing(sequence, end) + self._needed_before(sequence)
        self._reclaim_from([s for s in self._waiting if self._key(s) > self._key(sequence)], needed)
        try:
            reserved = self._reserve(sequence, end)
        except OutOfBlocksError:
            self._give_back(sequence)
            return None
        self._asking.pop(0)
        return sequence, reserved

    def _reserve(self, sequence: Sequence, end: int) -> list[int]:
        count = self._missing(sequence, end)
        needed = self._needed_before(sequence)
        available = self.pool.counts().available
        if count + needed > available:
            raise OutOfBlocksError(
                f"{count} blocks asked for, and {needed} of the {available} available ones are "
                f"needed by sequences that run or go first"
            )
        last = sequence.block_table[-1] if sequence.block_table else None
        reserved = self.pool.reserve(count, last)
        sequence.move(Phase.RECEIVING)
        self._receiving.add(sequence)
        sequence.block_table.extend(reserved)
        return reserved

    def resume_at(self, sequence: Sequence) -> int:
        """The first token to compute here once all but the last of the prompt have been received.

        With other choices it is the first of the prompt's last block, which each computes anew.
        """
        last = len(sequence.prompt) - 1
        return last // self.pool.block_size * self.pool.block_size if sequence.siblings else last

    def commit_received(
        self, sequence: Sequence, reserved: list[int], end: int, whole_from: int = 0
    ) -> None:
        """The transfer filled the blocks: the sequence is scheduled, with ``end`` tokens done.

        Tokens before ``whole_from`` lack KV that this sequence does not need. Whoever branches off
        among them would, so their blocks never enter the prefix index.
        """
        self.pool.commit(reserved)
        self._receiving.remove(sequence)
        sequence.received = end - sequence.computed
        sequence.computed = end
        whole = -(-whole_from // self.pool.block_size)
        sequence.published = max(sequence.published, whole)
        self._publish(sequence)
        self._enqueue(sequence)

    def abandon_received(self, sequence: Sequence, reserved: list[int]) -> None:
        """The transfer failed and cannot write any more: the sequence is prefilled here."""
        self._drop_reservation(sequence, reserved)
        self._enqueue(sequence)

    def cancel_received(self, sequence: Sequence, reserved: list[int]) -> None:
        """The client is gone, and the transfer cannot write any more."""
        self._drop_reservation(sequence, reserved)
        self._finish(sequence, FinishReason.CANCELLED)

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
        """A prefill-only sequence's KV has been sent or is not wanted any more. Idempotent."""
        if sequence in self._held:
            self._held.remove(sequence)
            self._give_back(sequence)

    # ---- the step --------------------------------------------------------------------------

    def schedule(self, prompt_tokens: int | None = None) -> StepPlan | None:
        """Plan the next step, or ``None`` when nothing can be computed now.

        ``prompt_tokens`` is the most that it computes of prompts if it decodes as well. What is
        left of a prompt that was received costs no more than decoding, and is not counted.
        """
        if self._in_flight:
            raise RuntimeError("the previous step has not been applied")
        budget = _StepBudget(min(self._max_tokens, self._memory_limit))
        if self._try_suspect(budget):
            return self._plan(budget)
        for sequence in [s for s in self._running if s.decoding]:
            self._grant(sequence, budget)
        prompts = [s for s in self._running if not s.decoding]
        decoding = bool(budget.shares)
        self._admit(budget, only_private=True)
        if decoding and prompt_tokens is not None:
            budget.prompts = prompt_tokens
        for sequence in prompts:
            self._grant(sequence, budget)
        self._admit(budget)
        if not budget.shares and not self._forget:
            return None
        return self._plan(budget)

    def apply(self, result: StepResult) -> list[StepOutput]:
        """Account for what the step in flight computed. Returns one output a touched sequence."""
        rows, self._in_flight = self._in_flight, {}
        cancelled, self._cancelled = self._cancelled, {}
        sampled = {s.sequence_id: s for s in result.sampled}
        outputs = []
        self._memory_limit = min(self._memory_limit + _LIMIT_GROWTH, self._max_tokens)
        for sequence, row in rows.items():
            if sequence.sequence_id in result.failed:
                # Nobody knows since when its KV is not good, so nobody else shall have it.
                self.pool.unpublish(sequence.block_table)
            else:
                sequence.computed = row.start + len(row.tokens)
                self._publish(sequence)
            if sequence in cancelled:
                self._finish(sequence, cancelled[sequence])
                continue
            sequence.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.sequence_id, ()))
            output = StepOutput(sequence, [])
            if sequence.sequence_id in result.failed:
                sequence.error = result.failed[sequence.sequence_id]
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
        """Nothing came of the step in flight: its sequences are tried again, one at a time.

        One that was alone ends with ``reason``, unless ``memory`` ran out and less of it can be
        computed at once. Returns one output for each that ended.
        """
        rows, self._in_flight = self._in_flight, {}
        cancelled, self._cancelled = self._cancelled, {}
        if memory:
            tokens = sum(len(row.tokens) for row in rows.values())
            self._memory_limit = max(1, tokens // 2)
        ended = []
        for sequence, row in rows.items():
            self._forget_at_ranks(sequence)
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
        """The step in flight was lost with its ranks: every sequence in it ends with an error."""
        rows, self._in_flight = self._in_flight, {}
        self._cancelled = {}
        for sequence in rows:
            sequence.error = reason
            self._finish(sequence, FinishReason.ERROR)
        return list(rows)

    # ---- inside ----------------------------------------------------------------------------

    def _stamp(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.phase is not Phase.WAITING:
            sequence.move(Phase.WAITING)
        insort(self._waiting, sequence, key=self._key)

    def _drop_reservation(self, sequence: Sequence, reserved: list[int]) -> None:
        self._receiving.remove(sequence)
        self.pool.cancel_reservation(reserved)
        if reserved:
            del sequence.block_table[-len(reserved) :]

    def _try_suspect(self, budget: _StepBudget) -> bool:
        """Grant a step to the next sequence of a step that failed; its blocks are there."""
        while self._suspects:
            sequence, tokens = self._suspects.popleft()
            if sequence.phase is Phase.RUNNING:
                budget.grant(sequence, min(tokens, budget.left))
                return True
        return False

    def _grant(self, sequence: Sequence, budget: _StepBudget) -> None:
        """Give a running sequence its share, taking blocks back from later ones while it must."""
        if sequence.phase is not Phase.RUNNING or budget.left <= 0:
            return  # preempted by an earlier one, or the step is full
        tokens = budget.share(sequence.target - sequence.computed)
        if not tokens:
            return
        while not self._cover(sequence, sequence.computed + tokens):
            victim = self._last_holder()
            if victim is sequence and self._is_only_holder(sequence):
                return  # only transfers hold other blocks; they end, so waiting is enough
            budget.take_back(victim)
            self._take_blocks(victim)
            if victim is sequence:
                return
        budget.grant(sequence, tokens)

    def _admit(self, budget: _StepBudget, *, only_private: bool = False) -> None:
        """Start waiting sequences while slots, tokens and blocks last; stop at the first that
        does not fit, so that a large one is not passed for ever by small ones. Private ones, which
        never sample, need no slot."""
        while self._waiting and budget.left > 0:
            sequence = self._waiting[0]
            if not sequence.private and (only_private or len(self._running) >= self._max_seqs):
                return
            if self._asking and self._key(self._asking[0][0]) < self._key(sequence):
                return  # it lacks blocks, and would never get them if others went first
            self.match_prefix(sequence)
            tokens = budget.share(sequence.target - sequence.computed)
            if not tokens or not self._cover_head(sequence, tokens, budget):
                if not sequence.received:
                    self._give_back(sequence)
                return
            self._waiting.pop(0)
            sequence.move(Phase.RUNNING)
            insort(self._running, sequence, key=self._key)
            if not sequence.preemptions:
                self._started.append(sequence)
            budget.grant(sequence, tokens)

    def _cover_head(self, sequence: Sequence, tokens: int, budget: _StepBudget) -> bool:
        """Make the block table of the head of the queue reach as far as it must."""
        # KV that is being sent must stay where it is: a prefill-only sequence gets all of its
        # blocks at once, so that it can never be the one that runs out of them.
        whole = sequence.compute_until is not None
        end = sequence.target if whole else sequence.computed + tokens
        self._reclaim_from(self._waiting[1:], self._missing(sequence, end))
        if sequence.private:
            self._make_room(sequence, end, budget)
        return self._cover(sequence, end)

    def _missing(self, sequence: Sequence, end: int) -> int:
        """How many blocks the table lacks to reach token ``end``."""
        return max(0, -(-end // self.pool.block_size) - len(sequence.block_table))

    def _needed_before(self, newcomer: Sequence) -> int:
        """Blocks that a reservation must leave: to running sequences the ones that they will fill
        soon, to waiting ones that go first and have a slot to run in all that they lack. The few of
        a private one may be taken from anybody."""
        if newcomer.private:
            return 0
        ends = ((s, min(s.length + GROWTH_TOKENS, self._end(s))) for s in self._running)
        growth = sum(self._missing(sequence, end) for sequence, end in ends)
        slots = self._max_seqs - len(self._running)
        first = (s for s in self._waiting[:slots] if self._key(s) < self._key(newcomer))
        return growth + sum(self._missing(sequence, sequence.target) for sequence in first)

    def _end(self, sequence: Sequence) -> int:
        """The length at which the sequence ends at the latest."""
        if sequence.compute_until is not None:
            return sequence.compute_until
        return min(len(sequence.prompt) + sequence.params.max_tokens, self.max_model_len)

    def _cover(self, sequence: Sequence, end: int) -> bool:
        """Make the block table reach token ``end``; False when the pool cannot."""
        missing = self._missing(sequence, end)
        if not missing:
            return True
        last = sequence.block_table[-1] if sequence.block_table else None
        try:
            sequence.block_table.extend(self.pool.allocate(missing, last))
        except OutOfBlocksError:
            return False
        return True

    def _last_holder(self) -> Sequence:
        """Of the running sequences and the waiting ones that hold blocks, the one that runs last
        by policy."""
        waiting = (s for s in reversed(self._waiting) if s.block_table)
        return max([*self._running[-1:], *islice(waiting, 1)], key=self._key)

    def _is_only_holder(self, sequence: Sequence) -> bool:
        """Whether only transfers hold blocks besides this sequence, which runs."""
        others = len(self._running) > 1 or any(s.block_table for s in self._waiting)
        return not others and bool(self.pool.counts().reserved)

    def _make_room(self, sequence: Sequence, end: int, budget: _StepBudget) -> None:
        """A private sequence gets the few blocks that it lacks from those that would run last; but
        KV that is being sent must stay where it is."""
        while self._missing(sequence, end) > self.pool.counts().available:
            holders = [s for s in [*self._running, *self._waiting] if s.block_table]
            victims = [s for s in holders if s.compute_until is None]
            if not victims:
                return
            victim = max(victims, key=self._key)
            budget.take_back(victim)
            self._take_blocks(victim)

    def _reclaim_from(self, later: list[Sequence], missing: int) -> None:
        """Take back what ``later`` waiting sequences hold, the last first, until so many blocks are
        available. What still would not do stays where it is."""
        available = self.pool.counts().available
        holders = [s for s in later if s.block_table]
        if missing > available + sum(len(s.block_table) for s in holders):
            return
        while holders and missing > self.pool.counts().available:
            self._take_blocks(holders.pop())

    def _take_blocks(self, victim: Sequence) -> None:
        """A sequence loses its blocks, and computes its tokens again when it is its turn."""
        if victim.phase is Phase.RUNNING:
            self._preempt(victim)
        else:
            self._give_back(victim)
            victim.received = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._give_back(sequence)
        if not sequence.outputs:
            sequence.prompt_logprobs.clear()
        sequence.preemptions += 1
        self.preemptions += 1
        self._enqueue(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.computed = sequence.published = 0

    def _plan(self, budget: _StepBudget) -> StepPlan:
        added, rows = [], []
        for sequence, tokens in budget.shares.items():
            row = self._row(sequence, tokens)
            if row.sample and not sequence.known_to_ranks:
                added.append(self._sampler_spec(sequence))
                sequence.known_to_ranks = True
            self._in_flight[sequence] = row
            rows.append(row)
        removed, self._forget = self._forget, []
        self._step += 1
        return StepPlan(self._step, rows, added, removed)

    def _row(self, sequence: Sequence, tokens: int) -> SequenceStep:
        start, end = sequence.computed, sequence.computed + tokens
        wants_prompt = sequence.params.prompt_logprobs is not None and not sequence.outputs
        return SequenceStep(
            sequence.sequence_id,
            sequence.tokens(start, end),
            start,
            list(sequence.block_table),
            sample=sequence.compute_until is None and end == sequence.length,
            prompt_logprobs=sequence.params.prompt_logprobs if wants_prompt else None,
            prompt_targets=sequence.prompt[start + 1 : end + 1] if wants_prompt else [],
        )

    def _sampler_spec(self, sequence: Sequence) -> SamplerSpec:
        params, sampling = sequence.params, _rank_sampling(sequence.params)
        blocked = set(params.stop_token_ids)
        if not params.ignore_eos:
            blocked |= self._eos
        return SamplerSpec(
            sequence.sequence_id,
            sampling,
            sequence.seed,
            sequence.prompt if sampling.penalizes else [],
            list(sequence.outputs),
            sorted(blocked) if params.min_tokens else [],
            params.min_tokens,
        )

    def _append(self, sequence: Sequence, tokens: list[int], output: StepOutput) -> None:
        """Append the tokens of a step until one ends the sequence; later ones are dropped."""
        params = sequence.params
        for token in tokens:
            sequence.outputs.append(token)
            if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
                sequence.stop_token = token
                reason = FinishReason.STOP
                break
            output.tokens.append(token)
            full = sequence.length >= self.max_model_len
            if full or len(sequence.outputs) >= params.max_tokens:
                reason = FinishReason.LENGTH
                break
        else:
            reason = None
        if output.prompt_done:
            self._start_siblings(sequence)
        if reason is not None:
            self._finish(sequence, reason)

    def _start_siblings(self, leader: Sequence) -> None:
        """The prompt is computed once: the other choices share its full blocks, and compute the
        rest of it (at most one block) themselves."""
        shared = leader.block_table[: self.resume_at(leader) // self.pool.block_size]
        for sibling in leader.siblings:
            if sibling.phase is Phase.FINISHED:
                continue
            self.pool.share(shared)
            sibling.block_table = list(shared)
            sibling.computed = len(shared) * self.pool.block_size
            sibling.published = len(shared)
            sibling.keys = leader.keys[: len(shared)]
            sibling.cached, sibling.received = leader.cached, leader.received
            self._stamp(sibling)
            self._enqueue(sibling)
        leader.siblings = []

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._asking = [asked for asked in self._asking if asked[0] is not sequence]
        sequence.move(Phase.FINISHED)
        sequence.finish_reason = reason
        self._forget_at_ranks(sequence)
        if reason is FinishReason.COMPUTED:
            self._held.add(sequence)
        else:
            self._give_back(sequence)

    def _forget_at_ranks(self, sequence: Sequence) -> None:
        """Ranks drop what they keep of it; a sequence that samples again is told to them anew."""
        if sequence.known_to_ranks:
            self._forget.append(sequence.sequence_id)
            sequence.known_to_ranks = False

    def _extend_keys(self, sequence: Sequence) -> None:
        sequence.keys = chain_keys(
            sequence.tokens(0, sequence.length),
            self.pool.block_size,
            sequence.salt,
            sequence.keys,
        )

    def _publish(self, sequence: Sequence) -> None:
        """Index the blocks that the last step filled."""
        full = sequence.computed // self.pool.block_size
        if full <= sequence.published or sequence.private:
            return
        if full > len(sequence.keys):
            self._extend_keys(sequence)
        for i in range(sequence.published, full):
            self.pool.publish(sequence.block_table[i], sequence.keys[i])
        sequence.published = full


def _rank_sampling(params: SamplingParams) -> RankSampling:
    return RankSampling(**{name: getattr(params, name) for name in _RANK_SAMPLING})


_RANK_SAMPLING = tuple(RankSampling.__dataclass_fields__)
