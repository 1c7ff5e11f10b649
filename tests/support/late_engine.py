"""A whole engine over a rank whose device is behind the host, and the same engine in turn.

``LateEngine`` does one thing at a time: a request comes, leaves or is handed over, a step is
launched, the device computes one, a step fails. After each it checks who owns every block.
``Expected`` has what each request gets alone, from an engine whose steps have results at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from tandem.shared.engine.core import EngineCore
from tandem.shared.engine.executor import StepFailedError
from tandem.shared.engine.messages import CODEC, ExecuteStep, KVSending, StepDone
from tandem.shared.engine.plan import (
    PositionLogprobs,
    SequenceStep,
    StepPlan,
    StepResult,
    TokenMasks,
)
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.scheduling.steps_in_flight import MAX_STEPS
from tandem.shared.engine.sequence import FinishReason, Phase, Sequence, StepOutput
from tandem.shared.engine.structured.constraint import Constraint
from tandem.shared.engine.work import Compute, Generate, Pool, Work
from tandem.shared.handoff.wire.layer_windows import first_tokens
from tandem.shared.kv.block_pool import BlockPool
from tandem.tests.support.late_rank import PLACES, SECONDS, LateRank, as_on_gpu
from tandem.tests.support.packed_kv import packed_bytes
from tandem.tests.support.step_rows import rows_of

T = TypeVar("T")
VOCAB = 512
ENDS = frozenset(range(3, VOCAB, 24))  # stand for the model's end token
STOPS = tuple(range(7, VOCAB, 16))
# A text may end with these, which only the listener notices.
UNWANTED = frozenset(range(11, VOCAB, 12))
LENGTHS = (2, 7, 8, 17, 30, 43)
MAX_LEN = 64
BLOCK = 4
MAX_FAULTS = 12  # fewer than those after which ranks count as broken

# What requests ask for, beside a length and a number of tokens.
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "greedy with ends": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.9),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6
    ),
    "edited": SamplingParams(
        temperature=0.7,
        bad_words=((9,), (20, 21)),
        logit_bias={40: 4.0, 41: 5.0},
        min_tokens=4,
        stop_token_ids=STOPS,
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, logprob_token_ids=(5, 6)),
    "prompt logprobs": SamplingParams(temperature=0.8, logprobs=2, prompt_logprobs=3),
    "grammar": SamplingParams(temperature=0.8),
    "stop string": SamplingParams(temperature=1.0),
}


class _Alternating:
    """A grammar in which the remainder of each token by 3 is one more than that of the one before,
    and that may end after any 5 tokens."""

    def __init__(self) -> None:
        self._count, self._last = 0, 0

    def matcher(self) -> _Alternating:
        return _Alternating()

    def advance(self, tokens: list[int]) -> None:
        for token in tokens:
            if token in ENDS:
                continue
            assert not self._count or token % 3 == (self._last + 1) % 3, "a draw without its mask"
            self._count, self._last = self._count + 1, token

    def mask(self) -> bytearray:
        bits = np.zeros(VOCAB, np.uint8)
        if self._count:
            bits[(self._last + 1) % 3 :: 3] = 1
        else:
            bits[:] = 1
        bits[list(ENDS)] = 0
        return bytearray(np.packbits(bits, bitorder="little").tobytes())

    @property
    def accepting(self) -> bool:
        return self._count >= 5


@dataclass(frozen=True)
class Request:
    """One choice of what a client may ask for. ``kind`` is of ``KINDS``, or one of
    "pool", "compute" and "private"."""

    kind: str
    length: int
    max_tokens: int
    distinct: int = 0
    seed: int = 0

    @property
    def prompt(self) -> list[int]:
        """The beginning of one of a few texts."""
        return random.Random(self.distinct).choices(range(VOCAB), k=max(LENGTHS))[: self.length]

    def work(self) -> Work:
        if self.kind == "pool":
            return Pool("mean")
        if self.kind in ("compute", "private"):
            return Compute(self.length - 1, private=self.kind == "private")
        params = replace(KINDS[self.kind], max_tokens=self.max_tokens)
        params = replace(params, min_tokens=min(params.min_tokens, self.max_tokens))
        constraint = Constraint(_Alternating(), ENDS) if self.kind == "grammar" else None
        return Generate(params, self.seed, constraint)


@dataclass
class Answer:
    """What one choice has brought so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    hidden: list[bytes] = field(default_factory=list)
    reason: FinishReason | None = None
    resumed: int = 0  # tokens drawn elsewhere
    leads: bool = True  # the first of several choices, which alone has logprobs of the prompt

    def add(self, output: StepOutput) -> None:
        assert self.reason is None, "an output after the last one"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.reason = output.finish_reason
        if output.finish_reason is not None:
            self.prompt_logprobs = list(output.sequence.prompt_logprobs)
            self.hidden = list(output.sequence.hidden)

    def check(self, expected: Answer) -> None:
        """Require what the same request gets alone, or a beginning of it if it did not end."""
        count = self.resumed + len(self.tokens)
        assert self.tokens == expected.tokens[self.resumed : count]
        assert self.reason is not None, "a stream did not end"
        if self.reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
            assert (count, self.reason) == (len(expected.tokens), expected.reason)
            if self.leads and not self.resumed:
                _same(self.prompt_logprobs, expected.prompt_logprobs)
            # Of each chunk there is a sum.
            one, other = (
                sum(np.frombuffer(x, np.float32) for x in each.hidden) for each in (self, expected)
            )
            assert np.allclose(one, other, atol=1e-2)
        _same(self.logprobs, expected.logprobs[self.resumed :][: len(self.logprobs)])


