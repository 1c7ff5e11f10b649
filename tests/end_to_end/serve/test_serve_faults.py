"""``tandem serve`` is as hard to kill as its parts: a node that dies is started again, a node that
drains leaves, and requests go on."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import psutil
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillStub
from tandem.router.cluster import admin
from tandem.shared.config import SecurityConfig
from tandem.shared.security.local_token import find_credentials
from tandem.tests.end_to_end.support.baseline import AT_REST_ZERO, SETTLE_SECONDS, Footprint
from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    START_SECONDS,
    TestCluster,
    get,
    metric,
    running,
    tandem,
    until,
)
from tandem.tests.support.extent import selected

CLIENTS = 3
FRESH_SEEDS = 10_000  # of prompts that no test sends twice
PAUSE_SECONDS = 0.5  # nodes start meanwhile, on the same cores
PREFILL, DECODE = "prefill-node", "decode-node"
PROMPT_TOKENS, STREAM_TOKENS = 100, 400
ENGINE = (
    "--max-num-batched-tokens=64",
    "--dtype=float32",
    "--threads=1",
    "--block-size=16",
    "--max-model-len=512",
)
# Its nodes ask their ranks for signs of life three times as often.
IMPATIENT = "from tandem.shared.engine import executor; executor.PING_SECONDS /= 3"
# The rank's watchdog has to fire first.
HANG_SECONDS = 2 * START_SECONDS


class ServedCluster:
    """A running ``tandem serve`` with some decode nodes; ``prefill`` are the options of its one
    prefill node."""

    def __init__(
        self,
        folder: Path,
        model: str,
        decode_nodes: int = 2,
        prefill: tuple[str, ...] = ("--prefill-nodes=1",),
    ) -> None:
        self.folder = folder
        self.errors = folder / "stderr"
        arguments = [
            *("serve", model, "--port=0", *prefill, "--share-devices"),
            f"--decode-nodes={decode_nodes}",
            *ENGINE,
            *("--prefill-threshold=1", "--no-enable-prefix-caching", "--drain-timeout=5"),
            f"--log-dir={folder}",
        ]
        assert TestCluster.forker is not None
        read, output = os.pipe()
        with self.errors.open("wb") as errors:
            self.process = TestCluster.forker.start(
                arguments,
                os.environ,
                output,
                errors.fileno(),
                ready=errors.fileno(),
                prelude=IMPATIENT,
            )
        os.close(output)
        self.output = open(read)  # noqa: SIM115
        greeting = ""
        while not (match := re.search(r"^Parts: .* (\S+)$", greeting, re.MULTILINE)):
            line = self.output.readline()
            assert line, self.errors.read_text()
            greeting += line
        self.registry = match[1]
        (self.url,) = re.findall(r"^Tandem is ready: (http://\S+)", greeting)
        self.credentials = find_credentials(SecurityConfig(), [self.registry])
        self._rest: Footprint | None = None
        self._long_outputs: dict[int, list[int]] = {}

    def stop(self) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0
        finally:
            self.close()

    def close(self) -> None:
        self.process.kill()
        self.output.close()

    def head(self, name: str) -> psutil.Process:
        """The process of a part, by the kind of node that it is started as."""
        parts = psutil.Process(self.process.pid).children(recursive=True)
        return next(part for part in parts if part.name() == name)

    def nodes(self) -> list[pb.NodeInfo]:
        return [
            n for n in admin.list_nodes(self.registry, self.credentials).nodes if not n.draining
        ]

    def wait_nodes(self, count: int) -> None:
        until(lambda: len(self.nodes()) == count, f"{count} nodes", START_SECONDS)

    def open(self, seed: int, **fields: Any) -> Any:
        """The response to a request, not read yet."""
        body = {
            "prompt": prompt(seed, PROMPT_TOKENS),
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, seed: int, **fields: Any) -> list[int]:
        with self.open(seed, **fields) as response:
            return list(json.loads(response.read())["choices"][0]["token_ids"])

    def long_output(self, seed: int) -> list[int]:
        """The tokens of an undisturbed stream, which are always the same."""
        if seed not in self._long_outputs:
            self._long_outputs[seed] = self.complete(seed, max_tokens=STREAM_TOKENS)
        return self._long_outputs[seed]

    def prefilled_remotely(self, seed: int) -> bool:
        with self.open(seed) as response:
            return bool(json.loads(response.read())["tandem"]["prefill_nodes"])

    def stream(self, seed: int, first_token: Event) -> tuple[list[int], int]:
        """The tokens of a long stream, and the number of errors that end it."""
        tokens, errors = [], 0
        with self.open(seed, stream=True, max_tokens=STREAM_TOKENS) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    event = json.loads(data)
                    errors += "error" in event
                    for choice in event.get("choices", ()):
                        tokens += choice["token_ids"]
                    first_token.set()
        return tokens, errors

    @contextmanager
    def streams(self, seeds: list[int]) -> Iterator[list[Future[tuple[list[int], int]]]]:
        """Streams that have begun, one on each decode node if there are as many."""
        with ThreadPoolExecutor(len(seeds)) as pool:
            first_tokens = [Event() for _ in seeds]
            futures = [
                pool.submit(self.stream, *each) for each in zip(seeds, first_tokens, strict=True)
            ]
            assert all(event.wait(60) for event in first_tokens)
            yield futures

    @contextmanager
    def under_load(self) -> Iterator[Callable[[], None]]:
        """Requests run before, during and after the block, and each gets the right output. Yields a
        function that waits until every client has had further responses."""
        want = [self.complete(seed) for seed in range(CLIENTS)]
        done = Event()
        num_completed = [0] * CLIENTS

        def client(seed: int) -> None:
            while not done.is_set():
                assert self.complete(seed) == want[seed]
                num_completed[seed] += 1
                done.wait(PAUSE_SECONDS)

        def more() -> None:
            before = list(num_completed)
            until(
                lambda: all(
                    now > then + 1 or future.done()
                    for now, then, future in zip(num_completed, before, futures, strict=True)
                ),
                "answers",
                60,
            )

        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [pool.submit(client, seed) for seed in range(CLIENTS)]
            try:
                more()
                yield more
                more()
            finally:
                done.set()
            for future in futures:
                future.result()

    def wait_at_rest(self) -> None:
        """Until no node holds anything, and the command has no more processes, descriptors and
        staging rings than it had when this was first called."""
        if self._rest is None:
            self._connect_nodes()
        until(lambda: not self._leaks(), "the nodes to hold nothing", SETTLE_SECONDS)
        if self._rest is None:
            self._rest = Footprint.of(self.process.pid)
        rest = self._rest
        until(
            lambda: not Footprint.of(self.process.pid).beyond(rest), f"only {rest}", SETTLE_SECONDS
        )

    def _connect_nodes(self) -> None:
        """Send prompts until all nodes are connected: they connect with one that started again when
        they first send it a prompt."""
        fresh = itertools.count(FRESH_SEEDS)

        def ask() -> bool:
            list(pool.map(self.prefilled_remotely, itertools.islice(fresh, CLIENTS)))
            return self._is_connected()

        with ThreadPoolExecutor(CLIENTS) as pool:
            until(ask, "all nodes to be connected", SETTLE_SECONDS)

    def _leaks(self) -> list[str]:
        return [
            series for text in self._metrics() for series in AT_REST_ZERO if metric(text, series)
        ]

    def _is_connected(self) -> bool:
        """True if the prefill node is connected with each of the others."""
        peers = sum(metric(text, "tandem_data_plane_peers") for text in self._metrics())
        return peers == 2 * (len(self._probe_ports()) - 1)

    def _metrics(self) -> list[str]:
        return [get(f"http://127.0.0.1:{port}/metrics") for port in self._probe_ports()]

    def _probe_ports(self) -> list[str]:
        """Of each node the one of its last start."""
        logs = self.folder.glob("latest/*-node-*.log")
        return [re.findall(r"probes on port (\d+)", log.read_text())[-1] for log in logs]

    def log_text(self) -> str:
        return self.errors.read_text()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[ServedCluster]:
    serve = ServedCluster(tmp_path_factory.mktemp("served"), tiny_model)
    yield serve
    serve.stop()


@pytest.mark.parametrize(
    ("kind", "what"),
    selected(
        [(PREFILL, "head"), (DECODE, "rank")],
        full=[(PREFILL, "rank"), (DECODE, "head")],
    ),
)
def test_a_node_that_dies_under_load_is_started_again_and_no_request_is_lost(
    serve: ServedCluster, kind: str, what: str
) -> None:
    serve.wait_nodes(3)
    head = serve.head(kind)
    victim = head if what == "head" else head.children()[0]
    before = serve.log_text().count("serves again")

    with serve.under_load():
        victim.kill()
        until(
            lambda: serve.log_text().count("serves again") > before,
            "the node to be started again",
            START_SECONDS,
        )
    serve.wait_nodes(3)
    assert re.search(rf"tandem: {kind}-. (ended|was killed) .* it is restarted", serve.log_text())
    assert not head.is_running()
    serve.wait_at_rest()


@contextmanager
def disturbed(serve: ServedCluster, kind: str, processes: list[psutil.Process]) -> Iterator[None]:
    """Stop processes of a node while streams and requests run, all of which must complete."""
    seeds, log = [10, 11], serve.log_text()
    want = [serve.long_output(seed) for seed in seeds]
    serve.wait_at_rest()
    with serve.streams(seeds) as streams:
        for process in processes:
            process.suspend()
        with serve.under_load() as more:
            # A node that is started again may be back before it is missed.
            until(
                lambda: len(serve.nodes()) == 2 or serve.log_text() != log,
                "the node to be lost",
                START_SECONDS,
            )
            more()
            if kind == PREFILL:
                assert not serve.prefilled_remotely(1)
            yield
    assert [stream.result() for stream in streams] == [(tokens, 0) for tokens in want]
    serve.wait_nodes(3)
    until(lambda: serve.prefilled_remotely(1), "the prefill node to be used", START_SECONDS)
    serve.wait_at_rest()


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
def test_a_paused_node_fails_no_request_and_is_not_restarted(
    serve: ServedCluster, kind: str
) -> None:
    serve.wait_nodes(3)
    log, head = serve.log_text(), serve.head(kind)
    node = [head, *head.children()]
    with disturbed(serve, kind, node):
        for process in node:
            process.resume()
        serve.wait_nodes(3)
    assert serve.log_text() == log and head.is_running()


@pytest.mark.parametrize("kind", selected([DECODE], full=[PREFILL]))
def test_a_node_with_a_hung_rank_is_restarted(serve: ServedCluster, kind: str) -> None:
    serve.wait_nodes(3)
    log, head = serve.log_text(), serve.head(kind)
    with disturbed(serve, kind, head.children()):
        until(
            lambda: "serves again" in serve.log_text().removeprefix(log),
            "the node to be started again",
            HANG_SECONDS,
        )
    assert re.fullmatch(
        rf"tandem: ({kind}-.) ended with exit status 1: .*rank 0 gave no sign of life.*"
        r"it is restarted in .*\ntandem: \1 serves again\n",
        serve.log_text().removeprefix(log),
    )
    assert not head.is_running()


def test_a_prefill_node_of_its_own_is_started_again_at_its_address_and_used_by_pd_client(
    tmp_path: Path, tiny_model: str
) -> None:
    with running(tmp_path, tiny_model) as cluster:
        part = cluster.start(["serve", tiny_model, "--pd-server", "--pd-url=127.0.0.1:0", *ENGINE])
        address = part.details["address"]
        client = ServedCluster(tmp_path, tiny_model, 1, ("--pd-client", f"--pd-url={address}"))
        try:
            _is_used(client)
            (rank,) = psutil.Process(part.process.pid).children()
            rank.kill()
            until(
                lambda: part.log.read_text().count(" listens on ") > 1,
                "the node to be started again",
                START_SECONDS,
            )
            with grpc.insecure_channel(address) as channel:
                assert PrefillStub(channel).Status(pb.StatusRequest(), timeout=10).ready
            assert "(restart 1 of 5)" in part.log.read_text()
            _is_used(client)
            client.stop()
        finally:
            client.close()
        part.process.terminate()
        assert part.process.wait(30) == 0


def _is_used(client: ServedCluster) -> None:
    """Wait until KV comes from the prefill node; then a stream has the tokens of a response."""
    until(lambda: client.prefilled_remotely(1), "the prefill node to be used", START_SECONDS)
    want = client.complete(2, max_tokens=STREAM_TOKENS)
    assert client.stream(2, Event()) == (want, 0)


def test_a_drained_node_leaves_and_the_others_go_on(serve: ServedCluster) -> None:
    serve.wait_nodes(3)
    names = [node.node_id for node in serve.nodes() if node.role == pb.ROLE_PREFILL]
    names += [node.node_id for node in serve.nodes() if node.role == pb.ROLE_DECODE][:1]

    with serve.under_load():
        for number, name in enumerate(names, 1):
            tandem("nodes", "--router", serve.registry, "drain", name).check_returncode()
            until(
                lambda number=number: serve.log_text().count("has drained and left") == number,  # type: ignore[misc]
                "the node to leave",
            )
    serve.wait_nodes(1)
    # The last one ends the command, as planned.
    last = serve.head(DECODE).pid
    psutil.Process(last).send_signal(signal.SIGTERM)
    assert serve.process.wait(60) == 0
    assert "no decode node is left: the last one has drained" in serve.log_text()


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path, tiny_model: str) -> None:
    serve = ServedCluster(tmp_path, tiny_model, decode_nodes=1)
    parts = psutil.Process(serve.process.pid).children(recursive=True)
    assert len(parts) == 6  # router, two heads, two ranks, and what has forked them
    serve.close()
    assert psutil.wait_procs(parts, timeout=30)[1] == []


def test_a_router_that_dies_ends_the_command_and_its_parts(tmp_path: Path, tiny_model: str) -> None:
    serve = ServedCluster(tmp_path, tiny_model, decode_nodes=1, prefill=())
    parts = psutil.Process(serve.process.pid).children(recursive=True)
    try:
        with serve.streams([1]) as (stream,):
            serve.head("router").kill()
            assert len(stream.result(60)[0]) < STREAM_TOKENS
        assert serve.process.wait(60) == 1
    finally:
        serve.close()
    assert "router was killed (SIGKILL)" in serve.log_text()
    assert psutil.wait_procs(parts, timeout=30)[1] == []
