"""The carriers of one rank, and the choice between two ranks' carriers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import PeerRefusedError
from ..wire.frame import HEADER_BYTES
from ..wire.greeting import Greeting, PeerKey
from .base import Carrier, CarrierUnavailableError, RankResources
from .device import Device
from .option import allows, not_possible
from .staging import HOST_WINDOW_BYTES, HostMemory, PrivateMemory, Ring, StagingRing, pinned

Kinds = Sequence[type[Carrier]]

# TCP always works, so that only --carrier can leave a pair of ranks without a carrier.
REMEDY = "use --carrier auto on both nodes"

log = logging.getLogger("tandem.handoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierSettings:
    """``carrier`` is the value of ``--carrier``. ``sends`` False: the rank only receives."""

    carrier: str
    sends: bool
    slots: int
    slot_bytes: int
    device_slots: int
    device_slot_bytes: int


class RankCarriers:
    """The opened carriers of a rank, best first; closed by the thread that opened them.

    ``ring`` is the staging ring in host memory.
    """

    def __init__(
        self, carriers: Iterable[Carrier], ring: StagingRing, closing: contextlib.ExitStack
    ) -> None:
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._baseline = {name for name, carrier in self._carriers.items() if carrier.baseline}
        self._closing = closing
        self.ring = ring
        # All rings that frames are sent from.
        self.rings: list[Ring[Any]] = list(
            dict.fromkeys([ring, *(carrier.ring for carrier in self._carriers.values())])
        )

    def __iter__(self) -> Iterator[Carrier]:
        return iter(self._carriers.values())

    def __getitem__(self, name: str) -> Carrier:
        return self._carriers[name]

    def ring_of(self, name: str) -> Ring[Any]:
        """The ring for frames to a peer with this carrier."""
        carrier = self._carriers.get(name)
        return self.ring if carrier is None else carrier.ring

    def window_of(self, name: str) -> int:
        """The default limit of a transfer's bytes in flight with this carrier."""
        carrier = self._carriers.get(name)
        return HOST_WINDOW_BYTES if carrier is None else carrier.window_bytes

    def hellos(self) -> dict[str, bytes]:
        """The offers in the greeting of a receiving rank."""
        return {carrier.name: carrier.hello() for carrier in self}

    def possible(self, me: Greeting, theirs: Greeting) -> list[Carrier]:
        """The carriers that both this rank and a peer may use. Raises ``PeerRefusedError`` if there
        are none."""
        one_host = bool(me.host) and me.host == theirs.host
        carriers = [c for c in self if c.name in theirs.offers and (one_host or not c.one_host)]
        if not carriers:
            here, there = ",".join(self._carriers), ",".join(theirs.offers)
            where = "one host" if one_host else "two hosts"
            raise PeerRefusedError(
                f"carrier: here {here}, at {theirs.node_id} {there}, on {where}; {REMEDY}"
            )
        return carriers

    def needs_choice(self, names: Iterable[str]) -> bool:
        """True if the receiving rank has to choose among these offered carriers."""
        return any(name not in self._baseline for name in names)

    def tick(self) -> None:
        for carrier in self:
            carrier.tick()

    def close(self) -> None:
        self._closing.close()


def without_carrier(possible: Iterable[Carrier], problem: Exception) -> str:
    """The error of a pair whose ``possible`` carriers do not work."""
    names = " or ".join(carrier.name for carrier in possible)
    return f"carrier: {names} only, and {problem}; {REMEDY}"


def open_carriers(
    kinds: Kinds, settings: CarrierSettings, me: PeerKey, device: Device | None
) -> RankCarriers:
    """Open the carriers that the settings allow, over one staging ring. Raises ``StartupError``."""
    with contextlib.ExitStack() as closing:
        if device is not None:
            device.enter()
            closing.callback(device.leave)
        kinds = [k for k in kinds if allows(settings.carrier, k.name, on_request=k.on_request)]
        kinds, memory = _host_memory(kinds, settings)
        closing.callback(memory.close)
        if settings.sends and device is not None:
            pin = pinned(device.driver, memory.memory)
            if pin is not None:
                closing.callback(pin.close)
        ring = StagingRing(
            slots=settings.slots, payload_bytes=settings.slot_bytes, memory=memory.memory
        )
        rank = RankResources(
            me=me,
            sends=settings.sends,
            memory=memory,
            ring=ring,
            max_frame_bytes=HEADER_BYTES + settings.slot_bytes,
            device=device,
            device_slots=settings.device_slots,
            device_slot_bytes=settings.device_slot_bytes,
        )
        carriers: list[Carrier] = []
        for kind in kinds:
            try:
                carriers.append(kind(rank))
            except CarrierUnavailableError as error:
                _skip(kind, settings.carrier, error)
                continue
            closing.callback(carriers[-1].close)
        return RankCarriers(carriers, ring, closing.pop_all())


def _host_memory(kinds: Kinds, settings: CarrierSettings) -> tuple[Kinds, HostMemory]:
    """The usable kinds, and memory for the staging ring: from the first carrier that provides it,
    or private."""
    size = settings.slots * StagingRing.stride(settings.slot_bytes)
    usable: list[type[Carrier]] = []
    memory: HostMemory | None = None
    for kind in kinds:
        if settings.sends and memory is None:
            try:
                memory = kind.host_memory(size)
            except CarrierUnavailableError as error:
                _skip(kind, settings.carrier, error)
                continue
        usable.append(kind)
    return usable, memory or PrivateMemory(size)


def _skip(kind: type[Carrier], setting: str, error: CarrierUnavailableError) -> None:
    """Continue without a carrier, unless it is the only one. Raises ``StartupError``."""
    if setting == kind.name:
        raise not_possible(kind.name, str(error)) from None
    level = logging.DEBUG if error.usual else logging.WARNING
    log.log(level, "KV is transferred without the carrier %s: %s", kind.name, error)
