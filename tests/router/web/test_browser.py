"""The page in a real browser: chats, their versions, errors, settings, keys and files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.support import Cluster, cluster, until
from tandem.tests.router.web.browser import Tab, says, streams, tab
from tandem.tests.router.web.scripts import goes_on

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_chat_is_edited_answered_again_and_still_there_after_a_reload(
    t: Tab, c: Cluster
) -> None:
    assert await t.ask("first question") == "hello world"
    figures = await t.page.inner_text(".figures")
    assert "first token" in figures and "tokens" in figures
    says(c, "another answer")
    await t.click("[aria-label='Answer again']")
    await t.has(".versions:has-text('2/2')")
    assert await t.answer() == "another answer"
    await t.click("[aria-label='Version before']")
    assert await t.answer() == "hello world"
    await t.page.press("#message", "ArrowUp")
    assert await t.page.input_value("#message") == "first question"
    await t.ask("second question")
    await t.page.reload()
    assert await t.answer() == "another answer"
    assert await t.page.inner_text(".bubble") == "second question"
    await t.click("article.user [aria-label='Version before']")
    assert await t.page.inner_text(".bubble") == "first question"
    assert await t.answer() == "hello world"
    prompts = [len(request.prompt) for request in c.node.requests]
    assert prompts[0] == prompts[1], "an answer is no part of the prompt of its sibling"


async def test_an_answer_is_stopped_and_what_has_come_stays(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.keyboard.press("Escape")
    await t.has("article:not(.running) .note:has-text('Stopped')")
    assert "it goes on" in await t.answer()
    await until(lambda: c.node.active == 0)


async def test_an_answer_goes_on_while_another_chat_is_shown(t: Tab, c: Cluster) -> None:
    end = asyncio.Event()
    goes_on(c, end)
    await t.send("one")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.keyboard.press("Control+Shift+O")
    await t.has(".chats li:has-text('one') .mark.running")
    assert await t.page.locator("article").count() == 0
    await t.send("two")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.fill("#message", "a draft")
    await t.click(".chats .title:has-text('one')")
    await t.has("article.running .markdown:has-text('goes on')")
    assert await t.page.input_value("#message") == ""
    await t.click("[aria-label='Stop this answer']")
    await t.has("article:not(.running) .note:has-text('Stopped')")
    await until(lambda: c.node.active == 1)
    end.set()
    await t.has(".chats li:has-text('two') .mark:not(.running)")
    await t.click(".chats .title:has-text('two')")
    assert await t.answer() == "it goes on to the end"
    assert await t.page.input_value("#message") == "a draft"
    assert await t.page.locator(".mark").count() == 0
    await t.page.reload()
    assert await t.answer() == "it goes on to the end", "it is kept"


async def test_answers_at_once_are_bounded(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    for text in ("one", "two", "three"):
        await t.page.keyboard.press("Control+Shift+O")
        await t.send(text)
        await t.has(f"article.user:has-text('{text}') + article.running")
    await t.page.keyboard.press("Control+Shift+O")
    await t.send("four")
    await t.has(".notice:has-text('3 answers are being streamed')")
    assert await t.page.input_value("#message") == "four" and c.node.active == 3
    await t.page.hover(".chats li:has-text('one')")
    await t.click(".chats li:has-text('one') [aria-haspopup]")
    await t.page.keyboard.press("Escape")
    assert c.node.active == 3, "the menu is closed, and no answer is stopped"
    await t.click(".chats li:has-text('one') [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Stop the answer')")
    await until(lambda: c.node.active == 2)
    await t.page.wait_for_selector(".notice", state="hidden")
    await t.page.press("#message", "Enter")
    await t.has("article.user:has-text('four') + article.running")


async def test_a_chat_that_is_deleted_while_it_is_answered_does_not_come_back(
    t: Tab, c: Cluster
) -> None:
    goes_on(c, asyncio.Event())
    await t.send("gone")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.hover(".chats li")
    await t.click(".chats [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Delete')")
    await t.click("dialog button.danger")
    await until(lambda: c.node.active == 0)
    await t.has(".welcome")
    await t.page.reload()
    await t.has(".welcome")
    assert await t.page.locator(".chats .title").count() == 0


async def test_an_answer_that_a_closed_page_has_cut_off_says_so(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.reload()
    await t.has("article:not(.running) .note:has-text('Incomplete')")
    c.node.script = None
    await t.click("[aria-label='Answer again']")
    await t.has(".versions:has-text('2/2')")
    assert await t.answer() == "hello world"


@pytest.mark.parametrize(
    ("status", "shown"),
    [(429, "Too many requests."), (503, "cannot serve"), (0, "Connection lost")],
)
async def test_errors_can_be_tried_again(t: Tab, status: int, shown: str) -> None:
    async def fail(route: Any) -> None:
        if not status:
            await route.abort()
            return
        error = {"error": {"message": "Come back later."}}
        await route.fulfill(status=status, json=error, headers={"retry-after": "1"})

    await t.page.route("**/v1/chat/completions", fail)
    await t.send("hi")
    await t.has(f".error:has-text('{shown}')")
    await t.page.unroute("**/v1/chat/completions")
    await t.click(".error button:enabled")
    assert await t.answer() == "hello world"
    assert await t.page.locator("article.assistant").count() == 1


async def test_settings_are_sent(t: Tab, c: Cluster) -> None:
    await t.page.keyboard.press("Control+,")
    await t.page.fill("dialog textarea >> nth=0", "be brief")
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "max_tokens": 3,
    }
    for name, value in values.items():
        await t.page.fill(f"#setting-{name}", str(value))
    tops = "[...document.querySelectorAll('dialog label')].map(l => l.getBoundingClientRect().top)"
    found = await t.page.evaluate(tops)
    assert found == sorted(found), "the fields stand below each other"
    await t.page.fill("#setting-more", '{"min_tokens": 1}')
    await t.page.keyboard.press("Escape")
    await t.page.select_option("#model", "other")
    before = len(c.encode("be brief"))
    await t.ask("hi")
    assert (await t.page.get_attribute(".figures", "title") or "").startswith("other: ")
    sampling = c.node.requests[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (7, 5, 3)
    assert (round(sampling.temperature, 3), round(sampling.top_p, 3)) == (0.5, 0.9)
    assert sampling.min_tokens == 1 and len(c.node.requests[-1].prompt) > before


async def test_chats_are_found_renamed_exported_deleted_and_imported(
    t: Tab, tmp_path: Path
) -> None:
    await t.ask("about apples")
    await t.page.keyboard.press("Control+Shift+O")
    await t.ask("about pears")
    assert await t.page.locator(".chats .title").count() == 2
    await t.page.keyboard.press("Control+k")
    await t.page.keyboard.type("apples")
    await t.has(".chats:not(:has-text('pears'))")
    await t.page.hover(".chats li")
    await t.click(".chats [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Rename')")
    await t.page.fill("dialog input", "Fruit")
    await t.page.keyboard.press("Enter")
    await t.has(".chats .title:has-text('Fruit')")
    async with t.page.expect_download() as downloading:
        await t.click("button:has-text('Export all')")
    file = tmp_path / "chats.json"
    await (await downloading.value).save_as(file)
    assert {chat["title"] for chat in json.loads(file.read_text())["chats"]} == {"Fruit", ""}
    await t.page.hover(".chats li")
    await t.click(".chats [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Delete')")
    await t.click("dialog button.danger")
    await t.has(".chats:not(:has-text('Fruit'))")
    async with t.page.expect_file_chooser() as choosing:
        await t.click("button:has-text('Import')")
    await (await choosing.value).set_files(file)
    await t.has(".chats .title:has-text('Fruit')")


async def test_a_long_chat_shows_its_end_and_more_on_demand(t: Tab, tmp_path: Path) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"message {i}"} for i in range(130)]
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"messages": messages}))
    async with t.page.expect_file_chooser() as choosing:
        await t.click("button:has-text('Import')")
    await (await choosing.value).set_files(file)
    await t.has("article:last-child:has-text('message 129')")
    assert await t.page.locator("article").count() == 50
    await streams(t, "chat/completions", [{"content": "the answer"}])  # too long for the model
    assert await t.ask("one more") == "the answer"
    assert await t.page.locator("article").count() == 52
    before = t.page.locator("article:has-text('message 80')")
    place = (await before.bounding_box())["y"]
    await t.page.evaluate("document.querySelector('.earlier').click()")
    await t.has("article:has-text('message 30')")
    assert abs((await before.bounding_box())["y"] - place) < 2, "the log stays in its place"
    await t.page.evaluate("document.querySelector('.scroller').scrollTop = 0")
    await t.has("article:has-text('message 0')")
    await t.page.wait_for_selector(".earlier", state="hidden")


async def test_a_key_is_asked_for(chromium: Any, tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret") as c, tab(chromium, c) as t:
        await t.page.goto(c.url)
        await t.page.fill("dialog input[type=password]", "wrong")
        await t.page.keyboard.press("Enter")
        await t.has("dialog:has-text('does not accept')")
        await t.page.keyboard.press("Escape")
        await t.has("#model:disabled:has-text('a key is needed')")
        await t.click("[aria-label='API key']")
        await t.page.fill("dialog input[type=password]", "secret")
        await t.page.keyboard.press("Enter")
        await t.has("#model:enabled")
        assert await t.ask("hi") == "hello world"
