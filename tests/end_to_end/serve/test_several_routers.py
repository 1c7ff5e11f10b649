"""Two routers on one port: every node joins both, and one that dies is missed by its own clients
only, until it is back."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tandem.router.cluster import admin
from tandem.tests.end_to_end.serve.test_serve_faults import ServedCluster
from tandem.tests.end_to_end.support.cluster import START_SECONDS, get, metric, running, until

Connection = http.client.HTTPConnection
ROUTERS = 2


class TwoRouters:
    """The routers of a launcher, and a client that tells to which of them it is connected."""

    def __init__(self, launcher: int, url: str, metrics: list[int]) -> None:
        self.launcher = psutil.Process(launcher)
        self.address = urlsplit(url)
        self.metrics = metrics

    def process(self, number: int) -> psutil.Process:
        """The process that has this router's port of metrics."""
        return next(
            process
            for process in self.launcher.children(recursive=True)
            if self.metrics[number] in {each.laddr.port for each in tcp(process)}
        )

    def page(self, number: int) -> str:
        return get(f"http://127.0.0.1:{self.metrics[number]}/metrics")

    def nodes(self, number: int) -> float:
        return metric(self.page(number), "tandem_node_up")

    def num_requests(self, number: int) -> float:
        return metric(self.page(number), "vllm:e2e_request_latency_seconds_count")

    @contextmanager
    def connections(self) -> Iterator[list[Connection]]:
        """A connection to each router, by its number."""
        opened: list[Connection] = []
        processes = [self.process(number) for number in range(ROUTERS)]
        by_router: dict[int, Connection] = {}
        try:
            while len(by_router) < ROUTERS:
                assert len(opened) < 64, "one router gets no connections"
                opened.append(connection := self.connect())
                port = connection.sock.getsockname()[1]
                for number, process in enumerate(processes):
                    if port in {each.raddr.port for each in tcp(process) if each.raddr}:
                        by_router.setdefault(number, connection)
            yield [by_router[number] for number in range(ROUTERS)]
        finally:
            for each in opened:
                each.close()

    def connect(self) -> Connection:
        """A connection that a router has accepted."""
        assert self.address.hostname
        connection = Connection(self.address.hostname, self.address.port, timeout=20)
        connection.request("GET", "/live")
        assert connection.getresponse().read()
        return connection


def tcp(process: psutil.Process) -> list[Any]:
    return list(process.net_connections("tcp"))


def complete(connection: Connection) -> int:
    """The status of a request to generate."""
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read()
    return response.status


def ask(connection: Connection, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The response to a GET, or to a POST with a ``body``."""
    headers = {"content-type": "application/json"}
    payload = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, payload, headers)
    response = connection.getresponse()
    content: dict[str, Any] = json.loads(response.read())
    assert response.status == 200, content
    return content


def share_responses(two: TwoRouters) -> None:
    """One router makes a response, and the other reads and continues it."""
    with two.connections() as (one, other):
        first = ask(one, "/v1/responses", {"input": "hi", "max_output_tokens": 3})
        assert ask(other, f"/v1/responses/{first['id']}") == first
        after = {"input": "hi", "previous_response_id": first["id"], "max_output_tokens": 3}
        second = ask(other, "/v1/responses", after)
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def survives_the_death_of_a_router(two: TwoRouters, serves_again: Callable[[], bool]) -> None:
    until(lambda: two.nodes(0) == two.nodes(1) == 1, "the node at both")
    with two.connections() as both:
        assert [complete(each) for each in both] == [200, 200]
        until(lambda: two.num_requests(0) == two.num_requests(1) == 1, "the request of each")
        two.process(0).kill()
        until(lambda: not is_open(both[0]), "the end of its connections")
        assert complete(both[1]) == 200
        for _ in range(4):  # on new connections
            other = two.connect()
            assert complete(other) == 200
            other.close()
        until(lambda: two.num_requests(1) >= 2, "further requests of the other")
    until(serves_again, "the router to be started again", START_SECONDS)
    assert two.nodes(0) == 1, "it takes connections once its node is back"
    with two.connections() as both:
        assert [complete(each) for each in both] == [200, 200]
    until(lambda: two.num_requests(0) >= 1, "a request of the new one")


def is_open(connection: Connection) -> bool:
    try:
        return bool(complete(connection))
    except (http.client.HTTPException, OSError):
        return False


def test_serve_keeps_two_routers_on_one_port(tmp_path: Path, tiny_model: str) -> None:
    folder = f"--batch-dir={tmp_path / 'batches'}"
    flags = ("--router-workers=2", "--registry-port=0", "--metrics-port=0", folder)
    serve = ServedCluster(tmp_path, tiny_model, decode_nodes=1, prefill=flags)
    try:
        logs = [tmp_path / "latest" / f"router-{number}.log" for number in range(ROUTERS)]
        metrics = [int(re.findall(r"metrics on port (\d+)", log.read_text())[0]) for log in logs]
        two = TwoRouters(serve.process.pid, serve.url, metrics)
        survives_the_death_of_a_router(two, lambda: "router-0 serves again" in serve.log_text())
        share_responses(two)
        assert re.search(r"router-0 was killed \(SIGKILL\).* it is restarted in", serve.log_text())
        serve.stop()
    finally:
        serve.close()


def test_a_launcher_of_routers_alone_writes_their_logs_and_ends_with_them(
    tmp_path: Path, tiny_model: str
) -> None:
    prelude = "from tandem.router import server; server.REJOIN_SECONDS = 0.0"
    command = ["router", "--router-workers=2", "--port=0", "--registry-port=0"]
    with running(tmp_path, tiny_model) as cluster:
        launcher = cluster.launch(command, prelude=prelude)
        launcher.wait_ready()
        ports = launcher.details["routers"]
        assert len({each["http"] for each in ports}) == 1
        assert len({each["registry"] for each in ports}) == ROUTERS
        for each in ports:
            assert not admin.list_nodes(f"127.0.0.1:{each['registry']}").nodes
        with pytest.raises(OSError, match="404"):
            get(f"http://127.0.0.1:{ports[0]['http']}/metrics")
        launcher.process.terminate()
        assert launcher.process.wait(30) == 0
        log = launcher.log.read_text()
        assert log.count("listening on") == log.count("tandem.router ended") == ROUTERS
