"""The parts of a process."""

from __future__ import annotations

import asyncio

import pytest

from tandem.shared.process.parts import first_end


async def test_the_error_of_the_part_that_ends_first_is_raised() -> None:
    async def fail() -> None:
        raise OSError("broken")

    async def end() -> None:
        return

    running = asyncio.create_task(asyncio.Event().wait())
    try:
        await first_end([running, asyncio.create_task(end())])
        with pytest.raises(OSError, match="broken"):
            await first_end([running, asyncio.create_task(fail())])
        assert not running.done()
    finally:
        running.cancel()
