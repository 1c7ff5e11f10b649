"""The duty of a container's first process: to reap orphans.

A process whose parent has died becomes a child of process 1 of its PID namespace, and stays a
zombie until process 1 waits for it. A process that uses ``subprocess`` or asyncio must not wait for
any child, since it would take their exit statuses. So process 1 forks, and the command itself runs
as its child.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

# Code of signals from the kernel, such as Ctrl-C, which the whole process group receives.
_SI_KERNEL = 0x80
_OWN = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def run_under_init() -> None:
    """In process 1, fork: the child returns; the parent reaps orphans, passes signals on to the
    child, and exits with its status. No-op in any other process."""
    if os.getpid() != 1:
        return
    passed_on = signal.valid_signals() - _OWN - {signal.SIGKILL, signal.SIGSTOP}
    waited_for = passed_on | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them pipes whose end others wait for
    while True:
        info = signal.sigwaitinfo(waited_for)
        if info.si_signo == signal.SIGCHLD:
            _reap(child)
        elif info.si_code != _SI_KERNEL:
            os.kill(child, info.si_signo)


def _reap(child: int) -> None:
    """Wait for all ended processes; if ``child`` is one of them, exit with its status."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid == child:
            _exit(os.waitstatus_to_exitcode(status))


def _exit(status: int) -> NoReturn:
    os._exit(status if status >= 0 else 128 - status)
