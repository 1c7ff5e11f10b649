"""The head's side of its ranks: start them, send them steps, notice when one is gone.

Each rank is a process of its own, reached over a socket pair, or over TCP if it is on another host
(``other_hosts.py``). The same step goes to every rank; rank 0 replies with the sampled tokens, the
others only that they are done. Data-plane commands and events travel on the same channel, and never
wait for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from ..errors import ModelError, StartupError
from ..handoff.plane import messages as plane
from ..handoff.wire.codec import CodecError
from ..kv.planning import RankDevice, RankMemory
from ..process.signals import describe_exit
from .channel import framed, read_message
from .messages import (
    AllocateCache,
    CacheAllocated,
    DeviceOpened,
    ExecuteStep,
    Failed,
    KVSending,
    LoadFormats,
    LoadModel,
    ModelLoaded,
    OpenDevice,
    Ping,
    Pong,
    RankEndpoints,
    RankSettings,
    Reply,
    StepDone,
    ToRank,
)
from .other_hosts import Host, OtherHosts, RemoteProcess
from .plan import SlotLimits, StepFailure, StepLimits, StepPlan, StepResult, TokenMasks
from .watchdog import Watchdog

log = logging.getLogger(__name__)

T = TypeVar("T")

ENVIRONMENT = {
    # Weights in huge pages: a CPU reads them a fifth faster at one row. glibc only.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # Triton 3.9 warns at each compilation where this default of its own is not spelled out.
    "TRITON_DEFAULT_FP_FUSION": "1",
    # Chunks of varying lengths fragment a GPU's memory, which expandable segments avoid.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
if platform.machine() in ("x86_64", "AMD64"):
    # How often an idle thread polls before it sleeps: for 50 us, which is longer than the gap
    # between most loops of a step, instead of 16 ms. Polling on a shared core would keep other
    # processes, above all the head, from running.
    ENVIRONMENT["GOMP_SPINCOUNT"] = "1000"
# Longer than any request waits. The watchdog notices a step that hangs much sooner.
STEP_SECONDS = 3600.0
# Ranks that continue after another one has failed reach its next collective within this time.
AGREE_SECONDS = 5.0
STOP_SECONDS = 5.0
PING_SECONDS = 1.0
# A rank that misses this many pings in a row is stuck. Pings are counted rather than seconds, so
# that a head which was itself suspended does not blame its ranks.
MAX_MISSED_PINGS = 10


class StepFailedError(Exception):
    """A step raised, on ranks that can continue. ``cause`` is one of plan.py's."""

    def __init__(self, failure: StepFailure) -> None:
        super().__init__(failure.reason)
        self.cause = failure.cause


class ExecutorLostError(Exception):
    """A rank process died: its state is lost, and the node with it."""


class Executor(Protocol):
    """Runs steps on the ranks."""

    def submit(self, plan: StepPlan, sending: list[KVSending]) -> None:
        """Submit a step to every rank, after the steps submitted before.

        ``sending`` are the transfers that take a sequence's KV as it is computed.
        """
        ...

    def send_masks(self, masks: TokenMasks) -> None:
        """Give the masks of a submitted step to the rank that draws its tokens."""
        ...

    async def result(self) -> StepResult:
        """The result of the oldest submitted step.

        Raises ``StepFailedError`` if the step failed (a step planned on top of it fails too), and
        ``ExecutorLostError`` if no later step can succeed.
        """
        ...


@dataclass(frozen=True, slots=True)
class _RankGone:
    """Stands in for the replies of a rank that is gone."""

    reason: str


@dataclass(slots=True, eq=False)
class Rank:
    """One rank's process and connection. ``host`` is ``None`` for a rank on the head's host."""

    index: int
    process: asyncio.subprocess.Process | RemoteProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    replies: asyncio.Queue[Reply | _RankGone] = field(default_factory=asyncio.Queue)
    pump: asyncio.Task[None] | None = None
    missed_pings: int = 0  # pings since the rank's last message
    watchdog: Watchdog = field(default_factory=Watchdog)
    host: Host | None = None

    def __str__(self) -> str:
        return f"rank {self.index}" + ("" if self.host is None else f" of {self.host}")


