"""A router as a process: its start, its ports, its credentials."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tandem.router.cluster import admin, pinned_model
from tandem.router.options import RouterOptions
from tandem.router.registry_server import RegistryServer
from tandem.router.server import Router, run, run_router
from tandem.shared.errors import RequestError, StartupError, UsageError
from tandem.shared.security.credentials import INSECURE, Credentials
from tandem.tests.router.support import cluster, until


async def test_a_port_in_use_is_a_startup_error(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        for options in (
            RouterOptions(port=c.router.http_port, registry_port=0),
            RouterOptions(port=0, registry_port=c.router.registry_port),
        ):
            with pytest.raises(StartupError, match="cannot listen"):
                await Router(options).start()


async def test_the_router_announces_that_it_is_ready_and_stops_on_sigterm() -> None:
    stop = asyncio.Event()
    ports: list[int] = []

    def on_ready(router: Router) -> None:
        ports.extend((router.http_port, router.registry_port))
        stop.set()

    async with asyncio.timeout(10):
        await run_router(RouterOptions(port=0, registry_port=0), stop, on_ready)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_probes_get_responses_while_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, stop = threading.Event(), asyncio.Event()
    monkeypatch.setattr(pinned_model, "find_model", lambda _: read.wait())
    router = Router(RouterOptions(port=0, registry_port=0, metrics_port=0, model="hub/model"))
    running = asyncio.create_task(run(router, stop, lambda: pytest.fail("it serves")))
    try:
        await until(lambda: bool(router.metrics_port))
        url = f"http://127.0.0.1:{router.metrics_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
            assert "tandem_nodes_lost_total" in (await client.get("/metrics")).text
            stop.set()
            async with asyncio.timeout(5):
                await running
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
    finally:
        read.set()


async def test_a_router_whose_clients_port_is_full_is_alive_at_its_metrics_port() -> None:
    """A kubelet would restart a router that it cannot reach."""
    router = Router(RouterOptions(port=0, registry_port=0, metrics_port=0, max_connections=1))
    await router.start()
    try:
        _, holding = await asyncio.open_connection("127.0.0.1", router.http_port)
        await until(lambda: len(router._http.connections) == 1)
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{router.http_port}/live")
            health = await client.get(f"http://127.0.0.1:{router.metrics_port}/health")
        assert health.status_code == 200
        holding.close()
        await holding.wait_closed()
    finally:
        await router.stop()


STUCK = """
import asyncio, os, signal, sys, threading
from tandem.router.cluster import pinned_model
from tandem.router.options import RouterOptions
from tandem.router.server import run_router
from tandem.shared.process.signals import catch_signals

begun = threading.Event()

def download(name):
    begun.set()
    threading.Event().wait()

pinned_model.find_model = download

async def main():
    stop = asyncio.Event()
    catch_signals(stop.set)
    options = RouterOptions(port=0, registry_port=0, model="hub/model")
    router = run_router(options, stop, lambda router: sys.exit("it serves"))
    running = asyncio.create_task(router)
    await asyncio.to_thread(begun.wait)
    os.kill(os.getpid(), signal.SIGTERM)
    await running

asyncio.run(main())
"""


def test_sigterm_ends_a_router_whose_download_hangs() -> None:
    subprocess.run([sys.executable, "-c", STUCK], check=True, timeout=30)


async def test_nodes_may_know_the_port_of_a_registry_that_does_not_serve_yet() -> None:
    options, stop = RouterOptions(port=0, registry_port=0), asyncio.Event()
    front = RegistryServer(options, INSECURE)
    address = f"127.0.0.1:{front.bind()}"
    early = asyncio.create_task(asyncio.to_thread(admin.list_nodes, address))

    async def ask_and_stop() -> None:
        assert not (await early).nodes
        stop.set()

    async with asyncio.timeout(10):
        probes: list[asyncio.Task[None]] = []
        await run_router(
            options,
            stop,
            lambda router: probes.append(asyncio.create_task(ask_and_stop())),
            registry_server=front,
        )
        await probes[0]


async def test_an_empty_key_or_a_wrong_address_is_a_usage_error() -> None:
    for wrong in ({"api_key": ""}, {"api_key": "secret,"}, {"api_key": " "}, {"pd_url": "host"}):
        with pytest.raises(UsageError, match="--"):
            Router(RouterOptions(port=0, registry_port=0, **wrong))  # type: ignore[arg-type]


START = """
import asyncio, sys
from tandem.router.options import RouterOptions
from tandem.router.server import run_router
stop = asyncio.Event()
options = RouterOptions(port=0, registry_port=0)
asyncio.run(run_router(options, stop, lambda router: stop.set()))
heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
# Not ru_maxrss: a child inherits what its parent weighed when it forked.
rss = next(x for x in open('/proc/self/status') if x.startswith('VmHWM:'))
print(int(rss.split()[1]) // 1024, *heavy)
assert sys.getswitchinterval() < 0.001, "threads would keep the loop from the interpreter for long"
"""


def test_a_router_starts_light(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=60
    )
    megabytes, *heavy = process.stdout.split()
    assert not heavy
    assert int(megabytes) < 120


async def test_a_router_with_a_token_counts_rpcs_without_it(
    tmp_path: Path,
) -> None:
    options = RouterOptions(port=0, registry_port=0, drain_timeout=1.0)
    router = Router(options, credentials=Credentials(token="of the cluster"))
    await router.start()
    try:
        address = f"127.0.0.1:{router.registry_port}"
        for token in ("", "wrong"):
            with pytest.raises(RequestError, match="every part of this cluster needs the same"):
                await asyncio.to_thread(admin.list_nodes, address, Credentials(token=token))
        credentials = Credentials(token="of the cluster")
        nodes = await asyncio.to_thread(admin.list_nodes, address, credentials)
        assert not nodes.nodes
        text = router.metrics.render().decode()
        for reason in ("no token", "wrong token"):
            assert f'tandem_registry_requests_refused_total{{reason="{reason}"}} 1.0' in text
    finally:
        await router.stop()


async def test_a_registry_for_other_machines_needs_a_lock_or_the_operators_word() -> None:
    options = RouterOptions(port=0, registry_port=0, registry_host="0.0.0.0")
    with pytest.raises(UsageError, match=r"--registry-host 0.0.0.0 is reachable"):
        await Router(options).start()
    trusting = Router(replace(options, insecure=True))
    await trusting.start()
    await trusting.stop()
