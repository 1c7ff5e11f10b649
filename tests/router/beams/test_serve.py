"""``use_beam_search`` against fake decode nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.packed_logprobs import pack_logprobs
from tandem.tests.router.in_process import InProcess
from tandem.tests.router.support import (
    Cluster,
    FakeDecodeNode,
    admitted,
    cluster,
    events,
    usage,
)

# The next tokens by the last one; the best first token leads to a worse output.
WORDS = ("one", " two", " three", " here", " stop")
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3}


@pytest.fixture
def c() -> InProcess:
    return beams()


def beams(**options: Any) -> InProcess:
    c = InProcess(**options)
    play(c, c.node)
    return c


def play(c: InProcess | Cluster, node: FakeDecodeNode) -> None:
    one, two, three, here, stop = (c.encode(word)[0] for word in WORDS)
    table = {
        one: [(two, -0.5), (three, -1.0), (0, -6.0)],
        two: [(here, -2.0), (0, -2.5)],
        three: [(stop, -0.1), (0, -5.0)],
        here: [(0, -0.1), (stop, -4.0)],
        stop: [(0, -0.2), (here, -4.0)],
    }

    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateEvent]:
        assert request.sampling.max_tokens == 1 and request.sampling.ignore_eos
        successors = table[request.prompt[-1]]
        assert request.sampling.logprobs >= 3
        yield admitted()
        yield usage(request, cached_tokens=len(request.prompt) - 1)
        token, logprob = successors[0]
        logprob_entry = pb.TokenLogprob(token=token, logprob=logprob, rank=1)
        scored = pb.PositionLogprobs(chosen=logprob_entry, packed_top=pack_logprobs(successors))
        yield pb.GenerateEvent(tokens=pb.Tokens(tokens=[successors[0][0]], logprobs=[scored]))

    node.script = script


def test_the_best_beams_are_the_choices(c: InProcess) -> None:
    body = c.complete("one", logprobs=1, return_token_ids=True, **BEAMS).json()
    first, second = body["choices"]
    assert (first["text"], first["finish_reason"]) == (" three stop", "stop")
    assert (second["text"], second["finish_reason"]) == (" two here", "stop")
    assert first["token_ids"] == [c.encode(word)[0] for word in WORDS[2::2]] + [0]
    assert first["logprobs"]["token_logprobs"] == pytest.approx([-1.0, -0.1, -0.2])
    assert len(first["logprobs"]["top_logprobs"][0]) == 2  # the most likely one, and this
    assert body["usage"]["prompt_tokens"] == 1 and body["usage"]["completion_tokens"] == 6
    assert body["tandem"]["decode_nodes"] == ["decode-0"]
    alone = c.complete("one", **BEAMS | {"n": 1}).json()
    assert alone["choices"][0]["text"] == " two here"
    best = c.complete("one", best_of=2, **BEAMS | {"n": 1}).json()
    assert best["choices"][0]["text"] == " three stop"


def test_streams_chats_prompts_stop_strings_and_echo(c: InProcess) -> None:
    stream = c.complete(["one", "one"], stream=True, stop="stop", echo=True, **BEAMS)
    texts = dict.fromkeys(range(4), "")
    for event in events(stream.text)[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(texts.values()) == ["one three ", "one two here"] * 2
    chats = beams(trust_request_chat_template=True)
    body = chats.chat("one", chat_template="{{ messages[0].content }}", **BEAMS).json()
    assert [x["message"]["content"] for x in body["choices"]] == [" three stop", " two here"]


async def test_a_step_moves_to_another_node(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        served = []

        def breaking(node: FakeDecodeNode) -> None:
            play(c, node)
            talk = node.script
            assert talk is not None

            async def script(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
                served.append(node)
                if len(served) == 3:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                async for event in talk(request, context):
                    yield event

            node.script = script

        for node in c.nodes:
            breaking(node)
        body = (await c.complete("one", **BEAMS)).json()
        assert [choice["text"] for choice in body["choices"]] == [" three stop", " two here"]


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"echo": True, "logprobs": 1}, "logprobs"),
    ({"echo": True, "max_tokens": 0}, "max_tokens"),
    ({"n": 33}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ({"early_stopping": "often"}, "early_stopping"),
    ({"length_penalty": 11}, "length_penalty"),
)


def test_conflicting_fields_are_named(c: InProcess) -> None:
    for fields, param in WRONG:
        response = c.complete("one", **BEAMS | fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param
