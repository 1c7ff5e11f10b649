"""Throughput of KV between two processes on one GPU by CUDA IPC, against a copy on that GPU.

    python -m tandem.benchmarks.handoff_cuda_ipc

Three variants alternate: a copy within the GPU in one process, the carrier alone (from the sender's
ring into the receiver's slot), and whole transfers (pack, checksum, carrier, verify, scatter).
``--device emulation`` runs it in CPU memory as a smoke test; it measures nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tandem.benchmarks.support.gpu_figures import Figure, figure, parser, run
from tandem.benchmarks.support.gpu_predictions import CARRIER, WHOLE
from tandem.benchmarks.support.handoff_cache import BLOCK, model_of
from tandem.benchmarks.support.handoff_pair import (
    MIB,
    Ranks,
    Variant,
    take_turns,
    whole_transfers,
)
from tandem.benchmarks.support.handoff_ring import (
    Memcpy,
    ReceivingEnd,
    SendingEnd,
    idle_sender,
)
from tandem.kernels.operators import Operators
from tandem.shared.handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from tandem.shared.handoff.carriers.device import DEVICE_SLOT_BYTES, Device
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.plane.messages import WINDOW_OF_CARRIER
from tandem.shared.kv.cache import KVCache
from tandem.tests.shared.handoff.support.fake_driver import FAKE, REAL, device_named

EMULATION = "emulation"


def _torch_device(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == REAL else torch.device("cpu")


def copier(pipe: Connection, size: int, rounds: int, name: str) -> None:
    pipe.recv()
    source, target = (
        torch.ones(size, dtype=torch.uint8, device=_torch_device(name)) for _ in range(2)
    )
    pipe.send(None)
    for _ in range(rounds):
        pipe.recv()
        target.copy_(source)
        if name == REAL:
            torch.cuda.synchronize()
        pipe.send(None)


# ---- the carrier alone -------------------------------------------------------------------------


def _frames(size: int) -> int:
    return size // DEVICE_SLOT_BYTES


def device_sender(pipe: Connection, size: int, rounds: int, name: str) -> None:
    sending = SendingEnd(CUDA_IPC, device_named(name))
    pipe.send(sending.start())
    sending.meet()
    for _ in range(rounds):
        pipe.recv()
        for _ in range(_frames(size)):
            sending.lend(sending.slot())
        sending.lend_at_most(0)
    pipe.recv()
    sending.close()


def device_receiver(pipe: Connection, size: int, rounds: int, name: str) -> None:
    endpoints: Endpoints = pipe.recv()
    receiving = ReceivingEnd(CUDA_IPC, endpoints, device_named(name))
    messages = receiving.messages()
    pipe.send(None)
    for _ in range(rounds):
        for _ in range(_frames(size)):
            assert len(next(messages).payload) == DEVICE_SLOT_BYTES
        pipe.send(None)
    receiving.close()


# ---- whole transfers ---------------------------------------------------------------------------


def device_rank(layers: int, tokens: int, *, name: str) -> tuple[KVCache, Device]:
    """A rank's cache, which real GPUs copy frames of by a kernel."""
    operators = Operators()
    if name == REAL:
        from tandem.kernels.gpu.operators import GpuOperators

        operators = GpuOperators()
    cache = KVCache(
        model_of(layers, tokens),
        num_blocks=tokens // BLOCK,
        block_size=BLOCK,
        dtype=torch.bfloat16,
        device=_torch_device(name),
        operators=operators,
    )
    return cache, device_named(name)


# ---- the run -----------------------------------------------------------------------------------


def measure(size: int, rounds: int, name: str) -> Iterator[Figure]:
    """All figures."""
    ranks = Ranks(partial(device_rank, name=name), WINDOW_OF_CARRIER)
    ends: dict[str, tuple[type[Variant], Callable[..., Any], Callable[..., Any]]] = {
        "copy": (Memcpy, idle_sender, partial(copier, name=name)),
        "carrier": (
            Variant,
            partial(device_sender, name=name),
            partial(device_receiver, name=name),
        ),
        "full": (Variant, *whole_transfers(CUDA_IPC, ranks=ranks)),
    }
    variants = {
        key: kind(sender, receiver, size, rounds) for key, (kind, sender, receiver) in ends.items()
    }
    copy, alone, full = map(statistics.median, take_turns(variants, rounds).values())
    yield figure("copy on the GPU, as large as a transfer", copy, "GB/s")
    yield figure("carrier alone: out of the ring", alone, "GB/s", alone / copy)
    yield figure(CARRIER, alone / copy, "", alone / copy)
    yield figure(WHOLE, full, "GB/s", full / copy)


def main() -> int:
    options = parser("handoff_cuda_ipc", __doc__)
    emulated = EMULATION in sys.argv
    options.add_argument("--mib", type=int, default=32 if emulated else 1024)
    options.add_argument("--rounds", type=int, default=3 if emulated else 9)
    chosen = options.parse_args()
    size = _frames(chosen.mib * MIB) * DEVICE_SLOT_BYTES
    return run("gpu_handoff", chosen, measure(size, chosen.rounds, FAKE if emulated else REAL))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
