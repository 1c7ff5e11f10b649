"""Memory files of other processes on this host.

A memfd has no name that could be left behind, and goes away with its last user, however that
process ends. Other processes open it through the owner's ``/proc`` entry, which requires the same
user and PID namespace.
"""

from __future__ import annotations

import fcntl
import os

from ...errors import TransferError

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class MemfdError(TransferError):
    """Another process's memory or pipe cannot be opened."""


def host_identity() -> str:
    """Equal in processes that see each other in ``/proc``; empty on systems without it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    except OSError:
        return ""


def can_share() -> bool:
    """True if this system has sealed memfds and ``/proc``."""
    sealing = hasattr(os, "memfd_create") and all(hasattr(fcntl, name) for name in _SEALS)
    return sealing and bool(host_identity())


def open_memfd(pid: int, descriptor: int, name: str) -> int:
    """Open another process's memfd of this name for reading. Raises ``MemfdError``."""
    # Built from numbers, so that a peer cannot name any other file.
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    try:
        # Checked before opening it, since opening some devices has side effects.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise MemfdError(f"{path} is not a {name}")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise MemfdError(f"cannot open {path}: {error}") from None
