"""A node on several hosts: the head's listener, and the command of a host without the head."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from ..config import EngineConfig, HandoffConfig, NodeConfig
from ..engine.headless import HeadlessHost
from ..engine.messages import JoinSecrets
from ..engine.other_hosts import OtherHosts
from ..errors import TandemError
from ..process.probe import ProbeServer
from ..process.signals import catch_signals
from ..security.credentials import Credentials
from ..security.several_hosts import check_hosts
from ..unix_sockets import folder_of

log = logging.getLogger("tandem.node")


@contextlib.asynccontextmanager
async def other_hosts(
    config: EngineConfig,
    credentials: Credentials,
    on_stop: Callable[[], None],
    failure: Callable[[], str],
) -> AsyncIterator[OtherHosts | None]:
    """The listener for the other hosts, if there are any. At the end they get ``failure()``, or the
    error that was raised. Raises ``StartupError``."""
    if not config.several_hosts:
        yield None
        return
    hosts = OtherHosts(config, _secrets(credentials), on_stop)
    await hosts.listen()
    reason = ""
    try:
        yield hosts
    except TandemError as error:
        reason = str(error)  # empty after a signal
        raise
    except Exception as error:
        reason = f"it failed: {error!r}"
        raise
    finally:
        await hosts.close(failure() or reason)


async def run_headless(
    config: EngineConfig,
    handoff: HandoffConfig,
    credentials: Credentials,
    node: NodeConfig | None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Run this host's ranks until the head ends, or drains after a signal here. With ``node``,
    there are probes at its health port. Raises ``UsageError`` or ``StartupError``."""
    check_hosts(config, handoff, credentials)
    probe, port = ProbeServer(), 0
    if node is not None:
        host_of_probe = "127.0.0.1" if folder_of(node.host) else node.host
        port = await probe.start(host_of_probe, node.health_port)

    def ready() -> None:
        probe.show(lambda: "", lambda: b"")
        probes = f", probes on port {port}" if port else ""
        log.info("node rank %d runs its ranks%s", config.node_rank, probes)
        on_ready()

    host = HeadlessHost(config, _secrets(credentials))
    running = asyncio.create_task(host.run(ready))

    def stop() -> None:
        if not host.stop():
            running.cancel()

    catch_signals(stop)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        await probe.stop()


def _secrets(credentials: Credentials) -> JoinSecrets:
    files = credentials.current
    return JoinSecrets(
        tokens=credentials.tokens,
        certificate=files.certificate,
        key=files.key,
        authority=files.authority,
        name=credentials.name,
    )
