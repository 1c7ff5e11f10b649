"""Counters of one data plane."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DataPlaneStats:
    """Written by the data-plane thread alone; others read a copy. Bytes are payload bytes.

    ``frames_stale`` were valid, but for an attempt that is over or a process that is gone;
    ``frames_refused`` were invalid. ``unknown_connections`` never greeted as a peer;
    ``keys_refused`` of them had a wrong CURVE key or password. ``peers`` counts live connections by
    carrier; the map is replaced, never changed. Slots are counted over all rings.
    """

    bytes_sent: int = 0
    frames_sent: int = 0
    bytes_acknowledged: int = 0
    bytes_written_off: int = 0
    bytes_received: int = 0
    frames_received: int = 0
    frames_stale: int = 0
    frames_refused: int = 0
    checksum_failures: int = 0
    aborts_sent: int = 0
    sends_finished: int = 0
    sends_failed: int = 0
    receives_finished: int = 0
    receives_failed: int = 0
    cancelled: int = 0
    peers_lost: int = 0
    unknown_connections: int = 0
    keys_refused: int = 0
    peers: dict[str, int] = field(default_factory=dict)
    active_sends: int = 0
    active_receives: int = 0
    free_slots: int = 0
    total_slots: int = 0
    credit_in_flight: int = 0
    credit_free: int = 0

    @property
    def connections(self) -> int:
        return sum(self.peers.values())

    @property
    def held_slots(self) -> int:
        return self.total_slots - self.free_slots
