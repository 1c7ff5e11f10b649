"""What the first process of a container owes the others: it waits for orphans that end.

A process whose parent has died is handed to process 1 of its PID namespace, and stays a zombie
until that waits for it. Only a process that has no other children may wait for any: here it would
take exit statuses from ``subprocess`` and asyncio. So process 1 forks, and the command itself runs
as its child.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

# Sent by the kernel, such as Ctrl-C: the child has it already, which is in the same process group.
_SI_KERNEL = 0x80
_OWN = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def run_under_init() -> None:
    """In process 1, fork: the child returns, and the parent waits for all that end, passes signals
    on to the child, and ends with its status. No-op in any other process."""
    if os.getpid() != 1:
        return
    passed_on = signal.valid_signals() - _OWN - {signal.SIGKILL, signal.SIGSTOP}
    waited_for = passed_on | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # pipes whose ends others wait for
    while True:
        told = signal.sigwaitinfo(waited_for)
        if told.si_signo == signal.SIGCHLD:
            _reap(child)
        elif told.si_code != _SI_KERNEL:
            os.kill(child, told.si_signo)


def _reap(child: int) -> None:
    """Wait for all that have ended; if ``child`` is one of them, end as it did."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid == child:
            _end(os.waitstatus_to_exitcode(status))


def _end(status: int) -> NoReturn:
    os._exit(status if status >= 0 else 128 - status)
