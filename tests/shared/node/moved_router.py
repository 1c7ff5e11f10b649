"""A router whose name resolves to another address after its restart. It is a separate program,
because it needs its own hosts file, in a mount namespace."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tandem.tests.shared.node.test_registration import FakeRegistry, RegisteredNode, serving

NAME = "router.test"
BEFORE, AFTER = "127.0.0.2", "127.0.0.3"


def lead(hosts: Path, address: str) -> None:
    hosts.write_text(f"{address} {NAME}\n")


async def find(hosts: Path) -> None:
    lead(hosts, BEFORE)
    first, second, node = FakeRegistry(), FakeRegistry(), RegisteredNode()
    async with serving(first, host=BEFORE) as port:
        registration = asyncio.create_task(node.register(port, NAME).run())
        await first.until(lambda: bool(first.beats))
    lead(hosts, AFTER)
    async with serving(second, port, AFTER):
        await second.until(lambda: bool(second.beats))
        registration.cancel()
        await asyncio.gather(registration, return_exceptions=True)


if __name__ == "__main__":
    subprocess.run(["mount", "--bind", sys.argv[1], "/etc/hosts"], check=True, timeout=10)
    asyncio.run(find(Path(sys.argv[1])))
