"""Rolling restarts: every part is ended by SIGTERM in turn while clients stream, and no request
fails."""

from __future__ import annotations

import http.client
import json
import random
import signal
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tandem.router.cluster import admin
from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    START_SECONDS,
    Part,
    TestCluster,
    get,
    running,
    until,
)

CLIENTS = 3
TOKENS = 40
POLL_SECONDS = 0.1
# Far longer than the balancer below takes to notice.
DELAY_SECONDS = 2.0
KINDS = ("prefill-node", "decode-node")
DRAIN = "--drain-timeout=30"


class Balancer:
    """Sends requests to routers that said that they are ready, as a load balancer does."""

    def __init__(self, routers: list[Part]) -> None:
        self.routers = routers
        self._ready: list[str] = []
        self._draw = random.Random(1)

    def watch(self, done: Event) -> None:
        while not done.is_set():
            self._ready = [address(part) for part in self.routers if is_ready(part)]
            time.sleep(POLL_SECONDS)

    def choose(self) -> str:
        until(lambda: bool(self._ready), "a router that is ready")
        return self._draw.choice(self._ready)


def address(router: Part) -> str:
    return f"127.0.0.1:{router.details['http']}"


def is_ready(router: Part) -> bool:
    try:
        get(f"http://{address(router)}/ready")
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return False
    return True


def stream(router: str, seed: int) -> list[int]:
    """The tokens of one stream that ended well."""
    body = {
        "prompt": prompt(seed, 100),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(router, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        lines = [line.decode().strip() for line in response if line.strip()]
        assert response.status == 200, lines
        assert lines[-1] == "data: [DONE]", lines[-3:]
    finally:
        connection.close()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]


class Rolling:
    """Two routers, two prefill nodes and two decode nodes, each of which knows both routers."""

    def __init__(self, cluster: TestCluster) -> None:
        self.cluster = cluster
        self.routers = [self._start_router(), self._start_router()]
        self.nodes = [self._launch(kind) for kind in KINDS * 2]
        for node in self.nodes:
            node.wait_ready()
        self.wait_joined(*self.nodes)

    def _start_router(self, http_port: int = 0, registry: int = 0) -> Part:
        return self.cluster.start_router(
            f"--shutdown-delay={DELAY_SECONDS}",
            DRAIN,
            f"--model={self.cluster.model}",
            http=http_port,
            registry=registry,
        )

    def _launch(self, kind: str) -> Part:
        joined = ",".join(f"127.0.0.1:{r.details['registry']}" for r in self.routers)
        return self.cluster.launch_node(
            kind, f"--join={joined}", DRAIN, "--no-enable-prefix-caching"
        )

    def wait_joined(self, *nodes: Part) -> None:
        addresses = {node.details["address"] for node in nodes}
        for router in self.routers:
            registry = f"127.0.0.1:{router.details['registry']}"

            def all_listed(registry: str = registry) -> bool:
                listed_nodes = admin.list_nodes(registry).nodes
                return addresses <= {n.address for n in listed_nodes if not n.draining}

            until(all_listed, f"{addresses} at {registry}", START_SECONDS)

    def roll_nodes(self) -> None:
        """Those of either kind in turn, while the other kind is restarted too."""

        def roll(kind: int) -> None:
            for index in range(kind, len(self.nodes), len(KINDS)):
                self._roll_node(index)

        with ThreadPoolExecutor(len(KINDS)) as pool:
            list(pool.map(roll, range(len(KINDS))))

    def _roll_node(self, index: int) -> None:
        kind = KINDS[index % len(KINDS)]
        end(self.nodes[index])
        self.nodes[index] = self._launch(kind)
        self.nodes[index].wait_ready()
        self.wait_joined(self.nodes[index])

    def roll_router(self, index: int) -> None:
        old = self.routers[index]
        end(old)
        self.routers[index] = self._start_router(old.details["http"], old.details["registry"])
        self.wait_joined(*self.nodes)


def end(part: Part) -> None:
    part.process.send_signal(signal.SIGTERM)
    assert part.process.wait(60) == 0, part.log.read_text()[-2000:]


@pytest.fixture
def rolling(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Rolling]:
    with running(tmp_path_factory.mktemp("rolling"), tiny_model) as cluster:
        yield Rolling(cluster)


def test_every_part_is_restarted_under_load_and_no_request_fails(rolling: Rolling) -> None:
    want = [stream(address(rolling.routers[0]), seed) for seed in range(CLIENTS)]
    balancer = Balancer(rolling.routers)
    done = Event()

    def client(seed: int) -> int:
        counts = 0
        while not done.is_set():
            assert stream(balancer.choose(), seed) == want[seed]
            counts += 1
            done.wait(0.2)
        return counts

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        watching = pool.submit(balancer.watch, done)
        clients = [pool.submit(client, seed) for seed in range(CLIENTS)]
        try:
            rolling.roll_nodes()
            for index in range(len(rolling.routers)):
                rolling.roll_router(index)
        finally:
            done.set()
        counts = [future.result() for future in clients]
        watching.result()
    assert min(counts) > 0
    for part in rolling.cluster.parts:
        assert "Traceback" not in part.log.read_text()
