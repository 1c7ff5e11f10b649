"""Data planes without threads, whose loops the test steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq

from tandem.shared.handoff.carriers.transport import Transport
from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane.endpoint import ZEROMQ
from tandem.shared.handoff.plane.loop import PlaneLoop
from tandem.tests.shared.handoff.support.faults import Schedule, faulty
from tandem.tests.shared.handoff.support.memory_transport import MEMORY, Network
from tandem.tests.shared.handoff.support.plane_pair import WAIT_SECONDS, PlaneRank, expect
from tandem.tests.support.clock import SteppedClock

CARRIERS = [MEMORY, "tcp", "shared_memory", "cuda_ipc"]
TURN_SECONDS = 0.001


class HandRank(PlaneRank):
    """A rank whose loop the test steps."""

    loop: PlaneLoop

    def __enter__(self) -> HandRank:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.loop = self.plane.loop(self._context)
        self.plane._endpoints = self.loop.start()
        self.alive = True
        return self

    def turn(self) -> None:
        if self.alive:
            self.loop.turn()

    def kill(self) -> None:
        """End as SIGKILL does: connections break without a message."""
        self.alive = False
        for end in (self.loop._listener, self.loop._dialer):
            end.close()
        self.loop._carriers.close()
        if self.device is not None:
            driver: Any = self.device.driver
            assert not driver.owned and not driver.opened, "each is given back once"
        self._context.destroy(linger=0)

    def __exit__(self, *_: object) -> None:
        if not self.alive:
            return
        self.alive = False
        try:
            self.loop.close()
        finally:
            self._context.destroy(linger=0)
        self.check_books()


class World:
    """Ranks that take turns over one carrier, with faults if a schedule has any.

    In memory a turn takes a millisecond of the world's own time; elsewhere time is real.
    """

    def __init__(self, carrier: str, schedule: Schedule | None = None) -> None:
        self.carrier = carrier
        self.network = Network()
        self.memory = carrier == MEMORY
        self.fake_clock = SteppedClock(1000.0)
        self.clock: Callable[[], float] = self.fake_clock if self.memory else time.monotonic
        self.transport: Transport = self.network.transport if self.memory else ZEROMQ
        if schedule is not None:
            self.transport = faulty(self.transport, schedule, self.clock)
        self.ranks: list[HandRank] = []
        self.stack = ExitStack()  # what ends with the world, the newest first

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def rank(self, name: str, **config: Any) -> HandRank:
        config.setdefault("timing", Timing(ping_seconds=0.2, silence_seconds=1.5))
        carrier = "tcp" if self.memory else self.carrier
        rank = HandRank(name, clock=self.clock, transport=self.transport, carrier=carrier, **config)
        self.ranks.append(self.stack.enter_context(rank))
        return rank

    def pass_time(self, seconds: float = TURN_SECONDS) -> None:
        """Advance the world's own clock, or wait briefly on the real one."""
        if self.memory:
            self.fake_clock.now += seconds
        else:
            time.sleep(TURN_SECONDS / 10)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            for rank in self.ranks:
                rank.turn()
            self.pass_time()

    def until(
        self,
        condition: Callable[[], bool],
        turn: Callable[[], None] | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        """Step all ranks until the condition holds; fail at the deadline, by the world's clock."""
        end = self.clock() + seconds
        while not condition():
            assert self.clock() < end, "the condition did not come true in time"
            (turn or self.turn)()

    def transfer(
        self, prefill: PlaneRank, decode: PlaneRank, number: int, blocks: Any, **fields: Any
    ) -> None:
        """Reserve, open and compute; the caller takes the turns."""
        decode.plane.submit(expect(prefill, number, blocks, **fields))
        prefill.open(decode, number, blocks, **fields)
        prefill.compute(number, 0, fields["end_token"], chunk=33)
