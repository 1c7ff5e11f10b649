"""The chat page with a real MCP server behind its router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.mcp.test_rounds import call
from tandem.tests.router.mcp.test_server_processes import REAL, served
from tandem.tests.router.web.browser import tab

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_call_runs_once_it_is_allowed(chromium: Any, tmp_path: Path) -> None:
    replies = [call(f"{REAL}__add", a=2, b=3), "It is five."]
    async with served(tmp_path, replies) as (c, _), tab(chromium, c) as t:
        await t.load()
        await t.page.keyboard.press("Control+,")
        await t.page.fill("#setting-mcp", REAL)
        await t.page.check("#setting-ask")
        await t.page.keyboard.press("Escape")
        await t.send("2 + 3?")
        await t.has(f"[aria-label='Allow {REAL}: add']")
        assert len(replies) == 1, "nothing runs before the decision"
        await t.click(f"[aria-label='Allow {REAL}: add']")
        assert await t.reply() == "It is five."
        await t.click(f".call summary:has-text('Ran {REAL}: add')")
        await t.has(".call pre:has-text('5')")
