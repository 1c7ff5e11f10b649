"""A model on one or several ranks of this process, without a head, and the handoff of a prompt's KV
from some ranks to others.

Ranks are threads, one of which computes at a time: from one collective to the next, then it is the
next rank's turn. That costs a fraction of what processes cost that talk over gloo, and a rank that
leaves a collective out, or has another shape there, fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from tandem.shared.engine.plan import SequenceStep
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.handoff.wire.head_parts import parts_of
from tandem.shared.handoff.wire.layer_windows import first_tokens
from tandem.shared.kv.layout import heads_by_rank
from tandem.shared.models.parallel import TensorParallel
from tandem.tests.support.batches import build_batch
from tandem.tests.support.packed_kv import packed_bytes

from .runners import build_runner

T = TypeVar("T")
# From a prompt and the tokens after it to the logits of the prompt's last token and of those.
Expected = Callable[[list[int], list[int]], torch.Tensor]
NEW_TOKENS = 8


class Meeting:
    """The collectives of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns: list[threading.Semaphore] = []
        self._given: list[torch.Tensor] = []

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What each rank returns. Raises what a rank raised first."""
        if self.size == 1:
            return [work(0)]
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        raised: list[BaseException] = []

        def in_turn(rank: int) -> T:
            self._turns[rank].acquire()
            try:
                return work(rank)
            except BaseException as error:
                raised.append(error)
                raise
            finally:
                self._pass_on(rank)

        with ThreadPoolExecutor(self.size) as threads:
            results = [threads.submit(in_turn, rank) for rank in range(self.size)]
            self._turns[0].release()
        if raised:
            raise raised[0]
        return [result.result() for result in results]

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which come here in their order."""
        if rank == 0:
            self._given = []
        parts = self._given
        assert len(parts) == rank, f"only rank {rank} has this collective"
        assert all((x.shape, x.dtype) == (other.shape, other.dtype) for other in parts)
        assert x.is_contiguous(), "torch.distributed takes no others"
        parts.append(x)
        self._pass_on(rank)
        self._turns[rank].acquire()
        assert len(parts) == self.size, f"other ranks left out a collective of rank {rank}"
        return parts

    def _pass_on(self, rank: int) -> None:
        self._turns[(rank + 1) % self.size].release()


@dataclass(frozen=True)
class ThreadRank(TensorParallel):
    """A rank that is a thread; its ``group`` is a ``Meeting``."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            with self.collectives.one():
                self.add_all(x)
        return x

    def add_all(self, x: torch.Tensor) -> None:
        """What a device does for ``all_reduce``."""
        assert x.is_contiguous()
        x.copy_(torch.stack(self.group.exchange(self.rank, x.clone())).sum(0))

    def broadcast(self, x: torch.Tensor) -> None:
        if self.size > 1:
            with self.collectives.one():
                x.copy_(self.group.exchange(self.rank, x.clone())[0])

    def agree(self, values: list[int]) -> list[int]:
        if self.size == 1:
            return values
        given = torch.tensor(values, dtype=torch.int64)
        sums: list[int] = sum(self.group.exchange(self.rank, given)).tolist()
        return sums

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [x]
        with self.collectives.one():
            parts: list[torch.Tensor] = self.group.exchange(self.rank, x.contiguous())
        return parts if self.rank == 0 else []


class Ranks:
    """The runners of a model's ranks, which compute one sequence in the same blocks."""

    def __init__(self, runners: Sequence[ModelRunner], meeting: Meeting | None = None) -> None:
        """With more than one runner, the ranks of all are those of the meeting."""
        self.runners = runners
        self.spec = runners[0].model.spec
        self.heads = heads_by_rank(self.spec, len(runners))
        self._meeting = meeting or Meeting(1)

    def logits(self, parts: list[list[int]], start: int, table: list[int]) -> torch.Tensor:
        """The logits [parts, V] after each part of a sequence, whose first is at ``start``."""

        def of_rank(rank: int) -> list[torch.Tensor | None]:
            runner, at = self.runners[rank], start
            logits = []
            with torch.inference_mode():
                for tokens in parts:
                    step = SequenceStep(1, tokens, at, table, True)
                    batch = build_batch([step], runner.cache.block_size, runner.cache.device)
                    hidden = runner.model.forward(batch, runner.cache.kv)
                    logits.append(runner.model.logits(hidden))
                    at += len(tokens)
            return logits

        first, *others = self._meeting.run(of_rank)
        assert all(logits is None for rank in others for logits in rank)
        return torch.cat([logits for logits in first if logits is not None])

    def draw(self, prompt: list[int], count: int, table: list[int]) -> torch.Tensor:
        """The logits [1 + count, V] after a prompt, and after each of ``count`` greedy tokens."""
        rows = [self.logits([prompt], 0, table)]
        for at in range(len(prompt), len(prompt) + count):
            rows.append(self.logits([[int(rows[-1].argmax())]], at, table))
        return torch.cat(rows)


