"""A claim to a GPU: nodes of one user share a GPU only on request.

Two nodes that plan for the whole memory of one GPU would both fail, later and for no visible
reason. A claim is a lock on a file that has the GPU's UUID as its name, so that it ends with the
process that has it, however that ends. Nodes of other users and in other containers are not seen.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time

import torch

from ...errors import StartupError
from ...private_folder import private_folder

log = logging.getLogger("tandem.node")

# A node that was killed leaves its GPU within seconds.
WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.1


def claim(device: torch.device, *, shared: bool) -> int | None:
    """Claim a GPU for the life of this process, or with ``shared`` beside others that share it.
    Returns the lock's descriptor; ``None`` for a CPU. Raises ``StartupError``."""
    if device.type != "cuda":
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    return lock(str(uuid), f"GPU {device.index}", shared=shared)


def lock(uuid: str, name: str, *, shared: bool, seconds: float = WAIT_SECONDS) -> int | None:
    """See ``claim``; ``None`` where no file can be written."""
    try:
        folder = private_folder() / "gpus"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = os.open(folder / uuid, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, StartupError) as error:
        log.warning("%s is not claimed, so that another node may use it too: %s", name, error)
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                continue
            os.close(file)
            alone = "a node that does not share it" if shared else "another node"
            raise StartupError(
                f"{name} ({uuid}) is used by {alone}: stop that node, name other GPUs with --d, or "
                "start all nodes on it with --nodes-per-device 2 or more (one tandem serve for "
                "all: --share-devices)"
            ) from None
        return file
