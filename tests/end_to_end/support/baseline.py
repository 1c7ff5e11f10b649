"""The resources that a cluster holds at rest, by its own count and by the system's. After any fault
it must return to them; anything more is a leak."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.router.cluster.admin import list_nodes
from tandem.tests.end_to_end.support.cluster import Part, metric, pauses

# Orphans are freed by reconciling every 5 s, and by leases after 10 s.
SETTLE_SECONDS = 20.0
# gRPC's and torch's thread pools breathe, and a connection may be closing while it is looked at.
BREATH_THREADS, BREATH_DESCRIPTORS = 6, 4

AT_REST_ZERO = (
    'tandem_kv_blocks{state="owned"}',
    'tandem_kv_blocks{state="reserved"}',
    "tandem_transfers_live",
    "tandem_leases",
    "tandem_sequences_running",
    "tandem_sequences_waiting",
    "tandem_prefill_queue_tokens",
    'tandem_data_plane_staging_slots{rank="0",state="held"}',
    'tandem_data_plane_transfers{direction="sending",rank="0"}',
    'tandem_data_plane_transfers{direction="receiving",rank="0"}',
    'tandem_data_plane_credit_bytes{rank="0",state="in_flight"}',
)
BLOCKS = ('tandem_kv_blocks{state="free"}', 'tandem_kv_blocks{state="cached"}')


@dataclass(frozen=True, slots=True)
class Footprint:
    """The system's counts for a process and those that it has started."""

    processes: int
    threads: int
    descriptors: int
    rings: int  # staging rings that are open or mapped

    @classmethod
    def of(cls, pid: int) -> Footprint:
        head = psutil.Process(pid)
        everyone = [head, *head.children(recursive=True)]
        return cls(
            processes=len(everyone),
            threads=sum(process.num_threads() for process in everyone),
            descriptors=sum(process.num_fds() for process in everyone),
            rings=sum(_rings(process.pid) for process in everyone),
        )

    def beyond(self, rest: Footprint) -> str:
        """The counts that are higher than at rest; empty if none is."""
        grown = (
            self.processes > rest.processes
            or self.threads > rest.threads + BREATH_THREADS
            or self.descriptors > rest.descriptors + BREATH_DESCRIPTORS
            or self.rings > rest.rings
        )
        return f"{self}, at rest it had {rest}" if grown else ""


def _rings(pid: int) -> int:
    """Descriptors of staging rings, and mappings of them."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            links.append(os.readlink(descriptor))
    lines = links + Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:tandem-staging" in line for line in lines)


class Baseline:
    """Taken once, of a warm cluster at rest; ``check`` may be called after every case.

    ``parts`` is looked at anew each time: a part that was started again must come to what the one
    of its name before it held.
    """

    def __init__(self, parts: Mapping[str, Part], registry: str) -> None:
        self._parts = parts
        self._registry = registry
        self._wait(self._leaks)
        self._rest = {name: Footprint.of(part.process.pid) for name, part in parts.items()}
        self._blocks = {name: _blocks(part) for name, part in parts.items()}
        self._segments = _segments()

    def check(self, seconds: float = SETTLE_SECONDS) -> None:
        """Wait until everything is as it was at rest; says what is not."""
        self._wait(self._differences, seconds)

    def _wait(self, differences: object, seconds: float = SETTLE_SECONDS) -> None:
        assert callable(differences)
        deadline = time.monotonic() + seconds
        for pause in pauses():
            if not (leaks := differences()):
                return
            assert time.monotonic() < deadline, f"after {seconds:g} s:\n" + "\n".join(leaks)
            time.sleep(pause)

    def _differences(self) -> list[str]:
        if leaks := self._leaks():
            return leaks  # the system's counts cost more
        for name, part in self._parts.items():
            grown = Footprint.of(part.process.pid).beyond(self._rest[name])
            leaks += [f"{name}: {grown}"] if grown else []
            if (blocks := _blocks(part)) != self._blocks[name]:
                leaks.append(f"{name}: {blocks} blocks free or cached of {self._blocks[name]}")
        leaks += [f"segment {name}" for name in _segments() - self._segments]
        return leaks

    def _leaks(self) -> list[str]:
        """Resources in use, by the nodes' metrics and the router's list; none at rest."""
        leaks = []
        for name, part in self._parts.items():
            assert part.process.poll() is None, f"{name} has ended:\n{part.log.read_text()[-2000:]}"
            text = part.metrics()
            leaks += [f"{name}: {s} is {v:g}" for s in AT_REST_ZERO if (v := metric(text, s))]
        nodes_by_id = {node.node_id: node for node in list_nodes(self._registry).nodes}
        leaks += [f"{name} is not listed" for name in self._parts.keys() - nodes_by_id.keys()]
        for node in nodes_by_id.values():
            load = node.load
            blocks = load.leases + load.transfers + load.owned_blocks + load.reserved_blocks
            leaks += (
                [f"{node.node_id}: {blocks} held, as listed"] if blocks or node.requests else []
            )
        return leaks


def _blocks(part: Part) -> float:
    text = part.metrics()
    return sum(metric(text, series) for series in BLOCKS)


def _segments() -> frozenset[str]:
    """Named shared memory of the whole machine, as far as it could be ours."""
    folder = Path("/dev/shm")
    return frozenset(file.name for file in folder.iterdir() if "tandem" in file.name.lower())
