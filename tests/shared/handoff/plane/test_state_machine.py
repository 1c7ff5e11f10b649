"""Two data planes over a carrier that fails, and heads that change their minds: whatever happens in
whatever order, no byte lands where it was not allowed, and in the end nobody holds anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    Cancelled,
    CancelSend,
    Event,
    Expect,
    LayerReady,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from tandem.tests.shared.handoff.support.by_hand import HandRank, World
from tandem.tests.shared.handoff.support.faults import Fault, Schedule
from tandem.tests.shared.handoff.support.memory_cache import MemoryCache, layer_of
from tandem.tests.shared.handoff.support.memory_transport import MEMORY
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    CELL,
    HEAD_BYTES,
    HEADS,
    LAYERS,
    expect,
)

BLOCKS = 24
MAX_TOKENS = 3 * BLOCK
MAX_LIVE = 5


class WatchedCache(MemoryCache):
    """Knows which block tables may be touched now. Planes survive whatever a cache raises, so what
    was wrong is remembered."""

    def __init__(self, source: random.Random) -> None:
        layout = [layer_of(range(HEADS), HEAD_BYTES)] * LAYERS
        super().__init__(layout, num_blocks=BLOCKS, block_size=BLOCK)
        self.source = source
        self.free = list(range(BLOCKS))
        self.owned: set[tuple[int, ...]] = set()
        self.violations: list[str] = []

    def reserve(self, tokens: int) -> tuple[int, ...]:
        self.source.shuffle(self.free)
        table = tuple(self.free.pop() for _ in range(-(-tokens // BLOCK)))
        self.owned.add(table)
        return table

    def give_back(self, table: tuple[int, ...]) -> None:
        """Give the blocks to another owner, which writes to them at once."""
        self.owned.remove(table)
        self.free += table
        for layer in self.layers:
            for token in range(len(table) * BLOCK):
                layer[self.row(table, token)] = self.source.randbytes(CELL)

    def pack(self, layer: int, block_table: Sequence[int], *of: Any) -> None:
        self._check("read", block_table)
        super().pack(layer, block_table, *of)

    def scatter(self, layer: int, block_table: Sequence[int], *of: Any) -> None:
        self._check("written", block_table)
        super().scatter(layer, block_table, *of)

    def _check(self, what: str, block_table: Sequence[int]) -> None:
        if tuple(block_table) not in self.owned:
            self.violations.append(f"{tuple(block_table)} was {what}, and is nobody's")


@dataclass(slots=True)
class AttemptSide:
    """One attempt on one rank: ``ended`` is the event that freed its blocks."""

    rank: HandRank
    table: tuple[int, ...]
    ended: Event | None = None
    asked_again: bool = False  # then the plane may answer once more, that it is over


@dataclass(slots=True)
class Try:
    """One attempt as both heads know it. ``rows`` is what the prefill node computes."""

    number: int
    attempt: int
    first: int
    end: int
    window: int
    there: AttemptSide
    here: AttemptSide
    rows: dict[tuple[int, int], bytes]
    computed: int = 0
    announced: list[LayerReady] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.there.ended is None or self.here.ended is None

    @property
    def range(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "first_token": self.first,
            "end_token": self.end,
            "window_bytes": self.window,
            "progress_seconds": 2.0,
        }


GONE = Cancelled(transfer_id=0, attempt=0, side="send")


class Planes(RuleBasedStateMachine):
    """The world, and the two heads' books."""

    def __init__(self) -> None:
        super().__init__()
        self.source = random.Random(0)
        self.schedule = Schedule(1)
        self.world = World(MEMORY, self.schedule)
        self.tries: list[Try] = []
        self.read: dict[HandRank, int] = {}
        self.epochs = 0
        self.numbers = 0
        self.prefill = self._start("p")
        self.decode = self._start("d")

    def _start(self, name: str) -> HandRank:
        self.epochs += 1
        rank = self.world.rank(
            name,
            epoch=self.epochs,
            cache=WatchedCache(self.source),
            staging_slots=8,
            slot_bytes=2 * CELL,
            timing=Timing(ping_seconds=0.3, silence_seconds=1.0),
            listen_host="127.0.0.1" if name == "p" else None,
        )
        self.read[rank] = 0
        return rank

    # ---- what the heads do -------------------------------------------------------------------

    @precondition(lambda self: sum(one.live for one in self.tries) < MAX_LIVE)
    @rule(
        first=st.integers(0, BLOCK + 1),
        tokens=st.integers(1, MAX_TOKENS - BLOCK - 1),
        window=st.sampled_from([2 * CELL, 5 * CELL, 40 * CELL, 1 << 20]),
        open_first=st.booleans(),
        computed=st.booleans(),
    )
    def begin(self, first: int, tokens: int, window: int, open_first: bool, computed: bool) -> None:
        self.numbers += 1
        one = self._begin(self.numbers, 1, first, first + tokens, window, open_first)
        if computed:
            self._compute(one, one.end)

    @precondition(lambda self: self.tries and sum(one.live for one in self.tries) < MAX_LIVE)
    @rule(data=st.data(), order=st.sampled_from(["expect", "open", "expect, a while, open"]))
    def try_again(self, data: st.DataObject, order: str) -> None:
        """A newer attempt, whether or not the old one has ended."""
        old = self._choose(data)
        attempt = 1 + max(one.attempt for one in self.tries if one.number == old.number)
        pause = 12 if "while" in order else 0
        self._begin(old.number, attempt, old.first, old.end, old.window, order == "open", pause)

    def _begin(
        self,
        number: int,
        attempt: int,
        first: int,
        end: int,
        window: int,
        open_first: bool,
        pause: int = 0,
    ) -> Try:
        there, here = self._cache(self.prefill), self._cache(self.decode)
        cells = [(layer, token) for layer in range(LAYERS) for token in range(end)]
        one = Try(
            number=number,
            attempt=attempt,
            first=first,
            end=end,
            window=window,
            there=AttemptSide(self.prefill, there.reserve(end)),
            here=AttemptSide(self.decode, here.reserve(end)),
            rows={cell: self.source.randbytes(CELL) for cell in cells},
        )
        self.tries.append(one)
        if open_first:
            self._open(one)
        self._expect(one)
        self._turn("both", pause)
        if not open_first:
            self._open(one)
        return one

    def _expect(self, one: Try) -> None:
        command = expect(
            one.there.rank, one.number, one.here.table, deadline_seconds=8.0, **one.range
        )
        assert isinstance(command, Expect)
        one.here.rank.plane.submit(command)

    def _open(self, one: Try) -> None:
        one.there.rank.open(one.here.rank, one.number, one.there.table, **one.range)

    @precondition(lambda self: self.tries)
    @rule(data=st.data(), tokens=st.integers(1, MAX_TOKENS))
    def compute(self, data: st.DataObject, tokens: int) -> None:
        """A chunk, layer by layer, as long as the blocks are held."""
        one = self._choose(data)
        self._compute(one, min(one.end, one.computed + tokens))

    def _compute(self, one: Try, end: int) -> None:
        if one.there.ended is not None or end <= one.computed:
            return
        cache = self._cache(one.there.rank)
        for layer in range(LAYERS):
            for token in range(one.computed, end):
                cache.layers[layer][cache.row(one.there.table, token)] = one.rows[layer, token]
            one.announced.append(
                LayerReady(
                    transfer_id=one.number,
                    attempt=one.attempt,
                    first_layer=layer,
                    end_layer=layer + 1,
                    first_token=one.computed,
                    end_token=end,
                )
            )
            one.there.rank.plane.submit(one.announced[-1])
        one.computed = end

    @precondition(lambda self: self.tries)
    @rule(data=st.data(), sending=st.booleans())
    def cancel(self, data: st.DataObject, sending: bool) -> None:
        self._cancel(self._choose(data), sending)

    def _cancel(self, one: Try, sending: bool) -> None:
        side = one.there if sending else one.here
        kind = CancelSend if sending else CancelExpect
        if side.rank.alive:
            side.rank.plane.submit(kind(transfer_id=one.number, attempt=one.attempt))

    @precondition(lambda self: self.tries)
    @rule(data=st.data(), which=st.sampled_from(["open", "expect", "ready"]))
    def say_it_again(self, data: st.DataObject, which: str) -> None:
        """Commands twice, and those of attempts that are long over."""
        one = self._choose(data)
        side = one.here if which == "expect" else one.there
        if not side.rank.alive:
            return
        if which == "ready":
            for command in one.announced[-2:]:
                side.rank.plane.submit(command)
            return
        side.asked_again = True
        self._expect(one) if which == "expect" else self._open(one)

    # ---- what the world does -----------------------------------------------------------------

    @rule(
        who=st.sampled_from(["both", "both", "prefill", "decode"]),
        times=st.sampled_from([1, 4, 30]),
    )
    def turn(self, who: str, times: int) -> None:
        self._turn(who, times)

    def _turn(self, who: str, times: int) -> None:
        for _ in range(times):
            if who != "decode":
                self.prefill.turn()
            if who != "prefill":
                self.decode.turn()
            self.world.pass_time()
            self._hear()
            self.slots_and_credits_are_conserved()

    @rule(seconds=st.sampled_from([0.05, 0.35, 1.1, 9.0]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(faults=st.lists(st.sampled_from([None, None, *Fault]), min_size=1, max_size=6))
    def go_wrong(self, faults: list[Fault | None]) -> None:
        self.schedule.planned.extend(faults)

    @precondition(lambda self: any(one.live for one in self.tries))
    @rule(what=st.sampled_from(["the cable is pulled", "p", "d", "p, silently", "d, silently"]))
    def disaster(self, what: str) -> None:
        if len(what) > 1:
            self.world.network.cut()
        if what[0] in "pd":
            self._restart(what[0])

    def _restart(self, name: str) -> None:
        """SIGKILL, or the end of a machine; another start under the same name."""
        old = self.prefill if name == "p" else self.decode
        old.kill()
        for one in self.tries:
            for side in (one.there, one.here):
                if side.rank is old and side.ended is None:
                    side.ended = GONE
        if name == "p":
            self.prefill = self._start(name)
        else:
            self.decode = self._start(name)

    # ---- what the heads hear -----------------------------------------------------------------

    def _hear(self) -> None:
        for rank in (self.prefill, self.decode):
            news = rank.log.events[self.read[rank] :]
            self.read[rank] = len(rank.log.events)
            for event in news:
                self._take(rank, event)

    def _take(self, rank: HandRank, event: Event) -> None:
        for one in self.tries:
            if (one.number, one.attempt) != (
                getattr(event, "transfer_id", None),
                getattr(event, "attempt", None),
            ):
                continue
            if isinstance(event, SendFinished):
                self._check_finished(one)
            if isinstance(event, Received):
                self._check_received(one)
            is_send = isinstance(event, (SendFinished, SendFailed))
            if is_send or (isinstance(event, Cancelled) and event.side == "send"):
                self._end(rank, one.there, event)
            is_receive = isinstance(event, (Received, ReceiveFailed))
            if is_receive or (isinstance(event, Cancelled) and event.side == "receive"):
                self._end(rank, one.here, event)

    def _end(self, rank: HandRank, side: AttemptSide, event: Event) -> None:
        if side.rank is not rank:
            return
        if side.ended is None:
            side.ended = event
            self._cache(rank).give_back(side.table)
            return
        again = isinstance(event, Cancelled) or (
            side.asked_again and isinstance(event, (SendFailed, ReceiveFailed))
        )
        assert again, f"{event} after {side.ended}"

    def _check_finished(self, one: Try) -> None:
        assert one.there.ended is None, "a transfer may finish once"
        if one.here.rank.alive:
            received = [(e.transfer_id, e.attempt) for e in one.here.rank.log.of(Received)]
            assert (one.number, one.attempt) in received

    def _check_received(self, one: Try) -> None:
        assert one.here.ended is None, "a transfer may be committed once"
        cache = self._cache(one.here.rank)
        for layer in range(LAYERS):
            for token in range(one.first, one.end):
                row = cache.layers[layer][cache.row(one.here.table, token)]
                assert row == one.rows[layer, token], f"layer {layer} token {token} is another's"

    # ---- what must always be so --------------------------------------------------------------

    @invariant()
    def nobody_touches_what_is_not_theirs(self) -> None:
        for rank in self.world.ranks:
            assert not self._cache(rank).violations

    @invariant()
    def slots_and_credits_are_conserved(self) -> None:
        sender = self.prefill.loop._sender
        self.prefill.loop._carriers.ring.check_conserved(sum(sender._slot_counts.values()))
        for transfer in sender._transfers.values():
            assert 0 <= transfer.in_flight <= transfer.command.window_bytes
        stats = self.prefill.plane.stats()
        flying = sum(transfer.in_flight for transfer in sender._transfers.values())
        assert stats.bytes_sent == stats.bytes_acknowledged + stats.bytes_written_off + flying

    def teardown(self) -> None:
        """After faults stop and all transfers end, nothing is held, and the next transfer works."""
        self.schedule.quiet()
        for one in self.tries:
            self._cancel(one, sending=True)
            self._cancel(one, sending=False)
        self._run(lambda: False)
        for rank in (self.prefill, self.decode):
            stats = rank.plane.stats()
            assert stats.active_sends == stats.active_receives == stats.held_slots == 0
            assert sorted(self._cache(rank).free) == list(range(BLOCKS))
        for window in (2 * CELL, 1 << 20):
            self.numbers += 1
            last = self._begin(self.numbers, 1, 0, MAX_TOKENS, window, False)
            self._compute(last, last.end)
            self._run(lambda last=last: not last.live)  # type: ignore[misc]
            assert isinstance(last.there.ended, SendFinished)
            assert isinstance(last.here.ended, Received)
        self.world.__exit__()

    def _run(self, until: Callable[[], bool]) -> None:
        """Time enough for every silence to be noticed."""
        for _ in range(60):
            self._turn("prefill", 3)
            self._turn("decode", 1)
            self.world.pass_time(0.07)
            if until():
                break
        self.nobody_touches_what_is_not_theirs()

    # ---- helpers -----------------------------------------------------------------------------

    def _choose(self, data: st.DataObject) -> Try:
        return self.tries[-1 - data.draw(st.integers(0, len(self.tries) - 1))]

    @staticmethod
    def _cache(rank: HandRank) -> WatchedCache:
        assert isinstance(rank.cache, WatchedCache)
        return rank.cache


class TestPlanes(Planes.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(
        max_examples=settings.default.max_examples // 2,  # type: ignore[union-attr]
        stateful_step_count=40,
    )
