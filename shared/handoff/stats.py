"""Counters of one data plane."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DataPlaneStats:
    """Written by the data-plane thread alone; others read a copy. Bytes are payload bytes."""

    bytes_sent: int = 0
    frames_sent: int = 0
    bytes_acknowledged: int = 0
    bytes_written_off: int = 0
    bytes_received: int = 0
    frames_received: int = 0
    frames_refused: int = 0
    checksum_failures: int = 0
    aborts_sent: int = 0
    sends_finished: int = 0
    sends_failed: int = 0
    receives_finished: int = 0
    receives_failed: int = 0
    cancelled: int = 0
    peers_lost: int = 0
    active_sends: int = 0
    active_receives: int = 0
    free_slots: int = 0
    total_slots: int = 0
    credit_in_flight: int = 0
