"""The prefill rank's half of every transfer: pack, send against credits, await the confirmation.

A frame is packed directly from the cache as soon as there is credit for it, so the compute thread
never waits and nothing is copied early. On a GPU, frames are packed while earlier ones are. One
that is packed leaves with the next layers, or a few milliseconds later, unless the transfer can
only go on with it: then a thread beside this one waits for its end (``device_waits.py``). Transfers
take turns frame by frame, and no peer may use more slots of the ring than are free, so that a peer
that does not drain always leaves some for the others.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from ...causes import Cause
from ...kv.copying import Copying
from ...kv.layout import widest_cell
from ..carriers.base import SendHandle
from ..carriers.staging import HOST_WINDOW_BYTES, Ring, RingSlot
from ..carriers.transport import Listener, PeerGoneError
from ..wire import frame
from ..wire.buffer import Buffer
from ..wire.frame import DeviceFrame, Digest, Fin, Header, Kind, Message
from ..wire.greeting import PeerKey
from .messages import Cancelled, CancelSend, LayerReady, OpenSend, SendFailed, SendFinished
from .part_layout import Layout, coverage_of
from .stats import DataPlaneStats
from .transfer_end import ClosedAttempts, PartKey, PlaneEnd, part_of, refusal
from .work_list import CellRange, WorkList


class Awaits(IntEnum):
    """What a sender waits for, apart from layers and packed frames; each includes those before it.

    While frames are on their way and more may follow, nobody waits for their acknowledgements: they
    are read with the next one that lets a frame leave, or at the next tick.
    """

    NOTHING = 0
    REPLIES = 1  # acknowledgements, or anything while nothing is on its way
    LOANS = 2  # frames that a peer gives back
    SLOTS = 3  # free slots of a ring, which may come without a sign


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """One attempt at one part of a transfer, seen from the sender. Counts are payload bytes."""

    command: OpenSend
    peer: PeerKey
    layout: Layout
    work: WorkList
    progress_at: float
    computed_at: float = 0.0
    sequence: int = 0
    packing: int = 0  # in frames that are not sent yet
    sent: int = 0
    acknowledged: int = 0
    fin_sent: bool = False
    digest: Digest = field(default_factory=Digest)

    @property
    def in_flight(self) -> int:
        return self.packing + self.unacknowledged

    @property
    def unacknowledged(self) -> int:
        return self.sent - self.acknowledged

    @property
    def waits_for_peer(self) -> bool:
        """True if the transfer waits for the receiver, False if for the computation."""
        return self.in_flight > 0 or self.fin_sent or not self.work.empty


class SlotHolder(NamedTuple):
    """A peer's frames in one ring, which leave it in order."""

    peer: PeerKey
    ring: Ring[Any]


@dataclass(slots=True, kw_only=True)
class Packing:
    """A frame that is being packed into a slot."""

    transfer: Outgoing
    piece: CellRange
    length: int
    holder: SlotHolder
    slot: RingSlot
    message: Message
    copying: Copying
    is_awaited: bool = False  # by another thread
    failure: Exception | None = None


