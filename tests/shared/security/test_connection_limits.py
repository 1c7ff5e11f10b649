"""Servers of the control plane with more connections than they may have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import RegistryStub
from tandem.shared.config import NodeConfig
from tandem.shared.node.process import _Front
from tandem.shared.security import credentials
from tandem.shared.security.credentials import INSECURE

MAX_CONNECTIONS = 3


@contextlib.asynccontextmanager
async def strangers(address: str, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections on which nothing is sent."""
    host, _, port = address.rpartition(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    try:
        yield [reader for reader, _ in connections]
    finally:
        for _, writer in connections:
            writer.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Read until the server closes, or has nothing more to say."""
    try:
        async with asyncio.timeout(0.5):
            while await reader.read(1024):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def serves(address: str) -> bool:
    """Whether a new connection gets a reply, even if only that the method is not implemented."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await RegistryStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return True


@pytest.fixture
async def front() -> AsyncIterator[_Front]:
    front = await _Front.open(NodeConfig(max_connections=MAX_CONNECTIONS), INSECURE)
    await front.server.start()
    yield front
    await front.close()


async def test_connections_beyond_the_limit_are_closed_at_once_and_others_stay(
    front: _Front,
) -> None:
    async with strangers(front.address, MAX_CONNECTIONS + 2) as readers:
        closed = [await is_closed(reader) for reader in readers]
        assert sum(closed) == 2
        assert not await serves(front.address)
    async with asyncio.timeout(20):
        while not await serves(front.address):
            pass


async def test_a_connection_that_does_not_greet_makes_room_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credentials, "HANDSHAKE_SECONDS", 1)
    front = await _Front.open(NodeConfig(max_connections=MAX_CONNECTIONS), INSECURE)
    await front.server.start()
    async with strangers(front.address, MAX_CONNECTIONS) as readers, asyncio.timeout(20):
        while not await serves(front.address):
            pass
        assert all([await is_closed(reader) for reader in readers])
    await front.close()
