"""Connections are spread evenly over the processes that listen."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tandem.router.processes.fair_accept import ConnectionCounts, FairAccept
from tandem.tests.support.waiting import until


class Process:
    """One process, in this one."""

    def __init__(self, number: int, listener: socket.socket, counts: ConnectionCounts) -> None:
        self.taken: list[socket.socket] = []
        self.accept = FairAccept(listener.dup(), counts, number, self.count, self.taken.append)

    def count(self) -> int:
        return len(self.taken)


async def test_connections_go_to_the_process_that_has_the_fewest(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    counts = ConnectionCounts(tmp_path / "counts", 3)
    processes = [Process(number, listener, counts) for number in range(2)]
    counts.gone(2)  # has not started
    opened = []

    async def open_more(count: int, total: int) -> list[int]:
        for _ in range(count):
            opened.append(await asyncio.open_connection(*listener.getsockname()))
        async with asyncio.timeout(20):
            await until(lambda: sum(process.count() for process in processes) == total)
        return sorted(process.count() for process in processes)

    for process in processes:
        process.accept.start()
    assert await open_more(10, 10) == [5, 5]
    processes[0].accept.stop()  # the other gets the rest, at once
    assert await open_more(3, 13) == [5, 8]
    # One that hangs is waited for, but not for ever.
    counts.set(2, 0)
    assert await open_more(2, 15) == [5, 10]
    processes[1].accept.stop()
    for _, writer in opened:
        writer.close()
    for process in processes:
        for taken in process.taken:
            taken.close()
    listener.close()
