"""A process of simulated nodes that join a router: the project's own ``Registration``, no engines.

Started by ``fleet.py``. Prints a line of JSON once all nodes have joined, and one with its counts
when its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import (
    DecodeServicer,
    PrefillServicer,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.node.registration import Registration
from tandem.shared.process.open_files import allow_many_files
from tandem.shared.security.credentials import Credentials, Options

BLOCK = 16
TOTAL_BLOCKS = 20_000
JOINS_A_SECOND = 100.0
# Odd, so that different numbers give different keys; as evenly spread as a hash.
SPREAD = 0x9E3779B97F4A7C15
FINGERPRINT = "\n".join(f"field_{number}=value {number}" for number in range(60))


@dataclass(frozen=True, slots=True)
class _OwnConnection(Credentials):
    """Each node has its own connection, as in a real fleet; gRPC would share one among all."""

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        own = (*options, ("grpc.use_local_subchannel_pool", 1))
        # Not super(): a dataclass with slots is another class than the one being defined.
        return Credentials.channel(self, address, own)


class SimulatedNode(DecodeServicer, PrefillServicer):
    """Half are decode nodes. Each keeps ``keys`` prefix keys, of which ``changes`` are replaced
    between two heartbeats, and a decode node has measured its link to ``links`` prefill nodes."""

    def __init__(self, number: int, keys: int, changes: int, links: int, card: pb.ModelCard):
        self._number = number
        self._keys = keys
        self._changes = changes
        self._decode = number % 2 == 0
        self._card = card
        self._random = random.Random(number)
        rates = [
            pb.LinkRate(node_id=f"node-{2 * n + 1}", tokens_per_second=2e5) for n in range(links)
        ]
        self._rates = rates if self._decode else []
        self._beats = 0
        self._address = ""

    async def listen(self) -> None:
        """Accept the router's connection check, which precedes admission."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add = add_DecodeServicer_to_server if self._decode else add_PrefillServicer_to_server
        add(self, self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(node_id=f"node-{self._number}", epoch=self._number + 1)

    def describe(self) -> pb.JoinRequest:
        busy = self._random.randrange(64)
        load = pb.Load(
            running=busy,
            free_blocks=TOTAL_BLOCKS - 100 * busy,
            total_blocks=TOTAL_BLOCKS,
            queued_prefill_tokens=100 * busy,
            prefill_tokens_per_second=9000.0 + busy,
            cached_blocks=TOTAL_BLOCKS // 2,
            owned_blocks=100 * busy,
            links=16,
            block_size=BLOCK,
            link_rates=self._rates,
        )
        return pb.JoinRequest(
            node_id=f"node-{self._number}",
            epoch=self._number + 1,
            role=pb.ROLE_DECODE if self._decode else pb.ROLE_PREFILL,
            address=self._address,
            model=self._card,
            load=load,
            version="0.1.0",
        )

    def prefixes(self, version: int) -> pb.Prefixes:
        """Version v holds the keys from (v - 1) * changes on."""
        self._beats += 1
        now = self._beats
        first, last = (now - 1) * self._changes, (now - 1) * self._changes + self._keys
        first_known = (version - 1) * self._changes
        if not version or now - version > self._keys:
            return pb.Prefixes(
                version=now,
                block_size=BLOCK,
                stride=1,
                added=self._range(first, last, ordered=True),
            )
        return pb.Prefixes(
            version=now,
            base=version,
            block_size=BLOCK,
            stride=1,
            added=self._range(first_known + self._keys, last),
            removed=self._range(first_known, first),
        )

    def _range(self, first: int, last: int, ordered: bool = False) -> bytes:
        base = self._number << 40
        numbers = np.arange(base + first, base + last, dtype=np.uint64)
        keys = numbers * np.uint64(SPREAD)  # modulo 2**64
        return (np.sort(keys) if ordered else keys).tobytes()


class _Joins(logging.Handler):
    """Counts the registrations' log lines about admitted nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.late = 0.0  # the largest delay of this process's own loop
        self.troubles: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("joined"):
            self.count += 1
        elif record.levelno >= logging.WARNING:
            trouble = record.getMessage()[:120]
            self.troubles[trouble] = self.troubles.get(trouble, 0) + 1


async def _watch_loop(joins: _Joins) -> None:
    while True:
        start = time.monotonic()
        await asyncio.sleep(0.05)
        joins.late = max(joins.late, time.monotonic() - start - 0.05)


async def simulate(arguments: argparse.Namespace) -> None:
    joins = _Joins()
    log = logging.getLogger("tandem.node")
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(joins)
    card = pb.ModelCard(
        name="fleet",
        path=str(builtin_model_path()),
        fingerprint=FINGERPRINT,
        max_model_len=4096,
    )
    tasks = [asyncio.create_task(_watch_loop(joins))]
    for number in range(arguments.nodes):
        node = SimulatedNode(number, arguments.keys, arguments.changes, arguments.links, card)
        await node.listen()
        registration = Registration(
            arguments.registry,
            node.describe,
            lambda seconds: None,
            _OwnConnection(),
            prefixes=node.prefixes,
        )
        tasks.append(asyncio.create_task(registration.run()))
        await asyncio.sleep(1 / JOINS_A_SECOND)
    while joins.count < arguments.nodes:  # noqa: ASYNC110 (a log handler has no event)
        await asyncio.sleep(0.1)
    start, joins.late = time.process_time(), 0.0
    print(json.dumps({"joins": joins.count}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    report = {
        "joins": joins.count,
        "cpu_seconds": time.process_time() - start,
        "troubles": joins.troubles,
        "late": joins.late,
    }
    print(json.dumps(report), flush=True)
    os._exit(0)  # skips a thousand leaves, which are not measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("registry")
    for name in ("nodes", "keys", "changes", "links"):
        parser.add_argument(f"--{name}", type=int, required=True)
    allow_many_files()
    asyncio.run(simulate(parser.parse_args()))


if __name__ == "__main__":
    main()
