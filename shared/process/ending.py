"""How a child process ended, in words."""

from __future__ import annotations

import signal


def ending(status: int) -> str:
    """The end that an exit status, as ``subprocess`` has it, stands for: "ended with exit status
    1", "was killed (SIGSEGV)"."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    # When memory runs out, the kernel kills the largest process, and only its own log says so.
    cause = ", possibly for lack of memory" if -status == signal.SIGKILL else ""
    return f"was killed ({name}){cause}"
