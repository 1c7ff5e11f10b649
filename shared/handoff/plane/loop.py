"""The loop of the data-plane thread: commands, control, frames, notices and timers, a bounded
amount of each in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import zmq

from ...kv.layout import scales_in
from ..carriers.device import Device
from ..carriers.memfd import host_identity
from ..carriers.ranks import Kinds, open_carriers
from ..carriers.transport import Endpoints, Joined, Lost, Notice, Transport, TransportEnd
from ..carriers.zeromq.curve import fresh_keys
from ..wire import frame
from ..wire.frame import HEADER_BYTES, FrameError, Header
from ..wire.greeting import Greeting, PeerKey, packed_scales
from .cache_port import CachePort
from .commands import Commands
from .device_waits import DeviceWaits
from .messages import (
    AdmitKeys,
    CancelExpect,
    CancelSend,
    Compare,
    Event,
    Expect,
    KeysAdmitted,
    LayerReady,
    OpenSend,
    PeerJoined,
    PeerLost,
    SendFailed,
)
from .part_layout import PartLayouts
from .receiver import Receiver
from .sender import Awaits, Sender
from .settings import DataPlaneConfig
from .stats import DataPlaneStats
from .transfer_end import PlaneEnd

TICK_SECONDS = 0.1
REPORT_SECONDS = 0.5
POLL_SECONDS = 0.001
# ZeroMQ does not tell when a slot is free, but acknowledgements, which wake this thread, come after
# it, so that looking in between is rarely of use.
SLOT_POLL_SECONDS = 0.01
# The longest time that a packed frame waits for the next layers, to leave in their round.
PACKED_SECONDS = 0.005
FRAMES_A_ROUND = 8
# Limit of the wait at the end for receivers to give back loans.
FAREWELL_SECONDS = 2.0


class PlaneLoop:
    """Created, used and closed on the plane's thread. ``turn`` never waits, ``round`` does."""

    def __init__(
        self,
        config: DataPlaneConfig,
        cache: CachePort,
        commands: Commands,
        emit: Callable[[Event], None],
        stats: DataPlaneStats,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        clock: Callable[[], float],
        transport: Transport,
        carriers: Kinds,
        device: Device | None,
    ) -> None:
        """``stats`` is written by this thread alone, and read by others."""
        self._commands = commands
        self._clock = clock
        self._stats = stats
        self._emit = emit
        self._listens = config.listen_host is not None
        self._carriers = open_carriers(carriers, config.carrier_settings, config.peer, device)
        self._me = greeting_of(config, cache, self._carriers.hellos())
        self._keys = fresh_keys() if config.curve else None
        self._dialer = transport.dialer(
            context,
            self._me,
            self._carriers,
            max_frame_bytes=HEADER_BYTES + config.slot_bytes,
            timing=config.timing,
            keys=self._keys,
        )
        self._listener = transport.listener(
            context,
            self._me,
            self._carriers,
            host=config.listen_host or "",
            port=config.listen_port,
            timing=config.timing,
            keys=self._keys,
            max_peers=config.max_peers,
        )
        self._waits = DeviceWaits("packed-frames")
        self._ends: tuple[TransportEnd, ...] = (self._listener, self._dialer)
        end = PlaneEnd(
            cache=cache,
            me=self._me,
            layouts=PartLayouts(cache.layout),
            carriers=self._carriers,
            emit=self._emit,
            stats=stats,
            clock=self._clock,
            waits=self._waits,
            wake=commands.wake,
        )
        self._sender = Sender(end, self._listener)
        self._receiver = Receiver(end, self._dialer, max_payload=config.max_payload)
        self._handlers: dict[type, Callable[..., None]] = {
            OpenSend: self._open,
            LayerReady: self._sender.ready,
            CancelSend: self._sender.cancel,
            Expect: self._receiver.expect,
            CancelExpect: self._receiver.cancel,
            Compare: self._receiver.compare,
            AdmitKeys: self._admit,
        }
        self._polled: list[Any] = []
        # Of the polled sockets: bulk sockets, those of acknowledgements, and both with commands.
        self._bulk: frozenset[Any] = frozenset()
        self._replies: frozenset[Any] = frozenset()
        self._moving: frozenset[Any] = frozenset()
        self._pollers = {awaits: zmq.Poller() for awaits in Awaits}
        self._same_sockets = False  # as the poller's; False if they may differ
        self._next_tick = self._next_report = 0.0
        self._last_report = DataPlaneStats()
        self._busy = False
        # True if something may happen that does not wake this thread: ZeroMQ releases a slot, or a
        # read over the network ends.
        self._is_polling = False

    def start(self) -> Endpoints:
        if self._listens:
            return self._listener.start()
        return Endpoints(key="" if self._keys is None else self._keys.public)

    def round(self) -> None:
        """Wait for anything, then handle it.

        Handling frames takes a core from concurrent decode steps, or Python's lock from the thread
        that launches them, and most of a turn would look at things that have not changed. So if
        only frames, commands and acknowledgements have come, only they are handled.
        """
        ready = self._wait()
        if not (self._is_only_moving(ready) and self._move(ready, self._clock())):
            self.turn()

    def _is_only_moving(self, ready: list[Any]) -> bool:
        others = self._busy or self._is_polling or self._clock() >= self._next_tick
        moves = bool(ready) or self._sender.is_packing
        return moves and self._moving.issuperset(ready) and not others

    def _move(self, ready: list[Any], now: float) -> bool:
        """Handle what moves frames; False if the rest of a turn has work too."""
        if self._commands.fileno() in ready:  # first: a frame may belong to a new attempt
            self._take_commands()
        if not self._replies.isdisjoint(ready):
            self._handle_control(self._listener.receive_replies(now), self._sender.on_control)
        count = self._receive(now) if not self._bulk.isdisjoint(ready) else None
        sends = self._sender.is_packing or not self._bulk.issuperset(ready)
        more = self._sender.pump(FRAMES_A_ROUND) if sends else False
        self._busy = more or count == FRAMES_A_ROUND
        return count != 0 and not any(end.has_notices for end in self._ends)

    def turn(self) -> None:
        """Do a bounded amount of everything."""
        self._take_commands()
        now = self._clock()
        self._handle_control(self._listener.receive_control(now), self._sender.on_control)
        self._handle_control(self._dialer.receive_control(now), self._receiver.on_control)
        count = self._receive(now)
        more = self._sender.pump(FRAMES_A_ROUND)
        self._busy = more or count == FRAMES_A_ROUND
        self._take_notices(now)
        self._carriers.tick()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._sender.tick(now)
            self._receiver.tick(now)
        self._sender.fill(self._stats)
        self._receiver.fill(self._stats)
        self._report_stats(now)

    def _report_stats(self, now: float) -> None:
        """Report the counters now and then, so that the head need not request them."""
        if now >= self._next_report and self._stats != self._last_report:
            self._next_report = now + REPORT_SECONDS
            self._last_report = replace(self._stats)
            self._emit(self._last_report)

    def _wait(self) -> list[Any]:
        """Wait for anything. Returns the sockets that are readable."""
        seconds = TICK_SECONDS
        needs_polling = any(end.needs_polling for end in self._ends)
        awaits_slots = self._sender.awaits is Awaits.SLOTS
        self._is_polling = needs_polling or awaits_slots
        if self._busy:
            seconds = 0.0
        elif needs_polling:
            seconds = POLL_SECONDS
        elif self._sender.is_packing:
            seconds = PACKED_SECONDS
        elif awaits_slots:
            seconds = SLOT_POLL_SECONDS
        ready = [each for each, _ in self._current_poller().poll(int(seconds * 1000))]
        if self._commands.fileno() in ready:
            self._commands.rest()
        return ready

    def _current_poller(self) -> zmq.Poller:
        """The poller, rebuilt only if sockets have changed, since each frame needs it."""
        if not self._same_sockets:
            self._same_sockets = True
            self._update_pollers()
        awaits = self._sender.awaits
        if awaits is Awaits.NOTHING and self._listener.is_greeting:
            awaits = Awaits.REPLIES
        return self._pollers[awaits]

    def _update_pollers(self) -> None:
        polled: list[Any] = [self._commands.fileno()]
        for end in self._ends:
            polled += end.sockets()
        if polled != self._polled:
            self._polled = polled
            loans = frozenset(self._listener.loan_sockets())
            self._bulk = frozenset(self._dialer.bulk_sockets())
            self._replies = frozenset(self._listener.reply_sockets())
            self._moving = self._bulk | self._replies | {self._commands.fileno()}
            without = {Awaits.NOTHING: self._replies, Awaits.REPLIES: loans}
            for awaits in Awaits:
                self._pollers[awaits] = poller = zmq.Poller()
                for each in polled:
                    if each not in without.get(awaits, ()):
                        poller.register(each, zmq.POLLIN)

    def _take_commands(self) -> None:
        for command in self._commands.take():
            if isinstance(command, (Expect, OpenSend)):
                # An unreported loss concerns earlier attempts only.
                self._take_notices(self._clock())
            self._handlers[type(command)](command)

    def _admit(self, command: AdmitKeys) -> None:
        self._listener.admit(command.keys)
        self._emit(KeysAdmitted(version=command.version))

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

    def _handle_control(
        self,
        messages: Iterable[tuple[PeerKey, bytes]],
        handle: Callable[[PeerKey, Header, memoryview], None],
    ) -> None:
        for peer, message in messages:
            try:
                header, payload = frame.decode(message, frame.MAX_REASON_BYTES)
            except FrameError:
                self._stats.frames_refused += 1
                continue
            # ZeroMQ may deliver messages for the previous process to a restarted one.
            if (header.sender_epoch, header.receiver_epoch) == (peer.epoch, self._me.epoch):
                handle(peer, header, payload)
            else:
                self._stats.frames_stale += 1

    def _receive(self, now: float) -> int:
        count = self._take_bulk(now)
        if count:
            self._receiver.fill(self._stats)
        return count

    def _take_bulk(self, now: float) -> int:
        for count in range(FRAMES_A_ROUND):
            item = self._dialer.receive_bulk(now)
            if item is None:
                return count
            self._receiver.on_bulk(*item)
        return FRAMES_A_ROUND

    def _take_notices(self, now: float) -> None:
        self._same_sockets = False  # peers may have come or gone
        for notice in self._listener.notices(now):
            if isinstance(notice, Lost):
                self._sender.on_lost(notice.peer, notice.reason)
            self._report(notice)
        self._stats.unknown_connections = self._listener.unknown_connections
        self._stats.keys_refused = self._listener.keys_refused
        for notice in self._dialer.notices(now):
            if isinstance(notice, Lost):
                self._receiver.on_lost(notice.peer, notice.reason, notice.cause)
            else:
                self._receiver.on_joined(notice.peer)
            self._report(notice)

    def _report(self, notice: Notice) -> None:
        self._stats.peers = dict(self._listener.live() + self._dialer.live())
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
            PeerLost(
                node_id=peer.node_id,
                epoch=peer.epoch,
                rank=peer.rank,
                reason=notice.reason,
                cause=notice.cause,
            )
        )

    def close(self) -> None:
        self._take_commands()  # each must get its event
        self._sender.close()
        self._receiver.close()
        self._let_receivers_finish()
        self._listener.close()
        self._dialer.close()
        # Closed sockets release their frames soon, after which the ring's memory may be freed.
        give_up = time.monotonic() + FAREWELL_SECONDS
        while not self._sender.settled and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)
        self._waits.close()
        self._carriers.close()
        self._sender.fill(self._stats)
        self._receiver.fill(self._stats)

    def _let_receivers_finish(self) -> None:
        """Wait for loans, before the connections are closed, which would reclaim them.

        A receiver may be copying out of a ring, whose memory must not be freed during that: on a
        GPU the effect would be undefined.
        """
        give_up = time.monotonic() + FAREWELL_SECONDS
        while not self._sender.settled and time.monotonic() < give_up:
            now = self._clock()
            self._handle_control(self._listener.receive_control(now), self._sender.on_control)
            self._take_notices(now)
            time.sleep(POLL_SECONDS)


def greeting_of(config: DataPlaneConfig, cache: CachePort, offers: Mapping[str, bytes]) -> Greeting:
    return Greeting(
        node_id=config.node_id,
        epoch=config.epoch,
        rank=config.rank,
        tp_size=config.tp_size,
        dtype=cache.kv_dtype,
        layers=[layer.shape for layer in cache.layout],
        host=host_identity(),
        offers=offers,
        max_payload=config.slot_bytes,
        kv_scales=packed_scales(scales_in(cache.layout)),
    )
