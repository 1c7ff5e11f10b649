"""Machines on this one: network namespaces, joined by a switch that a test can make lose, delay and
cut what passes.

Every host has a TUN device whose other end the switch holds, so that no part of the kernel beyond
TUN and namespaces is needed: many have no netem.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import math
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# A network that is reserved for tests between devices (RFC 2544).
NETWORK = "198.18.7."
# The test's own process, in the namespace that it is in anyway.
CLIENT = NETWORK + "254"
POLL_SECONDS = 0.05
PACKET_BYTES = 65536
# What waits longer at a slow link is lost, as with a router whose queue is full.
QUEUE_SECONDS = 0.3


class Switch:
    """Carries IP packets from host to host, on a thread of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.loss = 0.0  # of all packets, but for the client's
        self.delay = 0.0  # seconds, one way
        self.rate = math.inf  # bytes a second that pass each way between two, but for the client's
        self.cut: set[frozenset[str]] = set()  # pairs of hosts that do not reach each other
        self.closed: set[tuple[str, str]] = set()  # no new connections from the first to the second
        self.narrow: dict[frozenset[str], int] = {}  # the largest packet that passes between two
        self._draw = random.Random(seed)
        self._devices: dict[str, int] = {}
        self._marks: list[tuple[tuple[str, str], int, Callable[[], object]]] = []
        self._free: dict[tuple[str, str], float] = {}  # when a way has room for a packet
        self._num_bytes: dict[tuple[str, str], int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="switch")

    def plug(self, address: str, namespace: str, name: str) -> None:
        """Give a host its device; an empty namespace is the test's own."""
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._devices[address] = device
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        if namespace:
            ip("link", "set", name, "netns", namespace)
        inside = ("-n", namespace) if namespace else ()
        ip(*inside, "address", "add", f"{address}/24", "dev", name)
        ip(*inside, "link", "set", name, "up")

    def when(self, source: str, target: str, count: int, action: Callable[[], object]) -> None:
        """Run ``action`` when ``count`` more bytes have gone from one host to the other."""
        way = source, target
        self._marks.append((way, self._num_bytes.get(way, 0) + count, action))

    def heal(self) -> None:
        self.loss = self.delay = 0.0
        self.rate = math.inf
        self._marks.clear()
        self.cut.clear()
        self.closed.clear()
        self.narrow.clear()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)
        for device in self._devices.values():
            os.close(device)

    def _run(self) -> None:
        while not self._stop.is_set():
            seconds = self._late[0][0] - time.monotonic() if self._late else POLL_SECONDS
            ready, _, _ = select.select(
                list(self._devices.values()), [], [], max(0.0, min(seconds, POLL_SECONDS))
            )
            for device in ready:
                with contextlib.suppress(BlockingIOError):
                    self._take(os.read(device, PACKET_BYTES))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(self._late)
                with contextlib.suppress(OSError):  # a full queue loses it, like any switch's
                    os.write(device, packet)

    def _take(self, packet: bytes) -> None:
        source, target = (".".join(map(str, packet[i : i + 4])) for i in (12, 16))
        device = self._devices.get(target)
        if packet[0] >> 4 != 4 or device is None:
            return  # not ours: neighbour discovery, multicast
        if not {source, target} & {CLIENT} and self._draw.random() < self.loss:
            return
        self._count(source, target, len(packet))
        if (source, target) in self.closed and _opens(packet):
            return
        pair = frozenset((source, target))
        if pair in self.cut or len(packet) > self.narrow.get(pair, PACKET_BYTES):
            return
        now, way = time.monotonic(), (source, target)
        room = now
        if CLIENT not in way:
            room = max(now, self._free.get(way, now))
            if room - now > QUEUE_SECONDS:
                return
            self._free[way] = room + len(packet) / self.rate
        deadline = room + self.delay
        heapq.heappush(self._late, (deadline, next(self._numbers), device, packet))

    def _count(self, source: str, target: str, size: int) -> None:
        way = source, target
        self._num_bytes[way] = self._num_bytes.get(way, 0) + size
        for mark in [m for m in self._marks if m[0] == way and m[1] <= self._num_bytes[way]]:
            self._marks.remove(mark)
            mark[2]()


def _opens(packet: bytes) -> bool:
    """True for the first packet of a TCP connection."""
    header = 4 * (packet[0] & 0xF)
    return packet[9] == socket.IPPROTO_TCP and packet[header + 13] & 0x12 == 0x02


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def problem() -> str:
    """The reason why this machine cannot have hosts; empty if it can."""
    name = f"tandem-{os.getpid()}-try"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs network namespaces and TUN devices, so root: {error}"
    return ""


# Moves a process to a host, before it has threads.
ENTER = """
import ctypes, os
host = os.open("/run/netns/{name}", os.O_RDONLY)
assert not ctypes.CDLL(None).setns(host, 0)
os.close(host)
"""


@contextmanager
def three_hosts() -> Iterator[tuple[Switch, dict[str, str]]]:
    """The switch, and for each host's address the Python by which a process moves to it."""
    switch = Switch()
    names = {f"{NETWORK}{number}": f"tandem-{os.getpid()}-{number}" for number in (1, 2, 3)}
    try:
        for number, (address, name) in enumerate(names.items()):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            switch.plug(address, name, f"td{os.getpid() % 10**8}{number}")
        switch.plug(CLIENT, "", f"td{os.getpid() % 10**8}c")
        switch.start()
        yield switch, {address: ENTER.format(name=name) for address, name in names.items()}
    finally:
        switch.stop()
        for name in names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
