"""The limit on a process's open files."""

from __future__ import annotations

import contextlib
import resource

# More than any part of a cluster needs. Some systems allow a billion, and some programs iterate
# over all possible descriptors.
MOST = 1 << 16


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
