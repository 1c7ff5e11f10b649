"""The limit on a process's open files, connections included."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from pathlib import Path

log = logging.getLogger("tandem.process")

# More than any part of a cluster needs. Some systems allow a billion, and some programs iterate
# over all possible descriptors.
MOST = 1 << 16
# What a process opens while it serves, whatever its limit: files, and connections of probes.
FEW = 32
# The part of the limit that is kept for connections to nodes, routers and peers.
KEPT_PART = 4

REMEDY = (
    "raise the limit of open files (ulimit -Hn and -n, LimitNOFILE= of a systemd unit, ulimits of "
    "a container)"
)


def allow_many_files() -> None:
    """Raise the limit to what this user may have; child processes inherit it.

    The usual default is 1024. A decode rank needs eight descriptors for each rank of its peers, and
    a router has more connections than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems report infinity and allow less than this.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> int:
    """The number of files that this process has open."""
    return len(os.listdir(_OPEN))


def open_file_limit() -> int:
    """The number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def room_for_connections(wanted: int, most: int | None = None) -> int:
    """How many connections a server may have: ``wanted``, or what else the limit ``most`` leaves
    for them."""
    most = open_file_limit() if most is None else most
    return max(1, min(wanted, most - open_files() - FEW - most // KEPT_PART))


def warn_of_few_connections(wanted: int, room: int) -> None:
    """Log that a server may have fewer connections than its option says."""
    if room < wanted:
        log.warning(
            "this process has at most %d connections at a time, not its %d of --max-connections, "
            "because it may open %d files; %s",
            room,
            wanted,
            open_file_limit(),
            REMEDY,
        )


_OPEN = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
