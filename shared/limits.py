"""Limits of a process, and limits on which processes agree."""

from __future__ import annotations

import contextlib
import resource

# More than any part of a cluster has. Some systems allow a thousand million, and there are programs
# that walk through all that there could be.
MOST = 1 << 16
# Nodes of the other kind that a node deals with, unless --max-peers says otherwise.
MAX_PEERS = 1024
# A rank takes six sockets and eight descriptors for each rank of its peers, of the 2^14 and 2^16
# that it may have.
MOST_PEERS = 2048
# Prefill nodes that a decode node examines in one call of ``tandem doctor``.
MAX_EXAMINED = 64


def allow_many_files() -> None:
    """Take as many as this user may have; whatever this process starts inherits it.

    Shells and services begin with 1024 as a rule. A decode rank takes eight for each rank of its
    peers, and a router has more connections than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A system may promise infinity and keep less than this.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
