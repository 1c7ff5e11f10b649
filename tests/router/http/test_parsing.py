"""The order of parsing: by size class, and by clients in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from tandem.router.http.parsing import SMALL_BODY, THREADS, ParserPools
from tandem.shared.errors import OverloadedError
from tandem.tests.router.support import until

LARGE = SMALL_BODY + 1


class Gate:
    """A function that runs until it is released."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._open = threading.Event()

    def work(self, name: str) -> None:
        assert self._open.wait(20)
        self.done.append(name)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def parsers() -> AsyncIterator[ParserPools]:
    pools = ParserPools(patience=20.0)
    yield pools
    pools.close()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.mark.parametrize("size", [1, SMALL_BODY, LARGE])
async def test_no_work_is_done_on_the_loop_however_small_its_body(
    parsers: ParserPools, size: int
) -> None:
    """A chat template may loop even for a small body."""
    assert await parsers.run("a", size, threading.get_ident) != threading.get_ident()


async def test_large_bodies_hold_up_only_large_ones(parsers: ParserPools, gate: Gate) -> None:
    large = [
        asyncio.create_task(parsers.run(f"c{i}", LARGE, lambda: gate.work("large")))
        for i in range(2 * THREADS)
    ]
    await asyncio.sleep(0)
    assert await parsers.run("other", SMALL_BODY, lambda: 5) == 5
    assert not gate.done
    gate.open()
    await asyncio.gather(*large)


async def test_clients_take_turns(parsers: ParserPools, gate: Gate) -> None:
    async def run(client: str, name: str) -> None:
        await parsers.run(client, LARGE, lambda: gate.work(name))

    names = [("many", f"many-{i}") for i in range(8 + THREADS)] + [("one", "one")]
    tasks = [asyncio.create_task(run(*name)) for name in names]
    await until(lambda: len(parsers._large._waiting) == 2)
    gate.open()
    await asyncio.gather(*tasks)
    assert gate.done.index("one") <= 2 * THREADS


async def test_a_turn_that_does_not_come_is_an_error_and_frees_its_place(gate: Gate) -> None:
    parsers = ParserPools(patience=0.05)
    running = [
        asyncio.create_task(parsers.run("a", LARGE, lambda: gate.work("a"))) for _ in range(THREADS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=r"0\.05 s"):
        await parsers.run("b", LARGE, lambda: gate.work("b"))
    cancelled = asyncio.create_task(parsers.run("c", LARGE, lambda: gate.work("c")))
    await until(lambda: bool(parsers._large._waiting))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not parsers._large._waiting
    gate.open()
    await asyncio.gather(*running)
    await until(lambda: parsers._large._free == THREADS)
    assert await parsers.run("b", LARGE, lambda: 1) == 1
    parsers.close()


async def test_a_request_that_is_cancelled_keeps_its_thread_until_the_work_ends(
    parsers: ParserPools, gate: Gate
) -> None:
    tasks = [
        asyncio.create_task(parsers.run("a", LARGE, lambda: gate.work("a"))) for _ in range(THREADS)
    ]
    await until(lambda: parsers._large._free == 0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert parsers._large._free == 0
    gate.open()
    await until(lambda: parsers._large._free == THREADS)


async def test_an_error_of_the_work_is_the_callers(parsers: ParserPools) -> None:
    with pytest.raises(ZeroDivisionError):
        await parsers.run("a", SMALL_BODY, lambda: 1 // 0)
    assert parsers._small._free == THREADS
