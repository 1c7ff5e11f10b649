"""The address that a node announces to a router, if no ``--advertise`` names one."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from ..errors import UsageError
from ..host_port import is_loopback, is_wildcard, join_host_port, split_host_port

RESOLVE_SECONDS = 2.0
# Addresses elsewhere, reserved for documents (RFC 5737, RFC 3849). A datagram socket that is
# connected to one knows which of this machine's addresses it would send from.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True, slots=True)
class _Way:
    """The two ends of the way to a router."""

    here: str
    there: str

    @property
    def local(self) -> bool:
        """True if it stays on this machine."""
        return self.here == self.there or is_loopback(self.there)


async def announced_address(host: str, port: int, router: str) -> str:
    """The address of a node that listens on ``host``, for the router whose registry is ``router``:
    on a wildcard, that by which this machine reaches the router. A router on this machine gets the
    one by which the machine reaches others, because it passes addresses on to nodes elsewhere.

    Raises ``UsageError`` if the node listens on loopback only, and the router is elsewhere;
    ``OSError`` if the router's name does not resolve, or no way leads there.
    """
    if not is_wildcard(host) and not is_loopback(host):
        return join_host_port(host, port)
    way = await _way_to(router)
    if is_loopback(host):
        if not way.local:
            raise UsageError(
                f"--host {host} is open to this machine only, and the router {router} is on "
                f"another ({way.there}), which could not call this node; listen where it can "
                f"(--host {way.here}), or name an address that leads here (--advertise)"
            )
        return join_host_port(host, port)
    here = _outside_address() if way.local else ""
    return join_host_port(here or way.here, port)


async def _way_to(router: str) -> _Way:
    host, port = split_host_port(router)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    except TimeoutError:
        raise OSError(f"{host} does not resolve within {RESOLVE_SECONDS:g} s") from None
    except OSError as error:
        raise OSError(f"{host} does not resolve: {error.strerror}") from None
    problem = OSError(f"{host} has no address")
    for family, _, _, _, address in found:
        try:
            return _Way(_source(family, address), str(address[0]))
        except OSError as error:
            problem = error
    raise problem


def _outside_address() -> str:
    """This machine's own address on its way to others; empty if it has no way out."""
    for address in _OUTSIDE:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return _source(family, (address, 9))
        except OSError:
            continue
    return ""


def _source(family: int, address: tuple[object, ...]) -> str:
    """The local address of packets to ``address``. Sends none. Raises ``OSError``."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
