"""The connection between the keeper and one worker: a socket pair, messages in both directions.

A message has a topic and a body. ``tell`` sends one, ``ask`` also awaits the answer. Messages
arrive in the order in which they were sent; those told are handled before the next is read, those
asked in tasks of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping

from ...shared.errors import UnavailableError
from ...shared.telemetry.logs import logger

log = logger("router")

HEAD = struct.Struct("<IBBI")  # bytes of the body, kind, topic, number of the question
MAX_BODY = 256 << 20
# A peer that reads nothing while this much waits for it is given up.
MAX_WAITING = 256 << 20
ANSWER_SECONDS = 5.0
# The keeper answers some questions by asking all workers. It waits less for one that hangs than a
# worker waits for the keeper, so that the answers of the others come in time.
GATHER_SECONDS = ANSWER_SECONDS / 2
MAX_QUESTIONS = 4096


class Topic(enum.IntEnum):
    """Subjects of messages. From the keeper to workers, up to ``STOP``; then the reverse; then both
    ways."""

    JOIN = 1
    HEARTBEAT = 2
    STATE = 3
    LOST = 4
    ABSENT = 5
    OTHERS = 6
    WHOLE = 7
    RETIRE = 8
    STOP = 9
    SYNCED = 10

    SERVING = 20
    LOADS = 21
    SHUT_DOWN = 22
    COMMAND = 23
    PAGE = 24
    DOUBT = 25

    SERIES = 40
    USAGE = 41
    RESPONSE = 42
    OVERVIEW = 43
    APPROVAL = 44
    ITEMS = 45


class _MessageKind(enum.IntEnum):
    TOLD = 0
    ASKED = 1
    ANSWERED = 2
    FAILED = 3


Told = Callable[[bytes], None]
Asked = Callable[[bytes], Awaitable[bytes]]


class LinkClosedError(UnavailableError):
    """The process at the other end is gone, or does not answer."""


class Link:
    """One end. ``run`` reads until the other end closes."""

    def __init__(self, told: Mapping[Topic, Told], asked: Mapping[Topic, Asked]) -> None:
        self._told = told
        self._asked = asked
        self._writer: asyncio.StreamWriter | None = None
        self.opened = asyncio.Event()  # what is told before is lost
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, end: socket.socket) -> None:
        """Exchange messages until the other end closes."""
        reader, self._writer = await asyncio.open_connection(sock=end)
        self.opened.set()
        try:
            while True:
                head = await reader.readexactly(HEAD.size)
                size, kind, topic, number = HEAD.unpack(head)
                if size > MAX_BODY:
                    raise LinkClosedError(f"a message of {size} bytes is too large")
                self._take(kind, topic, number, await reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close this end; what was asked fails."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LinkClosedError("the router's other process is gone"))
        self._answers.clear()
        for task in self._answering:
            task.cancel()

    def tell(self, topic: Topic, body: bytes = b"") -> None:
        """Send a message; nothing if the other end is gone."""
        self._send(_MessageKind.TOLD, topic, 0, body)

    async def ask(self, topic: Topic, body: bytes = b"", seconds: float = ANSWER_SECONDS) -> bytes:
        """Send a message, and return the answer. Raises ``LinkClosedError`` without one in time,
        ``RequestError`` if the other end refuses."""
        if self._writer is None or len(self._answers) >= MAX_QUESTIONS:
            raise LinkClosedError("the router's other process is gone or too slow")
        number = next(self._numbers) & 0xFFFFFFFF
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(_MessageKind.ASKED, topic, number, body)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise LinkClosedError("the router's other process does not answer") from None
        finally:
            self._answers.pop(number, None)

    async def drained(self) -> None:
        """Wait until most of what was sent has been read; for callers that send much."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.drain()

    def _send(self, kind: _MessageKind, topic: Topic, number: int, body: bytes) -> None:
        writer = self._writer
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_WAITING:
            log.error("a process of the router reads nothing, and is given up")
            writer.transport.abort()
            return
        writer.write(HEAD.pack(len(body), kind, topic, number) + body)

    def _take(self, kind: int, topic: int, number: int, body: bytes) -> None:
        if kind == _MessageKind.TOLD:
            self._told[Topic(topic)](body)
        elif kind == _MessageKind.ASKED:
            task = asyncio.create_task(self._answer(Topic(topic), number, body))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (answer := self._answers.get(number)) is not None and not answer.done():
            if kind == _MessageKind.ANSWERED:
                answer.set_result(body)
            else:
                answer.set_exception(LinkClosedError(body.decode()))

    async def _answer(self, topic: Topic, number: int, body: bytes) -> None:
        try:
            found = await self._asked[topic](body)
            self._send(_MessageKind.ANSWERED, topic, number, found)
        except Exception as error:
            if not isinstance(error, UnavailableError):
                log.exception("a question of another process failed")
            self._send(_MessageKind.FAILED, topic, number, str(error).encode())
