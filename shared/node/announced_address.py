"""The address that a node announces to a router, unless ``--advertise`` sets one."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from ..errors import UsageError
from ..host_port import is_loopback, is_wildcard, join_host_port, split_host_port

RESOLVE_SECONDS = 2.0
# Documentation addresses (RFC 5737, RFC 3849), which are never this machine's. A datagram socket
# connected to one shows the source address for other machines; nothing is sent.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True, slots=True)
class _Route:
    """The two ends of the route to a router."""

    here: str
    there: str

    @property
    def local(self) -> bool:
        """True if the router is on this machine."""
        return self.here == self.there or is_loopback(self.there)


async def announced_address(host: str, port: int, router: str) -> str:
    """The address of a node that listens on ``host``, for the registry ``router``.

    For a wildcard, it is this machine's address on the route to the router. If that is local, it is
    the address on the route to other machines, since the router passes it on to nodes there.

    Raises ``UsageError`` if the node listens on loopback only but the router is on another machine;
    ``OSError`` if the router's name does not resolve, or there is no route to it.
    """
    if not is_wildcard(host) and not is_loopback(host):
        return join_host_port(host, port)
    route = await _route_to(router)
    if is_loopback(host):
        if not route.local:
            raise UsageError(
                f"--host {host} is open to this machine only, but the router {router} is on "
                f"another ({route.there}) and could not reach this node; listen on an address that "
                f"it can reach (--host {route.here}), or announce one (--advertise)"
            )
        return join_host_port(host, port)
    here = _outside_address() if route.local else ""
    return join_host_port(here or route.here, port)


async def _route_to(router: str) -> _Route:
    host, port = split_host_port(router)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            addresses = await loop.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    except TimeoutError:
        raise OSError(f"{host} does not resolve within {RESOLVE_SECONDS:g} s") from None
    except OSError as error:
        raise OSError(f"{host} does not resolve: {error.strerror}") from None
    problem = OSError(f"{host} has no address")
    for family, _, _, _, address in addresses:
        try:
            return _Route(_source(family, address), str(address[0]))
        except OSError as error:
            problem = error
    raise problem


def _outside_address() -> str:
    """This machine's address on the route to other machines; empty without a route."""
    for address in _OUTSIDE:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return _source(family, (address, 9))
        except OSError:
            continue
    return ""


def _source(family: int, address: tuple[object, ...]) -> str:
    """The source address of packets to ``address``; sends none. Raises ``OSError``."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
