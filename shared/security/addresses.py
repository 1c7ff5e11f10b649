"""Validation of node addresses: host:port, and no other form that gRPC would resolve.

gRPC also accepts ``unix:``, ``dns:``, ``vsock:`` and other schemes. An address announced by a node
must not make the router or a decode node connect to a local socket, so there is an allow-list."""

from __future__ import annotations

import ipaddress
import re

from ..host_port import split_host_port
from ..unix_sockets import is_socket_address

MAX_HOST = 253
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_PORT = re.compile(r"[0-9]{1,5}")


def is_host_port(text: str) -> bool:
    """True for a port after a host name, an IPv4 address, or an IPv6 address in brackets."""
    host, port = split_host_port(text)
    return _is_port(port) and (_is_name(host) or _is_ipv6(host))


def is_candidate(text: str) -> bool:
    """True for host:port, and for a control socket in a folder of ``--pd-url file://``."""
    return is_host_port(text) or is_socket_address(text)


def _is_port(text: str) -> bool:
    return bool(_PORT.fullmatch(text)) and 0 < int(text) < 65536


def _is_name(host: str) -> bool:
    return len(host) <= MAX_HOST and bool(_NAME.fullmatch(host))


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return len(host) <= MAX_HOST
