"""Real processes for black-box tests: start parts, ask them, kill them, count what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tandem.router.cluster import admin
from tandem.shared.process.lifeline import read_announcements
from tandem.tests.support.forked import ForkedProcess, Forker

START_SECONDS = 60.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 0.15
# Small enough that a short prompt crosses every border.
BLOCK, CHUNK, CONTEXT = 16, 64, 512


@dataclass
class Part:
    """One process and what it announced on the pipe ``ready``."""

    process: subprocess.Popen[bytes] | ForkedProcess
    log: Path
    ready: int
    host: str = "127.0.0.1"
    details: dict[str, Any] = field(default_factory=dict)

    def wait_ready(self) -> None:
        readable, _, _ = select.select([self.ready], [], [], START_SECONDS)
        lines = b""
        while readable and (chunk := os.read(self.ready, 65536)):
            lines += chunk
        _, self.details = read_announcements(lines)
        assert self.details, f"did not start:\n{self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def health_port(self) -> int:
        def ports() -> list[str]:
            return re.findall(r"probes on port (\d+)", self.log.read_text())

        until(lambda: bool(ports()), f"the probe port in {self.log}")  # a thread writes the log
        return int(ports()[0])

    def metrics(self) -> str:
        return get(f"http://{self.host}:{self.health_port()}/metrics")


@dataclass
class TestCluster:
    """One router and any nodes, all on ports from the OS."""

    __test__ = False
    # Set for the tests of a session; without it every part is an interpreter of its own.
    forker: ClassVar[Forker | None] = None
    folder: Path
    model: str
    prelude: str = ""
    parts: list[Part] = field(default_factory=list)
    router: Part | None = None

    @property
    def url(self) -> str:
        assert self.router is not None
        return f"http://{self.router.host}:{self.router.details['http']}"

    @property
    def registry(self) -> str:
        assert self.router is not None
        return f"127.0.0.1:{self.router.details['registry']}"

    def start_router(self, *flags: str, http: int = 0, registry: int = 0) -> Part:
        arguments = ["router", f"--port={http}", f"--registry-port={registry}", *flags]
        self.router = self.start(arguments)
        return self.router

    def start_node(self, kind: str, *flags: str) -> Part:
        (part,) = self.start_nodes((kind, *flags))
        return part

    def start_nodes(self, *nodes: tuple[str, ...]) -> list[Part]:
        """Each a kind and flags; all at the same time, until every one serves."""
        parts = [self.launch_node(*node) for node in nodes]
        for part in parts:
            part.wait_ready()
        return parts

    def launch_node(self, kind: str, *flags: str, prelude: str = "") -> Part:
        """A node that may still be loading. ``prelude``: see ``launch``."""
        return self.launch(
            [
                kind,
                self.model,
                f"--join={self.registry}",
                "--dtype=float32",
                "--threads=1",
                f"--block-size={BLOCK}",
                f"--max-model-len={CONTEXT}",
                f"--max-num-batched-tokens={CHUNK}",
                "--max-num-seqs=16",
                "--prefill-threshold=1",
                "--drain-timeout=10",
                *flags,
            ],
            prelude=prelude,
        )

    def start(self, arguments: list[str]) -> Part:
        """``tandem ARGUMENTS``, until it serves."""
        part = self.launch(arguments)
        part.wait_ready()
        return part

    def launch(
        self,
        arguments: list[str],
        host: str = "127.0.0.1",
        prelude: str = "",
    ) -> Part:
        """``tandem ARGUMENTS``, which may still be starting. ``prelude`` is Python that it runs
        first; ``host`` is where others reach it."""
        log = self.folder / f"{len(self.parts)}-{arguments[0]}.log"
        read, write = os.pipe()
        with log.open("wb") as file:
            process = self._begin(arguments, file.fileno(), write, prelude or self.prelude)
        os.close(write)
        part = Part(process, log, read, host)
        self.parts.append(part)
        return part

    def _begin(
        self, arguments: list[str], log: int, ready: int, prelude: str
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if self.forker is not None:
            return self.forker.start(arguments, os.environ, log, log, ready, prelude)
        assert not prelude, "only forks have one"
        return subprocess.Popen(
            [sys.executable, "-m", "tandem", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[ready],
            env=os.environ | {"TANDEM_READY_FD": str(ready), "PYTHONSAFEPATH": "1"},
        )

    def stop(self) -> None:
        for part in self.parts:
            if part.process.poll() is None:
                part.process.send_signal(signal.SIGTERM)
        for part in self.parts:
            try:
                part.process.wait(15)
            except subprocess.TimeoutExpired:
                part.kill()
            os.close(part.ready)

    # ---- asking --------------------------------------------------------------------------------

    def wait_nodes(self, decode: int, prefill: int) -> None:
        """Until the router's own metrics show this many nodes."""

        def all_listed() -> bool:
            text = get(f"{self.url}/metrics")
            joined = {(m[1], m[2]) for m in re.finditer(_NODE_LINE, text)}
            kinds = [kind for kind, _ in joined]
            return kinds.count("decode") == decode and kinds.count("prefill") == prefill

        until(all_listed, f"{decode} decode and {prefill} prefill nodes at the router")

    def roles(self) -> dict[str, str]:
        """The roles of the nodes that take work, as the router lists them."""
        nodes = admin.list_nodes(self.registry).nodes
        return {node.node_id: admin.ROLES[node.role] for node in nodes if not node.draining}

    def wait_parts(self, *parts: Part) -> None:
        """Until the router lists these nodes and no other: also none that has ended and whose
        heartbeats are still waited for."""
        addresses = {part.details["address"] for part in parts}

        def all_listed() -> bool:
            nodes = admin.list_nodes(self.registry).nodes
            taking_work = {node.address for node in nodes if not node.draining}
            return taking_work == addresses and len(nodes) == len(parts)

        until(all_listed, f"the nodes {addresses} at the router")

    def wait_roles(self, roles: dict[str, str]) -> None:
        until(lambda: self.roles() == roles, f"the roles {roles}")

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """``POST /v1/completions``; asserts that it succeeded."""
        status, body = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, body
        return body

    def post(self, path: str, body: Any, timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_idle(self, *nodes: Part) -> None:
        """Until no block is owned or reserved and no transfer is live on these nodes."""
        for node in nodes:
            until(lambda node=node: num_held(node) == 0, f"{node.log.name} to hold nothing")  # type: ignore[misc]


_NODE_LINE = r'node="((?:decode|prefill))-([^"]+)"'


def num_held(node: Part) -> float:
    """Blocks owned or reserved and transfers live, by the node's own metrics."""
    text = node.metrics()
    names = ('tandem_kv_blocks{state="owned"}', 'tandem_kv_blocks{state="reserved"}')
    return sum(metric(text, name) for name in (*names, "tandem_transfers_live"))


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an operator to its end."""
    command = [sys.executable, "-m", "tandem", *arguments]
    if TestCluster.forker is None:
        return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        files = output.fileno(), errors.fileno()
        # It announces nothing.
        process = TestCluster.forker.start([*arguments], os.environ, *files, ready=files[1])
        status = process.wait(START_SECONDS)
        texts = [Path(file.name).read_text() for file in (output, errors)]
    return subprocess.CompletedProcess(command, status, *texts)


def metric(text: str, series: str) -> float:
    """The sum of the samples with this name and these labels in Prometheus text, whatever other
    labels they have; 0 when there is none yet."""
    name, labels = _series(series)
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(name) and _matches(line.rsplit(" ", 1)[0], name, labels)
    )


def _matches(line_series: str, name: str, wanted: set[str]) -> bool:
    its_name, line_labels = _series(line_series)
    return its_name == name and wanted <= line_labels


def _series(series: str) -> tuple[str, set[str]]:
    name, _, labels = series.partition("{")
    return name, set(re.findall(r'\w+="[^"]*"', labels))


def node_metric(node: Part, series: str) -> float:
    return metric(node.metrics(), series)


def committed_transfers(decode: Part) -> float:
    """The number of prompts whose KV this node has received and taken over."""
    return node_metric(decode, 'tandem_transfers_total{outcome="committed"}')


def is_ready(node: Part) -> bool:
    """The state in the node's own /ready."""
    try:
        get(f"http://{node.host}:{node.health_port()}/ready")
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == 503
            return False
    return True


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until true; a test waits for states, never for time."""
    deadline = time.monotonic() + seconds
    for pause in pauses():
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if condition():
                return
        if time.monotonic() >= deadline:
            break
        time.sleep(pause)
    raise AssertionError(f"still waiting after {seconds:g} s for {what}")


def pauses() -> Iterator[float]:
    """Pauses between looks at a state: most states come soon, and each look costs what they wait
    for some of the CPU."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(1.25 * pause, MAX_PAUSE_SECONDS)


@contextlib.contextmanager
def running(folder: Path, model: str) -> Iterator[TestCluster]:
    """A cluster without parts, whose parts end with the block."""
    cluster = TestCluster(folder, model)
    try:
        yield cluster
    finally:
        cluster.stop()
