"""The cluster page in a real browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.support import Cluster, admitted, cluster, finished, tokens_event, usage
from tandem.tests.router.web.browser import axe_source, playwright, tab, violations

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Tokens; prompts of streams are about 100 tokens of the tiny tokenizer, and the long one 500.
LONG = 250


class HeldPrefill:
    """A decode node's script: streams run on, and long prompts wait for ``computed``."""

    def __init__(self, c: Cluster) -> None:
        self.computed = asyncio.Event()
        self._token = c.encode("hello")[:1]

    async def __call__(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        is_long = len(request.prompt) > LONG
        if is_long:
            await self.computed.wait()
        name = request.prefill[0].node_id if is_long else ""
        yield usage(request, prefill_node=name, remote_tokens=LONG if is_long else 0)
        for _ in range(request.sampling.max_tokens):
            yield tokens_event(0, self._token)
            await asyncio.sleep(0.005)
        yield finished(0, pb.FINISH_REASON_LENGTH)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def c(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    playwright()
    async with cluster(tmp_path_factory.mktemp("page"), context=1024) as c:
        await c.add("prefill-0", role=pb.ROLE_PREFILL)
        yield c


@pytest.mark.parametrize(
    "device",
    [
        {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
        {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True},
    ],
    ids=["desktop", "phone"],
)
async def test_the_page_moves_when_kv_moves(
    chromium: Any, c: Cluster, device: dict[str, Any]
) -> None:
    c.node.script = prefill = HeldPrefill(c)
    async with tab(chromium, c, **device) as t:
        await t.load("/cluster")
        await t.has(".prefill .card:has-text('prefill-0') .state:has-text('ready')")
        await t.has(".decode .card:has-text('decode-0')")
        await t.click("button:has-text('Start 3 streams')")
        rates = t.page.locator(".streams b", has_text=re.compile(r"^[1-9]"))
        await rates.nth(2).wait_for()
        # A prompt counts as moving until its node says where it was computed, and the page may
        # have asked before that.
        await t.page.wait_for_selector(".lines .moving", state="detached")
        await t.click("button:has-text('Send a long prompt')")
        await t.page.wait_for_selector(".lines path.moving", state="attached")
        await t.has(".prefill .card.moving:has-text('prefill-0')")
        await t.has(".decode .card.moving:has-text('decode-0')")
        await t.has(".flow:has-text('tokens')")
        await t.has("tr.moving:has-text('prefill-0'):has-text('decode-0')")
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert await t.page.evaluate(wide)
        prefill.computed.set()
        await t.has(".results li:has-text('by prefill-0; first token after')")
        await t.page.wait_for_selector(".lines path.moving", state="detached")
        await t.has("td:has-text('ago'), td:has-text('just now')")
        await t.click("button:has-text('Stop the streams')")
        await t.has(".streams b:has-text('ended')")


async def test_what_is_shown_turns_grey_while_the_server_is_away(chromium: Any, c: Cluster) -> None:
    async with tab(chromium, c) as t:
        await t.load("/cluster")
        await t.has(".cluster:not(.away) .prefill .card:has-text('prefill-0')")
        away = asyncio.Event()
        away.set()
        await t.page.route(
            "**/cluster/state", lambda route: route.abort() if away.is_set() else route.continue_()
        )
        await t.has(".cluster.away .error:has-text('The server does not respond. This state is')")
        await t.has(".prefill .card:has-text('prefill-0')")
        away.clear()
        await t.has(".cluster:not(.away) .prefill .card:has-text('prefill-0')")


async def test_the_long_prompt_is_one_that_takes_a_few_seconds(
    chromium: Any, tmp_path: Path
) -> None:
    async with cluster(tmp_path, context=9000) as c:
        await c.add("prefill-0", role=pb.ROLE_PREFILL)
        lengths = "select[aria-label='Tokens of the long prompt']"
        selector = f"{lengths} option:checked"
        async with tab(chromium, c) as t:
            await t.load("/cluster")
            await t.page.wait_for_selector(f"{selector}[value='1000']", state="attached")
            assert await t.page.locator(selector).inner_text() == "1,000 tokens"
            c.load.prefill_tokens_per_second = 500
            await t.page.wait_for_selector(f"{selector}[value='2000']", state="attached")
            assert await t.page.locator(selector).inner_text() == "2,000 tokens, about 4 s"
            await t.page.select_option(lengths, "500")
            c.load.prefill_tokens_per_second = 5000
            option = "option[value='8000']:has-text('8,000 tokens, about 2 s')"
            await t.page.locator(lengths).blur()
            await t.page.wait_for_selector(option, state="attached")
            assert await t.page.locator(selector).inner_text() == "500 tokens, under 1 s"


async def test_axe_finds_nothing_on_the_cluster_page(chromium: Any, c: Cluster) -> None:
    axe = axe_source()
    c.node.script = prefill = HeldPrefill(c)
    for scheme in ("light", "dark"):
        async with tab(chromium, c, color_scheme=scheme) as t:
            await t.load("/cluster")
            await t.click("button:has-text('Send a long prompt')")
            await t.page.wait_for_selector(".lines path.moving", state="attached")
            assert await violations(t, axe) == {}, scheme
    prefill.computed.set()
