"""The browser, the router and the tab that the tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tandem.tests.router.support import Cluster, cluster
from tandem.tests.router.web.browser import Tab, browser, playwright, tab


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as chromium:
        yield chromium


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def c(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    playwright()
    async with cluster(tmp_path_factory.mktemp("page"), served_model_name="tiny,other") as c:
        yield c


@pytest_asyncio.fixture(loop_scope="module")
async def t(chromium: Any, c: Cluster) -> AsyncIterator[Tab]:
    c.node.script, c.node.reply = None, c.encode("hello world")
    async with tab(chromium, c) as t:
        await t.load()
        yield t
