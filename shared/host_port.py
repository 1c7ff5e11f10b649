"""Hosts and ports in addresses and URLs: localhost:8100, 127.0.0.1:8100, [::1]:8100."""

from __future__ import annotations

import ipaddress
import re

from .unix_sockets import UNIX

# An IPv6 address is in brackets, which distinguish its colons from that of the port.
_ADDRESS = re.compile(r"(?:\[([^][]*:[^][]*)\]|([^][:]*))(?::([^]:]*))?")
LOCALHOST = "localhost"


def split_host_port(address: str) -> tuple[str, str]:
    """The host, without the brackets of an IPv6 address, and the port, empty if there is none.

    Both are empty for an invalid address, such as an IPv6 address without brackets."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return "", ""
    return match[1] or match[2] or "", match[3] or ""


def join_host_port(host: str, port: int | str) -> str:
    """The address of a port; ``host`` may have brackets."""
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """The host in the form of addresses and URLs."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def without_brackets(host: str) -> str:
    """The host in the form of sockets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_wildcard(host: str) -> bool:
    """True for a host that means all interfaces of a machine."""
    if host in ("", "*"):
        return True
    parsed = _ip(host)
    return parsed is not None and parsed.is_unspecified


def is_loopback(host: str) -> bool:
    """True for a host, or a Unix socket, that only this machine can reach."""
    return host.startswith(UNIX) or bool(loopback_ip(host))


def loopback_ip(host: str) -> str:
    """The loopback address of a host, in its shortest form; empty for other hosts."""
    if without_brackets(host).lower().removesuffix(".") == LOCALHOST:
        return "127.0.0.1"
    parsed = _ip(host)
    return parsed.compressed if parsed is not None and parsed.is_loopback else ""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address without its IPv6 zone, and as IPv4 if it is a mapped one."""
    try:
        parsed = ipaddress.ip_address(without_brackets(host).partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
