"""One rank's end of the data plane, for the rank's other threads.

The plane's own thread owns the rank's sockets, its staging ring and all its transfers
(``loop.py``). Other threads only queue commands and read counters. Events come back through
``on_event``, which is called on the plane's thread and must not block.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import zmq

from ...errors import StartupError
from ...kv.layout import widest_cell
from ..carriers.device import Device
from ..carriers.kinds import CARRIERS
from ..carriers.option import allows
from ..carriers.ranks import Kinds
from ..carriers.transport import Endpoints, Transport
from ..carriers.zeromq.dialer import ZmqDialer
from ..carriers.zeromq.listener import ZmqListener
from ..carriers.zeromq.sockets import MAX_SOCKETS
from .cache_port import CachePort
from .commands import Commands
from .loop import PlaneLoop
from .messages import Command, Event, PlaneFailed
from .settings import DataPlaneConfig
from .stats import DataPlaneStats

ZEROMQ = Transport(ZmqListener, ZmqDialer)


class DataPlane:
    """One rank's end of the data plane."""

    def __init__(
        self,
        config: DataPlaneConfig,
        cache: CachePort,
        on_event: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport = ZEROMQ,
        carriers: Kinds = CARRIERS,
        device: Device | None = None,
        on_thread: Callable[[], object] = lambda: None,
    ) -> None:
        """``carriers``: the available kinds, best first. ``device``: the GPU with the cache, if
        any. ``on_thread`` is called first on the plane's thread."""
        self._device = device
        self._on_thread = on_thread
        self._config = config
        self._cache = cache
        self._on_event = on_event
        self._clock = clock
        self._transport = transport
        self._carriers = carriers
        self._commands = Commands(config.max_commands)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._endpoints = Endpoints()
        self._stats = DataPlaneStats()

    # ---- any thread --------------------------------------------------------------------------

    @property
    def endpoints(self) -> Endpoints:
        """The addresses on which this rank listens; known after ``start``."""
        return self._endpoints

    def start(self, timeout: float = 10.0) -> Endpoints:
        """Bind, and begin to serve. Raises StartupError."""
        cell = widest_cell(self._cache.layout)
        if cell > self._config.slot_bytes:
            raise StartupError(
                f"one token of one layer has {cell} bytes, but a staging slot only "
                f"{self._config.slot_bytes}: raise the slot size"
            )
        for kind in self._carriers:
            if allows(self._config.carrier, kind.name, on_request=kind.on_request):
                kind.prepare()  # may take longer than ``timeout``
        self._commands.open()
        self._thread = threading.Thread(target=self._run, name="data-plane", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout):
            raise StartupError(f"the data plane did not start within {timeout:g} s")
        if self._failure is not None:
            self.stop()
            raise StartupError(f"the data plane cannot start: {self._failure}")
        return self._endpoints

    def submit(self, command: Command) -> None:
        """Queue a command; never waits for the plane.

        Raises OverloadedError when the queue is full, UnavailableError when the plane has ended.
        """
        self._commands.put(command)

    def stats(self) -> DataPlaneStats:
        """A copy of the counters."""
        return replace(self._stats)

    def stop(self, deadline: float = 5.0) -> None:
        """Fail all transfers, close the sockets, end the thread within ``deadline`` seconds."""
        self._commands.end()  # first, so that no command comes after the last that the plane takes
        self._stop.set()
        self._commands.wake()
        if self._thread is not None:
            self._thread.join(deadline)
            if self._thread.is_alive():
                raise TimeoutError(f"the data plane did not stop within {deadline:g} s")
        self._commands.close()

    def loop(self, context: zmq.Context[zmq.Socket[bytes]]) -> PlaneLoop:
        """The loop of the plane's thread, which tests step by hand."""
        return PlaneLoop(
            self._config,
            self._cache,
            self._commands,
            self._on_event,
            self._stats,
            context,
            clock=self._clock,
            transport=self._transport,
            carriers=self._carriers,
            device=self._device,
        )

    # ---- the data-plane thread ---------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            self._on_thread()
            with contextlib.closing(self.loop(context)) as loop:
                self._endpoints = loop.start()
                self._ready.set()
                while not self._stop.is_set():
                    loop.round()
        except Exception as error:  # reported to the head, whatever it is
            started = self._ready.is_set()
            self._failure = error
            self._commands.end()
            self._ready.set()
            if started:
                self._on_event(PlaneFailed(reason=repr(error)))
        finally:
            context.destroy(linger=0)
