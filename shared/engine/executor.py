"""The head's side of its ranks: start them, feed them, notice when one is gone.

Each rank is a process of its own, reached over a socket pair. The same step goes to every rank;
rank 0 answers with the sampled tokens, the others only say that they are done. Data-plane commands
and events travel on the same channel, and never wait for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError, StartupError
from ..kv.planning import RankDevice, RankMemory
from .channel import PREFIX_BYTES, body_length, pack, unpack
from .core import ExecutorLostError, StepFailedError
from .plan import StepFailure, StepPlan, StepResult, plan_to_wire, result_from_wire
from .watchdog import Watchdog

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    # Weights in huge pages: a CPU reads them a fifth faster at one row. Only glibc knows it.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # Triton 3.9 warns at each compilation where this default of its own is not spelled out.
    "TRITON_DEFAULT_FP_FUSION": "1",
    # Chunks of all lengths leave the memory of a GPU in pieces, which expandable segments avoid.
    # The variable was renamed in torch 2.9.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
# No request waits longer. A step that hangs is noticed long before, by its pulse.
STEP_SECONDS = 3600.0
# Ranks that go on after another one has failed come to its next collective within so many.
AGREE_SECONDS = 5.0
STOP_SECONDS = 5.0
PING_SECONDS = 1.0
# A rank that leaves so many pings in a row unanswered stands still. They are counted rather than
# seconds, so that a head which stood still itself does not blame its ranks.
MAX_UNANSWERED = 10


@dataclass(slots=True, eq=False)
class _Rank:
    index: int
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    replies: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    pump: asyncio.Task[None] | None = None
    unanswered: int = 0  # pings since the rank was last heard
    watchdog: Watchdog = field(default_factory=Watchdog)


class RankPool:
    """The ranks of one node.

    ``on_event(rank, data)`` gets data-plane events as wire bytes. ``on_lost(reason)`` is called
    once, when a rank that had its cache is gone or stands still, also between steps. A rank may
    take ``load_seconds`` for each of opening its device, loading, and allocating the cache.
    """

    def __init__(
        self,
        on_event: Callable[[int, bytes], None] = lambda rank, data: None,
        on_lost: Callable[[str], None] = lambda reason: None,
        *,
        load_seconds: float,
    ) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._load_seconds = load_seconds
        self._meeting: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[_Rank] = []
        self._serving = False
        self._lost = ""
        self._watch: asyncio.Task[None] | None = None

    async def start(self, settings: list[dict[str, Any]]) -> list[RankDevice]:
        """Start one process for each entry; each says what it runs on.

        Raises ``StartupError`` with the rank's own words when one cannot.
        """
        rendezvous = self._rendezvous() if len(settings) > 1 else ""
        for index, values in enumerate(settings):
            self._ranks.append(await self._spawn(index))
            self._send(self._ranks[-1], "open", values | {"rendezvous": rendezvous})
        return [RankDevice(*(await self._loading(rank, "device"))) for rank in self._ranks]

    async def load(self, formats: dict[str, str]) -> list[RankMemory]:
        """Load the weights, in the number ``formats`` that fit the devices.

        Raises ``ModelError`` or ``StartupError`` with the rank's own words when one cannot.
        """
        for rank in self._ranks:
            self._send(rank, "load", formats)
        return [RankMemory(*(await self._loading(rank, "loaded"))) for rank in self._ranks]

    async def allocate(self, num_blocks: int) -> list[list[str]]:
        """Give every rank its cache. Returns each rank's data-plane endpoints and CURVE key, if it
        has any.

        Raises ``StartupError`` with the rank's own words when one cannot, or is lost.
        """
        for rank in self._ranks:
            self._send(rank, "allocate", num_blocks)
        endpoints = [await self._loading(rank, "ready") for rank in self._ranks]
        if self._lost:  # after its answer
            raise StartupError(self._lost)
        self._serving = True
        self._watch = asyncio.create_task(self._ping())
        return endpoints

    async def step(self, plan: StepPlan, streams: dict[int, tuple[int, int]]) -> StepResult:
        """See ``Executor.step``."""
        payload = [plan_to_wire(plan), [[key, *transfer] for key, transfer in streams.items()]]
        message = pack("step", payload)
        for rank in self._ranks:
            rank.watchdog.begin()
            rank.writer.write(message)
        try:
            answers = await self._answers()
        except (StartupError, TimeoutError) as error:
            raise ExecutorLostError(str(error)) from None
        failures = [StepFailure(*failure) for _, failure, _ in answers if failure is not None]
        if failures:
            _check_together([counts for _, _, counts in answers], failures[0])
            raise StepFailedError(failures[0])
        return result_from_wire(answers[0][0])

    async def _answers(self) -> list[Any]:
        """What each rank says of a step: its result, its failure, its collectives.

        Once one rank has failed, the others answer soon, or hang in a collective that it left.
        """
        if len(self._ranks) == 1:
            return [await self._reply(self._ranks[0], "result", STEP_SECONDS)]
        tasks = [
            asyncio.create_task(self._reply(rank, "result", STEP_SECONDS)) for rank in self._ranks
        ]
        waiting, limit = set(tasks), None
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
                failed = [failure for one in done if (failure := one.result()[1]) is not None]
                if failed:
                    limit, reason = AGREE_SECONDS, failed[0][1]
                if not done:
                    raise StartupError(f"a rank failed a step, and others hang in it: {reason}")
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def send_data(self, rank: int, command: bytes) -> None:
        """Pass a command to one rank's data plane."""
        self._send(self._ranks[rank], "data", command)

    async def stop(self) -> None:
        """End every rank: closing its channel is the request, a signal the last resort."""
        self._serving = False
        if self._watch is not None:
            self._watch.cancel()
        for rank in self._ranks:
            rank.writer.close()
        for rank in self._ranks:
            await _end(rank.process)
            if rank.pump is not None:
                rank.pump.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rank.pump
            with contextlib.suppress(OSError):
                await rank.writer.wait_closed()
        self._ranks = []
        if self._meeting is not None:
            self._meeting.cleanup()
            self._meeting = None

    def _rendezvous(self) -> str:
        """A file in a folder that no other user may enter, through which the ranks meet: a port
        could be taken by somebody else first, and would be open to everybody."""
        self._meeting = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        return f"file://{self._meeting.name}/store"

    async def _spawn(self, index: int) -> _Rank:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tandem.shared.engine.rank.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=_ENVIRONMENT | os.environ | {"PYTHONSAFEPATH": "1"},
                # Ctrl-C reaches the whole foreground group; only the head may react to it.
                start_new_session=True,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        rank = _Rank(index, process, reader, writer)
        rank.pump = asyncio.create_task(self._pump(rank))
        return rank

    async def _pump(self, rank: _Rank) -> None:
        """Pass on what a rank says until it says no more; then it is lost to whoever waits."""
        try:
            end = await self._sort(rank)
        except Exception:
            # Nobody would hear from this rank again, so it is as good as dead.
            log.exception("what rank %d said could not be handled", rank.index)
            reason = f"rank {rank.index} is not understood; this node's log has the cause"
        else:
            reason = f"rank {rank.index} {end}; its log has the cause"
        self._lose(rank, reason)

    def _lose(self, rank: _Rank, reason: str) -> None:
        """Tell whoever waits and, once, the node."""
        self._lost = self._lost or reason
        if not self._serving:
            rank.replies.put_nowait(("lost", reason))
            return
        # The node is lost with its first rank: what another one computes now waits for this one.
        self._serving = False
        for each in self._ranks:
            each.replies.put_nowait(("lost", reason))
        self._on_lost(reason)

    async def _ping(self) -> None:
        """Until a rank stands still: its process was stopped, or hangs."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            for rank in self._ranks:
                if problem := _standing_still(rank):
                    self._lose(rank, f"rank {rank.index} {problem}")
                    return
                rank.unanswered += 1
                self._send(rank, "ping", None)

    async def _sort(self, rank: _Rank) -> str:
        """Events to the handoff, everything else to whoever waits; returns how it ended."""
        try:
            while True:
                prefix = await rank.reader.readexactly(PREFIX_BYTES)
                kind, payload = unpack(await rank.reader.readexactly(body_length(prefix)))
                rank.unanswered = 0
                if kind == "event":
                    self._on_event(rank.index, payload)
                elif kind == "pong":
                    rank.watchdog.answered(payload)
                else:
                    if kind == "result":
                        rank.watchdog.end()
                    rank.replies.put_nowait((kind, payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(TimeoutError):
                status = await asyncio.wait_for(rank.process.wait(), STOP_SECONDS)
                return f"ended with exit status {status}"
        return "closed its channel"

    async def _loading(self, rank: _Rank, wanted: str) -> Any:
        try:
            return await self._reply(rank, wanted, self._load_seconds)
        except TimeoutError as error:
            raise StartupError(f"{error}; a longer --load-timeout may help") from None

    async def _reply(self, rank: _Rank, wanted: str, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                kind, payload = await rank.replies.get()
        except TimeoutError:
            raise TimeoutError(
                f"rank {rank.index} gave no {wanted!r} within {seconds:g} s; see its log"
            ) from None
        if kind == wanted:
            return payload
        if kind == "failed":
            category, message = payload
            raise (ModelError if category == "model" else StartupError)(message)
        raise StartupError(payload if kind == "lost" else f"rank answered {kind!r}, not {wanted!r}")

    def _send(self, rank: _Rank, kind: str, payload: Any) -> None:
        if not rank.writer.is_closing():
            rank.writer.write(pack(kind, payload))


def _check_together(counts: list[list[int]], failure: StepFailure) -> None:
    """Ranks that have begun and ended the same collectives can begin the next step together.

    Raises ``ExecutorLostError`` for others: what one of them sends next, another one would take for
    something else.
    """
    if any(begun != ended or begun != counts[0][0] for begun, ended in counts):
        raise ExecutorLostError(f"ranks are not in step after a failure: {failure.reason}")


def _standing_still(rank: _Rank) -> str:
    """In which way a rank does; empty: in none."""
    if rank.unanswered >= MAX_UNANSWERED:
        return f"gave no sign of life for {MAX_UNANSWERED * PING_SECONDS:g} s"
    if still := rank.watchdog.still:
        return f"answers, but has computed no layer of a step for {still * PING_SECONDS:g} s"
    return ""


async def _end(process: asyncio.subprocess.Process) -> None:
    for signal in (None, process.terminate, process.kill):
        if signal is not None:
            with contextlib.suppress(ProcessLookupError):
                signal()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
            return
        except TimeoutError:
            continue
