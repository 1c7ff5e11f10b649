"""A node on several hosts: the head's listener, and the command of a host without the head."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from ..config import EngineConfig, HandoffConfig
from ..engine.headless import HeadlessHost
from ..engine.messages import JoinSecrets
from ..engine.other_hosts import OtherHosts
from ..errors import TandemError
from ..process.signals import catch_signals
from ..security.credentials import Credentials
from ..security.several_hosts import check_hosts


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
        reason = str(error)
        raise
    finally:
        await hosts.close(failure() or reason)


async def run_headless(
    config: EngineConfig,
    handoff: HandoffConfig,
    credentials: Credentials,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Run this host's ranks until the head ends, or drains after a signal here. Raises
    ``UsageError`` or ``StartupError``."""
    check_hosts(config, handoff, credentials)
    host = HeadlessHost(config, _secrets(credentials))
    running = asyncio.create_task(host.run(on_ready))

    def stop() -> None:
        if not host.stop():
            running.cancel()

    catch_signals(stop)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _secrets(credentials: Credentials) -> JoinSecrets:
    files = credentials.current
    return JoinSecrets(
        tokens=credentials.tokens,
        certificate=files.certificate,
        key=files.key,
        authority=files.authority,
        name=credentials.name,
    )
