"""Requests whose calls a real MCP server runs, started by the router from its configuration."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tandem.router.mcp.servers import McpServers
from tandem.tests.router.mcp.test_rounds import call
from tandem.tests.router.mcp.test_servers import SCRIPT
from tandem.tests.router.openai.test_tools import TEMPLATE
from tandem.tests.router.support import Cluster, cluster, held_briefly, make_model, until

REAL = "real"
TOOLS = [{"type": "mcp", "server_label": REAL}]


@asynccontextmanager
async def served(
    tmp_path: Path, replies: list[str], *faults: str, **options: Any
) -> AsyncIterator[tuple[Cluster, McpServers]]:
    """A router with a good server and one for each fault, and a node that sends one reply after the
    other."""
    arguments = {REAL: ()} | {fault: (fault,) for fault in faults}
    programs = {
        label: {"command": sys.executable, "args": ["-S", str(SCRIPT), *args]}
        for label, args in arguments.items()
    }
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": programs}))
    make_model(tmp_path / "model", TEMPLATE)
    async with cluster(tmp_path, context=4096, mcp_config=str(config), **options) as c:
        mcp = c.router.app.mcp
        assert mcp is not None
        await until(lambda: mcp.listings[REAL].error is None)

        async def talk(request: Any, context: Any) -> AsyncIterator[Any]:
            c.node.reply = c.encode(replies.pop(0))
            async for event in c.node._talk(request, context):
                yield event

        c.node.script = talk
        yield c, mcp
    assert not mcp._thread.is_alive()


async def test_a_configured_router_runs_calls_in_the_background_too(tmp_path: Path) -> None:
    async with served(tmp_path, [call("real__add", a=2, b=3), "five"]) as (c, _):
        body = {"input": "2 + 3", "tools": TOOLS, "background": True}
        created = (await c.client.post("/v1/responses", json=body)).json()
        assert created["status"] == "queued", created
        await c.router.app.handler.wait_for_background()
        ended = (await c.client.get(f"/v1/responses/{created['id']}")).json()
        _, result, message = ended["output"]
        assert result["output"] == "5" and message["content"][0]["text"] == "five"


async def test_servers_that_flood_or_stay_silent_do_not_hold_the_loop(tmp_path: Path) -> None:
    definitions = {
        "values": "rows",
        "blocks": "ValidationError",
        "huge": "closed|1.5 s",  # whichever a busy machine sees first
        "large": "xxx",
        "hang": "1.5 s",
        "exit": "closed|1.5 s",
        "add": "3",
    }
    loop = asyncio.get_running_loop()
    replies: list[str] = []
    options = {"mcp_timeout": 1.5, "mcp_max_result_bytes": 1024}
    async with served(tmp_path, replies, "garbage", "silent", "endless", **options) as (c, mcp):

        def send_request(tool: str) -> str:
            """The result of the only call."""
            replies[:] = [call(f"real__{tool}", a=1, b=2), "Done."]
            connected = until(lambda: mcp.listings[REAL].error is None)
            asyncio.run_coroutine_threadsafe(connected, loop).result()
            body = {"input": "go", "tools": TOOLS, "stream": True}
            text = httpx.post(f"{c.url}/v1/responses", json=body, timeout=60, verify=False).text
            whole = json.loads(text.rpartition("data: ")[2])["response"]
            assert whole["status"] == "completed"
            items = [item for item in whole["output"] if item["type"] == "mcp_call"]
            results = [str(item["error"] or item["output"]) for item in items]
            # The router reconnects to a server that broke, once it notices.
            return send_request(tool) if not items or "not connected" in results[0] else results[0]

        for name, part in definitions.items():
            assert re.search(part, await held_briefly(partial(send_request, name)))
