"""Requests whose decode node is gone after each event of theirs (in the full extent; else after
every fifth): what the client gets is what it gets from one node. Router, services, engine and
ranks are real; only the deaths are played."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest

from tandem import EngineConfig
from tandem.decode_node.examine import Examiner
from tandem.decode_node.service import DecodeService
from tandem.decode_node.transfers import PrefillSource
from tandem.proto import tandem_pb2 as pb
from tandem.router import generation
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.start import NodeEngine, NodeIdentity, start_engine
from tandem.shared.errors import NODE_DRAINING
from tandem.tests.decode_node.fake_parts import FakeTransfers
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster
from tandem.tests.support.extent import FULL, selected
from tandem.tests.support.one_call import call_events

pytestmark = pytest.mark.usefixtures("forked_ranks")

CONTEXT = 512
CONFIG = EngineConfig(
    dtype="float32",
    threads=1,
    num_blocks=128,
    block_size=8,
    max_model_len=CONTEXT,
    # One engine is both nodes, and the second must not find what the first has computed.
    enable_prefix_caching=False,
)
HI = [{"role": "user", "content": "Who are you?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 4, "maxLength": 9},
        "b": {"type": "integer"},
    },
    "required": ["a", "b"],
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DRAWN: dict[str, Any] = {"temperature": 1.3, "max_tokens": 16, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"prompt": "one two", "temperature": 0, "max_tokens": 16, "ignore_eos": True}),
    "logprobs and an echo": (TEXT, {"prompt": "one two", "echo": True, "logprobs": 2} | DRAWN),
    "choices": (TEXT, {"prompt": ["one", "two"], "n": 2, "stop": [" the", "2"]} | DRAWN),
    "penalties": (
        TEXT,
        {"prompt": "one", "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 9}
        | DRAWN,
    ),
    "a stop string": (CHAT, {"messages": HI, "stop": ["4", "e "], "logprobs": True} | DRAWN),
    "reasoning": (CHAT, {"messages": HI, "thinking_token_budget": 6} | DRAWN),
    "a format": (
        CHAT,
        {
            "messages": HI,
            "temperature": 1.3,
            "max_tokens": 60,
            "thinking_token_budget": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
        },
    ),
    "a call": (
        CHAT,
        {
            "messages": HI,
            "tools": [WEATHER],
            "tool_choice": "required",
            "temperature": 1.3,
            "max_tokens": 60,
            "thinking_token_budget": 2,
        },
    ),
    "a response": ("/v1/responses", {"input": "hi", "store": False, "max_output_tokens": 16}),
    "a message": (
        "/v1/messages",
        {"model": "tiny", "messages": HI, "max_tokens": 16, "temperature": 1.0},
    ),
}
# Ids, times, and where the request was served.
VARYING = re.compile(
    r'"(id|call_id|item_id|signature|created\w*|completed_at|\w+_duration|decode_nodes)":'
    r'\s*("[^"]*"|[\d.]+|\[[^]]*\])'
)
LOGPROB = re.compile(r"-?\d+\.\d+(?:e-\d+)?")
GONE = "Socket closed"


class EngineNode(FakeDecodeNode):
    """A decode node with an engine, and with the model that this has."""

    engine: NodeEngine

    def join_request(self, model: Path, *args: Any, **fields: Any) -> pb.JoinRequest:
        request = super().join_request(model, *args, **fields)
        spec = self.engine.spec
        request.model.vocab_size = spec.vocab_size
        request.model.eos_token_ids[:] = spec.eos_token_ids
        return request


class Mortal:
    """Serves the requests of all nodes; the first call ends after ``count`` events."""

    def __init__(self, engine: NodeEngine) -> None:
        async def prefill(sequence: Sequence) -> PrefillSource:
            engine.core.enqueue(sequence)
            return PrefillSource()

        self._service = DecodeService(
            engine,
            NodeIdentity("decode", 1),
            FakeTransfers(prefill),
            cast(Examiner, None),
            pb.StatusReply,
        )
        self.num_streams = self.deaths = 0
        self.count: int | None = None
        self.details = GONE

    async def serve(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        self.num_streams += 1
        remaining = self.count if self.num_streams == 1 else None
        events = call_events(self._service, request)
        async for event in events:
            if remaining == 0:
                self.deaths += 1
                await events.aclose()
                await context.abort(grpc.StatusCode.UNAVAILABLE, self.details)
            remaining = None if remaining is None else remaining - 1
            yield event


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Mortal, NodeEngine]]:
    engine = await start_engine(CONFIG, NodeIdentity("decode", 1))
    stepping = asyncio.create_task(engine.core.run())
    (tmp_path / "model").symlink_to(builtin_model_path())
    EngineNode.engine = engine
    try:
        async with cluster(
            tmp_path, nodes=0, context=CONTEXT, reasoning_parser="deepseek_r1"
        ) as nodes:
            mortal = Mortal(engine)
            for name in ("a", "b"):
                node = await nodes.add(name, node_type=EngineNode)
                node.script = mortal.serve
            yield nodes, mortal, engine
    finally:
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping
        await engine.ranks.stop()


async def normalized_response(
    c: Cluster, path: str, body: dict[str, Any]
) -> tuple[str, list[float]]:
    """What the client gets, and the logprobs in it. Events of several choices come in any order."""
    response: httpx.Response = await c.client.post(path, json=body)
    assert response.status_code == 200, response.text
    text = VARYING.sub(r'"\1":0', response.text)
    if path == TEXT and body["stream"]:
        text = "\n\n".join(sorted(text.split("\n\n"), key=choice_of))
    return LOGPROB.sub("0.0", text), [float(logprob) for logprob in LOGPROB.findall(text)]


def choice_of(event: str) -> int:
    match = re.search(r'"index":(\d+)', event)
    return int(match[1]) if match else 99


async def test_a_request_goes_on_after_each_event_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (c, mortal, engine):
        # Where the client gives no seed, the router does.
        monkeypatch.setattr(generation.secrets, "randbits", lambda bits: 7)
        for name, (path, fields) in REQUESTS.items():
            for stream in selected([True], full=[False]):
                body = fields | {"stream": stream}
                mortal.num_streams, mortal.count = 0, None
                want, logprobs = await normalized_response(c, path, body)
                for count in range(1, 99, 1 if FULL else 5):
                    mortal.num_streams, mortal.deaths, mortal.count = 0, 0, count
                    mortal.details = NODE_DRAINING if count % 3 == 0 else GONE
                    text, again = await normalized_response(c, path, body)
                    assert text == want, f"{name}, after {count} events"
                    assert again == pytest.approx(logprobs, abs=1e-4)
                    if not mortal.deaths:
                        break
                assert not mortal.deaths and count > 9, name
        counts = engine.core.load().blocks
        assert (counts.owned, counts.reserved) == (0, 0)
