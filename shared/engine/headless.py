"""The launcher of a node's ranks on a host other than the head's.

It joins the head, starts this host's ranks, which connect to the head themselves, and reports how
they end. It ends with the head, and its ranks with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..config import EngineConfig
from ..errors import StartupError
from ..handoff.wire.codec import CodecError, VersionError
from ..process.threads import in_thread, share_of_cores
from ..version import version, versions
from ..weights.obtain import obtain_model
from . import executor
from .channel import BlockingChannel
from .join import UnreachableError, connect
from .messages import (
    HeadEnds,
    HostAccepted,
    HostJoins,
    HostRefused,
    HostStops,
    JoinHead,
    JoinSecrets,
    KillRank,
    RankEnded,
    RankMessage,
)
from .start import fingerprint_of, weights_field

log = logging.getLogger("tandem.node")

RETRY_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank of this host. It ends when ``lifeline`` is closed."""

    index: int
    process: asyncio.subprocess.Process
    lifeline: BlockingChannel
    watch: asyncio.Task[None]


class HeadlessHost:
    """The ranks of one host, from the join to the head's end."""

    def __init__(self, config: EngineConfig, secrets: JoinSecrets) -> None:
        assert config.master_addr is not None
        self._config = config
        self._secrets = secrets
        self._address = config.master_addr, config.master_port
        self._head: BlockingChannel | None = None
        # The head's messages; an error at the end of its connection.
        self._messages: asyncio.Queue[RankMessage | StartupError] = asyncio.Queue()
        self._ranks: list[_Rank] = []

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until the head ends; ``on_ready`` is called when the ranks have been started.

        Raises ``StartupError`` if the head refuses this host, or fails, or is lost. No rank is left
        then.
        """
        try:
            await self._join()
            if not await self._accepted():
                return
            for index in range(self._config.ranks_per_host):
                await self._start(self._config.node_rank * self._config.ranks_per_host + index)
            on_ready()
            await self._obey()
        finally:
            await self._end()

    def stop(self) -> bool:
        """Ask the head to drain the node, which then ends this host. False without ranks, which
        would be drained."""
        if self._head is None or not self._ranks:
            return False
        self._head.send(HostStops())
        return True

    async def _join(self) -> None:
        config = self._config
        model = await in_thread(lambda: obtain_model(config))  # may be a long download
        fields = await in_thread(lambda: fingerprint_of(model) | weights_field(config, model))
        channel = await self._connect()
        self._head = channel
        loop = asyncio.get_running_loop()
        reading = threading.Thread(target=self._read, args=(channel, loop), daemon=True)
        reading.start()
        threads = config.threads or share_of_cores(config.ranks_per_host)
        channel.send(
            HostJoins(
                node_rank=config.node_rank,
                nnodes=config.nnodes,
                size=config.world_size,
                versions=versions(),
                fingerprint=fields,
                address=channel.local_address,
                model_path=str(model.path),
                device=config.device if not config.device_ids else "cuda",
                devices=config.device_ids,
                threads=threads,
            )
        )
        log.info("waiting at the head, %s, for all hosts of the node", config.master)

    async def _connect(self) -> BlockingChannel:
        """Connect once the head listens. Raises ``StartupError``."""
        warned = False
        deadline = asyncio.get_running_loop().time() + self._config.join_timeout
        while True:
            try:
                return await in_thread(lambda: connect(*self._address, self._secrets))
            except UnreachableError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise StartupError(
                        f"the head cannot be reached within {self._config.join_timeout:g} s at "
                        f"{error}; see --master-addr, and start host 0"
                    ) from None
                if not warned:
                    log.info("waiting for the head at %s", error)
                warned = True
            await asyncio.sleep(RETRY_SECONDS)

    def _read(self, channel: BlockingChannel, loop: asyncio.AbstractEventLoop) -> None:
        """Queue the head's messages, in a thread."""
        last = StartupError(f"the head at {self._config.master} is gone")
        try:
            while (message := channel.receive()) is not None:
                loop.call_soon_threadsafe(self._messages.put_nowait, message)
        except VersionError:
            last = StartupError(
                f"the head at {self._config.master} has another version of Tandem than this host's "
                f"{version()}; install the same on all hosts"
            )
        except (CodecError, ValueError) as error:
            last = StartupError(
                f"the head at {self._config.master} sent an invalid message: {error}"
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(self._messages.put_nowait, last)

    async def _next(self) -> RankMessage:
        message = await self._messages.get()
        if isinstance(message, StartupError):
            raise message
        return message

    async def _accepted(self) -> bool:
        """Wait until all hosts have joined; false if the head ends in order before."""
        message = await self._next()
        if isinstance(message, HostRefused):
            raise StartupError(
                f"the head at {self._config.master} refuses this host: {message.reason}"
            )
        if isinstance(message, HeadEnds):
            _check(message)
        return isinstance(message, HostAccepted)

    async def _start(self, rank: int) -> None:
        assert self._head is not None
        ours, theirs = socket.socketpair()
        try:
            process = await executor.start_rank(theirs)
        finally:
            theirs.close()
        lifeline = BlockingChannel(ours)
        lifeline.send(JoinHead(*self._address, self._secrets, rank))
        watch = asyncio.create_task(self._watch(rank, process))
        self._ranks.append(_Rank(rank, process, lifeline, watch))

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        assert self._head is not None
        self._head.send(RankEnded(rank, status))

    async def _obey(self) -> None:
        """Do what the head says until it ends."""
        while True:
            message = await self._next()
            if isinstance(message, HeadEnds):
                _check(message)
                log.info("the head has ended, and this host with it")
                return
            if isinstance(message, KillRank):
                for rank in self._ranks:
                    if rank.index == message.rank:
                        executor.kill_process(rank.process)

    async def _end(self) -> None:
        for rank in self._ranks:
            rank.lifeline.close()
        await asyncio.gather(
            *(executor.end_process(rank.process, at_once=False) for rank in self._ranks)
        )
        await asyncio.gather(*(rank.watch for rank in self._ranks), return_exceptions=True)
        if self._head is not None:
            self._head.close()


def _check(message: HeadEnds) -> None:
    """Raise ``StartupError`` if the node has failed."""
    if message.reason:
        raise StartupError(f"the head has ended: {message.reason}")
