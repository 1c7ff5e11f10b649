"""A TCP proxy between two processes, which breaks what passes through it at the byte that a test
names.

A ``Wire`` is one port and every connection through it. ``DOWN`` is from the server that it stands
for to the client: the way of KV. All wires of a ``FaultProxy`` live on one event loop in a thread
of its own; a test may call any method from any thread, and an action that it gives to ``when`` runs
on the loop, between two bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

DOWN, UP = "down", "up"
BOTH = (DOWN, UP)
CHUNK = 65536
CONNECT_SECONDS = 5.0

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Mark:
    """An action for when ``count`` bytes have passed, and the time at which it ran."""

    count: int
    action: Callable[[], object]
    fired_at: float = 0.0
    fired: threading.Event = field(default_factory=threading.Event)

    def fire(self) -> None:
        self.fired_at = time.monotonic()
        self.action()
        self.fired.set()


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction of a wire: how its bytes pass at present, and how many have."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    rate: float = float("inf")
    delay: float = 0.0
    flips: bool = False
    duplicates: bool = False
    passed: int = 0
    marks: list[Mark] = field(default_factory=list)

    def fire_due(self) -> None:
        for mark in [mark for mark in self.marks if mark.count <= self.passed]:
            self.marks.remove(mark)
            mark.fire()

    def until_mark(self) -> int:
        """Bytes that may pass before something happens."""
        return min((mark.count - self.passed for mark in self.marks), default=CHUNK)

    async def carry(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.delay + len(piece) / self.rate)
        # Counted first: the receiver may ask for the count at once.
        self.passed += len(piece)
        writer.write(self._spoil(piece))
        await writer.drain()

    def _spoil(self, piece: bytes) -> bytes:
        if self.flips:
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        if self.duplicates:
            piece += piece
        self.flips = self.duplicates = False
        return piece


class Wire:
    """One proxied port. Connections to ``target``; until that is set, they are refused."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.target: tuple[str, int] | None = None
        self.port = 0
        self._loop = loop
        self._server: asyncio.Server | None = None
        self._lanes = {DOWN: _Lane(), UP: _Lane()}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._age = 0
        self.heal()

    # ---- what a test does ----------------------------------------------------------------------

    def passed(self, way: str = DOWN) -> int:
        """Bytes that have gone through, since the wire is there."""
        return self._lanes[way].passed

    def when(self, way: str, count: int, action: Callable[[], object]) -> Mark:
        """Run ``action`` between two bytes: when ``count`` more have passed, or just before the
        next one when it is 0."""
        lane = self._lanes[way]
        mark = Mark(lane.passed + count, action)
        self._run_in_loop(lambda: lane.marks.append(mark))
        return mark

    def hole(self, *ways: str) -> None:
        """Let nothing through, not even that a connection has ended."""
        self._change(ways, lambda lane: lane.open.clear())

    def forget(self) -> None:
        """Let nothing through on the connections that there are, for good, as a firewall that has
        forgotten them; new ones pass."""

        def change() -> None:
            self._age += 1

        self._run_in_loop(change)

    def slow(self, *ways: str, rate: float = float("inf"), delay: float = 0.0) -> None:
        """At most ``rate`` bytes a second, and every chunk ``delay`` seconds late."""

        def change(lane: _Lane) -> None:
            lane.rate, lane.delay = rate, delay

        self._change(ways, change)

    def flip(self, way: str) -> None:
        """Turn one bit of the next byte."""
        self._change((way,), lambda lane: setattr(lane, "flips", True))

    def duplicate(self, way: str) -> None:
        """Send the next chunk twice."""
        self._change((way,), lambda lane: setattr(lane, "duplicates", True))

    def reset(self) -> None:
        """End every connection with RST, at both ends, wherever it is in a message."""
        self._run_in_loop(lambda: _reset_all(self._writers))

    def heal(self) -> None:
        """Let everything through; what was held up arrives now, late."""

        def change(lane: _Lane) -> None:
            lane.rate, lane.delay = float("inf"), 0.0
            lane.flips = lane.duplicates = False
            lane.marks.clear()
            lane.open.set()

        self._change(BOTH, change)

    # ---- on the loop ---------------------------------------------------------------------------

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self.target = None
        # asyncio loses the connection that it is about to accept when a server closes.
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)
        self._server.close()
        for writer in self._writers:
            _reset(writer)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._join(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):  # cancelled by ``close`` alone
            _reset(writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target is None:
            raise ConnectionRefusedError
        async with asyncio.timeout(CONNECT_SECONDS):
            server_reader, server_writer = await asyncio.open_connection(*self.target)
        self._writers.add(server_writer)
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, self._lanes[UP]),
                self._pump(server_reader, writer, self._lanes[DOWN]),
            )
        finally:
            self._writers.discard(server_writer)
            server_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: _Lane
    ) -> None:
        """One direction of one connection, to its end."""
        end, age = writer.close, self._age
        try:
            while data := await reader.read(CHUNK):
                while data:
                    lane.fire_due()
                    await self._passable(lane, age)
                    room = lane.until_mark()
                    await lane.carry(data[:room], writer)
                    data = data[room:]
                lane.fire_due()
        except OSError:
            end = lambda: _reset(writer)  # noqa: E731 - the end is passed on as it came
        await self._passable(lane, age)
        end()

    async def _passable(self, lane: _Lane, age: int) -> None:
        """Wait until what has come in may go on."""
        if age != self._age:
            await asyncio.Event().wait()
        await lane.open.wait()

    def _change(self, ways: tuple[str, ...], change: Callable[[_Lane], Any]) -> None:
        self._run_in_loop(lambda: [change(self._lanes[way]) for way in ways])

    def _run_in_loop(self, function: Callable[[], T]) -> T:
        return on_loop(self._loop, function)


class FaultProxy:
    """The thread and the wires; ``running`` makes one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self.wires: list[Wire] = []

    def start(self) -> None:
        self._thread.start()

    def wire(self, port: int = 0) -> Wire:
        """A new wire, on any port or on this one. Raises OSError when it is taken."""
        wire = on_loop(self._loop, lambda: Wire(self._loop))
        self._wait(wire.listen(port))
        self.wires.append(wire)
        return wire

    def two_wires(self) -> tuple[Wire, Wire]:
        """Two wires on ports that follow each other, as a rank's bulk and control do."""
        while True:
            first = self.wire()
            with contextlib.suppress(OSError):
                return first, self.wire(first.port + 1)

    def heal(self) -> None:
        for wire in self.wires:
            wire.heal()

    def stop(self) -> None:
        for wire in self.wires:
            self._wait(wire.close())
        self._wait(_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


async def _others() -> None:
    """Wait for all other tasks of the loop, among them connections that no wire knows yet."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


@contextmanager
def running_proxy() -> Iterator[FaultProxy]:
    proxy = FaultProxy()
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Run it on the loop, from any thread, and wait for it."""
    try:
        if asyncio.get_running_loop() is loop:
            return function()
    except RuntimeError:
        pass

    async def run() -> T:
        return function()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(10)


def _reset_all(writers: Iterable[asyncio.StreamWriter]) -> None:
    for writer in writers:
        _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN, and drop what was not sent."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
