"""Where a router keeps files, batches and what it shares with other routers of its host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ...shared.config.batches import OFF
from ..options import RouterOptions


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """``path`` is ``None`` where files and batches are off, for the reason ``why_off``. The router
    serves without a folder that it has chosen itself, but not without a ``required`` one."""

    path: Path | None
    required: bool = False
    why_off: str = ""


def batch_folder(options: RouterOptions) -> BatchFolder:
    """The folder of ``--batch-dir``, else one among the user's state files.

    Its name has the port, by which a router finds its batches again and two on one machine keep
    theirs apart, and the host's name: a home may be on a network file system, where SQLite is safe
    for one machine only.
    """
    given = options.batch_dir
    if given == OFF:
        return BatchFolder(None, why_off="--batch-dir is off")
    if given is not None:
        return BatchFolder(Path(given), required=True)
    if options.port == 0:
        return BatchFolder(None, why_off="at a port chosen at random they would not be found again")
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):
        return BatchFolder(None, why_off="this user has no home")
    return BatchFolder(Path(state, "tandem", "batches", f"{socket.gethostname()}-{options.port}"))
