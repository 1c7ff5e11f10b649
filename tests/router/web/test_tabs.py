"""Several tabs of one browser: each shows the changes of the others, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tandem.tests.router.support import Cluster, cluster, until
from tandem.tests.router.web.browser import Tab, playwright, tab
from tandem.tests.router.web.scripts import goes_on

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def c(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    playwright()
    async with cluster(tmp_path_factory.mktemp("tabs")) as c:
        yield c


@pytest_asyncio.fixture(loop_scope="module")
async def t(chromium: Any, c: Cluster) -> AsyncIterator[Tab]:
    c.node.script = None
    async with tab(chromium, c) as t:
        await t.load()
        yield t


async def test_a_reply_is_followed_stopped_and_ended_in_another_tab(t: Tab, c: Cluster) -> None:
    end = asyncio.Event()
    goes_on(c, end)
    await t.send("one")
    await t.has("article.running .markdown:has-text('goes on')")
    other = await t.beside()
    await other.click(".chats .title:has-text('one')")
    await other.has("article.running:has-text('Generating in another tab')")
    await other.has("article.running .markdown:has-text('goes on')")
    await other.has(".chats .mark.running")
    end.set()
    assert await other.reply() == "it goes on to the end"
    await other.page.wait_for_selector(".mark", state="detached")
    assert await other.page.locator(".note:has-text('Incomplete')").count() == 0
    goes_on(c, asyncio.Event())
    await t.send("two")
    await other.has("article.running .markdown:has-text('goes on')")
    await other.click("[aria-label='Stop this answer']")
    await until(lambda: c.node.active == 0)
    for each in (t, other):
        await each.has("article:not(.running) .note:has-text('Stopped')")


async def test_the_partial_reply_of_a_closed_tab_is_kept_and_marked_incomplete(
    t: Tab, c: Cluster
) -> None:
    goes_on(c, asyncio.Event())
    other = await t.beside()
    await other.send("cut off")
    await t.click(".chats .title:has-text('cut off')")
    await t.has("article.running .markdown:has-text('goes on')")
    await other.page.close()
    await t.has("article:not(.running) .note:has-text('Incomplete')")
    await t.page.reload()
    await t.has("article .markdown:has-text('goes on')")
    await t.has("article:not(.running) .note:has-text('Incomplete')")


async def test_messages_of_two_tabs_in_one_chat_are_all_kept(t: Tab, c: Cluster) -> None:
    await t.send_and_read("begin")
    other = await t.beside()
    await other.click(".chats .title:has-text('begin')")
    end = asyncio.Event()
    goes_on(c, end)
    await t.send("of the first tab")
    await t.has("article.assistant.running .markdown:has-text('goes on')")
    await other.has("article.running")
    await other.page.press("#message", "ArrowUp")  # another version
    assert await other.page.input_value("#message") == "of the first tab"
    c.node.script = None
    await other.send_and_read("of the second tab")
    end.set()
    for each in (t, other):
        await each.has(".bubble:has-text('of the second tab')")
        await each.click("article.user:has-text('second') [aria-label='Version before']")
        assert await each.reply() == "it goes on to the end"


async def test_a_chat_that_another_tab_deletes_or_renames(t: Tab, c: Cluster) -> None:
    await t.send_and_read("first name")
    other = await t.beside()
    await other.click(".chats .title:has-text('first name')")
    await t.menu("Rename")
    await t.page.fill("dialog input", "Second name")
    await t.page.keyboard.press("Enter")
    await other.has(".chats .title:has-text('Second name')")
    await other.send_and_read("more")
    await t.has(".bubble:has-text('more')")
    await t.has(".chats .title:has-text('Second name')")
    await t.menu("Delete")
    await t.click("dialog button.danger")
    await other.has(".notice:has-text('deleted in another tab')")
    await other.has(".welcome")