class MultiprocessExecutor:
    """The ranks of one node, each a process, those after the first ones on ``hosts``.

    ``on_event(rank, event)`` gets the events of data planes. ``on_lost(reason)`` is called once,
    when a rank that had its cache is gone or stuck, also between steps. ``load_seconds`` is the
    time limit for opening the device, for loading, and for allocating the cache.
    """

    def __init__(
        self,
        on_event: Callable[[int, plane.Event], None] = lambda rank, event: None,
        on_lost: Callable[[str], None] = lambda reason: None,
        *,
        load_seconds: float,
        hosts: OtherHosts | None = None,
    ) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._load_seconds = load_seconds
        self._hosts = hosts
        self._rendezvous_folder: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[Rank] = []
        self._serving = False
        self._lost_reason = ""
        self._watch: asyncio.Task[None] | None = None

    async def start(self, settings: list[RankSettings]) -> list[RankDevice]:
        """Start one process for each entry, or await it from its host; returns the devices that
        they run on.

        Raises ``StartupError`` with the message of a rank that cannot.
        """
        rendezvous = self._rendezvous() if len(settings) > 1 else ""
        here = len(settings) if self._hosts is None else self._hosts.ranks_per_host
        for index, each in enumerate(settings):
            self._ranks.append(
                await self._spawn(index) if index < here else await self._connected(index)
            )
            self._send(self._ranks[-1], OpenDevice(replace(each, rendezvous=rendezvous)))
        return [reply.device for reply in await self._loading(DeviceOpened)]

    async def load(self, formats: LoadFormats, limits: StepLimits) -> list[RankMemory]:
        """Load the weights, in dtypes that suit the devices, and measure a GPU's steps.

        Raises ``ModelError`` or ``StartupError`` with the message of a rank that cannot.
        """
        for rank in self._ranks:
            self._send(rank, LoadModel(formats, limits))
        return [reply.memory for reply in await self._loading(ModelLoaded)]

    async def allocate(self, num_blocks: int, limits: SlotLimits) -> list[RankEndpoints]:
        """Give every rank its cache; returns the endpoints of the ranks' data planes, if any.

        Raises ``StartupError`` with the message of a rank that cannot, or is lost.
        """
        for rank in self._ranks:
            self._send(rank, AllocateCache(num_blocks, limits))
        ready = await self._loading(CacheAllocated)
        if self._lost_reason:  # after its reply
            raise StartupError(self._lost_reason)
        self._serving = True
        self._watch = asyncio.create_task(self._ping())
        return [reply.endpoints for reply in ready if reply.endpoints is not None]

    def submit(self, plan: StepPlan, sending: list[KVSending]) -> None:
        """See ``Executor.submit``."""
        message = framed(ExecuteStep(plan, sending))
        for rank in self._ranks:
            rank.watchdog.begin()
            rank.writer.write(message)

    def send_masks(self, masks: TokenMasks) -> None:
        """See ``Executor.send_masks``."""
        self._send(self._ranks[0], masks)

    async def result(self) -> StepResult:
        """See ``Executor.result``."""
        try:
            replies = await self._replies()
        except (StartupError, TimeoutError) as error:
            raise ExecutorLostError(str(error)) from None
        failures = [reply.failure for reply in replies if reply.failure is not None]
        if failures:
            reason = failures[0].reason
            if len(replies) < len(self._ranks):
                raise ExecutorLostError(f"a rank failed a step, and others hang in it: {reason}")
            _check_together(replies, reason)
            raise StepFailedError(failures[0])
        (result,) = [reply.result for reply in replies if reply.result is not None]
        return result

    async def _replies(self) -> list[StepDone]:
        """The ranks' replies to the oldest step, since each rank replies to steps in their order.

        Once a rank has failed, the others reply soon, or hang in a collective that it left; the
        replies of those that hang are missing.
        """
        if len(self._ranks) == 1:
            return [await self._reply(self._ranks[0], StepDone, STEP_SECONDS)]
        tasks = [
            asyncio.create_task(self._reply(rank, StepDone, STEP_SECONDS)) for rank in self._ranks
        ]
        replies: list[StepDone] = []
        try:
            async with asyncio.timeout(None) as limit:
                for reply in asyncio.as_completed(tasks):
                    replies.append(await reply)
                    if replies[-1].failure is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + AGREE_SECONDS)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return replies

    def send_command(self, rank: int, command: plane.Command) -> None:
        """Pass a command to one rank's data plane."""
        self._send(self._ranks[rank], command)

    async def stop(self) -> None:
        """End every rank: by closing its channel, and if that is not enough, with a signal. If a
        rank was lost, the others may wait for it in a collective, so all are killed at once."""
        self._serving = False
        if self._watch is not None:
            self._watch.cancel()
        for rank in self._ranks:
            rank.writer.close()
        await asyncio.gather(*map(self._end, self._ranks))
        if self._rendezvous_folder is not None:
            self._rendezvous_folder.cleanup()
            self._rendezvous_folder = None

    async def _end(self, rank: Rank) -> None:
        await end_process(rank.process, at_once=bool(self._lost_reason))
        if rank.pump is not None:
            rank.pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rank.pump
        rank.writer.transport.abort()  # its host may not reply any more
        with contextlib.suppress(OSError):
            await rank.writer.wait_closed()

    def _rendezvous(self) -> str:
        """The address of a file through which the ranks meet, in a private folder. A port could be
        taken by another process first, and would be open to every user; only other hosts need
        one."""
        if self._hosts is not None:
            return self._hosts.rendezvous
        self._rendezvous_folder = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        return f"file://{self._rendezvous_folder.name}/store"

    async def _spawn(self, index: int) -> Rank:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await start_rank(theirs)
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return self._pumped(Rank(index, process, reader, writer))

    async def _connected(self, index: int) -> Rank:
        assert self._hosts is not None
        host, process, connection = await self._hosts.connection(index, self._load_seconds)
        return self._pumped(Rank(index, process, *connection, host=host))

    def _pumped(self, rank: Rank) -> Rank:
        rank.pump = asyncio.create_task(self._pump(rank))
        return rank

    async def _pump(self, rank: Rank) -> None:
        """Dispatch a rank's messages until there are no more; the rank is lost then."""
        try:
            end = await self._dispatch(rank)
        except CodecError as error:
            reason = f"{rank} sent an invalid message: {error}"
        except Exception:
            # Nothing reads this rank's messages any more.
            log.exception("a message of %s could not be handled", rank)
            reason = f"a message of {rank} could not be handled; see this node's log"
        else:
            reason = f"{rank} {end}"
        self._lose(rank, reason)

    def _lose(self, rank: Rank, reason: str) -> None:
        """Fail all waits for replies and, once, the node."""
        self._lost_reason = self._lost_reason or reason
        if not self._serving:
            rank.replies.put_nowait(_RankGone(reason))
            return
        # One lost rank loses the node: the others' collectives would wait for it.
        self._serving = False
        for each in self._ranks:
            each.replies.put_nowait(_RankGone(reason))
        self._on_lost(reason)

    async def _ping(self) -> None:
        """Ping until a rank is stuck: its process was stopped, or hangs."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            for rank in self._ranks:
                if problem := _stuck(rank):
                    self._lose(rank, f"{rank} {problem}")
                    return
                rank.missed_pings += 1
                self._send(rank, Ping())

    async def _dispatch(self, rank: Rank) -> str:
        """Pass events to the handoff and replies to their queue. Returns how the rank ended."""
        try:
            while True:
                message = await read_message(rank.reader)
                rank.missed_pings = 0
                if isinstance(message, plane.Event):
                    self._on_event(rank.index, message)
                elif isinstance(message, Pong):
                    rank.watchdog.note_pong(message.layers)
                elif isinstance(message, Reply):
                    if isinstance(message, StepDone):
                        rank.watchdog.end()
                    rank.replies.put_nowait(message)
                else:
                    raise CodecError(f"{type(message).__name__} is a message to ranks")
        except (asyncio.IncompleteReadError, OSError):
            with contextlib.suppress(TimeoutError):
                status = await asyncio.wait_for(rank.process.wait(), STOP_SECONDS)
                if status is None:
                    return "is lost with its host"
                # A killed rank has logged nothing.
                return (
                    describe_exit(status)
                    if status < 0
                    else f"{describe_exit(status)}; its log has the cause"
                )
        return "closed its channel; its log has the cause"

    async def _loading(self, kind: type[T]) -> list[T]:
        """The replies of all ranks. Raises the error of the rank that fails first, for which the
        others may wait, in a collective for instance."""
        tasks = [
            asyncio.create_task(self._reply(rank, kind, self._load_seconds)) for rank in self._ranks
        ]
        try:
            return await asyncio.gather(*tasks)
        except TimeoutError as error:
            raise StartupError(f"{error}; a longer --load-timeout may help") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reply(self, rank: Rank, kind: type[T], seconds: float) -> T:
        try:
            async with asyncio.timeout(seconds):
                reply = await rank.replies.get()
        except TimeoutError:
            raise TimeoutError(
                f"{rank} sent no {kind.__name__} within {seconds:g} s; see its log"
            ) from None
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, Failed):
            raise (ModelError if reply.category == "model" else StartupError)(reply.reason)
        if isinstance(reply, _RankGone):
            raise StartupError(reply.reason)
        raise StartupError(f"{rank} sent {type(reply).__name__}, not {kind.__name__}")

    def _send(self, rank: Rank, message: ToRank) -> None:
        if not rank.writer.is_closing():
            rank.writer.write(framed(message))


async def start_rank(channel: socket.socket) -> asyncio.subprocess.Process:
    """Start a rank's process with its end of the channel."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tandem.shared.engine.rank.process",
        str(channel.fileno()),
        pass_fds=[channel.fileno()],
        env=ENVIRONMENT | os.environ | {"PYTHONSAFEPATH": "1"},
        # Ctrl-C reaches the whole foreground group; only the head may react to it.
        start_new_session=True,
    )


