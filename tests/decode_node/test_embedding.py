"""Vectors of prompts, by the service over an engine without a model."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from tandem.decode_node.embedding import pooling_work
from tandem.decode_node.streams.router_stream import RequestEndedError
from tandem.decode_node.transfers import PrefillSource
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Pool
from tandem.shared.models.spec import ClassifierSpec, Pooling, ScoreActivation
from tandem.tests.decode_node.fake_parts import fake_service
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.one_call import call_events

HIDDEN = 32  # of the fake node's model


def request(**fields: Any) -> pb.GenerateRequest:
    embed = pb.Embed(**({"pooling": "last"} | fields))
    return pb.GenerateRequest(
        request_id="r", prompt=range(20), sampling=pb.Sampling(max_tokens=1, n=1), embed=embed
    )


async def events_of(node: FakeNode, message: pb.GenerateRequest) -> list[pb.GenerateEvent]:
    async def here(sequence: Sequence) -> PrefillSource:
        node.core.submit(sequence, node.core._listeners[sequence])
        return PrefillSource()

    async with node.running():
        return [event async for event in call_events(fake_service(node, here), message)]


async def test_a_prompt_becomes_a_vector_and_its_blocks_are_freed() -> None:
    events = await events_of(FakeNode("d", 7), request(dimensions=2, normalize=True))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["admitted", "usage", "embedding", "finished"]
    assert events[1].usage.prompt_tokens == 20
    # The fake ranks' hidden states are 3, 4, 0, ...
    assert struct.unpack("<2f", events[2].embedding.values) == pytest.approx((0.6, 0.8))
    plain = await events_of(FakeNode("d", 7), request())
    assert struct.unpack(f"<{HIDDEN}f", plain[2].embedding.values)[:3] == (3, 4, 0)


@pytest.mark.parametrize(
    ("fields", "word"), [({"pooling": "x"}, "pooling"), ({"dimensions": HIDDEN + 1}, "dimensions")]
)
async def test_invalid_options_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestEndedError, match=word):
        await events_of(FakeNode("d", 7), request(**fields))


async def test_a_node_whose_model_has_no_head_generates_nothing() -> None:
    node = FakeNode("d", 7)
    node.engine = replace(node.engine, generates=False)
    assert len(await events_of(node, request())) == 4
    message = request()
    message.ClearField("embed")
    with pytest.raises(
        RequestEndedError, match="has no lm_head, so that it serves embeddings only"
    ):
        await events_of(node, message)


def cross_encoder(
    *, activation: ScoreActivation = "sigmoid", segments: int = 2, pooling: Pooling = "cls"
) -> FakeNode:
    node = FakeNode("d", 7)
    classifier = ClassifierSpec(labels=("LABEL_0",), activation=activation, pooling=pooling)
    spec = replace(node.engine.spec, classifier=classifier, segments=segments)
    node.engine = replace(node.engine, spec=spec, generates=False)
    return node


@pytest.mark.parametrize(
    ("activation", "normalize", "expected"),
    [
        ("sigmoid", True, 1 / (1 + math.exp(-3))),
        ("sigmoid", False, 3),
        ("none", True, 3),
        ("softmax", True, 1),
    ],
)
async def test_a_pair_becomes_a_score(
    activation: ScoreActivation, normalize: bool, expected: float
) -> None:
    message = request(pooling="", score=True, second_text=8, normalize=normalize)
    events = await events_of(cross_encoder(activation=activation), message)
    [score] = struct.unpack("<f", events[2].embedding.values)
    # The fake ranks' logit is 3.
    assert score == pytest.approx(expected)


@pytest.mark.parametrize(("segments", "second"), [(2, 8), (1, 0)])
def test_only_models_with_two_segments_number_the_texts(segments: int, second: int) -> None:
    engine = cross_encoder(segments=segments, pooling="last").engine
    work = pooling_work(request(score=True, second_text=8), engine)
    assert work == Pool("last", classify=True, second_text=second)
    assert Sequence(1, list(range(20)), work).target == 20


async def test_a_cross_encoder_does_nothing_else() -> None:
    node = cross_encoder()
    with pytest.raises(
        RequestEndedError, match="has a classifier, which only scores or labels texts"
    ):
        await events_of(node, request())
    message = request()
    message.ClearField("embed")
    with pytest.raises(RequestEndedError, match="use /v1/rerank"):
        await events_of(node, message)
    with pytest.raises(RequestEndedError, match="second_text is 20; the prompt has 20 tokens"):
        await events_of(node, request(score=True, second_text=20))
    with pytest.raises(RequestEndedError, match="has no classifier that scores or labels texts"):
        await events_of(FakeNode("d", 7), request(score=True))
