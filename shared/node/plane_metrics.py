"""Data-plane metrics, one series per rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..handoff.carriers.kinds import NAMES
from ..handoff.plane.stats import DataPlaneStats

# name: (help, label besides the rank if any, field of the statistics by the label's value)
_Series = dict[str, tuple[str, str, dict[str, str]]]

_COUNTERS: _Series = {
    "tandem_data_plane_bytes": (
        "KV bytes that crossed the data plane, canaries and failed attempts included.",
        "direction",
        {"sent": "bytes_sent", "received": "bytes_received"},
    ),
    "tandem_data_plane_frames": (
        "KV frames, by direction.",
        "direction",
        {"sent": "frames_sent", "received": "frames_received"},
    ),
    "tandem_data_plane_frames_dropped": (
        "Dropped frames: of a stale or unknown attempt, or malformed.",
        "reason",
        {"stale": "frames_stale", "refused": "frames_refused"},
    ),
    "tandem_data_plane_checksum_failures": (
        "Of the refused frames, those with a wrong checksum.",
        "",
        {"": "checksum_failures"},
    ),
    "tandem_data_plane_peers_lost": (
        "Connections to other ranks that ended.",
        "",
        {"": "peers_lost"},
    ),
    "tandem_data_plane_unknown_connections": (
        "Accepted connections that never greeted as a peer.",
        "",
        {"": "unknown_connections"},
    ),
    "tandem_data_plane_keys_refused": (
        "Handshakes with a key or password that the control plane has not announced.",
        "",
        {"": "keys_refused"},
    ),
}
_GAUGES: _Series = {
    "tandem_data_plane_credit_bytes": (
        "Bytes that receivers have granted to current transfers: used, and still free.",
        "state",
        {"in_flight": "credit_in_flight", "free": "credit_free"},
    ),
    "tandem_data_plane_staging_slots": (
        "Slots of the staging ring: held by frames on their way out, and free.",
        "state",
        {"held": "held_slots", "free": "free_slots"},
    ),
    "tandem_data_plane_transfers": (
        "Transfers under way.",
        "direction",
        {"sending": "active_sends", "receiving": "active_receives"},
    ),
}


class PlaneCollector(Collector):
    """Metrics of the ranks' last reports, which are at most a second old."""

    def __init__(self, stats: Mapping[int, DataPlaneStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, (text, label, sources) in table.items():
                family = kind(name, text, labels=["rank", *([label] if label else [])])
                for rank, stats in sorted(self._stats.items()):
                    for value, source in sources.items():
                        labels = [str(rank), *([value] if label else [])]
                        family.add_metric(labels, getattr(stats, source))
                yield family
        yield self._peers()

    def _peers(self) -> Metric:
        text = "Live connections to other ranks, by the carrier of their KV."
        family = GaugeMetricFamily("tandem_data_plane_peers", text, labels=["rank", "carrier"])
        for rank, stats in sorted(self._stats.items()):
            for carrier in dict.fromkeys([*NAMES, *stats.peers]):
                family.add_metric([str(rank), carrier], stats.peers.get(carrier, 0))
        return family