def _check_together(replies: list[StepDone], reason: str) -> None:
    """Raise ``ExecutorLostError`` unless all ranks have begun and ended the same collectives.

    Otherwise a rank would mistake the next message of another one.
    """
    counts = {(reply.collectives_begun, reply.collectives_ended) for reply in replies}
    if len(counts) > 1 or any(started != ended for started, ended in counts):
        raise ExecutorLostError(f"ranks are not in step after a failure: {reason}")


def _stuck(rank: Rank) -> str:
    """The symptom of a stuck rank; empty if it is not stuck."""
    if rank.missed_pings >= MAX_MISSED_PINGS:
        return f"gave no sign of life for {MAX_MISSED_PINGS * PING_SECONDS:g} s"
    if pings := rank.watchdog.stuck:
        return (
            f"replies to pings, but has computed no layer of a step for {pings * PING_SECONDS:g} s"
        )
    return ""


async def end_process(
    process: asyncio.subprocess.Process | RemoteProcess, *, at_once: bool
) -> None:
    """Await the end of a rank whose channel is closed; kill it if it takes long, or ``at_once``."""
    for by_signal in (True,) if at_once else (False, True):
        if by_signal:
            kill_process(process)
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
            return
        except TimeoutError:
            continue


def kill_process(process: asyncio.subprocess.Process | RemoteProcess) -> None:
    """Kill a rank that has not ended.

    ``asyncio.subprocess.Process.kill`` polls first in older versions of Python. If the rank just
    ended, it thereby takes the exit status from asyncio's thread, which reports 255 instead.
    """
    with contextlib.suppress(ProcessLookupError):
        if not isinstance(process, asyncio.subprocess.Process):
            process.kill()
        elif process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
