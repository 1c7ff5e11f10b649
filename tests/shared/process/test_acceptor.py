"""Listening sockets, also when there is no descriptor left for connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.shared.process import acceptor
from tandem.shared.process.acceptor import QUIET_SECONDS, Acceptor, listen
from tandem.tests.support.clock import SteppedClock
from tandem.tests.support.waiting import until


class FullProcess(socket.socket):
    """A listening socket whose process has no descriptor left while it is ``full``."""

    full = False
    attempts = 0

    def accept(self) -> Any:
        self.attempts += 1
        if self.full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
async def listener() -> AsyncIterator[FullProcess]:
    listener = FullProcess(fileno=listen("127.0.0.1", 0, 16).detach())
    listener.setblocking(False)
    yield listener
    listener.close()


async def test_connections_wait_for_a_free_descriptor(
    listener: FullProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", 0.001)
    accepted: list[socket.socket] = []
    clock = SteppedClock()
    accepting = Acceptor(listener, accepted.append, "a connection", clock)
    listener.full = True
    accepting.start()
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    await until(lambda: listener.attempts > 3)
    (line,) = caplog.messages  # of all tries
    assert line.startswith("a connection cannot be accepted: Too many open files; raise the limit")
    clock.now += QUIET_SECONDS
    await until(lambda: len(caplog.messages) == 2)
    assert "more times in between)" in caplog.messages[1]
    listener.full = False
    await until(lambda: len(accepted) == 3)
    accepting.stop()
    accepting.stop()
    for each in (*clients, *accepted):
        each.close()


async def test_a_full_process_asks_for_connections_after_a_pause_only(
    listener: FullProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", 60.0)
    accepting = Acceptor(listener, lambda accepted: None, "a connection")
    listener.full = True
    accepting.start()
    with socket.create_connection(listener.getsockname()):
        await until(lambda: listener.attempts > 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert listener.attempts == 1
    accepting.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_a_host_is_an_address_or_a_name(host: str) -> None:
    with listen(host, 0, 1) as listener:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        assert listener.family == family and listener.proto == socket.IPPROTO_TCP


def test_what_cannot_be_listened_on_leaves_no_socket() -> None:
    with listen("127.0.0.1", 0, 1) as listener, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1], 1)
