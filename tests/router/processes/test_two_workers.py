"""Two workers on one port, as a whole: one registry, one page of metrics, one router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import RegistryStub
from tandem.shared.config.limits import BACKGROUND_PRIORITY
from tandem.shared.process.lifeline import read_announcements
from tandem.tests.router.support import FakeDecodeNode, make_model
from tandem.tests.support.waiting import until

ADMIN = {"authorization": "Bearer admin"}
KEY = {"authorization": "Bearer key"}
START_SECONDS = 60
LIMIT = 200
LOCKS = Path("/proc/locks")


class HoldingNode(FakeDecodeNode):
    """Answers the requests of batches only once ``released`` is set."""

    def __init__(self) -> None:
        super().__init__("decode-0", [104, 105])
        self.released = asyncio.Event()
        self.batched = 0  # their requests
        self.script = self._hold

    async def _hold(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        if request.priority == BACKGROUND_PRIORITY:
            self.batched += 1
            await self.released.wait()
        async for event in self._talk(request, context):
            yield event


class Workers:
    """A router of two workers, and a node that has joined it."""

    def __init__(
        self, process: subprocess.Popen[bytes], ports: dict[str, int], folder: Path
    ) -> None:
        self.process = process
        self.node = HoldingNode()
        self.batches = folder / "batches"
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

    async def begin_batch(self) -> str:
        """The id of a batch of one request, which the node has."""
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        content = json.dumps({**line, "body": {"prompt": "a"}}).encode()
        form = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
        uploaded = (await self.request("POST", "/v1/files", **form)).json()
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        asked["input_file_id"] = uploaded["id"]
        made = (await self.request("POST", "/v1/batches", json=asked)).json()
        await until(lambda: self.node.batched == 1)
        return str(made["id"])

    async def end_batch(self, batch_id: str) -> str:
        """Let the node answer; returns the results of the batch."""
        self.node.released.set()
        shown: dict[str, Any] = {}
        async with asyncio.timeout(START_SECONDS):
            while shown.get("status") != "completed":
                await asyncio.sleep(0.05)
                shown = (await self.request("GET", f"/v1/batches/{batch_id}")).json()
        content = f"/v1/files/{shown['output_file_id']}/content"
        return (await self.request("GET", content)).text

    def batch_worker(self) -> psutil.Process:
        """The worker that runs the batches: the one that holds the lock."""
        inode = (self.batches / "lock").stat().st_ino
        held = re.findall(rf"FLOCK +ADVISORY +WRITE (\d+) \S+:{inode} ", LOCKS.read_text())
        (worker,) = (one for one in self.children() if str(one.pid) in held)
        return worker

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    async def usage(self) -> dict[str, Any]:
        shown: dict[str, Any] = (await self.request("GET", "/v1/usage", headers=ADMIN)).json()
        return shown

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
    with os.fdopen(read, "rb") as pipe:
        _, ports = read_announcements(pipe.read())
    assert ports, (folder / "router.log").read_text()
    return process, ports


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[Workers]:
    async with asyncio.timeout(START_SECONDS):
        process, ports = await asyncio.to_thread(start, folder)
    made = Workers(process, ports, folder)
    model, node = make_model(folder / "model"), made.node
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


def _by_worker(responses: list[dict[str, Any]]) -> Counter[str]:
    """The number of responses of each worker, which their ids end with."""
    return Counter(response["id"][-2:] for response in responses)


def _requests(usage: dict[str, Any]) -> int:
    return sum(entry["requests"] for entry in usage["data"])


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
        made = await _responses_are_shared(router)
        await _sums_are_over_both(router, len(made) + 16 + 1)

        # Without a word from the keeper the workers serve on, with the nodes that they know.
        os.kill(router.process.pid, signal.SIGSTOP)
        try:
            ask = {"json": {"prompt": "a"}, "headers": ADMIN}
            answers = [await router.request("POST", "/v1/completions", **ask)]
            answers.append(await router.request("GET", f"/v1/responses/{made[1]['id']}"))
        finally:
            os.kill(router.process.pid, signal.SIGCONT)
        assert [answer.status_code for answer in answers] == [200, 200]

        await _a_dead_worker_is_replaced(router, made)
        await _an_unreachable_node_is_so_for_all(router)
        # An operator's command reaches the node through any worker, and all place nothing there.
        drained = await router.request("POST", "/admin/nodes/decode-0/drain", headers=ADMIN)
        assert drained.status_code == 200, drained.text
        unready = [(await router.request("GET", "/ready")).status_code for _ in range(6)]
        assert set(unready) == {503}

        ended = await router.request("POST", "/shutdown", headers=ADMIN)
        assert ended.status_code == 200
        assert await asyncio.to_thread(router.process.wait, 20) == 0


async def _responses_are_shared(router: Workers) -> list[dict[str, Any]]:
    """Whichever worker gets a request about a response, it is found, continued and deleted. Returns
    those of both, in the order of their workers; the first is deleted."""
    made: list[dict[str, Any]] = []
    while min(_by_worker(made)[end] for end in ("00", "01")) < 2:
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
        named = [{"type": "item_reference", "id": response["output"][0]["id"]}]
        more += [await router.respond(input=named, store=False) for _ in range(2)]
        assert all(one["usage"]["input_tokens"] > 0 for one in more)
    unknown = {"input": [{"type": "item_reference", "id": "x"}]}
    assert (await router.request("POST", "/v1/responses", json=unknown)).status_code == 404
    asked = {"input": "hi", "background": True}
    begun = (await router.request("POST", "/v1/responses", json=asked)).json()
    path = f"/v1/responses/{begun['id']}"
    while (await router.request("GET", path)).json()["status"] != "completed":
        pass
    gone = f"/v1/responses/{made[0]['id']}"
    assert (await router.request("DELETE", gone)).json()["deleted"]
    assert {(await router.request("GET", gone)).status_code for _ in range(4)} == {404}
    return made


async def _sums_are_over_both(router: Workers, count: int) -> None:
    """Each series is on the page once, with the sum over both."""
    assert await router.sum_of("vllm:e2e_request_latency_seconds_count") == [count]
    assert await router.sum_of("tandem_node_up") == [1.0]
    usage = await router.usage()
    assert sum(entry["completion_tokens"] for entry in usage["data"]) == 3 * count
    state = (await router.request("GET", "/cluster/state")).json()
    assert (state["generated_tokens"], state["totals"]["local"]) == (3 * count, count)


async def _an_unreachable_node_is_so_for_all(router: Workers) -> None:
    """What a request of one worker has found out, until the node answers again."""
    assert router.node.server is not None
    await router.node.server.stop(grace=None)  # its heartbeats go on
    answer = await router.request("POST", "/v1/completions", json={"prompt": "a"}, headers=ADMIN)
    assert answer.status_code == 503
    unready = 0
    async with asyncio.timeout(START_SECONDS):
        while unready < 8:
            answer = await router.request("GET", "/ready")
            unready = unready + 1 if answer.status_code == 503 else 0
    await router.node.start(router.node.port)
    await until_ready(router)


async def _a_dead_worker_is_replaced(router: Workers, made: list[dict[str, Any]]) -> None:
    """Nobody who connects meanwhile is refused. Another one goes on with the batches; the counts of
    the dead one remain, but not its responses."""
    batch = await router.begin_batch()
    before = await router.usage()
    router.batch_worker().kill()
    assert (await router.request("GET", "/live")).status_code == 200
    assert len((await router.end_batch(batch)).splitlines()) == 1
    assert router.node.batched == 2
    await until_ready(router)
    after = [await router.usage() for _ in range(4)]
    assert {one["since"] for one in after} == {before["since"]}
    assert all(_requests(one) >= _requests(before) for one in after)
    kept = {response["id"][-2:]: response["id"] for response in made[1:]}
    answers = [await router.request("GET", f"/v1/responses/{one}") for one in kept.values()]
    assert sorted(answer.status_code for answer in answers) == [200, 404]
