"""Throughput of KV between two processes on one GPU by CUDA IPC, against a copy on that GPU.

    python -m tandem.benchmarks.handoff_cuda_ipc

Three variants alternate: a copy within the GPU in one process, the carrier alone (from the sender's
ring into the receiver's slot), and whole transfers (pack, checksum, carrier, verify, scatter).
Without a GPU it prints a note and exits with status 0. ``--device emulation`` runs it in CPU memory
as a smoke test; it measures nothing and writes no result.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tandem.benchmarks.support.gpu_predictions import CARRIER, PREDICTIONS
from tandem.benchmarks.support.handoff_cache import BLOCK, model_of
from tandem.benchmarks.support.handoff_pair import (
    MIB,
    Ranks,
    Variant,
    row,
    take_turns,
    whole_transfers,
)
from tandem.benchmarks.support.handoff_ring import (
    Memcpy,
    ReceivingEnd,
    SendingEnd,
    idle_sender,
)
from tandem.benchmarks.support.report import RESULTS, write
from tandem.shared.handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from tandem.shared.handoff.carriers.device import DEVICE_SLOT_BYTES, Device
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.plane.messages import WINDOW_OF_CARRIER
from tandem.shared.kv.cache import KVCache
from tandem.tests.shared.handoff.support.fake_driver import FAKE, REAL, device_named

EMULATION = "emulation"
AGAINST = "copy on the GPU, same size, same run"


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
    cache = KVCache(
        model_of(layers, tokens),
        num_blocks=tokens // BLOCK,
        block_size=BLOCK,
        dtype=torch.bfloat16,
        device=_torch_device(name),
    )
    return cache, device_named(name)


# ---- the run -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser("handoff_cuda_ipc", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=(REAL, EMULATION), default=REAL)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == REAL and not torch.cuda.is_available():
        print("handoff_cuda_ipc: there is no CUDA device here, so there is nothing to measure")
        return
    size = _frames(options.mib * MIB) * DEVICE_SLOT_BYTES
    name = REAL if options.device == REAL else FAKE
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
        key: kind(sender, receiver, size, options.rounds)
        for key, (kind, sender, receiver) in ends.items()
    }
    copy, alone, full = take_turns(variants, options.rounds).values()
    rows = [
        {"metric": "copy on the GPU", "value": statistics.median(copy), "unit": "GB/s"},
        row("carrier alone: out of the ring", alone, copy, PREDICTIONS[CARRIER].goal, AGAINST),
        row("pack + sums + carrier + sums + scatter", full, copy, "", AGAINST),
    ]
    for each in rows:
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in each.items()})
    if options.device == REAL:
        print(write("handoff_cuda_ipc", rows, options.out))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
