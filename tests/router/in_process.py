"""Requests served by functions: what the router does between a body and its response, without
connections, processes and placement.

    body -> surface.parse -> serve, over the events of a scripted node -> the response's text

It is the router's own code, all but what writes to a socket, and takes milliseconds where a
``cluster`` takes a hundred of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from tandem.proto import tandem_pb2 as pb
from tandem.router.anthropic.surface import AnthropicMessages
from tandem.router.app import APIS
from tandem.router.cluster.node_table import NodeTable
from tandem.router.dispatch import Dispatcher
from tandem.router.errors import to_api_error
from tandem.router.generation import GenerationRequest
from tandem.router.handler import UnknownFields
from tandem.router.http.access_log import AccessRecord
from tandem.router.http.encoding import dump
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.json_body import parse_json
from tandem.router.http.memory_budget import MemoryBudget
from tandem.router.node_streams.events import NodeEvent, PlainTokens
from tandem.router.openai.surfaces import ChatCompletions, Completions
from tandem.router.options import RouterOptions
from tandem.router.serve_request import serve
from tandem.router.served_model import ServedModel, system_fingerprint
from tandem.router.surface import ErrorShape, Surface
from tandem.router.telemetry.metrics import Metrics
from tandem.router.telemetry.request_metrics import RequestMetrics
from tandem.router.write_outputs import collect_outputs, stream_outputs
from tandem.shared.config.sampling_defaults import read_defaults
from tandem.shared.node.caller import Caller
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import (
    CONTEXT,
    TEMPLATE,
    FakeDecodeNode,
    StreamedContext,
    events,
    make_model,
)

CHAT, COMPLETIONS, MESSAGES = ChatCompletions(), Completions(), AnthropicMessages()
HI = {"role": "user", "content": "hi"}


@dataclass
class Response:
    """A response, with the part of httpx's interface that tests use."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[Any]:
        """The data of a stream's events, without ``[DONE]``."""
        return [event for event in events(self.text) if event != "[DONE]"]


@cache
def tiny(
    template: str | None = TEMPLATE, special: tuple[str, ...] = (), **generation_config: Any
) -> Tokenizer:
    """The tokenizer of ``make_model``, loaded once for all tests."""
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder), template, special, **generation_config)
        return Tokenizer.load(read_tokenizer_files(model), 320)


