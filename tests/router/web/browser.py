"""A browser with the page of a router with fake nodes. Tests are skipped without playwright or
chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.support import Cluster

# The shell draws pages as chromium does, without the rest of a browser: half the time of a test.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# Everything happens within milliseconds, but a busy machine may take longer.
PATIENCE_MS = 20_000


def playwright() -> Any:
    """The module playwright; skips the test without it."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    return pytest.importorskip("playwright.async_api", reason="playwright is not installed")


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """A running chromium."""
    async with playwright().async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield chromium
        finally:
            await chromium.close()


class Tab:
    """A page of a visitor, initially without chats, and its errors."""

    def __init__(self, page: Any, cluster: Cluster) -> None:
        self.page = page
        self.cluster = cluster
        self.problems: list[str] = []
        self.foreign: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        page.on("request", self._check)

    def _note(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def _check(self, request: Any) -> None:
        if not request.url.startswith((self.cluster.url, "blob:")):
            self.foreign.append(request.url)

    async def load(self, path: str = "/") -> None:
        await self.page.goto(self.cluster.url + path)
        await self.page.wait_for_selector("#model:enabled")

    async def beside(self) -> Tab:
        """Another tab of the same visitor; its errors are added to this one's."""
        other = Tab(await self.page.context.new_page(), self.cluster)
        other.problems, other.foreign = self.problems, self.foreign
        await other.load()
        return other

    async def menu(self, item: str) -> None:
        """Choose an item in the menu of the first chat."""
        await self.page.bring_to_front()
        await self.page.hover(".chats li")
        await self.click(".chats [aria-haspopup]")
        await self.click(f"[role=menuitem]:has-text('{item}')")

    async def send(self, text: str) -> None:
        await self.page.fill("#message", text)
        await self.page.press("#message", "Enter")

    async def send_and_read(self, text: str) -> str:
        """Send a message. Returns the complete reply."""
        await self.send(text)
        return await self.reply()

    async def reply(self) -> str:
        last = "article.assistant:last-child:not(.running)"
        await self.page.wait_for_selector(f"{last} .figures, {last} .error")
        assert await self.page.locator(f"{last} .error").all_inner_texts() == []
        text: str = await self.page.inner_text("article.assistant:last-child > .markdown")
        return text

    async def has(self, selector: str) -> None:
        await self.page.wait_for_selector(selector)

    async def click(self, selector: str) -> None:
        """Click on an element, in front: a tab behind draws a frame a second, and a click waits
        for several."""
        await self.page.bring_to_front()
        await self.page.click(selector)


@asynccontextmanager
async def tab(chromium: Any, cluster: Cluster, **options: Any) -> AsyncIterator[Tab]:
    """A new visitor's tab. Asserts at the end that there were no errors, and no requests to
    other servers."""
    context = await chromium.new_context(**options)
    try:
        new_tab = Tab(await context.new_page(), cluster)
        yield new_tab
        assert new_tab.problems == [] and new_tab.foreign == []
    finally:
        await context.close()


def axe_source() -> str:
    """The script of axe, which finds accessibility problems; skips the test without it."""
    module = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed")
    return Path(module.AXE_FILE_PATH).read_text()


async def violations(t: Tab, source: str) -> dict[str, list[str]]:
    await t.page.evaluate(source)
    report = await t.page.evaluate("axe.run()")
    return {
        rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in report["violations"]
    }


def says(c: Cluster, text: str) -> None:
    """Let the node generate this text."""
    c.node.reply = c.encode(text)


async def streams(t: Tab, path: str, *outputs: list[dict[str, Any]]) -> list[Any]:
    """Serve requests with these deltas, or events of a response; returns the bodies."""
    bodies: list[Any] = []

    async def fulfil(route: Any) -> None:
        events = [
            event if "type" in event else {"choices": [{"index": 0, "delta": event}]}
            for event in outputs[len(bodies)]
        ]
        bodies.append(route.request.post_data_json)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        end = "data: [DONE]\n\n" if path == "chat/completions" else ""
        await route.fulfill(content_type="text/event-stream", body=body + end)

    await t.page.route(f"**/v1/{path}", fulfil)
    return bodies
