"""The thread of a rank that owns its sockets, its staging ring and all its transfers.

Other threads only queue commands and read counters. Events come back through ``on_event``, which
is called on this thread and must not block.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import zmq

from ..errors import OverloadedError, StartupError, UnavailableError
from . import frame, nixl_agent
from .cache_port import CachePort
from .carrier import Carrier, Endpoints, Ends, Joined, Lost, Notice
from .carrier_names import AUTO, CUDA_IPC, NIXL, SHARED_MEMORY, TCP, allowed, allows
from .computing import Announced, Computing
from .curve import fresh_keys
from .device import DEVICE_SLOT_BYTES, DEVICE_SLOTS, Device
from .device_ring import OnDevice, on_device
from .frame import HEADER_BYTES, FrameError, Header
from .greeting import Greeting, PeerKey
from .landing import Landing
from .messages import (
    Admit,
    Admitted,
    CancelExpect,
    CancelSend,
    Command,
    Compare,
    Event,
    Expect,
    LayerReady,
    OpenSend,
    PeerJoined,
    PeerLost,
    PlaneFailed,
    SendFailed,
)
from .nixl_agent import NixlAgent
from .plane_end import PlaneEnd
from .receiver import Receiver
from .sender import Sender
from .shared_ring import host_identity
from .staging import DEFAULT_SLOT_BYTES, StagingRing
from .staging_memory import StagingMemory
from .stats import DataPlaneStats
from .zmq_dialer import ZmqDialer
from .zmq_listener import ZmqListener
from .zmq_sockets import Timing

TICK_SECONDS = 0.1
REPORT_SECONDS = 0.5
SLOT_POLL_SECONDS = 0.001
FRAMES_A_ROUND = 8
ZEROMQ = Ends(ZmqListener, ZmqDialer)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneConfig:
    """Who this rank is, and what it may use. ``listen_host`` None: it only receives.
    ``listen_port`` and the next one are listened on; 0: any two that are free. ``curve``: peers are
    known by keys."""

    node_id: str
    epoch: int
    rank: int = 0
    tp_size: int = 1
    dtype: str = "bfloat16"
    first_head: int = 0
    end_head: int = 1
    listen_host: str | None = "127.0.0.1"
    listen_port: int = 0
    carrier: str = AUTO
    curve: bool = False
    slot_bytes: int = DEFAULT_SLOT_BYTES
    staging_slots: int = 64
    device_slot_bytes: int = DEVICE_SLOT_BYTES
    device_slots: int = DEVICE_SLOTS
    max_commands: int = 65_536
    timing: Timing = field(default_factory=Timing)

    @property
    def max_payload(self) -> int:
        """Bytes of any frame; those that come over TCP are bounded by their sockets as well."""
        return max(self.slot_bytes, self.device_slot_bytes)


class DataPlane:
    """One rank's end of the data plane."""

    def __init__(
        self,
        config: DataPlaneConfig,
        cache: CachePort,
        on_event: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        ends: Ends = ZEROMQ,
        device: Device | None = None,
    ) -> None:
        """``device``: what the cache lives on, if that is a GPU."""
        self._device = device
        self._config = config
        self._cache = cache
        self._on_event = on_event
        self._clock = clock
        self._ends = ends
        self._commands: queue.Queue[Command | Announced] = queue.Queue(config.max_commands)
        self._wake_in: socket.socket | None = None
        self._wake_out: socket.socket | None = None
        self._woken = False
        self._stop = threading.Event()
        # Held for a put or a flag only: what was queued before the stop is still answered, and
        # nothing can be queued after it.
        self._submitting = threading.Lock()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._endpoints = Endpoints()
        self._stats = DataPlaneStats()

    # ---- any thread --------------------------------------------------------------------------

    @property
    def endpoints(self) -> Endpoints:
        """Where this rank listens; known after ``start``."""
        return self._endpoints

    def start(self, timeout: float = 10.0) -> Endpoints:
        """Bind, and begin to serve. Raises StartupError."""
        if self._cache.layer_bytes_per_token > self._config.slot_bytes:
            raise StartupError(
                f"one token of one layer has {self._cache.layer_bytes_per_token} bytes, a staging "
                f"slot {self._config.slot_bytes}: raise the slot size"
            )
        if allows(self._config.carrier, NIXL):
            nixl_agent.load()  # it may take longer than the rest has time
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="data-plane", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout):
            raise StartupError(f"the data plane did not start within {timeout:g} s")
        if self._failure is not None:
            self.stop()
            raise StartupError(f"the data plane cannot start: {self._failure}")
        return self._endpoints

    def submit(self, command: Command | Announced) -> None:
        """Queue a command; never waits for the plane.

        Raises OverloadedError when the queue is full, UnavailableError when the plane has ended.
        """
        with self._submitting:
            if self._stop.is_set() or self._failure is not None:
                raise UnavailableError("the data plane has ended; it takes no more commands")
            try:
                self._commands.put_nowait(command)
            except queue.Full:
                raise OverloadedError(
                    f"{self._config.max_commands} commands wait for the data plane; it is stuck"
                ) from None
        self._wake()

    def layer_ready(
        self,
        transfer_id: int,
        attempt: int,
        layer: int,
        first_token: int,
        end_token: int,
        end_layer: int | None = None,
    ) -> None:
        """For the runner's thread, after it computed a layer of a chunk: only queues."""
        self.submit(
            LayerReady(
                transfer_id=transfer_id,
                attempt=attempt,
                first_layer=layer,
                end_layer=layer + 1 if end_layer is None else end_layer,
                first_token=first_token,
                end_token=end_token,
            )
        )

    def stats(self) -> DataPlaneStats:
        """A copy of the counters."""
        return replace(self._stats)

    def stop(self, deadline: float = 5.0) -> None:
        """Fail what is under way, close the sockets, end the thread within ``deadline`` seconds."""
        with self._submitting:
            self._stop.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(deadline)
            if self._thread.is_alive():
                raise TimeoutError(f"the data plane did not stop within {deadline:g} s")
        for end in (self._wake_in, self._wake_out):
            if end is not None:
                end.close()
        self._wake_in = self._wake_out = None

    def _wake(self) -> None:
        # A lost race costs one byte more in the pair, never a lost wake-up: the thread clears the
        # flag before it reads the queue.
        pair = self._wake_in
        if not self._woken and pair is not None:
            self._woken = True
            with contextlib.suppress(OSError):  # full, or closed by a stop: either way it is awake
                pair.send(b"w")

    def rest(self) -> None:
        """The loop is awake: swallow the wake-ups; the commands are read after this."""
        if self._wake_out is not None:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        self._woken = False

    # ---- the data-plane thread ---------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            with contextlib.closing(PlaneLoop(self, context)) as loop:
                self._endpoints = loop.start()
                self._ready.set()
                while not self._stop.is_set():
                    loop.round()
        except Exception as error:  # the head must learn of it, whatever it is
            started = self._ready.is_set()
            self._failure = error
            self._ready.set()
            if started:
                self._on_event(PlaneFailed(reason=repr(error)))
        finally:
            context.destroy(linger=0)