class InProcess:
    """A router with one model and one node, which sends ``reply`` or runs its script.
    ``options`` are the router's options."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        reply: str = "hello world",
        context: int = CONTEXT,
        **options: Any,
    ) -> None:
        self.options = RouterOptions(**options)
        self.tokenizer = tokenizer or tiny()
        name, *aliases = self.options.served_names or ("tiny",)
        defaults = read_defaults(self.options)
        self.model = ServedModel(
            name=name,
            aliases=tuple(aliases),
            max_model_len=context,
            vocab_size=320,
            created=0,
            tokenizer=self.tokenizer,
            system_fingerprint=system_fingerprint(name, "layers=2"),
            defaults=defaults.for_model(self.tokenizer.generation_config),
            template_variables=self.options.template_variables,
            eos_token_ids=frozenset([0]),
        )
        self.node = FakeDecodeNode("decode-0", self.encode(reply))
        self._unknown = UnknownFields(strict=self.options.strict_parameters)

    def encode(self, text: str) -> list[int]:
        """Tokens of a model's output; special tokens in the text become their own tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self) -> str:
        """The last prompt of the node, as text."""
        return self.tokenizer.decode(self.node.requests[-1].prompt, skip_special_tokens=False)

    def chat(self, content: Any = "hi", **fields: Any) -> Response:
        return self.post(CHAT, {"messages": [HI | {"content": content}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> Response:
        return self.post(COMPLETIONS, {"prompt": prompt, **fields})

    def post(self, surface: Surface, body: Any) -> Response:
        """The response of a surface to a body."""
        return asyncio.run(self._post(surface, body))

    def compute(self, work: Callable[[Any, ServedModel, set[str]], Any], body: Any) -> Response:
        """The response of a route that needs no node, such as ``/tokenize``."""
        ignored: set[str] = set()
        try:
            response = work(self._parsed(body), self.model, ignored)
            self._unknown.note(ignored)
        except Exception as error:
            return _failed(error, _errors_of(CHAT))
        return Response(200, dump(response).decode())

    async def _post(self, surface: Surface, body: Any) -> Response:
        sink = _Sink(AccessRecord("POST", surface.path))
        errors = _errors_of(surface)
        try:
            request = surface.parse(self._parsed(body), self.model, self.options)
            self._unknown.note(request.ignored)
            return Response(200, await self._served(surface, request, sink))
        except Exception as error:
            failed = _failed(error, errors, streaming=sink.started)
            return Response(failed.status_code, sink.text + failed.text)

    def _parsed(self, body: Any) -> Any:
        return parse_json(json.dumps(body).encode())

    async def _served(self, surface: Surface, request: GenerationRequest, sink: _Sink) -> str:
        formatter, usage = surface.formatter(request, 0), sink.access.usage
        node = _ScriptedNode(self.node)

        def generate(one: GenerationRequest) -> Any:
            return serve(one, lambda: _Script(node), usage)

        outputs = surface.outputs(request, generate)
        with (
            RequestMetrics(_metrics(), request, sink.access) as metrics,
            MemoryBudget(
                self.options.max_held_response_bytes, "bytes of responses"
            ).share() as memory,
        ):
            async with aclosing(outputs):
                if request.stream:
                    formatter.account_in(memory)
                    await stream_outputs(cast(HttpExchange, sink), outputs, metrics, formatter)
                    return sink.text
                collector = formatter.collector(request, memory)
                await collect_outputs(outputs, metrics, collector.add)
            metrics.finish(usage)
        return dump(formatter.whole(collector.result(usage))).decode()


class _Sink:
    """A client's connection, which collects text."""

    def __init__(self, access: AccessRecord) -> None:
        self.access = access
        self.started = False
        self.text = ""

    async def start_stream(self) -> None:
        self.started = True

    async def write(self, events: bytes) -> None:
        self.text += events.decode()

    async def end_stream(self, events: bytes = b"") -> None:
        await self.write(events)


class _ScriptedNode:
    """The part of a node that a served prompt uses."""

    def __init__(self, script: FakeDecodeNode) -> None:
        self.script = script
        self.node_id = script.node_id

    def end_choice(self, call: int, index: int) -> None:
        self.script.ended.append((call, index))


class _Script(Dispatcher):
    """Serves each prompt on the one node."""

    def __init__(self, node: Any) -> None:
        self._node = node

    async def events(
        self,
        request: pb.GenerateRequest,
        tokens: Sequence[int],
        resume: Callable[[pb.GenerateRequest], bool] = lambda request: True,
    ) -> AsyncGenerator[tuple[Any, Sequence[NodeEvent]], None]:
        node = self._node.script
        node.requests.append(request)
        request.internal_id = len(node.requests)
        async with aclosing(node.events(request, StreamedContext(Caller()))) as script:
            async for event in script:
                message = event.tokens
                if message.tokens and not message.logprobs:
                    event = PlainTokens(message.index, [*message.tokens])
                yield self._node, [event]


@cache
def _metrics() -> Metrics:
    return Metrics(NodeTable(3.0))


def _errors_of(surface: Surface) -> ErrorShape:
    paths = {route.path: api.errors for api in APIS for route in api.router.routes}  # type: ignore[attr-defined]
    return paths[surface.path]


def _failed(error: Exception, shape: ErrorShape, *, streaming: bool = False) -> Response:
    failure = to_api_error(error, retry_after=1)
    if failure is None:
        raise error
    failure.request_id = "request"
    if streaming:
        return Response(200, shape.error_event(failure).decode())
    return Response(failure.status, dump(shape.error_body(failure)).decode())