def _same(positions: list[PositionLogprobs], expected: list[PositionLogprobs]) -> None:
    assert [one.token for one in positions] == [one.token for one in expected]
    for one, other in zip(positions, expected, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3 and abs(one.rank - other.rank) <= 1
        assert len(one.top) == len(other.top)
        for (_, mine), (_, theirs) in zip(one.top, other.top, strict=True):
            assert abs(mine - theirs) < 1e-3


class InTurn:
    """An executor whose runner computes each step at once."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plan: StepPlan | None = None
        self._may_run = asyncio.Event()

    def submit(self, plan: StepPlan, sending: list[KVSending]) -> None:
        self._plan = plan
        self._may_run.clear()
        if not plan.columns.masked:
            self._may_run.set()

    def send_masks(self, masks: TokenMasks) -> None:
        self._runner.masks.put(masks)
        self._may_run.set()

    async def result(self) -> StepResult:
        await self._may_run.wait()
        assert self._plan is not None
        return self._runner.execute(self._plan)


class Expected:
    """The answers of requests that are alone, from a runner on the CPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._answers: dict[Request, Answer] = {}

    def of(self, request: Request) -> Answer:
        """All of the answer; whoever asks may have stopped reading before."""
        if request not in self._answers:
            self._answers[request] = asyncio.run(self._alone(request))
        return self._answers[request]

    async def _alone(self, request: Request) -> Answer:
        cache = self.runner.cache
        scheduler = scheduler_of(BlockPool(cache.num_blocks, cache.block_size))
        core = EngineCore(scheduler, InTurn(self.runner))
        loop = asyncio.create_task(core.run())
        answer, ended = Answer(), asyncio.Event()

        def listen(output: StepOutput) -> None:
            answer.add(output)
            if answer.reason is not None:
                ended.set()

        core.submit(Sequence(core.new_id(), request.prompt, request.work()), listen)
        try:
            async with asyncio.timeout(SECONDS):
                await ended.wait()
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        # The ranks have not heard that it ended.
        self.runner.launch(StepPlan.of(0, [], [], [1]))
        return answer

    def compute_prompt(self, request: Request) -> list[int]:
        """Compute a prompt but its last token, in these blocks."""
        prompt = request.prompt[:-1]
        blocks = list(range(-(-len(prompt) // self.runner.cache.block_size)))
        row = SequenceStep(1, prompt, 0, blocks, False)
        self.runner.execute(StepPlan.of(0, [row], [], []))
        self.runner.launch(StepPlan.of(0, [], [], [1]))
        return blocks


def storm(engine: LateEngine, seed: int, moves: int) -> None:
    """Let anything happen at any moment, and then everything end. Raises ``AssertionError``."""
    draw = random.Random(seed)
    for _ in range(moves):
        can = ["arrive"] * 2
        can += ["launch"] * (6 * engine.may_launch) + ["complete"] * (6 * engine.may_complete)
        can += ["receive"] * bool(engine.receiving) + ["release"] * bool(engine.holding)
        if engine.requests and draw.random() < 0.3:
            can.append("cancel")
        match draw.choice(can):
            case "arrive":
                kind = draw.choice([*KINDS, "pool", "compute", "private"])
                request = Request(
                    kind,
                    draw.choice(LENGTHS[:3] if kind == "private" else LENGTHS),
                    draw.choice((1, 3, 14, MAX_LEN)),
                    draw.randint(0, 2),
                    draw.randint(0, 1),
                )
                way = draw.random() if kind in KINDS else 1.0
                if way < 0.15:
                    engine.resume(request, draw.random())
                else:
                    several = draw.choice((1, 1, 3)) if kind in KINDS else 1
                    engine.arrive(request, choices=several, receives=way < 0.4)
            case "launch":
                fails = engine.faults < MAX_FAULTS and draw.random() < 0.07
                engine.launch(draw.choice(PLACES) if fails else "", memory=draw.random() < 0.5)
            case "complete":
                engine.complete()
            case "receive":
                engine.received(draw.choice(("commit", "commit", "abandon", "cancel")))
            case "release":
                engine.release(draw.choice(engine.holding))
            case "cancel":
                engine.cancel(draw.choice(list(engine.requests)))
    engine.finish()


def scheduler_of(pool: BlockPool, *, slots: int = 8, tokens: int = 64) -> Scheduler:
    return Scheduler(
        pool,
        max_num_batched_tokens=tokens,
        max_num_seqs=slots,
        max_model_len=MAX_LEN,
        max_waiting=1000,
        eos_token_ids=ENDS,
    )


@dataclass(frozen=True)
class _InFlight:
    """A step without a result: the blocks that each of its sequences has up to its last row."""

    plan: StepPlan
    blocks: dict[Sequence, list[int]]


class LateExecutor:
    """Passes steps to a rank when the test says so. Messages are encoded as on the channel."""

    def __init__(self) -> None:
        self.waiting: deque[ExecuteStep] = deque()
        self.masked: set[int] = set()  # steps whose masks were sent
        self.masks: deque[TokenMasks] = deque()
        self.sent_masks = asyncio.Event()
        self._results: asyncio.Queue[StepDone] = asyncio.Queue()

    def submit(self, plan: StepPlan, sending: list[KVSending]) -> None:
        message = CODEC.decode(CODEC.encode(ExecuteStep(plan, sending)))
        assert isinstance(message, ExecuteStep)
        self.waiting.append(message)

    def send_masks(self, masks: TokenMasks) -> None:
        message = CODEC.decode(CODEC.encode(masks))
        assert isinstance(message, TokenMasks)
        self.masked.add(masks.step)
        self.masks.append(message)
        self.sent_masks.set()

    async def result(self) -> StepResult:
        done = await self._results.get()
        if done.failure is not None:
            raise StepFailedError(done.failure)
        assert done.result is not None
        return done.result

    def put(self, done: StepDone) -> None:
        self._results.put_nowait(done)


class LateEngine:
    """An engine of one rank. ``runner`` is a CPU's, with the weights of ``expected``'s."""

    def __init__(
        self, runner: ModelRunner, expected: Expected, *, blocks: int, slots: int, tokens: int
    ) -> None:
        self._stack = ExitStack()
        self._expected = expected
        self.rank = LateRank(runner, as_on_gpu(runner, self._stack))
        self.rank.check = self._check_launch
        self.pool = BlockPool(blocks, runner.cache.block_size)
        self.scheduler = scheduler_of(self.pool, slots=slots, tokens=tokens)
        self.executor = LateExecutor()
        self.loop = asyncio.new_event_loop()
        self.answers: dict[Sequence, Answer] = {}
        self.requests: dict[Sequence, Request] = {}
        self.receiving: list[Reception] = []
        self.faults = 0
        self._in_flight: deque[_InFlight] = deque()
        self._unwanted: set[Sequence] = set()

        async def begin() -> tuple[EngineCore, asyncio.Task[None]]:
            core = EngineCore(self.scheduler, self.executor, max_steps=MAX_STEPS)
            return core, asyncio.create_task(core.run())

        self.core, self._running = self._do(begin())
        self._submit, self.executor.submit = self.executor.submit, self._submitted  # type: ignore[method-assign]
        self._result, self.executor.result = self.executor.result, self._ended  # type: ignore[method-assign]
        forward = runner.model.forward

        def checked(batch: Any, kv: Any, on_layer: Any = None) -> Any:
            before = self._cache()
            try:
                return forward(batch, kv, on_layer)
            finally:
                self._check_writes(before, batch.attention.slots.tolist())

        runner.model.forward = checked  # type: ignore[assignment, method-assign]

    # ---- what may happen ---------------------------------------------------------------------

    def resume(self, request: Request, share: float) -> None:
        """A request comes of which another node has drawn a share of the tokens."""
        tokens = self._expected.of(request).tokens
        one = Sequence(self.core.new_id(), request.prompt, request.work(), mid_stream=True)
        one.resumed = int(share * len(tokens))
        one.outputs = tokens[: one.resumed]
        self.requests[one], self.answers[one] = request, Answer(resumed=one.resumed)
        self.core.submit(one, self._listen)
        self.settle()

    def arrive(self, request: Request, *, choices: int = 1, receives: bool = False) -> None:
        sequences = []
        for index in range(choices):
            one = replace(request, seed=request.seed + index)
            sequence = Sequence(self.core.new_id(), one.prompt, one.work(), index=index)
            sequences.append(sequence)
            self.requests[sequence], self.answers[sequence] = one, Answer(leads=not index)
        first = sequences[0]
        first.siblings = sequences[1:]
        reception = None
        if receives and request.length > 1 and not first.wants_every_position:
            self.core.match_prefix(first)
            self.core.listen(first, self._listen)
            end = len(first.prompt) - 1
            if first.computed < end:
                reception = self.core.reserve(first, end)
            if reception is None:
                self.core.enqueue(first)
            else:
                self.receiving.append(reception)
                self._transfer(reception)
        else:
            self.core.submit(first, self._listen)
        self.settle()

    def received(self, how: str) -> None:
        """End the oldest reception: "commit", "abandon" or "cancel"."""
        reception = self.receiving.pop(0)
        one = reception.sequence
        if how == "commit":
            reception.commit(len(one.prompt) - 1, max(self._first_tokens(reception)))
        elif how == "abandon":
            reception.abandon()
        else:
            for each in (one, *one.siblings):
                self.answers[each].reason = FinishReason.CANCELLED
            self.core.cancel(one)
            reception.cancel()
        self.settle()

    def cancel(self, one: Sequence) -> None:
        """As a client or a stop string does."""
        if one.phase is not Phase.RECEIVING:
            self._cancel(one)
        self.settle()

    def release(self, one: Sequence) -> None:
        """Release the blocks of a computed prompt."""
        self.core.release_blocks(one)
        self.settle()

    @property
    def holding(self) -> list[Sequence]:
        """The computed prompts whose blocks were not released."""
        return list(self.scheduler._holding)

    @property
    def may_launch(self) -> bool:
        return bool(self.executor.waiting) and not self.rank.busy

    def launch(self, fault: str = "", *, memory: bool = False) -> None:
        """Launch the next step, which may fail."""
        self.rank.fault, self.rank.fault_is_memory = fault, memory
        self.faults += bool(fault)
        self.rank.launch(self.executor.waiting.popleft())
        self.settle()

    @property
    def may_complete(self) -> bool:
        return self.rank.replies_due > 0

    def complete(self) -> None:
        """The device computes its oldest step, and the head hears of it."""
        self.executor.put(self.rank.complete())
        self.settle()

    def finish(self) -> None:
        """Run everything to its end, and check it."""
        for _ in range(20_000):
            if self.receiving:
                self.received("abandon" if len(self.receiving) % 2 else "cancel")
            elif self.may_complete and (self.rank.replies_due > 1 or not self.may_launch):
                self.complete()
            elif self.may_launch:
                self.launch()
            elif self.holding:
                self.release(self.holding[0])
            else:
                break
        assert self.scheduler.idle
        assert self.pool.counts().available == self.pool.num_blocks, "a block leaked"
        self._check_answers()
        self._check_slots()

    def __enter__(self) -> LateEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.cancel()
        self._do(asyncio.gather(self._running, return_exceptions=True))
        self.loop.close()
        if not self.rank.busy:
            self.rank.end()
        self._stack.close()

    # ---- inside ------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        return self.loop.run_until_complete(work)

    def settle(self) -> None:
        """Let the head do all that it can, and check who owns the blocks."""
        self._do(self._settle())
        self.pool.check()
        tables = Counter(block for one in self.requests for block in one.block_table)
        reserved = {block for reception in self.receiving for block in reception.blocks}
        for block in reserved:
            assert tables.pop(block) == 1, "a reserved block has another owner"
        assert dict(tables) == self.pool._references, "blocks are not those of the tables"
        for step in self._in_flight:
            for one, blocks in step.blocks.items():
                assert one.block_table[: len(blocks)] == blocks, "a step in flight lost its blocks"

    async def _settle(self) -> None:
        for _ in range(3):
            for _ in range(5):
                await asyncio.sleep(0)
            if self._running.done():
                self._running.result()
                raise AssertionError("the loop has ended")
            async with asyncio.timeout(SECONDS):
                while self._needs_masks():
                    self.executor.sent_masks.clear()
                    await self.executor.sent_masks.wait()
            while self.executor.masks:
                self.rank.put_masks(self.executor.masks.popleft())

    def _needs_masks(self) -> bool:
        if not self.scheduler.in_flight:
            return False
        plan = self.scheduler.in_flight.oldest.plan
        return bool(plan.columns.masked) and plan.step not in self.executor.masked

    def _submitted(self, plan: StepPlan, sending: list[KVSending]) -> None:
        by_id = {one.sequence_id: one for one in self.requests}
        blocks = {}
        for row in rows_of(plan):
            count = -(-(row.start + len(row.tokens)) // self.pool.block_size)
            blocks[by_id[row.sequence_id]] = by_id[row.sequence_id].block_table[:count]
        self._in_flight.append(_InFlight(plan, blocks))
        self._submit(plan, sending)

    async def _ended(self) -> StepResult:
        try:
            return await self._result()
        finally:
            if self._in_flight:
                self._in_flight.popleft()

    def _listen(self, output: StepOutput) -> None:
        one = output.sequence
        self.answers[one].add(output)
        stops = self.requests[one].kind == "stop string"
        if stops and output.finish_reason is None and not UNWANTED.isdisjoint(output.tokens):
            self._cancel(one)

    def _cancel(self, one: Sequence) -> None:
        for each in (one, *one.siblings):
            answer = self.answers[each]
            if answer.reason is None:
                answer.reason = FinishReason.CANCELLED
        self.core.cancel(one)

    def _transfer(self, reception: Reception) -> None:
        """Fill reserved blocks, at the first moment at which a transfer may."""
        one = reception.sequence
        written = {
            block for step in self._in_flight for table in step.blocks.values() for block in table
        }
        assert written.isdisjoint(reception.blocks), "a step in flight writes reserved blocks"
        blocks = self._expected.compute_prompt(self.requests[one])
        source, target = self._expected.runner.cache, self.rank.runner.cache
        end = len(one.prompt) - 1
        mark, target.mark = target.mark, None
        for layer, first in enumerate(self._first_tokens(reception)):
            out = bytearray(packed_bytes(source, layer, end - first))
            source.pack(layer, blocks, first, end, out)
            target.scatter(layer, one.block_table, first, end, out)
        target.mark = mark

    def _first_tokens(self, reception: Reception) -> tuple[int, ...]:
        one, spec = reception.sequence, self.rank.runner.model.spec
        return first_tokens(spec, one.computed, len(one.prompt) - 1, reception.resume_at)

    def _cache(self) -> list[torch.Tensor]:
        return [x.view(torch.uint8).clone() for each in self.rank.runner.cache.layers for x in each]

    def _check_writes(self, before: list[torch.Tensor], slots: list[int]) -> None:
        """A forward pass writes the places of its rows, and no others."""
        for one, other in zip(before, self._cache(), strict=True):
            changed = (one != other).any(-1).any(0).nonzero().flatten().tolist()
            assert set(changed) <= set(slots), "a step wrote to another place"

    def _check_launch(self, request: ExecuteStep) -> None:
        """The rank has the block tables of the head, on the host and on the device."""
        step = next(each for each in self._in_flight if each.plan.step == request.plan.step)
        slots = self.rank.runner.slots
        for one, blocks in step.blocks.items():
            if one.sequence_id not in slots:
                continue  # the step failed before
            slot = slots[one.sequence_id]
            if slots.host_tables[slot, : len(blocks)].tolist() == blocks:
                assert slots.tables[slot, : len(blocks)].tolist() == blocks

    def _check_answers(self) -> None:
        """A fault ends at most one sequence, the first choice of a request with the others."""
        failed = sum(
            each.reason is FinishReason.ERROR for each in self.answers.values() if each.leads
        )
        assert failed <= self.faults
        for one, answer in self.answers.items():
            assert one.phase is Phase.FINISHED
            answer.check(self._expected.of(self.requests[one]))

    def _check_slots(self) -> None:
        """The ranks keep at most the sequences of which the head has not told them yet."""
        known = set(self.rank.runner.slots._by_sequence)
        assert known <= set(self.scheduler._removed), "a slot leaked"
