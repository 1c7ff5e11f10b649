"""``tandem serve`` is as hard to kill as its parts: a node that dies is started again, a node that
drains leaves, and requests go on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import grpc
import psutil
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillStub
from tandem.router.cluster import admin
from tandem.shared.config import SecurityConfig
from tandem.shared.security.local_token import find_credentials
from tandem.tests.end_to_end.clients import prompt
from tandem.tests.end_to_end.cluster import START_SECONDS, running, tandem, until
from tandem.tests.support.extent import selected

CLIENTS = 3


class Served:
    """A running ``tandem serve`` with one prefill node and two decode nodes."""

    def __init__(self, folder: Path, model: str) -> None:
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tandem", "serve", model),
                    *("--port=0", "--prefill-nodes=1", "--decode-nodes=2", "--dtype=float32"),
                    *("--threads=1", "--block-size=16", "--max-model-len=512"),
                    *("--prefill-threshold=1", "--no-enable-prefix-caching", "--drain-timeout=5"),
                    f"--log-dir={folder}",
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        greeting = [self.process.stdout.readline() for _ in range(4)]
        assert greeting[3], self.errors.read_text()
        (self.url,) = re.findall(r"http://\S+", greeting[0])
        self.registry = greeting[3].split()[-1]
        self.credentials = find_credentials(SecurityConfig(), [self.registry])

    def stop(self) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def head(self, name: str) -> psutil.Process:
        """The process of a part, by the kind of node that it is started as."""
        parts = psutil.Process(self.process.pid).children()
        return next(part for part in parts if name in part.cmdline())

    def nodes(self) -> list[pb.NodeInfo]:
        return [n for n in admin.list_nodes(self.registry, self.credentials) if not n.draining]

    def wait_nodes(self, count: int) -> None:
        until(lambda: len(self.nodes()) == count, f"{count} nodes", START_SECONDS)

    def complete(self, seed: int) -> list[int]:
        body = {
            "prompt": prompt(seed, 100),
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.loads(answer.read())["choices"][0]["token_ids"])

    def under_load(self, act: Callable[[], object]) -> None:
        """Requests run before, while and after ``act``, and each gets its right answer."""
        want = [self.complete(seed) for seed in range(CLIENTS)]
        done = Event()
        answered = [0] * CLIENTS

        def client(seed: int) -> None:
            while not done.is_set():
                assert self.complete(seed) == want[seed]
                answered[seed] += 1
                done.wait(0.05)

        def more() -> None:
            before = list(answered)
            until(
                lambda: all(
                    now > then + 1 or future.done()
                    for now, then, future in zip(answered, before, futures, strict=True)
                ),
                "answers",
                60,
            )

        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [pool.submit(client, seed) for seed in range(CLIENTS)]
            try:
                more()
                act()
                more()
            finally:
                done.set()
            for future in futures:
                future.result()

    def told(self) -> str:
        return self.errors.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"), tiny_model)
    yield served
    served.stop()


@pytest.mark.parametrize(
    ("kind", "what"),
    selected(
        [("prefill-node", "head"), ("decode-node", "rank")],
        full=[("prefill-node", "rank"), ("decode-node", "head")],
    ),
)
def test_a_node_that_dies_under_load_is_started_again_and_no_request_is_lost(
    served: Served, kind: str, what: str
) -> None:
    served.wait_nodes(3)
    head = served.head(kind)
    victim = head if what == "head" else head.children()[0]
    before = served.told().count("serves again")

    def die() -> None:
        victim.kill()
        until(
            lambda: served.told().count("serves again") > before,
            "the node to be started again",
            START_SECONDS,
        )

    served.under_load(die)
    served.wait_nodes(3)
    assert re.search(rf"tandem: {kind}-. ended with exit status .* it is restarted", served.told())
    assert not head.is_running()


def test_a_prefill_node_of_its_own_is_started_again_at_its_address(
    tmp_path: Path, tiny_model: str
) -> None:
    with running(tmp_path, tiny_model) as cluster:
        part = cluster.start(
            ["serve", tiny_model, "--pd-server", "--pd-url=127.0.0.1:0", "--threads=1"]
        )
        for number in (1, 2):
            (rank,) = psutil.Process(part.process.pid).children()
            rank.kill()
            until(
                lambda number=number: part.log.read_text().count(" is ready on ") > number,  # type: ignore[misc]
                "the node to be started again",
                START_SECONDS,
            )
            with grpc.insecure_channel(part.details["address"]) as channel:
                assert PrefillStub(channel).Status(pb.StatusRequest(), timeout=10).ready
            assert f"(restart {number} of 5)" in part.log.read_text()
        part.process.terminate()
        assert part.process.wait(30) == 0


def test_a_node_that_an_operator_drains_leaves_and_the_others_go_on(served: Served) -> None:
    served.wait_nodes(3)
    names = [node.node_id for node in served.nodes() if node.role == pb.ROLE_PREFILL]
    names += [node.node_id for node in served.nodes() if node.role == pb.ROLE_DECODE][:1]

    def drain() -> None:
        for number, name in enumerate(names, 1):
            tandem("nodes", "--router", served.registry, "drain", name).check_returncode()
            until(
                lambda number=number: served.told().count("has drained and left") == number,  # type: ignore[misc]
                "the node to leave",
            )

    served.under_load(drain)
    served.wait_nodes(1)
    # The last one ends the command, as planned.
    last = served.head("decode-node").pid
    psutil.Process(last).send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    assert "no decode node is left: the last one has drained" in served.told()
