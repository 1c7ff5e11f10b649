"""The ``Host`` header: the names under which clients may reach this router.

A web page can point its own host name at 127.0.0.1 (DNS rebinding), and its scripts can then read
an API that listens on loopback without a key. The browser still sends the page's host name.
"""

from __future__ import annotations

import ipaddress

from ...shared.host_port import LOCALHOST, is_loopback, split_host_port
from ..errors import ApiError
from ..options import RouterOptions

ANY = "*"


class AllowedHosts:
    """IP addresses and localhost are always allowed. Other names are checked against
    ``--allowed-hosts``; without that option, they are rejected if the API listens on loopback
    without a key."""

    def __init__(self, options: RouterOptions) -> None:
        self._names = options.allowed_host_names
        keyless = not options.requires_key and is_loopback(options.host)
        self._checked = ANY not in self._names and (bool(self._names) or keyless)

    def check(self, header: bytes) -> None:
        """Raise ``ApiError`` 403 for a name that is not allowed. A missing header is allowed."""
        if not self._checked or not header:
            return
        name = _name(header.decode("latin-1"))
        if name in self._names or name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            short = name if len(name) <= 128 else name[:128] + "..."
            raise ApiError(
                403,
                f"The host name '{short}' is not allowed; start the router with "
                f"--allowed-hosts {short}, or with --api-key.",
                code="host_not_allowed",
            ) from None


def _name(host: str) -> str:
    """The host without its port."""
    return split_host_port(host.strip().lower())[0].rstrip(".")
