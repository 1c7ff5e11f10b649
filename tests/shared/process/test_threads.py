"""Blocking work beside the loop, and cores for threads."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from tandem import EngineConfig
from tandem.shared.engine import start as engine
from tandem.shared.engine.start import NodeIdentity, start_engine
from tandem.shared.process.threads import in_thread, share_of_cores


async def test_it_gives_what_the_work_gives() -> None:
    assert await in_thread(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_a_node_can_be_stopped_while_its_model_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, release = threading.Event(), threading.Event()

    def download(config: EngineConfig) -> None:
        started.set()
        release.wait()

    monkeypatch.setattr(engine, "obtain_model", download)
    starting = asyncio.create_task(start_engine(EngineConfig(model="a/b"), NodeIdentity("n", 1)))
    try:
        async with asyncio.timeout(20):
            while not started.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.01)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
    finally:
        release.set()


@pytest.mark.parametrize(("ranks", "each"), [(1, 16), (2, 8), (3, 5), (16, 1), (40, 1)])
def test_each_rank_gets_its_share_and_never_none(
    ranks: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert share_of_cores(ranks) == each