class PlaneLoop:
    """What the thread works with; made, used and closed on it. Tests drive one by hand: ``turn``
    never waits."""

    def __init__(self, plane: DataPlane, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        config, cache, stats = plane._config, plane._cache, plane._stats
        self._commands = plane._commands
        self._plane = plane
        self._clock = plane._clock
        self._stats = stats
        self._emit = plane._on_event
        self._listens = config.listen_host is not None
        self._device = plane._device
        self._on_device = self._enter_device(config)
        self._me = _greeting(config, cache, on_device=self._on_device is not None)
        self._agent = NixlAgent(self._me.key.agent) if allows(config.carrier, NIXL) else None
        limit = HEADER_BYTES + config.slot_bytes
        self._keys = fresh_keys() if config.curve else None
        self._dialer = plane._ends.dialer(
            context,
            self._me,
            max_frame_bytes=limit,
            timing=config.timing,
            keys=self._keys,
            landing=None if self._agent is None else Landing(self._agent, limit),
            device_landing=None if self._on_device is None else self._on_device.landing,
        )
        slots = config.staging_slots if self._listens else 2
        self._memory = self._staging(config.carrier, slots * StagingRing.stride(config.slot_bytes))
        self._listener = plane._ends.listener(
            context,
            self._introduced(),
            host=config.listen_host or "",
            port=config.listen_port,
            timing=config.timing,
            stats=stats,
            keys=self._keys,
            agent=self._agent,
        )
        self._carriers: tuple[Carrier, ...] = (self._listener, self._dialer)
        ring = StagingRing(slots=slots, payload_bytes=config.slot_bytes, memory=self._memory.memory)
        end = PlaneEnd(cache=cache, me=self._me, emit=self._emit, stats=stats, clock=self._clock)
        device_ring = None if self._on_device is None else self._on_device.ring
        self._sender = Sender(end, self._listener, ring, device_ring)
        self._computing = Computing(self._sender.ready)
        self._receiver = Receiver(end, self._dialer, max_payload=config.max_payload)
        self._next_tick = self._next_report = 0.0
        self._reported = DataPlaneStats()
        self._busy = False

    def _enter_device(self, config: DataPlaneConfig) -> OnDevice | None:
        if self._device is not None:
            self._device.enter()
        return on_device(
            config.carrier,
            self._device,
            slots=config.device_slots if self._listens else 0,
            payload_bytes=config.device_slot_bytes,
        )

    def _staging(self, carrier: str, size: int) -> StagingMemory:
        """Nobody needs to reach that of a rank which sends nothing."""
        if not self._listens:
            return StagingMemory(TCP, size, None)
        driver = None if self._device is None else self._device.driver
        return StagingMemory(carrier, size, self._agent, driver)

    def _introduced(self) -> Greeting:
        """The greeting of a rank with these rings."""
        me = self._memory.introduce(self._me)
        return me if self._on_device is None else self._on_device.introduce(me)

    def start(self) -> Endpoints:
        if self._listens:
            return self._listener.start()
        return Endpoints(key="" if self._keys is None else self._keys.public)

    def round(self) -> None:
        """Wait for anything, then deal with it."""
        self._wait()
        self.turn()

    def turn(self) -> None:
        """A bounded amount of everything."""
        self._take_commands()
        self._computing.let_through()
        now = self._clock()
        self._take_control(self._listener, self._sender.on_control, now)
        self._take_control(self._dialer, self._receiver.on_control, now)
        received = self._take_bulk(now)
        more = self._sender.pump(FRAMES_A_ROUND)
        self._busy = more or received == FRAMES_A_ROUND
        self._take_notices(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._sender.tick(now)
            self._receiver.tick(now)
        self._sender.fill(self._stats)
        self._receiver.fill(self._stats)
        self._report_stats(now)

    def _report_stats(self, now: float) -> None:
        """The head reads counters that are a little old rather than asking for them."""
        if now >= self._next_report and self._stats != self._reported:
            self._next_report = now + REPORT_SECONDS
            self._reported = replace(self._stats)
            self._emit(self._reported)

    def _wait(self) -> None:
        seconds = TICK_SECONDS
        if self._busy:
            seconds = 0.0
        elif (
            self._sender.awaits_slots
            or self._computing.under_way
            or any(each.needs_polling for each in self._carriers)
        ):
            # Nothing wakes us when ZeroMQ lets go of a slot, a GPU has computed a layer, or a read
            # over the network is over.
            seconds = SLOT_POLL_SECONDS
        poller = zmq.Poller()
        poller.register(self._plane._wake_out, zmq.POLLIN)
        for carrier in self._carriers:
            for each in carrier.sockets():
                poller.register(each, zmq.POLLIN)
        poller.poll(int(seconds * 1000))
        self._plane.rest()

    def _take_commands(self) -> None:
        handlers: dict[type, Callable[..., None]] = {
            OpenSend: self._open,
            LayerReady: self._sender.ready,
            Announced: self._computing.add,
            CancelSend: self._sender.cancel,
            Expect: self._receiver.expect,
            CancelExpect: self._receiver.cancel,
            Compare: self._receiver.compare,
            Admit: self._admit,
        }
        for _ in range(self._commands.qsize()):
            command = self._commands.get_nowait()
            handlers[type(command)](command)

    def _admit(self, command: Admit) -> None:
        self._listener.admit(command.keys)
        self._emit(Admitted(version=command.version))

    def _open(self, command: OpenSend) -> None:
        if self._listens:
            self._sender.open(command)
            return
        reason = "this rank sends nothing: it was configured without listen_host"
        self._emit(
            SendFailed(
                transfer_id=command.transfer_id,
                attempt=command.attempt,
                peer_rank=command.peer_rank,
                reason=reason,
            )
        )

    def _take_control(
        self,
        carrier: Carrier,
        handle: Callable[[PeerKey, Header, memoryview], None],
        now: float,
    ) -> None:
        for peer, message in carrier.receive_control(now):
            try:
                header, payload = frame.decode(message, frame.MAX_REASON_BYTES)
            except FrameError:
                self._stats.frames_refused += 1
                continue
            # ZeroMQ may hand a restarted process what was meant for the one before it.
            if (header.sender_epoch, header.receiver_epoch) == (peer.epoch, self._me.epoch):
                handle(peer, header, payload)
            else:
                self._stats.frames_stale += 1

    def _take_bulk(self, now: float) -> int:
        for count in range(FRAMES_A_ROUND):
            taken = self._dialer.receive_bulk(now)
            if taken is None:
                return count
            self._receiver.on_bulk(*taken)
        return FRAMES_A_ROUND

    def _take_notices(self, now: float) -> None:
        for notice in self._listener.notices(now):
            if isinstance(notice, Lost):
                self._sender.on_lost(notice.peer, notice.reason)
            self._report(notice)
        for notice in self._dialer.notices(now):
            if isinstance(notice, Lost):
                self._receiver.on_lost(notice.peer, notice.reason, refused=notice.refused)
            else:
                self._receiver.on_joined(notice.peer)
            self._report(notice)

    def _report(self, notice: Notice) -> None:
        live = self._listener.live() + self._dialer.live()
        self._stats.peers_tcp, self._stats.peers_shared_memory = live[TCP], live[SHARED_MEMORY]
        self._stats.peers_nixl, self._stats.peers_cuda_ipc = live[NIXL], live[CUDA_IPC]
        peer = notice.peer
        if isinstance(notice, Joined):
            self._emit(
                PeerJoined(
                    node_id=peer.node_id,
                    epoch=peer.epoch,
                    rank=peer.rank,
                    carrier=notice.carrier,
                    note=notice.note,
                )
            )
            return
        self._stats.peers_lost += 1
        self._emit(
            PeerLost(node_id=peer.node_id, epoch=peer.epoch, rank=peer.rank, reason=notice.reason)
        )

    def close(self) -> None:
        self._take_commands()  # each is owed its event
        self._sender.close()
        self._receiver.close()
        self._listener.close()
        self._dialer.close()
        # Closed sockets let go of their frames soon; only then may the ring's memory go away.
        give_up = time.monotonic() + 2.0
        while not self._sender.settled and time.monotonic() < give_up:
            time.sleep(SLOT_POLL_SECONDS)
        self._memory.close()
        if self._on_device is not None:
            self._on_device.close()
        if self._device is not None:
            self._device.leave()
        if self._agent is not None:
            self._agent.close()
        self._sender.fill(self._stats)
        self._receiver.fill(self._stats)


def _greeting(config: DataPlaneConfig, cache: CachePort, *, on_device: bool = False) -> Greeting:
    me = Greeting(
        node_id=config.node_id,
        epoch=config.epoch,
        rank=config.rank,
        tp_size=config.tp_size,
        dtype=config.dtype,
        num_layers=cache.num_layers,
        layer_bytes_per_token=cache.layer_bytes_per_token,
        first_head=config.first_head,
        end_head=config.end_head,
        carriers=allowed(config.carrier),
        host=host_identity(),
    )
    return me if on_device else me.without_device()
