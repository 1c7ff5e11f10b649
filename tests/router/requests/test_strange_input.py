"""Arbitrary input from nodes and clients: accepted or rejected, never a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.proto import tandem_pb2 as pb
from tandem.router.anthropic.request import MessagesRequest, parse_messages
from tandem.router.cluster.node_table import NodeTable
from tandem.router.cluster.reachability import Reachability
from tandem.router.cluster.registry_service import Registry
from tandem.router.errors import ApiError
from tandem.router.generation import GenerationRequest
from tandem.router.http.encoding import dump
from tandem.router.http.json_body import parse_json
from tandem.router.node_request import request_error
from tandem.router.ollama.request import (
    OPENAI_NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OnlyLoadsError,
    read_chat,
    read_generate,
)
from tandem.router.openai.chat_request import ChatCompletionRequest, parse_chat
from tandem.router.openai.completion_request import CompletionRequest, parse_completion
from tandem.router.options import RouterOptions
from tandem.router.requests.body_model import BodyModel
from tandem.router.responses.request import CreateResponseRequest
from tandem.router.responses.surface import Responses
from tandem.router.served_model import ServedModel
from tandem.router.telemetry.metrics import Metrics
from tandem.shared.errors import RequestError
from tandem.shared.security.credentials import INSECURE
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import make_model
from tandem.tests.support.fake_call import AbortedError
from tandem.tests.support.fuzz import FEWER, changed, cheap, protos, strange


class Context:
    """A stand-in for the context of an RPC."""

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        assert details and len(details) < 2000
        raise AbortedError(details)


@cache
def _temporary_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def folder() -> Path:
    return make_model(Path(_temporary_folder().name) / "model")


def _join(**changes: Any) -> pb.JoinRequest:
    card = pb.ModelCard(name="m", path=str(folder()), fingerprint="layers=2", max_model_len=64)
    fields: dict[str, Any] = {
        "node_id": "a",
        "epoch": 1,
        "role": pb.ROLE_DECODE,
        "address": "127.0.0.1:9",
    }
    return pb.JoinRequest(**(fields | {"model": card} | changes))


class Everywhere(Reachability):
    """Accepts every node, at any address."""

    async def meet(self, node_id: str, epoch: int, role: pb.Role, address: str) -> None:
        pass


@FEWER
@given(st.deferred(lambda: changed(_join())), st.data())
@example(_join(address="h:²"), None)
@example(_join(address="h:" + "9" * 5000), None)
@example(_join(model=pb.ModelCard(path="a\0b", max_model_len=1)), None)
def test_the_registry_accepts_or_refuses_any_join(request: pb.JoinRequest, data: Any) -> None:
    asyncio.run(_visit(request, data))


async def _visit(request: pb.JoinRequest, data: st.DataObject | None) -> None:
    nodes = NodeTable(3.0)
    registry = Registry(RouterOptions(), nodes)
    registry.reachability = Everywhere(nodes, INSECURE)
    try:
        await registry.Join(request, Context())
    except AbortedError:
        assert len(nodes) == 0
        return
    beat = pb.HeartbeatRequest(node_id=request.node_id, epoch=request.epoch)
    if data is not None:
        beat = data.draw(changed(beat))
    await registry.Heartbeat(beat, Context())
    assert len((await registry.List(pb.ListRequest(), Context())).nodes) == 1
    Metrics(nodes).render().decode()
    assert len(nodes) == 1
    await nodes.close()


@FEWER
@given(protos(pb.HeartbeatRequest))
def test_any_heartbeat_of_a_known_node_leaves_a_valid_metrics_page(
    beat: pb.HeartbeatRequest,
) -> None:
    async def visit() -> None:
        nodes = NodeTable(3.0)
        nodes.join(_join(), "127.0.0.1:9")
        beat.node_id, beat.epoch = "a", 1
        assert nodes.heartbeat(beat) is not None
        for line in Metrics(nodes).render().decode().splitlines():
            assert line.startswith("#") or line.rsplit(" ", 1)[1]

    asyncio.run(visit())


@given(st.text(max_size=50) | strange(st.just(b'{"message": "m"}')).map(lambda b: str(b, "latin")))
@example("[" * 100_000)
@example('{"message": ["x"], "param": {}}')
def test_a_refusal_with_any_details_is_a_request_error(details: str) -> None:
    error = request_error(details)
    assert isinstance(error, RequestError)
    assert error.param is None or isinstance(error.param, str)
    assert error.code is None or isinstance(error.code, str)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
    | st.sampled_from(["user", "system", "text", "<|end|>", "1", "²", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "name", "json_schema"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def _bodies(body: type[BodyModel], **valid: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({*body.model_fields, *body.unsupported, "nonsense"})
    other = st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    return other.map(lambda changes: valid | changes)


@cache
def model() -> ServedModel:
    tokenizer = Tokenizer.load(read_tokenizer_files(folder()))
    return ServedModel(
        name="m",
        max_model_len=64,
        vocab_size=tokenizer.vocab_size,
        created=0,
        tokenizer=tokenizer,
        system_fingerprint="tandem-0-0",
    )


def _parsed(parse: Any, body: Any) -> None:
    with cheap(20):
        try:
            generation = parse(body, model(), RouterOptions())
        except (RequestError, ApiError, OnlyLoadsError) as error:
            assert isinstance(error, OnlyLoadsError) or 0 < len(str(error)) < 2000
            return
    assert isinstance(generation, GenerationRequest)
    assert all(granted >= 1 for granted in generation.max_tokens)


HI = {"role": "user", "content": "hi"}


@given(_bodies(ChatCompletionRequest, messages=[HI]))
def test_any_chat_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    _parsed(parse_chat, body)


@given(VALUES)
def test_any_messages_are_understood_or_refused(value: Any) -> None:
    _parsed(parse_chat, {"messages": value})
    _parsed(parse_chat, {"messages": [{"role": "user", "content": value}]})


@given(_bodies(CompletionRequest, prompt="hi"))
def test_any_completion_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    _parsed(parse_completion, body)


@FEWER
@given(_bodies(MessagesRequest, model="m", max_tokens=9, messages=[HI]))
def test_any_body_of_anthropics_is_understood_or_refused(body: dict[str, Any]) -> None:
    _parsed(parse_messages, body)


OPTIONS = st.fixed_dictionaries({}, optional=dict.fromkeys((*OPENAI_NAMES, "num_ctx", "x"), VALUES))


@FEWER
@given(_bodies(OllamaChatRequest, model="m", messages=[HI]), OPTIONS)
def test_any_chat_body_of_ollamas_is_understood_or_refused(
    body: dict[str, Any], options: dict[str, Any]
) -> None:
    _parsed(read_chat, {"options": options} | body)


@FEWER
@given(_bodies(OllamaGenerateRequest, model="m", prompt="hi"), OPTIONS)
def test_any_prompt_of_ollamas_is_understood_or_refused(
    body: dict[str, Any], options: dict[str, Any]
) -> None:
    _parsed(read_generate, {"options": options} | body)


@pytest.fixture(scope="module")
def responses() -> Iterator[InProcessResponses]:
    with InProcessResponses() as c:
        yield c


@FEWER
@given(body=_bodies(CreateResponseRequest, input="hi"))
def test_any_body_of_responses_is_understood_or_refused(
    responses: InProcessResponses, body: dict[str, Any]
) -> None:
    _parsed(responses.surfaces[Responses.path].parse, body)


@FEWER
@given(value=VALUES)
def test_any_input_is_understood_or_refused(responses: InProcessResponses, value: Any) -> None:
    _parsed(responses.surfaces[Responses.path].parse, {"input": value})
    _parsed(responses.surfaces[Responses.path].parse, {"input": [HI | {"content": value}]})


@given(strange(st.builds(dump, st.dictionaries(st.text(), VALUES, max_size=3))))
@example(b'{"a":' * 100_000)
@example(b"1" * 10_000)
@example(b"1e999")
@example(b'{"a": "\\ud800"}')
def test_any_body_is_json_or_refused(body: bytes) -> None:
    with cheap(20):
        try:
            value = parse_json(body)
        except RequestError:
            return
    assert json.loads(dump(value)) == value


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(value=VALUES)
def test_a_body_that_is_anything(parse: Any, value: Any) -> None:
    _parsed(parse, value)
