"""Requests served by functions: what the router does between a body and its response, without
connections, processes and the choice of nodes.

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

import httpx
import openai

from tandem.proto import tandem_pb2 as pb
from tandem.router.anthropic.request import count_prompt_tokens
from tandem.router.anthropic.surface import AnthropicMessages
from tandem.router.app import APIS
from tandem.router.cluster import pinned_model
from tandem.router.cluster.node_table import NodeTable
from tandem.router.dispatch import Dispatcher
from tandem.router.embeddings.surfaces import Classify, Embeddings, Rerank, Score
from tandem.router.errors import to_api_error
from tandem.router.generation import GenerationRequest
from tandem.router.handler import UnknownFields, Work
from tandem.router.http.access_log import AccessRecord
from tandem.router.http.encoding import dump
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.json_body import parse_json
from tandem.router.http.memory_budget import MemoryBudget
from tandem.router.node_streams.events import NodeEvent, PlainTokens
from tandem.router.ollama import surfaces as ollama
from tandem.router.ollama.models import show
from tandem.router.openai.surfaces import ChatCompletions, Completions
from tandem.router.options import RouterOptions
from tandem.router.serve_request import serve
from tandem.router.served_model import ServedModel, system_fingerprint
from tandem.router.surface import ErrorShape, Surface
from tandem.router.telemetry.metrics import Metrics
from tandem.router.telemetry.request_metrics import RequestMetrics
from tandem.router.tokenization.to_text import detokenize
from tandem.router.tokenization.to_tokens import tokenize
from tandem.router.write_outputs import collect_outputs, stream_outputs
from tandem.shared.config.sampling_defaults import read_defaults
from tandem.shared.node.rpc_context import RpcContext
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
SURFACES: tuple[Surface, ...] = (
    *(CHAT, COMPLETIONS, MESSAGES, Embeddings(), Score(), Rerank(), Classify()),
    *(ollama.CHAT, ollama.GENERATE, ollama.EMBED, ollama.EMBEDDINGS),
)
# Routes that need no node.
WORKS: dict[str, Work] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/messages/count_tokens": count_prompt_tokens,
}
HI = {"role": "user", "content": "hi"}


@dataclass
class Response:
    """A response, under the names that ``httpx`` has for its parts."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[Any]:
        """The data of a stream's events, without the mark of its end."""
        return [event for event in events(self.text) if event != "[DONE]"]


@cache
def tiny(
    template: str | None = TEMPLATE, special: tuple[str, ...] = (), **generation_config: Any
) -> Tokenizer:
    """The tokenizer of ``make_model``, made once for all tests."""
    with TemporaryDirectory() as folder:
        return load_tokenizer(make_model(Path(folder), template, special, **generation_config))


def load_tokenizer(folder: Path, **options: Any) -> Tokenizer:
    """The tokenizer of a model's folder, as a router with these options loads it."""
    files = read_tokenizer_files(folder)
    return asyncio.run(pinned_model.load_tokenizer(files, 320, RouterOptions(**options)))


class InProcess:
    """A router of one model and of one node, which sends ``reply`` or follows its script. Its
    ``options`` are the router's."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        reply: str = "hello world",
        context: int = CONTEXT,
        scoring: str = "",
        labels: tuple[str, ...] = (),
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
            scoring=scoring,
            labels=labels,
        )
        self.node = FakeDecodeNode("decode-0", self.encode(reply))
        self.node.labels = len(labels) or 1
        self.surfaces = {surface.path: surface for surface in SURFACES}
        self.works = WORKS | {"/api/show": self._show}
        self._unknown = UnknownFields(strict=self.options.strict_parameters)

    def encode(self, text: str) -> list[int]:
        """Tokens as a model writes them: special ones where the text has their form."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self) -> str:
        """The prompt that the node got last, as text."""
        return self.tokenizer.decode(self.node.requests[-1].prompt, skip_special_tokens=False)

    def chat(self, content: Any = "hi", **fields: Any) -> Response:
        return self.post(CHAT.path, messages=[HI | {"content": content}], **fields)

    def complete(self, prompt: Any = "hi", **fields: Any) -> Response:
        return self.post(COMPLETIONS.path, prompt=prompt, **fields)

    def post(self, path: str, /, **body: Any) -> Response:
        """The response of a path to a body of these fields."""
        if path in self.works:
            return self._compute(path, body)
        return self.respond(self.surfaces[path], body)

    def respond(self, surface: Surface, body: Any) -> Response:
        """The response of a surface to a body."""
        return asyncio.run(self._respond(surface, body))

    def client(self, library: Any = httpx) -> Any:
        """A client whose requests are served here, for an SDK over ``httpx`` or ``httpx2``."""

        def respond(request: Any) -> Any:
            body = json.loads(request.content)
            response = self.post(request.url.path, **body)
            is_stream = body.get("stream") and response.status_code == 200
            kind = "text/event-stream" if is_stream else "application/json"
            headers = {"content-type": kind}
            return library.Response(response.status_code, text=response.text, headers=headers)

        return library.Client(transport=library.MockTransport(respond))

    def openai(self) -> Any:
        """OpenAI's client of this router."""
        return openai.OpenAI(
            base_url="http://router/v1", api_key="x", max_retries=0, http_client=self.client()
        )

    def _compute(self, path: str, body: Any) -> Response:
        ignored: set[str] = set()
        try:
            value = self.works[path](self._parsed(body), self.model, ignored)
            self._unknown.note(ignored)
        except Exception as error:
            return _failed(error, _error_shapes()[path])
        return Response(200, dump(value).decode())

    async def _respond(self, surface: Surface, body: Any) -> Response:
        sink = _Sink(AccessRecord("POST", surface.path))
        errors = _error_shapes()[surface.path]
        try:
            request = surface.parse(self._parsed(body), self.model, self.options)
            self._unknown.note(request.ignored)
            return Response(200, await self._served(surface, request, sink))
        except Exception as error:
            failed = _failed(error, errors, streaming=sink.started)
            return Response(failed.status_code, sink.text + failed.text)

    def _show(self, body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
        return show(body, model, self.options, ignored)

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
        body = dump(formatter.whole(collector.result(usage))).decode()
        await formatter.store()
        return body


class _Sink:
    """The connection of a client, as text."""

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
    """What a served prompt knows of the node that serves it."""

    def __init__(self, script: FakeDecodeNode) -> None:
        self.script = script
        self.node_id = script.node_id

    def end_choice(self, call: int, index: int) -> None:
        self.script.ended.append((call, index))


class _Script(Dispatcher):
    """Has the one node serve each prompt."""

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
        async with aclosing(node.events(request, StreamedContext(RpcContext()))) as script:
            async for event in script:
                event_tokens = event.tokens
                if event_tokens.tokens and not event_tokens.logprobs:
                    event = PlainTokens(event_tokens.index, [*event_tokens.tokens])
                yield self._node, [event]


@cache
def _metrics() -> Metrics:
    return Metrics(NodeTable(3.0))


@cache
def _error_shapes() -> dict[str, ErrorShape]:
    return {route.path: api.errors for api in APIS for route in api.router.routes}  # type: ignore[attr-defined]


def _failed(error: Exception, shape: ErrorShape, *, streaming: bool = False) -> Response:
    failure = to_api_error(error, retry_after=1)
    if failure is None:
        raise error
    failure.request_id = "request"
    if streaming:
        return Response(200, shape.error_event(failure).decode())
    return Response(failure.status, dump(shape.error_body(failure)).decode())
