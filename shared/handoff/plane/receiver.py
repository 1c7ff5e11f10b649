"""The decode rank's half of every transfer: check each frame, scatter it, grant credit, confirm.

A frame is accepted only if its connection, epochs, transfer, attempt, sequence, ranges, coverage
and checksum all match the reservation. Anything else ends the attempt (never the process or the
request). Frames are scattered on the thread that also handles cancels, which waits for a GPU before
it reports an end, so an attempt that was cancelled or has failed can write nothing afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...causes import Cause
from ...errors import TransferError
from ...kv.copying import Copying
from ..carriers.transport import Dialer, Endpoints, PeerGoneError
from ..wire import frame
from ..wire.buffer import Buffer
from ..wire.frame import (
    ChecksumError,
    DeviceFrame,
    Digest,
    FrameError,
    Header,
    Kind,
    Message,
)
from ..wire.greeting import PeerKey
from .canary import worst_difference
from .coverage import Coverage, OverlapError
from .messages import (
    CancelExpect,
    Cancelled,
    Compare,
    Compared,
    Expect,
    Expecting,
    Received,
    ReceiveFailed,
)
from .part_layout import Layout, coverage_of
from .stats import DataPlaneStats
from .transfer_end import ClosedAttempts, PartKey, PlaneEnd, part_of, refusal

# Words for a lost connection, by cause.
_LOSS_WORDS = {Cause.REFUSED: "refused by", Cause.NO_PLACE: "no place at"}

# The longest time that received bytes stay unacknowledged. For the sender, unacknowledged bytes
# mean that it waits for its peer, so the rest of a quarter window must not wait for the next frame:
# the link may be slow, and the computation may pause for any time.
ACK_SECONDS = 0.5


@dataclass(slots=True, kw_only=True)
class Incoming:
    """One attempt at one part of a transfer, seen from the receiver. Counts are payload bytes."""

    command: Expect
    peer: PeerKey
    layout: Layout
    coverage: Coverage
    opened_at: float
    acknowledged_at: float
    announced: bool = False
    sequence: int = 0
    received: int = 0
    acknowledged: int = 0
    digest: Digest = field(default_factory=Digest)
    # Of the last frame, after which all earlier ones are over too.
    copying: Copying | None = None

    def settle(self) -> None:
        """Wait until nothing is copied into the blocks."""
        copying, self.copying = self.copying, None
        if copying is not None:
            copying.wait()


class Receiver:
    """All incoming transfers of one rank."""

    def __init__(self, end: PlaneEnd, dialer: Dialer, *, max_payload: int) -> None:
        self._end = end
        self._cache, self._stats, self._clock = end.cache, end.stats, end.clock
        self._emit, self._me = end.emit, end.me
        self._dialer = dialer
        self._max_payload = max_payload
        self._transfers: dict[PartKey, Incoming] = {}
        self._closed = ClosedAttempts()
        self._aborted = ClosedAttempts()

    # ---- commands ----------------------------------------------------------------------------

    def expect(self, command: Expect) -> None:
        current = self._transfers.get(part_of(command))
        if current is not None and current.command.attempt == command.attempt:
            return
        under_way = current.command.attempt if current else None
        reason = refusal(command, self._end.layouts, self._me.dtype, under_way, self._closed)
        if reason:
            self._report_failed(command, reason, Cause.OTHER, retriable=False)
            return
        if current is not None:
            reason = f"attempt {command.attempt} took its place"
            self._fail(current, reason, Cause.SUPERSEDED, retriable=False)
        now = self._clock()
        layout = self._end.layouts.of(command.heads, self._me.dtype)
        transfer = Incoming(
            command=command,
            peer=PeerKey(
                node_id=command.peer_node, epoch=command.peer_epoch, rank=command.peer_rank
            ),
            layout=layout,
            coverage=coverage_of(command, layout),
            opened_at=now,
            acknowledged_at=now,
        )
        self._transfers[part_of(command)] = transfer
        self._dialer.connect(
            transfer.peer,
            Endpoints(command.bulk, command.control, command.key),
            now,
        )
        self._announce(transfer)

    def cancel(self, command: CancelExpect) -> None:
        self._closed.add((command.transfer_id, None), command.attempt)
        for transfer in list(self._transfers.values()):
            mine = transfer.command.transfer_id == command.transfer_id
            if mine and transfer.command.attempt <= command.attempt:
                self._send_reason(transfer, Kind.ABORT, "cancelled")
                self._drop(transfer)
                self._stats.cancelled += 1
        self._emit(
            Cancelled(transfer_id=command.transfer_id, attempt=command.attempt, side="receive")
        )

    def compare(self, command: Compare) -> None:
        """Compare the KV of two block tables of this rank."""
        try:
            worst = worst_difference(self._cache, command)
        except Exception as error:  # an error of the cache ends one comparison, not the plane
            reason = f"comparing failed: {error!r}"
            self._report_failed(command, reason, Cause.CANARY, retriable=True)
            return
        self._emit(
            Compared(
                transfer_id=command.transfer_id,
                attempt=command.attempt,
                layer=worst.layer,
                component=worst.component,
                largest=worst.largest,
                limit=worst.limit,
            )
        )

    def on_joined(self, peer: PeerKey) -> None:
        for transfer in self._transfers.values():
            if transfer.peer == peer:
                self._announce(transfer)

    def _announce(self, transfer: Incoming) -> None:
        if transfer.announced or not self._dialer.is_live(transfer.peer):
            return
        transfer.announced = True
        command = transfer.command
        self._emit(
            Expecting(
                transfer_id=command.transfer_id,
                attempt=command.attempt,
                peer_rank=command.peer_rank,
            )
        )

    # ---- the wire ----------------------------------------------------------------------------

    def on_bulk(self, peer: PeerKey, message: Message) -> None:
        """Handle one bulk frame, valid or not."""
        head, _ = frame.parts_of(message)
        first_head = bytes(head)
        try:
            header, payload = frame.parse(message, self._max_payload)
        except FrameError:
            self._stats.frames_refused += 1
            return
        transfer = self._transfers.get((header.transfer_id, peer.rank))
        if not self._is_expected(transfer, peer, header):
            self._stats.frames_stale += 1
            self._abort_stale(peer, header)
            return
        assert transfer is not None
        try:
            self._take(transfer, header, message, payload)
            # In shared memory, a sender that considers this rank dead may have packed another frame
            # into the slot.
            if head != first_head:
                raise FrameError("the frame changed while it was read; its sender reclaimed it")
        except TransferError as error:
            self._stats.frames_refused += 1
            self._stats.checksum_failures += isinstance(error, ChecksumError)
            self._reject(transfer, str(error), error.cause)
        except Exception as error:  # an error of the cache ends one transfer, not the plane
            self._reject(transfer, f"scattering failed: {error!r}", Cause.OTHER)

    def _is_expected(self, transfer: Incoming | None, peer: PeerKey, header: Header) -> bool:
        """True if the frame belongs to an expected attempt, from the expected process."""
        return (
            transfer is not None
            and transfer.peer == peer
            and transfer.command.attempt == header.attempt
            and header.sender_epoch == peer.epoch
            and header.receiver_epoch == self._me.epoch
        )

    def _abort_stale(self, peer: PeerKey, header: Header) -> None:
        """Abort an attempt, once for a whole window of late frames."""
        if header.kind not in (Kind.DATA, Kind.FIN):
            return
        key = header.transfer_id, peer.rank
        if self._aborted.covers(key, header.attempt):
            return
        self._aborted.add(key, header.attempt)
        abort = self._end.header(Kind.ABORT, peer, header.transfer_id, header.attempt)
        if self._end.send_reason(self._dialer, peer, abort, "not expecting this attempt"):
            self._stats.aborts_sent += 1

    def _take(self, transfer: Incoming, header: Header, message: Message, payload: Buffer) -> None:
        # In a device's memory, bytes are summed while they are scattered: blocks of a transfer that
        # is not complete are nobody's yet, and a frame that is corrupt ends it.
        late = None
        if header.kind is Kind.DATA and self._cache.sums_on_the_way:
            late = message if isinstance(message, DeviceFrame) else None
        checksum = frame.verify(message) if late is None else 0
        if header.sequence != transfer.sequence:
            raise FrameError(f"expected frame {transfer.sequence}, got frame {header.sequence}")
        if header.kind is Kind.DATA:
            window = self._end.window_of(transfer.command, self._dialer.carrier(transfer.peer))
            self._check_data(transfer, header, len(payload), window)
            copying = self._scatter(transfer, header, payload)
            if late is not None:
                checksum = _verify_copied(late, copying)
            self._count(transfer, len(payload), checksum, window)
        elif header.kind is Kind.FIN:
            self._fin(transfer, frame.read_fin(payload))
        else:
            raise FrameError(f"a {header.kind.name.lower()} frame on the bulk connection")

    def _scatter(self, transfer: Incoming, header: Header, payload: Buffer) -> Copying:
        copying = self._cache.scatter_frame(
            range(header.first_layer, header.end_layer),
            transfer.command.block_table,
            header.first_token,
            header.end_token,
            payload,
            transfer.layout[header.first_layer].heads,
        )
        transfer.copying = copying
        return copying

    def _count(self, transfer: Incoming, length: int, checksum: int, window: int) -> None:
        transfer.digest.add(checksum)
        transfer.sequence += 1
        transfer.received += length
        self._stats.frames_received += 1
        self._stats.bytes_received += length
        quarter = 4 * (transfer.received - transfer.acknowledged) >= window
        if quarter or self._ack_is_due(transfer):
            self._acknowledge(transfer)

    def _ack_is_due(self, transfer: Incoming) -> bool:
        elapsed = self._clock() - transfer.acknowledged_at
        return transfer.received > transfer.acknowledged and elapsed >= ACK_SECONDS

    def _check_data(self, transfer: Incoming, header: Header, length: int, window: int) -> None:
        try:
            transfer.coverage.add(
                header.first_layer, header.end_layer, header.first_token, header.end_token
            )
        except OverlapError as error:
            raise FrameError(str(error)) from None
        part, *others = transfer.layout[header.first_layer : header.end_layer]
        if any(other != part for other in others):
            layers = f"[{header.first_layer}, {header.end_layer})"
            raise FrameError(f"layers {layers} of one frame have different layouts")
        heads = range(header.first_head, header.end_head)
        if heads != part.heads:
            raise FrameError(f"got heads {heads}, expected {part.heads}")
        cells = (header.end_layer - header.first_layer) * (header.end_token - header.first_token)
        if length != cells * part.token_bytes:
            raise FrameError(f"{length} bytes for {cells} cells of {part.token_bytes}")
        outstanding = transfer.received + length - transfer.acknowledged
        if outstanding > window:
            raise FrameError(f"{outstanding} bytes without credit; the window is {window}")

    def _fin(self, transfer: Incoming, fin: frame.Fin) -> None:
        mine = frame.Fin(transfer.sequence, transfer.received, transfer.digest.value)
        if fin != mine:
            raise FrameError(f"the sender counts {fin}, this rank {mine}")
        if not transfer.coverage.complete:
            coverage = transfer.coverage
            raise FrameError(f"fin after {coverage.cells} of {coverage.total} cells")
        transfer.settle()
        transfer.sequence += 1
        self._acknowledge(transfer)
        # All bytes are here: if the connection broke on the last ack, only the send has failed.
        if self._transfers.get(part_of(transfer.command)) is transfer:
            self._drop(transfer)
        self._stats.receives_finished += 1
        command = transfer.command
        self._emit(
            Received(
                transfer_id=command.transfer_id,
                attempt=command.attempt,
                peer_rank=command.peer_rank,
                bytes=transfer.received,
            )
        )

    def _acknowledge(self, transfer: Incoming) -> None:
        transfer.acknowledged = transfer.received
        transfer.acknowledged_at = self._clock()
        message = frame.encode(
            self._header(transfer, Kind.ACK), frame.ack_payload(transfer.received)
        )
        try:
            self._dialer.send_control(transfer.peer, message)
        except PeerGoneError:
            return  # a notice will fail the transfer

    def _header(self, transfer: Incoming, kind: Kind) -> Header:
        command = transfer.command
        return self._end.header(
            kind, transfer.peer, command.transfer_id, command.attempt, transfer.sequence
        )

    def on_control(self, peer: PeerKey, header: Header, payload: memoryview) -> None:
        """Handle an abort from a sender, whose epochs were checked. There is no reply, which would
        echo."""
        transfer = self._transfers.get((header.transfer_id, peer.rank))
        if header.kind is Kind.ABORT and self._is_expected(transfer, peer, header):
            assert transfer is not None
            reason = frame.read_reason(payload)
            text = f"aborted by the sender: {reason}"
            self._fail(transfer, text, Cause.PEER_FAILED, retriable=True)

    # ---- failures and time -------------------------------------------------------------------

    def on_lost(self, peer: PeerKey, reason: str, cause: Cause) -> None:
        what = _LOSS_WORDS.get(cause, "lost")
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            text, retriable = f"{what} {peer}: {reason}", cause is not Cause.REFUSED
            self._fail(transfer, text, cause, retriable=retriable)

    def tick(self, now: float) -> None:
        """Acknowledge remaining bytes, and fail transfers past their deadline.

        Silence is no failure here: between two frames the peer may compute for any time. Pings on
        the connection show that the rank is alive, heartbeats of its head that it computes.
        """
        for transfer in list(self._transfers.values()):
            seconds = transfer.command.deadline_seconds
            if now - transfer.opened_at > seconds:
                reason = f"not complete after {seconds:g} s, when its request ends"
                self._reject(transfer, reason, Cause.TIMEOUT_TRANSFER)
            elif self._ack_is_due(transfer):
                self._acknowledge(transfer)

    def _reject(self, transfer: Incoming, reason: str, cause: Cause) -> None:
        """Fail an attempt, and send the reason to the sender."""
        self._send_reason(transfer, Kind.NACK, reason)
        self._fail(transfer, reason, cause, retriable=True)

    def _send_reason(self, transfer: Incoming, kind: Kind, reason: str) -> None:
        self._end.send_reason(self._dialer, transfer.peer, self._header(transfer, kind), reason)

    def _fail(self, transfer: Incoming, reason: str, cause: Cause, *, retriable: bool) -> None:
        if self._transfers.get(part_of(transfer.command)) is not transfer:
            return
        self._drop(transfer)
        self._report_failed(transfer.command, reason, cause, retriable=retriable)

    def _report_failed(
        self, command: Expect | Compare, reason: str, cause: Cause, *, retriable: bool
    ) -> None:
        self._stats.receives_failed += 1
        self._emit(
            ReceiveFailed(
                transfer_id=command.transfer_id,
                attempt=command.attempt,
                peer_rank=command.peer_rank if isinstance(command, Expect) else 0,
                reason=reason,
                retriable=retriable,
                cause=cause.value,
            )
        )

    def _drop(self, transfer: Incoming) -> None:
        key = part_of(transfer.command)
        del self._transfers[key]
        transfer.settle()  # its blocks are free with the next event
        self._closed.add(key, transfer.command.attempt)
        # The sender knows that the attempt ended, so its late frames need no abort.
        self._aborted.add(key, transfer.command.attempt)

    def close(self) -> None:
        for transfer in list(self._transfers.values()):
            self._reject(transfer, "the data plane is shutting down", Cause.STOPPING)

    def fill(self, stats: DataPlaneStats) -> None:
        stats.active_receives = len(self._transfers)


def _verify_copied(message: DeviceFrame, copying: Copying) -> int:
    """``frame.verify`` of a message whose payload was copied, when that is over."""
    copying.wait()
    sums = copying.sums
    return frame.verify(message if sums is None else replace(message, sums=lambda _: sums()))
