"""A node's hold on its ranks, with real rank processes of the built-in model."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tandem import EngineConfig
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.config import HandoffConfig
from tandem.shared.errors import StartupError
from tandem.shared.node.engine import NodeIdentity, start_engine

CONFIG = EngineConfig(model=str(builtin_model_path()), threads=1, num_blocks=64, max_model_len=512)
IDENTITY = NodeIdentity("node", 1)
SECONDS = 60.0


def rank() -> psutil.Process:
    children = psutil.Process().children()
    (found,) = [p for p in children if "tandem.shared.engine.rank" in p.cmdline()]
    return found


async def test_a_rank_that_dies_between_steps_is_noticed() -> None:
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = await start_engine(CONFIG, IDENTITY, on_lost=lost.set_result)
    try:
        rank().kill()
        assert "rank 0 ended with exit status -9" in await asyncio.wait_for(lost, SECONDS)
    finally:
        await engine.ranks.stop()


async def test_a_rank_that_is_too_slow_is_an_error_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.shared.engine.executor.START_SECONDS", 0.01)
    with pytest.raises(StartupError, match=r"rank 0 gave no 'loaded' within 0\.01 s"):
        await start_engine(CONFIG, IDENTITY)


async def test_a_rank_that_is_asked_to_end_is_not_lost() -> None:
    lost: list[str] = []
    engine = await start_engine(CONFIG, IDENTITY, on_lost=lost.append)
    await engine.ranks.stop()
    assert lost == []


async def test_an_event_that_cannot_be_handled_ends_the_node_not_only_the_hearing() -> None:
    def cannot(rank: int, data: bytes) -> None:
        raise IndexError("no place for it")

    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    # The data plane's first report may come before or after the cache is there.
    try:
        engine = await start_engine(
            CONFIG,
            IDENTITY,
            handoff=HandoffConfig(),
            listen=True,
            on_event=cannot,
            on_lost=lost.set_result,
        )
    except StartupError as error:
        assert "rank 0 is not understood" in str(error)
        return
    try:
        assert "rank 0 is not understood" in await asyncio.wait_for(lost, SECONDS)
    finally:
        await engine.ranks.stop()
