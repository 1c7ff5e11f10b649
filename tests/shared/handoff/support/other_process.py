"""A rank in a process of its own, for tests that kill it in the middle of a transfer.

    python -m ...support.other_process CARRIER DEVICE send EPOCH PEER_EPOCH
    python -m ...support.other_process CARRIER DEVICE receive EPOCH PEER_EPOCH ENDS

The transfer has the number of the process's epoch. A sender writes its endpoints as a line of JSON,
and begins to send slowly when it reads a line. A receiver writes a line when it is ready for its
transfer, and one with what has arrived in the end.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

from tandem.shared.handoff.carriers.cuda_ipc.torch_device import Gpu
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.plane.messages import Received
from tandem.tests.shared.handoff.support.fake_driver import device_named
from tandem.tests.shared.handoff.support.memory_cache import MemoryCache
from tandem.tests.shared.handoff.support.plane_pair import BLOCK, PlaneRank, rows

NONE = "none"
END = 400
BLOCKS = range(END // BLOCK)


@contextmanager
def other(carrier: str, *of: object, device: str = NONE) -> Iterator[Popen[str]]:
    """Such a process, which is killed in the end."""
    module = f"tandem.{__name__.removeprefix('tandem.')}"
    command = [sys.executable, "-m", module, carrier, device, *map(str, of)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def peer(name: str, epoch: int, endpoints: str = "{}") -> Any:
    """A rank in another process, as far as its peer needs it."""
    return SimpleNamespace(
        config=SimpleNamespace(node_id=name, epoch=epoch, rank=0),
        plane=SimpleNamespace(endpoints=Endpoints(**json.loads(endpoints))),
    )


def read_json_line(process: Popen[str]) -> str:
    """The next line in JSON; libraries may say other things in between."""
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("{"))


def go(process: Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def contents(cache: MemoryCache) -> dict[str, str]:
    """A digest of the transfer's blocks."""
    return {"blocks": hashlib.sha256(b"".join(rows(cache, BLOCKS, 0, END))).hexdigest()}


def _device(name: str) -> Gpu | None:
    return None if name == NONE else device_named(name)


def _send(carrier: str, device: str, epoch: int, peer_epoch: int) -> None:
    with PlaneRank("p", seed=1, epoch=epoch, carrier=carrier, device=_device(device)) as prefill:
        print(json.dumps(asdict(prefill.plane.endpoints)), flush=True)
        sys.stdin.readline()
        fields = {"first_token": 0, "end_token": END, "progress_seconds": 60.0}
        prefill.open(peer("d", peer_epoch), epoch, BLOCKS, **fields)
        for token in range(END - 1):
            prefill.compute(epoch, token, token + 1, chunk=1)
            time.sleep(0.01)
        sys.stdin.readline()


def _receive(carrier: str, device: str, epoch: int, peer_epoch: int, endpoints: str) -> None:
    with PlaneRank(
        "d", epoch=epoch, listen_host=None, carrier=carrier, device=_device(device)
    ) as decode:
        sender = peer("p", peer_epoch, endpoints)
        decode.expect(sender, epoch, BLOCKS, first_token=0, end_token=END)
        print("{}", flush=True)
        decode.log.wait(Received, epoch)
        print(json.dumps(contents(decode.cache)), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    carrier, device, role, epoch, peer_epoch, *rest = sys.argv[1:]
    run: Callable[..., None] = _send if role == "send" else _receive
    run(carrier, device, int(epoch), int(peer_epoch), *rest)
