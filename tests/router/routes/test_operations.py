"""Routes for operators and monitors: health, load, usage, documentation, commands, shutdown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.options import RouterOptions
from tandem.router.server import Router, run_router
from tandem.tests.router.support import Cluster, admitted, cluster, until

ROOT = {"authorization": "Bearer root"}


async def hold(c: Cluster) -> asyncio.Task[Any]:
    """A request that does not end."""

    async def never(request: Any, context: Any) -> Any:
        yield admitted()
        await asyncio.Event().wait()

    c.node.script = never
    task = asyncio.create_task(c.complete("x"))
    await until(lambda: c.node.active == 1)
    return task


async def test_the_names_of_probes(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:

        async def states() -> list[int]:
            paths = ("/health/live", "/health", "/ping", "/ready", "/health/ready")
            return [(await c.client.get(path)).status_code for path in paths]

        assert await states() == [200, 503, 503, 503, 503]
        await c.add()
        assert await states() == [200] * 5
        assert (await c.client.post("/ping")).status_code == 200
        c.router.app.services.draining = True
        assert await states() == [200, 200, 200, 503, 503]


async def test_details_and_load(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        task = await hold(c)
        details = (await c.client.get("/health/details")).json()
        assert details.pop("uptime_seconds") >= 0 and details.pop("version")
        nodes = {"decode/ready": 1}
        assert details == {"status": "ready", "model": "tiny", "requests": 1, "nodes": nodes}
        assert (await c.client.get("/load")).json() == {"server_load": 1}
        task.cancel()
        await until(lambda: c.router.app.handler.active == 0)
        c.router.app.services.draining = True
        assert (await c.client.get("/health/details")).json()["status"] == "draining"
    async with cluster(tmp_path, nodes=0) as c:
        details = (await c.client.get("/health/details")).json()
        assert (details["status"], details["model"]) == ("unavailable", None)


async def test_usage_of_a_key_and_of_all(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="alice: a,bob: b", admin_api_key="root") as c:

        async def usage(key: str) -> list[dict[str, Any]]:
            headers = {"authorization": f"Bearer {key}"}
            data: list[dict[str, Any]] = (await c.client.get("/v1/usage", headers=headers)).json()[
                "data"
            ]
            return data

        headers = {"authorization": "Bearer a"}
        statuses = []
        for stream in (False, True):
            body = {"prompt": "hi", "stream": stream, "max_tokens": 2}
            response = await c.client.post("/v1/completions", json=body, headers=headers)
            statuses.append(response.status_code)
        body = {"prompt": "hi", "temperature": -1}
        statuses.append(
            (await c.client.post("/v1/completions", json=body, headers=headers)).status_code
        )
        assert statuses == [200, 200, 400]
        prompt = 2 * len(c.encode("hi"))
        await until(lambda: c.router.app.services.usage.of("alice").requests == 3)
        [entry] = await usage("a")
        assert entry == {
            "key": "alice",
            "requests": 3,
            "errors": 1,
            "prompt_tokens": prompt,
            "cached_tokens": 6,
            "completion_tokens": 4,
            "total_tokens": prompt + 4,
            "limited": {"requests": 0, "tokens": 0},
        }
        assert [(e["key"], e["requests"]) for e in await usage("b")] == [("bob", 0)]
        assert {e["key"] for e in await usage("root")} >= {"alice", "bob"}
        await c.client.post("/v1/completions", json=body, headers={"authorization": "Bearer no"})
        page = c.router.metrics.render().decode()
        assert 'tandem_key_tokens_total{key="alice",kind="generated"} 4.0' in page
        assert 'key=""' not in page, "a request without a key is counted for nobody"


async def test_the_documentation_page_has_every_route_and_no_script(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        page = await c.client.get("/docs")
        document = (await c.client.get("/openapi.json")).json()
    assert page.status_code == 200 and page.headers["content-security-policy"]
    for path in document["paths"]:
        assert f" {path}</code>" in page.text, path
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page.text
    for foreign in ("<script", "src=", "http:", "https:", "@import", "url("):
        assert foreign not in page.text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_invocation_is_a_chat_or_a_completion(tmp_path: Path, stream: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    text = {"prompt": "hi", "stream": stream}
    async with cluster(tmp_path) as c:
        for body, kind in ((chat, "chat.completion"), (text, "text_completion")):
            response = await c.client.post("/invocations", json=body)
            assert response.status_code == 200
            first = response.text.partition("\n")[0].removeprefix("data: ")
            assert json.loads(first)["object"].removesuffix(".chunk") == kind
        bad: tuple[Any, ...] = ({"stream": stream}, [], {"prompt": "x", "n": 0})
        for wrong in bad:
            rejection = await c.client.post("/invocations", json=wrong)
            assert rejection.status_code == 400 and rejection.json()["error"]["message"]


async def test_nodes_are_listed_drained_and_switched(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2, admin_api_key="root") as c:

        async def post(path: str, **fields: Any) -> tuple[int, Any]:
            response = await c.client.post(f"/admin/nodes/{path}", headers=ROOT, **fields)
            return response.status_code, response.json()

        nodes = (await c.client.get("/admin/nodes", headers=ROOT)).json()
        assert [node["node_id"] for node in nodes["nodes"]] == ["decode-0", "decode-1"]
        assert nodes["absent"] == []
        assert (await post("decode-0/drain"))[0] == 200
        node = c.router.nodes.find("decode-0")
        assert node is not None and node.to_drain and node.drain_seconds is None
        status, response = await post("decode-1/role", json={"role": "prefill"})
        assert status == 400 and "the last decode node" in response["error"]["message"]
        status, _ = await post("decode-1/role", json={"role": "prefill", "force": True})
        other = c.router.nodes.find("decode-1")
        assert status == 200 and other is not None and other.next_role == pb.ROLE_PREFILL
        status, response = await post("none/drain", json={"timeout": 3})
        assert status == 404 and response["error"]["code"] == "node_not_found"
        for path, body in (
            ("decode-0/drain", {"timeout": -1}),
            ("decode-0/drain", {"timeout": "long"}),
            ("decode-0/drain", {"seconds": 1}),
            ("decode-0/role", {}),
            ("decode-0/role", {"role": "router"}),
            ("decode-0/role", {"role": "prefill", "force": "x" * 5000}),
        ):
            assert (await post(path, json=body))[0] in (400, 413), body


async def test_a_shutdown_finishes_requests_as_sigterm_does(tmp_path: Path) -> None:
    stop, ready = asyncio.Event(), asyncio.Queue[Router]()
    options = RouterOptions(port=0, registry_port=0, admin_api_key="root", drain_timeout=0.2)
    running = asyncio.create_task(run_router(options, stop, ready.put_nowait))
    router = await ready.get()
    reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
    writer.write(b"POST /shutdown HTTP/1.1\r\nhost: localhost\r\nx-api-key: root\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.close()
    await asyncio.wait_for(running, 10)
    assert stop.is_set() and router.app.services.draining
