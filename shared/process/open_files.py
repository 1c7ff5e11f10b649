"""The limit on a process's open files, connections included."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from pathlib import Path

log = logging.getLogger("tandem.process")

# More than any part of a cluster needs. Some systems allow a billion, but some programs iterate
# over all possible descriptors.
MAX_FILES = 1 << 16
# Files and probes' connections that a process opens while it serves, whatever its limit.
OTHER_FILES = 32
# Divisor of the limit: this part is reserved for connections to nodes, routers and peers.
RESERVED_PART = 4

REMEDY = (
    "raise the limit of open files (ulimit -Hn and -n, LimitNOFILE= of a systemd unit, ulimits of "
    "a container)"
)


def allow_many_files() -> None:
    """Raise the limit as far as this user may; child processes inherit it.

    The usual default of 1024 is too low for a router's connections, and for a decode rank, which
    needs eight descriptors for each rank of its peers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        # Some systems report infinity but allow less.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_files() -> int:
    """Number of files that this process has open."""
    return len(os.listdir(_OPEN))


def open_file_limit() -> int:
    """Number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def room_for_connections(max_connections: int, max_files: int | None = None) -> int:
    """``max_connections`` of a server, reduced to the room within ``max_files``, if that is
    less."""
    max_files = open_file_limit() if max_files is None else max_files
    room = max_files - open_files() - OTHER_FILES - max_files // RESERVED_PART
    return max(1, min(max_connections, room))


def warn_of_few_connections(max_connections: int, room: int) -> None:
    """Log that a server may have fewer connections than its option says."""
    if room < max_connections:
        log.warning(
            "this process has at most %d connections at a time, not its %d of --max-connections, "
            "because it may open %d files; %s",
            room,
            max_connections,
            open_file_limit(),
            REMEDY,
        )


_OPEN = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