class Sender:
    """All outgoing transfers of one rank."""

    def __init__(self, end: PlaneEnd, listener: Listener) -> None:
        self._end = end
        self._cache, self._stats, self._clock = end.cache, end.stats, end.clock
        self._emit = end.emit
        # The number of components before each layer.
        counts = (len(layer.values) for layer in end.cache.layout)
        self._components = list(accumulate(counts, initial=0))
        self._listener = listener
        self._carriers = end.carriers
        self._transfers: dict[PartKey, Outgoing] = {}
        self._turn: deque[PartKey] = deque()
        # In the order in which they will be sent.
        self._packing: deque[Packing] = deque()
        self._departing: dict[SlotHolder, deque[tuple[RingSlot, SendHandle]]] = {}
        self._slot_counts: Counter[SlotHolder] = Counter()
        # When a peer was last sent a frame, or acknowledged one, in any transfer.
        self._moved_at: dict[PeerKey, float] = {}
        self._closed = ClosedAttempts()
        self.awaits = Awaits.REPLIES  # since the last pump

    # ---- commands ----------------------------------------------------------------------------

    def open(self, command: OpenSend) -> None:
        current = self._transfers.get(part_of(command))
        if current is not None and current.command.attempt == command.attempt:
            return
        reason = self._refusal(command, current)
        if reason:
            self._report_failed(command, reason, Cause.REFUSED)
            return
        if current is not None:
            self._fail(current, f"attempt {command.attempt} took its place", Cause.SUPERSEDED)
        layout = self._end.layouts.of(command.heads, command.dtype)
        self._transfers[part_of(command)] = Outgoing(
            command=command,
            peer=PeerKey(
                node_id=command.peer_node, epoch=command.peer_epoch, rank=command.peer_rank
            ),
            layout=layout,
            work=WorkList(layout, coverage_of(command, layout)),
            progress_at=self._clock(),
        )
        self._turn.append(part_of(command))

    def _refusal(self, command: OpenSend, current: Outgoing | None) -> str:
        under_way = current.command.attempt if current is not None else None
        reason = refusal(command, self._end.layouts, command.dtype, under_way, self._closed)
        if reason:
            return reason
        cell = widest_cell(self._end.layouts.of(command.heads, command.dtype))
        window = command.window_bytes or HOST_WINDOW_BYTES
        if window < 2 * cell:
            return f"a window of {window} bytes; two tokens need {2 * cell}"
        slot = self._carriers.ring.payload_bytes
        if cell > slot:
            return f"one token has {cell} bytes, but a staging slot only {slot}"
        return ""

    def ready(self, command: LayerReady) -> None:
        """Queue computed cells; ignored if the transfer is over."""
        for transfer in self._parts(command.transfer_id):
            if transfer.command.attempt == command.attempt:
                self._note_computed(transfer, command)

    def _parts(self, transfer_id: int) -> list[Outgoing]:
        return [t for t in self._transfers.values() if t.command.transfer_id == transfer_id]

    def _note_computed(self, transfer: Outgoing, command: LayerReady) -> None:
        now = self._clock()
        if not transfer.waits_for_peer:
            transfer.progress_at = now
        try:
            transfer.work.add(
                command.first_layer, command.end_layer, command.first_token, command.end_token
            )
        except ValueError as error:
            self._fail(transfer, str(error), Cause.OTHER, notify=True)
            return
        if transfer.work.complete and not transfer.computed_at:
            transfer.computed_at = now

    def cancel(self, command: CancelSend) -> None:
        self._closed.add((command.transfer_id, None), command.attempt)
        for transfer in self._parts(command.transfer_id):
            if transfer.command.attempt <= command.attempt:
                self._send_reason(transfer, Kind.ABORT, "cancelled by the sender")
                self._drop(transfer)
                self._stats.cancelled += 1
        self._emit(Cancelled(transfer_id=command.transfer_id, attempt=command.attempt, side="send"))

    # ---- the wire ----------------------------------------------------------------------------

    def pump(self, max_frames: int) -> bool:
        """Pack and send up to ``max_frames``, in turn for all transfers; True if more could be
        sent."""
        self._send_packed()
        self._reap()
        self.awaits = Awaits.NOTHING
        frames = idle = 0
        while idle < len(self._turn) and frames < max_frames:
            self._turn.rotate(-1)
            if self._advance(self._transfers[self._turn[0]]):
                frames += 1
                idle = 0
            else:
                idle += 1
        if not any(transfer.in_flight for transfer in self._transfers.values()):
            self._await(Awaits.REPLIES)
        if self.awaits or any(packing.transfer.work.complete for packing in self._packing):
            self._wait_for_packed()
        return frames >= max_frames

    def _await(self, what: Awaits) -> None:
        self.awaits = max(self.awaits, what)

    def _advance(self, transfer: Outgoing) -> bool:
        """Begin one frame of a transfer, if credit and staging allow it."""
        if transfer.fin_sent:
            self._await(Awaits.REPLIES)
            return False
        if not self._listener.is_live(transfer.peer):
            return False
        try:
            if transfer.work.empty:
                complete = transfer.work.complete and not transfer.packing
                return complete and self._send_fin(transfer)
            return self._pack_piece(transfer)
        except PeerGoneError as error:
            self._fail(transfer, str(error), error.cause)
        except Exception as error:  # an error of the cache ends one transfer, not the plane
            self._fail(transfer, f"packing failed: {error!r}", Cause.OTHER, notify=True)
        return False

    def _pack_piece(self, transfer: Outgoing) -> bool:
        carrier = self._listener.carrier(transfer.peer)
        ring = self._carriers.ring_of(carrier)
        holder = SlotHolder(transfer.peer, ring)
        window = self._end.window_of(transfer.command, carrier)
        limit = min(ring.payload_bytes, window // 2)
        if ring is self._carriers.ring:
            limit = min(limit, self._listener.max_payload(transfer.peer))
        piece = transfer.work.peek(limit)
        if piece is None:
            reason = f"{transfer.peer} accepts {limit} bytes of payload; one token has more"
            self._fail(transfer, reason, Cause.REFUSED, notify=True)
            return False
        length = piece.cells * transfer.layout[piece.first_layer].token_bytes
        if transfer.in_flight + length > window:
            self._await(Awaits.REPLIES)
            return False
        slots = self._slot_counts[holder]
        if slots >= self._listener.slots_for(transfer.peer):
            self._await(Awaits.LOANS)
            return False
        slot = ring.acquire() if slots < ring.free else None
        if slot is None:
            self._await(Awaits.SLOTS)
            if not slots:  # other peers use the whole ring, which is not this peer's fault
                transfer.progress_at = self._clock()
            return False
        try:
            message = slot.message(length)
            copying = self._pack(transfer, piece, frame.parts_of(message)[1])
        except BaseException:
            ring.release(slot)
            raise
        if not transfer.in_flight:
            transfer.progress_at = self._clock()
        transfer.work.take(piece)
        transfer.packing += length
        self._slot_counts[holder] += 1
        packing = Packing(
            transfer=transfer,
            piece=piece,
            length=length,
            holder=holder,
            slot=slot,
            message=message,
            copying=copying,
        )
        self._packing.append(packing)
        self._send_packed()
        return True

    def _pack(self, transfer: Outgoing, piece: CellRange, out: Buffer) -> Copying:
        scales = self._listener.kv_scales(transfer.peer)
        return self._cache.pack_frame(
            range(piece.first_layer, piece.end_layer),
            transfer.command.block_table,
            piece.first_token,
            piece.end_token,
            out,
            transfer.layout[piece.first_layer].heads,
            transfer.command.dtype,
            scales[self._components[piece.first_layer] : self._components[piece.end_layer]],
        )

    def _packed(self, packing: Packing, failure: Exception | None) -> None:
        """Called on another thread."""
        packing.failure = failure
        self._end.wake()

    def _wait_for_packed(self) -> None:
        """Wake this thread when the oldest frame is packed."""
        if self._packing and not self._packing[0].is_awaited:
            packing = self._packing[0]
            packing.is_awaited = True
            self._end.waits.put(packing.copying.wait, partial(self._packed, packing))

    @property
    def is_packing(self) -> bool:
        return bool(self._packing)

    def _send_packed(self) -> None:
        """Send the frames that are packed, in order."""
        while self._packing and _is_packed(self._packing[0]):
            packing = self._packing.popleft()
            transfer = packing.transfer
            transfer.packing -= packing.length
            handle: SendHandle | None = None
            try:
                if self._transfers.get(part_of(transfer.command)) is transfer:
                    handle = self._depart(packing)
            except PeerGoneError as error:
                self._fail(transfer, str(error), error.cause)
            except Exception as error:  # an error of the cache ends one transfer, not the plane
                self._fail(transfer, f"packing failed: {error!r}", Cause.OTHER, notify=True)
            finally:
                if handle is None:
                    packing.holder.ring.release(packing.slot)
                    self._release(packing.holder)

    def _depart(self, packing: Packing) -> SendHandle:
        """Seal and send a frame. Raises the error with which it was packed, or
        ``PeerGoneError``."""
        if packing.failure is not None:
            raise packing.failure
        transfer, slot, message = packing.transfer, packing.slot, packing.message
        sums = packing.copying.sums
        if sums is not None and isinstance(message, DeviceFrame):
            message = DeviceFrame(message.head, message.payload, lambda payload: sums())
        checksum = frame.seal(message, self._data_header(transfer, packing.piece))
        handle = self._listener.send_bulk(transfer.peer, message, slot.offset)
        self._departing.setdefault(packing.holder, deque()).append((slot, handle))
        self._count(transfer, packing.length, checksum)
        return handle

    def _count(self, transfer: Outgoing, length: int, checksum: int) -> None:
        transfer.digest.add(checksum)
        transfer.sequence += 1
        transfer.sent += length
        self._stats.frames_sent += 1
        self._stats.bytes_sent += length

    def _data_header(self, transfer: Outgoing, piece: CellRange) -> Header:
        part, command = transfer.layout[piece.first_layer], transfer.command
        return Header(
            kind=Kind.DATA,
            transfer_id=command.transfer_id,
            attempt=command.attempt,
            sequence=transfer.sequence,
            sender_epoch=self._end.me.epoch,
            receiver_epoch=transfer.peer.epoch,
            first_layer=piece.first_layer,
            end_layer=piece.end_layer,
            first_token=piece.first_token,
            end_token=piece.end_token,
            first_head=part.first_head,
            end_head=part.end_head,
        )

    def _send_fin(self, transfer: Outgoing) -> bool:
        """Send the fin after the data, on the same socket, which keeps the order."""
        fin = Fin(transfer.sequence, transfer.sent, transfer.digest.value)
        message = frame.encode(self._header(transfer, Kind.FIN), frame.fin_payload(fin))
        self._listener.send_bulk(transfer.peer, memoryview(message))
        transfer.fin_sent = True
        return True

    def _header(self, transfer: Outgoing, kind: Kind) -> Header:
        command = transfer.command
        return self._end.header(
            kind, transfer.peer, command.transfer_id, command.attempt, transfer.sequence
        )

    def on_control(self, peer: PeerKey, header: Header, payload: memoryview) -> None:
        """Handle an ack, nack or abort from a receiver, whose epochs were checked."""
        transfer = self._transfers.get((header.transfer_id, peer.rank))
        if transfer is None or transfer.command.attempt != header.attempt or transfer.peer != peer:
            self._abort_unknown(peer, header)
        elif header.kind is Kind.ACK:
            self._on_ack(transfer, header.sequence, frame.read_ack(payload))
        elif header.kind in (Kind.NACK, Kind.ABORT):
            reason = f"refused by the receiver: {frame.read_reason(payload)}"
            self._fail(transfer, reason, Cause.PEER_FAILED)

    def _abort_unknown(self, peer: PeerKey, header: Header) -> None:
        """Abort an unknown transfer, so that its receiver stops waiting."""
        if header.kind is not Kind.ACK:
            return
        abort = self._end.header(Kind.ABORT, peer, header.transfer_id, header.attempt)
        if self._end.send_reason(self._listener, peer, abort, "not sending this attempt"):
            self._stats.aborts_sent += 1

    def _on_ack(self, transfer: Outgoing, sequence: int, received: int) -> None:
        if not transfer.acknowledged <= received <= transfer.sent:
            reason = f"{received} bytes acknowledged, {transfer.sent} sent"
            self._fail(transfer, reason, Cause.INCOMPLETE, notify=True)
            return
        self._stats.bytes_acknowledged += received - transfer.acknowledged
        transfer.acknowledged = received
        transfer.progress_at = self._moved_at[transfer.peer] = self._clock()
        # Only the ack of the fin has the next sequence; bytes are acknowledged before the end is
        # verified.
        if transfer.fin_sent and sequence == transfer.sequence + 1 and not transfer.in_flight:
            self._finish(transfer)

    def _finish(self, transfer: Outgoing) -> None:
        self._drop(transfer)
        self._stats.sends_finished += 1
        self._emit(
            SendFinished(
                transfer_id=transfer.command.transfer_id,
                attempt=transfer.command.attempt,
                peer_rank=transfer.peer.rank,
                bytes=transfer.sent,
                exposed_seconds=self._clock() - transfer.computed_at,
            )
        )

    # ---- failures and time -------------------------------------------------------------------

    def on_lost(self, peer: PeerKey, reason: str) -> None:
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            self._fail(transfer, f"lost {peer}: {reason}", Cause.PEER_LOST)

    def tick(self, now: float) -> None:
        """Fail transfers that wait too long for their receiver; the head watches the computation.

        Transfers to one peer share its link, and each may wait long for its turn: while anything
        moves to the peer, none of them has failed.
        """
        peers = {transfer.peer for transfer in self._transfers.values()}
        self._moved_at = {peer: at for peer, at in self._moved_at.items() if peer in peers}
        for transfer in list(self._transfers.values()):
            elapsed = now - max(transfer.progress_at, self._moved_at.get(transfer.peer, 0.0))
            if transfer.waits_for_peer and elapsed > transfer.command.progress_seconds:
                reason = f"no progress at {transfer.peer} for {elapsed:.1f} s"
                self._fail(transfer, reason, Cause.TIMEOUT_PROGRESS, notify=True)

    def _fail(self, transfer: Outgoing, reason: str, cause: Cause, *, notify: bool = False) -> None:
        if notify:
            self._send_reason(transfer, Kind.ABORT, reason)
        self._drop(transfer)
        self._report_failed(transfer.command, reason, cause)

    def _report_failed(self, command: OpenSend, reason: str, cause: Cause) -> None:
        self._stats.sends_failed += 1
        self._emit(
            SendFailed(
                transfer_id=command.transfer_id,
                attempt=command.attempt,
                peer_rank=command.peer_rank,
                reason=reason,
                cause=cause.value,
            )
        )

    def _send_reason(self, transfer: Outgoing, kind: Kind, reason: str) -> None:
        self._end.send_reason(self._listener, transfer.peer, self._header(transfer, kind), reason)

    def _drop(self, transfer: Outgoing) -> None:
        key = part_of(transfer.command)
        del self._transfers[key]
        self._turn.remove(key)
        self._closed.add(key, transfer.command.attempt)
        self._stats.bytes_written_off += transfer.unacknowledged

    # ---- staging -----------------------------------------------------------------------------

    def _reap(self) -> None:
        """Release the slots whose frames have left."""
        for holder, queue in list(self._departing.items()):
            while queue and queue[0][1].done:
                holder.ring.release(queue.popleft()[0])
                self._release(holder)
                self._moved_at[holder.peer] = self._clock()
            if not queue:
                del self._departing[holder]

    def _release(self, holder: SlotHolder) -> None:
        self._slot_counts[holder] -= 1
        if not self._slot_counts[holder]:
            del self._slot_counts[holder]

    def close(self) -> None:
        """Fail everything. Slots are released as their frames leave (``settled``)."""
        for transfer in list(self._transfers.values()):
            reason = "the data plane is shutting down"
            self._fail(transfer, reason, Cause.STOPPING, notify=True)

    @property
    def settled(self) -> bool:
        """True if every slot is free again. Raises ``AssertionError`` when slots have leaked."""
        self._send_packed()
        self._reap()
        rings = self._carriers.rings
        for ring in rings:
            ring.check_conserved(
                sum(n for holder, n in self._slot_counts.items() if holder.ring is ring)
            )
        return all(ring.free == ring.total for ring in rings)

    def fill(self, stats: DataPlaneStats) -> None:
        stats.active_sends = len(self._transfers)
        stats.credit_in_flight = sum(t.in_flight for t in self._transfers.values())
        credit = sum(
            self._end.window_of(t.command, self._listener.carrier(t.peer))
            for t in self._transfers.values()
        )
        stats.credit_free = credit - stats.credit_in_flight
        rings = self._carriers.rings
        stats.free_slots = sum(ring.free for ring in rings)
        stats.total_slots = sum(ring.total for ring in rings)


def _is_packed(packing: Packing) -> bool:
    """True if a frame is packed, or failed."""
    if packing.failure is None:
        try:
            return packing.copying.wait.is_over()
        except Exception as error:  # torch and drivers raise errors of many types
            packing.failure = error
    return True
