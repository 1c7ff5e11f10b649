"""Connections to MCP servers: over stdio and HTTP, good and hostile."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tandem.router.mcp import connection
from tandem.router.mcp.connection import MAX_TOOLS
from tandem.router.mcp.server_config import McpServerConfig, read_servers
from tandem.router.mcp.servers import McpServers
from tandem.router.requests.mcp_tools import model_name
from tandem.shared.config.mcp import McpConfig
from tandem.shared.errors import UsageError
from tandem.tests.support.waiting import until

SCRIPT = Path(__file__).with_name("stdio_server.py")
SECRET = "hunter2"


def stdio(label: str, *args: str) -> McpServerConfig:
    return McpServerConfig(
        label=label, command=sys.executable, args=("-S", str(SCRIPT), *args), env={"MINE": SECRET}
    )


@asynccontextmanager
async def connected(*servers: McpServerConfig, seconds: float = 20.0) -> AsyncIterator[McpServers]:
    connections = McpServers(servers, seconds=seconds, max_result_bytes=2000)
    connections.start()
    try:
        yield connections
    finally:
        await connections.close()
        assert not connections._thread.is_alive()


def has_tools(servers: McpServers, label: str) -> bool:
    return servers.listings[label].error is None


def is_lost(servers: McpServers, label: str) -> bool:
    return "not available" in (servers.listings[label].error or "")


async def test_a_server_on_stdio_lists_and_runs_its_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROUTERS_SECRET", SECRET)
    async with connected(stdio("s")) as servers:
        assert not has_tools(servers, "s")
        assert (await servers.call("s", "add", "{}")).failed  # not connected yet
        await until(lambda: has_tools(servers, "s"))
        add, *_ = servers.listings["s"].tools
        assert (add.name, add.description, add.read_only) == ("add", "Add.", True)
        sum_of = await servers.call("s", "add", '{"a": 2, "b": 3}')
        assert (sum_of.text, sum_of.failed) == ("5", False)
        environment = (await servers.call("s", "environment", "")).text
        assert "MINE" in environment and "ROUTERS_SECRET" not in environment
        failed = await servers.call("s", "fail", "{}")
        assert failed.error() == {
            "type": "mcp_tool_execution_error",
            "content": [{"type": "text", "text": "it failed"}],
        }
        large = await servers.call("s", "large", "{}")
        assert len(large.text) <= 2000 and large.text.endswith("[cut: the result has 100000 bytes]")
        for arguments in ("{", "[]", "5"):
            assert "not a JSON object" in (await servers.call("s", "add", arguments)).text


async def test_hostile_servers_cost_only_their_tools(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(stdio("endless", "endless")) as servers:
        await until(lambda: has_tools(servers, "endless"))
        assert len(servers.listings["endless"].tools) == 64  # pages
        servers._connections["endless"]._seconds = 0.2
        hanging = await servers.call("endless", "hang", "{}")
        assert hanging.failed and "did not answer within 0.2 s" in hanging.text
    missing = McpServerConfig(label="missing", command="/nowhere", args=(SECRET,))
    unreachable = McpServerConfig(label="url", url=f"http://127.0.0.1:1/{SECRET}")
    silent, garbage = stdio("silent", "silent"), stdio("garbage", "garbage")
    async with connected(silent, garbage, missing, unreachable, seconds=0.5) as servers:
        for label in servers.listings:
            await until(partial(is_lost, servers, label))
    warned = [r.getMessage() for r in caplog.records if "is not available" in r.getMessage()]
    assert len(warned) == 4 and SECRET not in caplog.text


async def test_the_tools_of_a_server_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_DEFINITIONS", 450_000)
    counts = {"many": MAX_TOOLS, "descriptions": 4, "names": 4, "schemas": 4}
    async with connected(*(stdio(label, label) for label in counts)) as servers:
        for label, count in counts.items():
            await until(partial(has_tools, servers, label))
            assert len(servers.listings[label].tools) == count, label
    assert caplog.text.count("has too many tools; only the first 4 are used") == 3


async def test_results_of_many_values() -> None:
    async with connected(stdio("s"), seconds=20.0) as servers:
        await until(lambda: has_tools(servers, "s"))
        rows = await servers.call("s", "values", "{}")
        assert rows.text.startswith('{"rows": [[1], {}, [1]') and not rows.failed
        assert "ValidationError" in (await servers.call("s", "blocks", "{}")).text
        assert (await servers.call("s", "add", '{"a": 1, "b": 1}')).text == "2"
        deep = '{"a":' * 100_000
        assert "not a JSON object" in (await servers.call("s", "add", deep)).text


async def test_a_server_that_breaks_is_connected_again() -> None:
    async with connected(stdio("s")) as servers:
        for tool in ("huge", "exit"):
            await until(lambda: has_tools(servers, "s"))
            assert (await servers.call("s", tool, "{}")).failed
            await until(lambda: not has_tools(servers, "s"))
        await until(lambda: has_tools(servers, "s"))
        assert (await servers.call("s", "add", '{"a": 1, "b": 1}')).text == "2"


@asynccontextmanager
async def http_server(app: Any) -> AsyncIterator[str]:
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.should_exit = True
        await serving


async def test_a_server_by_http(caplog: pytest.LogCaptureFixture) -> None:
    from mcp.server.mcpserver import MCPServer

    mcp_server = MCPServer("test")

    @mcp_server.tool()
    def twice(text: str) -> str:
        """Say it twice."""
        return text * (2 if len(text) < 10 else 2_000_000 // len(text))

    tokens: list[str] = []
    app = mcp_server.streamable_http_app()

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        tokens.extend(
            value.decode() for name, value in scope.get("headers", ()) if name == b"x-key"
        )
        await app(scope, receive, send)

    async with http_server(recorded) as url:
        config = McpServerConfig(label="h", url=url, headers={"x-key": SECRET})
        async with connected(config) as servers:
            await until(lambda: has_tools(servers, "h"))
            [tool] = servers.listings["h"].tools
            assert (tool.name, tool.description) == ("twice", "Say it twice.")
            assert (await servers.call("h", "twice", '{"text": "ab"}')).text == "abab"
            too_much = await servers.call("h", "twice", json.dumps({"text": "x" * 20}))
            assert too_much.failed
    assert set(tokens) == {SECRET} and SECRET not in caplog.text


def read(tmp_path: Path, servers: Any, **options: Any) -> tuple[McpServerConfig, ...]:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return read_servers(McpConfig(mcp_config=str(path), **options), {"KEY": SECRET})


def test_the_configuration_is_that_of_other_programs(tmp_path: Path) -> None:
    servers = {
        "fs": {"command": "npx", "args": ["-y", "x"], "env": {"A": "${KEY}"}},
        "web": {"type": "http", "url": "https://x/y", "headers": {"authorization": "${KEY}"}},
        "off": {"command": "x", "disabled": True},
    }
    own, fs, web = read(tmp_path, servers, mcp_command="prog", mcp_args="-a,b")
    assert (own.label, own.command, own.args) == ("mcp", "prog", ("-a", "b"))
    assert fs.args == ("-y", "x") and fs.env == {"A": SECRET}
    assert web.headers == {"authorization": SECRET} and SECRET not in repr((fs, web))
    assert read_servers(McpConfig()) == ()


WRONG: tuple[Any, ...] = (
    [], {"a": 5}, {"a": {}}, {"a": {"command": "x", "url": "y"}}, {"": {"command": "x"}},
    {"a": {"command": 5}}, {"a": {"command": "x", "args": "y"}},
    {"a": {"command": "x", "b": SECRET}},
    {"a": {"command": "x", "env": [SECRET]}}, {"a": {"command": "${NO}" + SECRET}},
    {"a": {"command": "x", "type": "http"}}, {str(i): {"command": "x"} for i in range(65)},
    {"mcp": {"command": "x"}},
)  # fmt: skip


def test_a_wrong_configuration_is_refused_without_its_values(tmp_path: Path) -> None:
    for servers in WRONG:
        with pytest.raises(UsageError) as error:
            read(tmp_path, servers, mcp_command="x")
        assert "--mcp-config" in str(error.value) and SECRET not in str(error.value)
    for config in (McpConfig(mcp_args="x"), McpConfig(mcp_config="/nowhere")):
        with pytest.raises(UsageError):
            read_servers(config)
    (tmp_path / "mcp.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        read_servers(McpConfig(mcp_config=str(tmp_path / "mcp.json")))


def test_names_of_tools_are_valid_and_distinct() -> None:
    assert model_name("fs", "read_file") == "fs__read_file"
    pairs = [("a", "b"), ("a__b", "c"), ("a", "b__c"), ("a b", "c"), ("a.b", "c"), ("a", "x" * 99)]
    names = [model_name(*pair) for pair in pairs]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 64 and name.replace("-", "_").isidentifier() for name in names)
