"""A simulated decode node and the clients of a router in one process; see ``benchmarks/router/``.

A step gives each running request one token. The next step begins when the clients have received all
but ``--ahead`` steps: with one, the router always has work, and hardly a token waits for it; with
more, tokens wait as behind nodes that are faster than the router. Prints a line of JSON
when the first step begins, and another one with what was received when the last client has its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tokenizers import AddedToken, Tokenizer

from tandem.decode_node.streams.router_stream import RequestOutput, RouterStream
from tandem.proto import tandem_pb2 as pb
from tandem.proto.capabilities import CAPABILITIES
from tandem.proto.tandem_pb2_grpc import (
    DecodeServicer,
    RegistryStub,
    add_DecodeServicer_to_server,
)
from tandem.shared.node.rpc_context import RpcContext
from tandem.tests.router.support import admitted, finished, make_model, usage

# No other part of an event contains the mark, so it counts tokens.
TEXT, MARK = " word~", b"~"
CONTEXT = 1 << 20
STOP_SECONDS = 5.0


class Pace:
    """Counts tokens on both sides of the router, and holds the next step back."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead  # tokens
        self._progress = asyncio.Event()
        self.sent = 0
        self.received = 0
        self.events = 0

    def receive(self, tokens: int, events: int) -> None:
        self.received += tokens
        self.events += events
        if self.sent - self.received <= self._ahead:
            self._progress.set()

    async def next_step(self, size: int) -> None:
        while self.sent - self.received > self._ahead:
            self._progress.clear()
            await self._progress.wait()
        self.sent += size


class LoadNode(DecodeServicer):
    """Gives each request ``max_tokens`` tokens in steps, once ``streams`` requests run."""

    def __init__(self, token: int, streams: int, pace: Pace) -> None:
        self._token = token
        self._streams = streams
        self._pace = pace
        self._running: dict[RequestOutput, int] = {}
        self._over = asyncio.Event()
        self._open: list[RouterStream] = []

    async def Stream(  # type: ignore[override]  # writes to its context
        self, requests: AsyncIterator[pb.StreamRequest], context: Any
    ) -> None:
        stream = RouterStream(self._serve)
        self._open.append(stream)
        await stream.run(requests, context)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(node_id="load", epoch=1)

    def end(self) -> None:
        """End the streams, which routers keep open: gRPC logs an error for each that its server
        cuts off."""
        for stream in self._open:
            stream.end()

    async def _serve(
        self, request: pb.GenerateRequest, context: RpcContext, out: RequestOutput
    ) -> None:
        for event in (admitted(), usage(request)):
            out.event(event)
        self._begin(out, request)
        await self._over.wait()

    def _begin(self, out: RequestOutput, request: pb.GenerateRequest) -> None:
        self._running[out] = request.sampling.max_tokens
        if len(self._running) == self._streams:
            self._steps = asyncio.create_task(self._run())

    async def _run(self) -> None:
        print(json.dumps({"begun": time.monotonic()}), flush=True)
        for _ in range(max(self._running.values())):
            await self._pace.next_step(len(self._running))
            for out in self._running:
                out.tokens(0, [self._token])
        for out in self._running:
            out.event(finished(0, pb.FINISH_REASON_LENGTH))
        self._over.set()


class Client(asyncio.Protocol):
    """One streamed request; parses only as much of the response as counting needs."""

    def __init__(self, head: bytes, pace: Pace) -> None:
        self._head = head
        self._pace = pace
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        self._pace.receive(data.count(MARK), data.count(b"data: "))
        self._tail = (self._tail + data)[-64:]
        if b"[DONE]" in self._tail and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the stream broke: {self._tail!r}"))


def request_of(path: str, **fields: Any) -> bytes:
    """The bytes of one client's streaming request."""
    body = json.dumps({**fields, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def read_all(port: int, requests: Iterable[bytes], pace: Pace) -> None:
    """Run one client per request until all streams end."""
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(partial(Client, request, pace), "127.0.0.1", port)
        for request in requests
    ]
    await asyncio.gather(*(client.ended for _, client in connections))
    for transport, _ in connections:
        transport.close()


async def clients(options: argparse.Namespace, pace: Pace) -> None:
    """Run all streams to their ends."""
    messages = [{"role": "user", "content": "hello"}]
    request = request_of("/v1/chat/completions", messages=messages, max_tokens=options.tokens)
    await read_all(options.http, [request] * options.streams, pace)


def model(folder: Path) -> int:
    """A model of which only the tokenizer is used; the token that all outputs consist of."""
    path = make_model(folder) / "tokenizer.json"
    raw = Tokenizer.from_file(str(path))
    raw.add_tokens([AddedToken(TEXT, special=False)])
    raw.save(str(path))
    token = raw.token_to_id(TEXT)
    assert token is not None
    return token


async def join(options: argparse.Namespace, address: str, port: int, vocabulary: int) -> None:
    """Enter the node into a router's table; without heartbeats it would stay a minute."""
    request = pb.JoinRequest(
        node_id="load",
        epoch=1,
        role=pb.ROLE_DECODE,
        address=f"127.0.0.1:{port}",
        capabilities=sorted(CAPABILITIES),
        model=pb.ModelCard(
            name="tiny",
            path=options.folder,
            fingerprint="layers=1",
            max_model_len=CONTEXT,
            vocab_size=vocabulary,
            eos_token_ids=[0],
        ),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        registry: Any = RegistryStub(channel)
        await registry.Join(request)
        while True:
            await asyncio.sleep(0.5)
            await registry.Heartbeat(pb.HeartbeatRequest(node_id="load", epoch=1))


async def run(options: argparse.Namespace) -> None:
    pace = Pace(options.ahead * options.streams)
    if options.registry:
        token = model(Path(options.folder))
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        node = LoadNode(token, options.streams, pace)
        add_DecodeServicer_to_server(node, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        beats = [
            asyncio.create_task(join(options, address, port, token + 1))
            for address in options.registry.split(",")
        ]
        await asyncio.sleep(1.5)  # until the routers have read the tokenizer
        await clients(options, pace)
        print(json.dumps({"received": pace.received, "events": pace.events}), flush=True)
        for each in beats:
            each.cancel()
        node.end()
        await server.stop(STOP_SECONDS)
    else:
        print(json.dumps({"begun": time.monotonic()}), flush=True)
        await clients(options, pace)
        print(json.dumps({"received": pace.received, "events": pace.events}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--registry", default="", help="or several; absent: the clients alone")
    parser.add_argument("--folder", default="")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--ahead", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