def build_ranks(model: str | Path, size: int = 1, **options: Any) -> Ranks:
    """Load a model onto several ranks; ``options`` are those of ``build_runner``, by default in
    float32."""
    meeting = Meeting(size)
    settings = {"dtype": "float32", "block_size": 4, "num_blocks": 60, **options}
    runners = [
        build_runner(model, tp=ThreadRank(rank, size, meeting), **settings) for rank in range(size)
    ]
    return Ranks(runners, meeting)


def hand_over(sender: Ranks, receiver: Ranks, end: int, theirs: list[int], ours: list[int]) -> None:
    """The KV of ``end`` tokens, in as many parts as the ranks of both sides make of it. Layers with
    a window send no more than that; the receiver's blocks have nothing else."""
    for runner in receiver.runners:
        for components in runner.cache.layers:
            for each in components:
                each.unflatten(1, (-1, runner.cache.block_size))[:, ours] = 0
    firsts = first_tokens(receiver.spec, 0, end, end)
    for part in parts_of(receiver.heads, sender.heads):
        source, target = sender.runners[part.sender].cache, receiver.runners[part.receiver].cache
        heads = [
            range(run.first_head, run.end_head) for run in part.heads for _ in range(run.layers)
        ]
        for layer, (first, shard) in enumerate(zip(firsts, heads, strict=True)):
            if not shard:
                continue
            out = bytearray(packed_bytes(source, layer, end - first, shard))
            source.pack(layer, theirs, first, end, out, shard)
            target.scatter(layer, ours, first, end, out, shard)


def check_on_ranks(
    model: Path, prompt: list[int], expected: Expected, *, size: int = 2, atol: float = 1e-4
) -> Ranks:
    """A prompt's logits and those of the greedy tokens after it, on one rank and on several, to
    which the first one hands over; in between, the several compute the prompt in chunks and hand it
    over to the first. All are the expected ones, and so are the tokens. Returns the several."""
    one, several = (
        build_ranks(model, ranks, block_size=block, kv_dtype="float32")
        for ranks, block in ((1, 4), (size, 8))
    )
    tables = {one: list(range(20, 40)), several: list(range(12))[::-1]}
    others = {one: list(range(58, 40, -1)), several: list(range(12, 60, 3))}
    logits = one.draw(prompt, NEW_TOKENS, tables[one])
    tokens = logits.argmax(-1).tolist()
    expected_logits = expected(prompt, tokens[:NEW_TOKENS])
    assert expected_logits.argmax(-1).tolist() == tokens

    def check(result: torch.Tensor, rows: int = NEW_TOKENS + 1) -> None:
        torch.testing.assert_close(result, expected_logits[:rows], atol=atol, rtol=atol)
        assert result.argmax(-1).tolist() == tokens[:rows]

    check(logits)
    half, end = len(prompt) // 2, len(prompt) - 1
    check(several.logits([prompt[:half], prompt[half:]], 0, tables[several])[1:], rows=1)
    following = [prompt[end:], *([token] for token in tokens[:NEW_TOKENS])]
    for sender, receiver in ((one, several), (several, one)):
        hand_over(sender, receiver, end, tables[sender], others[receiver])
        check(receiver.logits(following, end, others[receiver]))
    return several
