"""A fake decode node, a tiny tokenizer, and a router on real ports."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import uvicorn.server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.decode_node.streams.router_stream import RequestEndedError, RequestOutput, RouterStream
from tandem.proto import tandem_pb2 as pb
from tandem.proto.capabilities import CAPABILITIES
from tandem.proto.packed_logprobs import pack_logprobs
from tandem.proto.tandem_pb2_grpc import (
    DecodeServicer,
    PrefillServicer,
    RegistryStub,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)
from tandem.router.options import RouterOptions
from tandem.router.server import Router
from tandem.shared.node.rpc_context import RpcContext
from tandem.shared.security.credentials import PINGED
from tandem.tests.support.waiting import until as until

T = TypeVar("T")

CONTEXT = 512


class _Impatient:
    """uvicorn's asyncio with shorter sleeps: its server polls every 100 ms whether to stop."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


vars(uvicorn.server)["asyncio"] = _Impatient()
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = ["hello world, the quick brown fox jumps over the lazy dog", "one two three stop here"]


def make_model(
    folder: Path,
    template: str | None = TEMPLATE,
    special: Sequence[str] = (),
    **generation_config: Any,
) -> Path:
    """A byte-level tokenizer with a few hundred tokens, and further ``special`` ones."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>", *special],
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS * 8, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, **generation_config})
    )
    return folder


Script = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateEvent]]


def admitted() -> pb.GenerateEvent:
    return pb.GenerateEvent(admitted=pb.Admitted(node_epoch=1))


def usage(request: pb.GenerateRequest, **fields: Any) -> pb.GenerateEvent:
    return pb.GenerateEvent(usage=pb.Usage(prompt_tokens=len(request.prompt), **fields))


def logprobs(token: int, count: int) -> pb.PositionLogprobs:
    """Arbitrary logprobs that depend on the token only."""
    token_logprob = pb.TokenLogprob(token=token, logprob=-0.5, rank=1)
    entries = [((token + i) % 300, -0.5 - i) for i in range(count)]
    return pb.PositionLogprobs(chosen=token_logprob, packed_top=pack_logprobs(entries))


def tokens_event(index: int, tokens: list[int], count: int | None = None) -> pb.GenerateEvent:
    positions = [] if count is None else [logprobs(token, count) for token in tokens]
    return pb.GenerateEvent(tokens=pb.Tokens(index=index, tokens=tokens, logprobs=positions))


def finished(index: int, reason: int = pb.FINISH_REASON_STOP, **fields: Any) -> pb.GenerateEvent:
    return pb.GenerateEvent(finished=pb.Finished(index=index, reason=reason, **fields))  # type: ignore[arg-type]


# Numbers in a vector of a fake node.
DIMENSIONS = 8


def vector(prompt: Sequence[int]) -> list[float]:
    """An arbitrary vector of a prompt."""
    return [len(prompt) + i / DIMENSIONS for i in range(DIMENSIONS - 1)] + [float(prompt[-1])]


def score(prompt: Sequence[int]) -> float:
    """An arbitrary score of a pair of texts."""
    return sum(prompt) % 64 / 64


def embedded(request: pb.GenerateRequest, labels: int) -> list[pb.GenerateEvent]:
    """The events of a prompt that becomes a vector, or scores of this many labels."""
    values = vector(request.prompt)[: request.embed.dimensions or None]
    if request.embed.score:
        values = [score(request.prompt[label:]) for label in range(labels)]
    packed = struct.pack(f"<{len(values)}f", *values)
    vector_event = pb.GenerateEvent(embedding=pb.Embedding(values=packed))
    return [admitted(), usage(request), vector_event, finished(0)]


class StreamedContext:
    """The RPC context for a script, for one request of a stream."""

    def __init__(self, context: RpcContext) -> None:
        self.context = context

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise RequestEndedError(code, details)


class FakeStatus(PrefillServicer):
    """The status of a node whose role has changed to prefill."""

    def __init__(self, node: FakeDecodeNode) -> None:
        self._node = node

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return await self._node.Status(request, context)


class FakeDecodeNode(DecodeServicer):
    """A decode node that sends ``reply`` token by token for every choice, or runs a ``script``."""

    def __init__(self, node_id: str, reply: list[int]) -> None:
        self.node_id = node_id
        self.epoch = hash(node_id) & 0xFFFF
        self.reply = reply
        self.script: Script | None = None
        self.requests: list[pb.GenerateRequest] = []
        self.ended: list[tuple[int, int]] = []  # internal id and choice
        self.streams: list[RouterStream] = []  # including closed ones
        self.open_streams = 0
        self.cancelled = 0
        self.active = 0
        self.chunk = 1
        self.delay = 0.0
        self.prefill_node = ""
        self.labels = 1
        self.server: grpc.aio.Server | None = None
        self.port = 0
        self.beat: asyncio.Task[None] | None = None

    async def Stream(  # type: ignore[override]  # writes to its context
        self, requests: AsyncIterator[pb.StreamRequest], context: Any
    ) -> None:
        stream = RouterStream(self._serve)
        self.streams.append(stream)
        self.open_streams += 1
        try:
            await stream.run(requests, context)
        finally:
            self.open_streams -= 1

    async def _serve(
        self, request: pb.GenerateRequest, context: RpcContext, out: RequestOutput
    ) -> None:
        """Yield the events of one request."""
        self.requests.append(request)
        self.active += 1
        try:
            async for event in self.events(request, StreamedContext(context)):
                tokens = event.tokens
                if tokens.tokens and not tokens.logprobs:
                    out.tokens(tokens.index, tokens.tokens)
                else:
                    out.event(event)
                await out.drain()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    def events(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        """The events that the node sends for a request."""
        return (self.script or self._talk)(request, context)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(node_id=self.node_id, epoch=self.epoch)

    async def EndChoice(self, request: pb.EndChoiceRequest, context: Any) -> pb.EndChoiceReply:
        self.ended.append((request.internal_id, request.index))
        return pb.EndChoiceReply()

    async def _talk(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        if request.HasField("embed"):
            for event in embedded(request, self.labels):
                yield event
            return
        sampling = request.sampling
        count = sampling.logprobs if sampling.HasField("logprobs") else None
        yield admitted()
        yield usage(request, cached_tokens=3, prefill_node=self.prefill_node)
        if sampling.HasField("prompt_logprobs"):
            count_of_prompt, scored = sampling.prompt_logprobs, request.prompt[1:]
            for start in range(0, max(1, len(scored)), 50):
                positions = [
                    logprobs(token, count_of_prompt) for token in scored[start : start + 50]
                ]
                yield pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=positions))
        reply = self.reply[: sampling.max_tokens]
        done = {choice.index: len(choice.tokens) for choice in request.resume}
        done = done or dict.fromkeys(range(sampling.n), 0)
        for start in range(min(done.values()), len(reply), self.chunk):
            await asyncio.sleep(self.delay)
            for index, tokens_so_far in done.items():
                if tokens := reply[max(start, tokens_so_far) : start + self.chunk]:
                    yield tokens_event(index, tokens, count)
        for index in done:
            if len(self.reply) >= sampling.max_tokens:
                yield finished(index, pb.FINISH_REASON_LENGTH)
            else:
                yield finished(index, stop_token=0)

    async def start(self, port: int = 0) -> None:
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *PINGED))
        add_DecodeServicer_to_server(self, self.server)
        add_PrefillServicer_to_server(FakeStatus(self), self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()

    async def stop(self) -> None:
        if self.beat is not None:
            self.beat.cancel()
            await asyncio.gather(self.beat, return_exceptions=True)
        if self.server is not None:
            await self.server.stop(grace=None)

    def join_request(
        self, model: Path, fingerprint: str = "layers=2", **fields: Any
    ) -> pb.JoinRequest:
        card = pb.ModelCard(
            name="tiny",
            path=str(model),
            fingerprint=fingerprint,
            max_model_len=CONTEXT,
            vocab_size=320,
            eos_token_ids=[0],
        )
        request = pb.JoinRequest(
            node_id=self.node_id,
            epoch=self.epoch,
            role=pb.ROLE_DECODE,
            address=f"127.0.0.1:{self.port}",
            model=card,
            capabilities=sorted(CAPABILITIES),
        )
        request.MergeFrom(pb.JoinRequest(**fields))
        return request


class Cluster:
    """A router with fake nodes that have joined it."""

    def __init__(self, router: Router, model: Path, client: httpx.AsyncClient) -> None:
        self.router = router
        self.model = model
        self.client = client
        self.nodes: list[FakeDecodeNode] = []
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{router.registry_port}")
        self.registry: Any = RegistryStub(self.channel)
        self.context = CONTEXT
        self.load = pb.Load()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def node(self) -> FakeDecodeNode:
        return self.nodes[0]

    def encode(self, text: str) -> list[int]:
        return Tokenizer.from_file(str(self.model / "tokenizer.json")).encode(text).ids

    def prompt(self) -> str:
        """The last prompt of the first node, as text."""
        tokenizer = self.router.registry.model().tokenizer
        return tokenizer.decode(self.node.requests[-1].prompt, skip_special_tokens=False)

    async def add(
        self,
        node_id: str = "decode-0",
        reply: str = "hello world",
        epoch: int | None = None,
        role: pb.Role = pb.ROLE_DECODE,
        node_type: type[FakeDecodeNode] | None = None,
        scoring: str = "",
        labels: Sequence[str] = ("LABEL_0",),
    ) -> FakeDecodeNode:
        """Join a node. A prefill node is known to the router only, and serves nothing."""
        node = (node_type or FakeDecodeNode)(node_id, self.encode(reply))
        node.epoch = node.epoch if epoch is None else epoch
        node.labels = len(labels)
        await node.start()
        self.nodes.append(node)
        request = node.join_request(self.model)
        request.model.max_model_len = self.context
        request.model.scoring = scoring
        request.model.labels.extend(labels)
        request.role = role
        await self.registry.Join(request)
        node.beat = asyncio.create_task(self._beat(node))
        return node

    async def enter(self, request: pb.JoinRequest) -> None:
        """Add a node without a server, as if the router had reached it."""
        await self.router.registry.enter(request, request.address, met=True)

    async def replace(self, node: FakeDecodeNode, **fields: Any) -> FakeDecodeNode:
        """Stop a node and start its successor, like an update."""
        await node.stop()
        return await self.add(node.node_id, epoch=node.epoch + 1, **fields)

    async def _beat(self, node: FakeDecodeNode) -> None:
        while True:
            request = pb.HeartbeatRequest(node_id=node.node_id, epoch=node.epoch, load=self.load)
            await self.registry.Heartbeat(request)
            await asyncio.sleep(0.05)

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    async def first_tokens(self, count: int = 1) -> None:
        """Wait until the router has read the first token of each of the ``count`` requests in
        progress. A node cannot tell that."""
        metrics = self.router.metrics
        await until(lambda: metrics.requests.total() == count and not metrics.unstarted.total())

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()
        await self.channel.close(grace=None)


@asynccontextmanager
async def cluster(
    tmp_path: Path, nodes: int = 1, context: int = CONTEXT, **options: Any
) -> AsyncIterator[Cluster]:
    """A running router with ``nodes`` fake decode nodes, all stopped at the end."""
    model = (
        make_model(tmp_path / "model") if not (tmp_path / "model").exists() else tmp_path / "model"
    )
    defaults: dict[str, Any] = {"port": 0, "registry_port": 0, "drain_timeout": 1.0}
    router = Router(RouterOptions(**(defaults | options)))
    await router.start()
    try:
        # Otherwise each client would load all certificate authorities, which takes 25 ms.
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{router.http_port}", timeout=20, verify=False
        ) as client:
            cluster = Cluster(router, model, client)
            cluster.context = context
            try:
                for number in range(nodes):
                    await cluster.add(f"decode-{number}")
                yield cluster
            finally:
                await cluster.stop()
    finally:
        await router.stop()


def events(text: str) -> list[Any]:
    """The data of a server-sent stream; ``[DONE]`` stays a string."""
    parsed = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            parsed.append(data if data == "[DONE]" else json.loads(data))
    return parsed


@dataclass
class Hold:
    """The longest time that one task blocked the loop, in CPU seconds of this thread, so that
    other processes do not count."""

    seconds: float = 0.0


@asynccontextmanager
async def longest_hold() -> AsyncIterator[Hold]:
    """Watches the running loop while the block runs."""
    hold = Hold()

    async def watch() -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.001)
            hold.seconds = max(hold.seconds, time.thread_time() - start)

    # Otherwise each full collection would scan the objects of earlier tests.
    gc.collect()
    gc.freeze()
    watching = asyncio.create_task(watch())
    try:
        yield hold
    finally:
        await asyncio.sleep(0.002)  # let the watching task run once more
        watching.cancel()


# CPU seconds of the loop's thread. The aim is 20 ms; the fake node shares the thread, and a shared
# core takes half as long again.
HELD_SECONDS = 0.03
# For the largest allowed bodies and responses.
HELD_BY_LARGEST = 0.1
TRIES = 3


async def held_briefly(send: Callable[[], T], seconds: float = HELD_SECONDS) -> T:
    """The result of ``ask``, a client in its own thread. Asserts that no task blocks the loop
    for ``seconds`` in at least one of a few tries: a first import or a full garbage collection
    delays only one of them."""
    holds = []
    for _ in range(TRIES):
        async with longest_hold() as hold:
            response = await asyncio.to_thread(send)
        if hold.seconds < seconds:
            return response
        holds.append(hold.seconds)
    raise AssertionError(f"the loop was held for {holds} seconds, at best {min(holds):.3f}")
