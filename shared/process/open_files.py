"""The limit on a process's open files."""

from __future__ import annotations

import contextlib
import resource

# More than any part of a cluster has. Some systems allow a thousand million, and there are programs
# that walk through all that there could be.
MOST = 1 << 16


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
