"""The browser that the tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from tandem.tests.router.web.browser import browser


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as made:
        yield made
