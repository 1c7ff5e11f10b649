"""Two workers on one port, as a whole: one registry, one page of metrics, one router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import RegistryStub
from tandem.tests.router.support import FakeDecodeNode, make_model

ADMIN = {"authorization": "Bearer admin"}
KEY = {"authorization": "Bearer key"}
START_SECONDS = 60
LIMIT = 200


class Workers:
    """A router of two workers, and a fake node that has joined it."""

    def __init__(self, process: subprocess.Popen[bytes], ports: dict[str, int]) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{ports['http']}"
        self.metrics = f"http://127.0.0.1:{ports['metrics']}/metrics"
        self.remaining: list[int] = []  # requests of the key, as responses told
        self.registry = f"127.0.0.1:{ports['registry']}"

    async def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """On a connection of its own, so that any worker may get it."""
        more.setdefault("headers", KEY)
        async with httpx.AsyncClient(base_url=self.url, timeout=20) as client:
            return await client.request(method, path, **more)

    async def respond(self, **fields: Any) -> dict[str, Any]:
        answer = await self.request("POST", "/v1/responses", json={"input": "hi", **fields})
        assert answer.status_code == 200, answer.text
        self.remaining.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        made: dict[str, Any] = answer.json()
        return made

    async def sum_of(self, series: str) -> list[float]:
        """The values of all lines of a series."""
        async with httpx.AsyncClient(timeout=20) as client:
            page = (await client.get(self.metrics)).text
        return [float(v) for v in re.findall(rf"^{series}(?:\{{.*\}})? (\S+)$", page, re.M)]


def start(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    read, write = os.pipe()
    command = [sys.executable, "-m", "tandem", "router", "--router-workers=2", "--port=0"]
    command += ["--registry-port=0", "--metrics-port=0", "--drain-timeout=5"]
    command += [f"--batch-dir={folder / 'batches'}", f"--requests-per-minute={LIMIT}"]
    secrets = {"TANDEM_API_KEY": "key", "TANDEM_ADMIN_API_KEY": "admin"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            pass_fds=[write],
            env=environment | secrets | {"TANDEM_READY_FD": str(write)},
            stderr=log,
        )
    os.close(write)
    with os.fdopen(read) as pipe:
        ports = json.loads(pipe.readline() or "{}")
    assert ports, (folder / "router.log").read_text()
    return process, ports


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[Workers]:
    async with asyncio.timeout(START_SECONDS):
        process, ports = await asyncio.to_thread(start, folder)
    made = Workers(process, ports)
    model = make_model(folder / "model")
    node = FakeDecodeNode("decode-0", [104, 105])
    channel = grpc.aio.insecure_channel(made.registry)
    registry: Any = RegistryStub(channel)

    async def beat() -> None:
        while True:
            await registry.Heartbeat(pb.HeartbeatRequest(node_id=node.node_id, epoch=node.epoch))
            await asyncio.sleep(0.2)

    beating: asyncio.Task[None] | None = None
    try:
        await node.start()
        await registry.Join(node.join_request(model))
        beating = asyncio.create_task(beat())
        yield made
    finally:
        if beating is not None:
            beating.cancel()
        await node.stop()
        await channel.close(grace=None)
        if process.poll() is None:
            process.kill()
        await asyncio.to_thread(process.wait)


async def until_ready(router: Workers) -> None:
    """Wait until every worker is ready, as far as can be seen from here."""
    ready = 0
    async with asyncio.timeout(START_SECONDS):
        while ready < 8:
            answer = await router.request("GET", "/ready")
            ready = ready + 1 if answer.status_code == 200 else 0


async def test_two_workers_are_one_router(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as router:
        await until_ready(router)
        # Whichever worker gets a request about a response, it is found, continued and deleted.
        made: list[dict[str, Any]] = []
        while {response["id"][-2:] for response in made} != {"00", "01"}:
            made += await asyncio.gather(*(router.respond() for _ in range(6)))
        # A limit holds across both.
        assert min(router.remaining) == LIMIT - len(made)
        made.sort(key=lambda response: str(response["id"])[-2:])
        for response in (*made[:2], *made[-2:]):
            path = f"/v1/responses/{response['id']}"
            shown = [await router.request("GET", path) for _ in range(4)]
            assert [answer.json() for answer in shown] == [response] * 4
            more = [await router.respond(previous_response_id=response["id"]) for _ in range(2)]
            assert all(one["previous_response_id"] == response["id"] for one in more)
        gone = f"/v1/responses/{made[0]['id']}"
        assert (await router.request("DELETE", gone)).json()["deleted"]
        assert {(await router.request("GET", gone)).status_code for _ in range(4)} == {404}

        # Each series is on the page once, with the sum over both.
        count = len(made) + 8
        assert await router.sum_of("vllm:e2e_request_latency_seconds_count") == [count]
        assert await router.sum_of("tandem_node_up") == [1.0]
        usage = await router.request("GET", "/v1/usage", headers=ADMIN)
        assert sum(entry["completion_tokens"] for entry in usage.json()["data"]) == 3 * count
        state = (await router.request("GET", "/cluster/state")).json()
        assert (state["generated_tokens"], state["totals"]["local"]) == (3 * count, count)

        # Without a word from the keeper the workers serve on, with the nodes that they know.
        os.kill(router.process.pid, signal.SIGSTOP)
        try:
            asked = {"json": {"prompt": "a"}, "headers": ADMIN}
            answers = [await router.request("POST", "/v1/completions", **asked)]
            answers.append(await router.request("GET", f"/v1/responses/{made[1]['id']}"))
        finally:
            os.kill(router.process.pid, signal.SIGCONT)
        assert [answer.status_code for answer in answers] == [200, 200]

        # A worker that dies is replaced, and nobody who connects meanwhile is refused.
        psutil.Process(router.process.pid).children()[0].kill()
        assert (await router.request("GET", "/live")).status_code == 200
        await until_ready(router)
        # An operator's command reaches the node through any worker, and all place nothing there.
        drained = await router.request("POST", "/admin/nodes/decode-0/drain", headers=ADMIN)
        assert drained.status_code == 200, drained.text
        unready = [(await router.request("GET", "/ready")).status_code for _ in range(6)]
        assert set(unready) == {503}

        ended = await router.request("POST", "/shutdown", headers=ADMIN)
        assert ended.status_code == 200
        assert await asyncio.to_thread(router.process.wait, 20) == 0
