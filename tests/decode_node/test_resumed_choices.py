"""Choices that another node has begun: with any sampling parameters, they continue as they would
have continued there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tandem import Engine, EngineConfig
from tandem.decode_node.choices import Choices
from tandem.decode_node.generate_request import admitted_sequences
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.sequence import FinishReason
from tandem.shared.engine.start import NodeEngine
from tandem.shared.errors import RequestError
from tandem.tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("forked_ranks")

CONFIG = EngineConfig(dtype="float32", threads=1, num_blocks=512, block_size=8, max_model_len=256)
# Each continuation is drawn again from every state before it.
MAX_TOKENS = 28
PROMPT = "Once upon a time there were three of them"
SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"string","maxLength":9},"b":{"type":"integer"}}}'
)
THINKING = pb.ThinkingBudget(tokens=9, start="", end="</think>")
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 0},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3},
    "three choices": {"temperature": 1.5, "n": 3, "seed": 5, "stop_token_ids": range(40)},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "logprobs": {"temperature": 1.0, "seed": 1, "logprobs": 3},
    "listed logprobs": {"logprobs": 0, "logprob_token_ids": [3, 5]},
    "least tokens": {"temperature": 1.0, "seed": 2, "min_tokens": 20, "stop_token_ids": range(120)},
    "bad words": {
        "temperature": 1.0,
        "seed": 4,
        "bad_words": [pb.TokenIds(ids=[token]) for token in range(50)]
        + [pb.TokenIds(ids=[60, token]) for token in range(60, 99)],
    },
    "some tokens": {"temperature": 1.0, "seed": 6, "allowed_token_ids": range(30, 60)},
    "biased": {"temperature": 1.0, "seed": 6, "logit_bias": {9: 5.0}},
    "grammar": {
        "temperature": 1.5,
        "seed": 7,
        "n": 2,
        "structured_outputs": pb.StructuredOutputs(json=SCHEMA, param="response_format"),
    },
    "grammar without an end": {
        "temperature": 1.5,
        "seed": 8,
        "ignore_eos": True,
        "structured_outputs": pb.StructuredOutputs(regex="[a-z ]{80}", param="regex"),
    },
    "thinking": {"temperature": 1.0, "seed": 9, "thinking": THINKING},
    # The marker that opens the reasoning is drawn, and characters of several tokens.
    "thinking in a grammar": {
        "temperature": 1.5,
        "seed": 10,
        "thinking": pb.ThinkingBudget(tokens=8, start="<think>", end="</think>"),
        "structured_outputs": pb.StructuredOutputs(
            regex="<think>[α-ω]*</think>[0-9]{9}", param="regex"
        ),
    },
    "thinking before a grammar": {
        "temperature": 1.5,
        "seed": 11,
        "thinking": THINKING,
        "structured_outputs": pb.StructuredOutputs(
            regex="[0-9]{12}", reasoning_end="</think>", param="regex"
        ),
    },
}


@dataclass
class Drawn:
    """The output of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scored: list[tuple[int, int]] = field(default_factory=list)  # tokens and their ranks
    end: tuple[FinishReason, int | None] | None = None

    def copy(self) -> Drawn:
        return Drawn([*self.tokens], [*self.logprobs], [*self.scored], self.end)


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(replace(CONFIG, async_scheduling=request.param)) as engine:
        yield engine


def message(engine: Engine, **sampling: Any) -> pb.GenerateRequest:
    assert engine._thread is not None
    prompt = engine._thread.runner.tokenizer.encode(PROMPT)
    fields: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "n": 1,
        "ignore_eos": "structured_outputs" not in sampling,
    }
    fields |= sampling
    return pb.GenerateRequest(prompt=prompt, sampling=pb.Sampling(**fields))


async def draw_all(
    engine: NodeEngine, request: pb.GenerateRequest, state: dict[int, Drawn] | None = None
) -> list[dict[int, Drawn]]:
    """The choices after each output. The prompt is computed once, before the first."""
    sequences = await admitted_sequences(request, engine)
    choices = Choices(engine.core, sequences)
    choices.listen()
    engine.core.enqueue(choices.leader)
    n = request.sampling.n
    states = [{index: Drawn() for index in range(n)} if state is None else state]
    done = 0
    while (output := await choices.next()) is not None:
        state = {index: one.copy() for index, one in states[-1].items()}
        one = state[output.sequence.index]
        done += output.prompt_done and output.sequence is choices.leader
        assert done, "siblings wait for the prompt"
        one.tokens += output.tokens
        one.logprobs += [each.logprob for each in output.logprobs]
        one.scored += [(each.token, each.rank) for each in output.logprobs]
        if output.finish_reason is not None:
            one.end = (output.finish_reason, output.sequence.stop_token)
        states.append(state)
    assert done == 1
    choices.cancel()
    return states


async def continued(engine: NodeEngine, request: pb.GenerateRequest) -> None:
    """Assert that the request continues in the same way from the state after each output."""
    states = await draw_all(engine, request)
    expected, works = states[-1], []
    assert all(one.end and one.end[0] is not FinishReason.ERROR for one in expected.values()), (
        expected
    )
    assert len(states) > 10, expected
    for state in states[1:-1]:
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(request)
        resumed.resume.extend(
            pb.Resumed(index=index, tokens=one.tokens)
            for index, one in state.items()
            if one.end is None
        )
        works.append(draw_all(engine, resumed, state))
    for number, ends in enumerate(await asyncio.gather(*works), 1):
        for index, one in ends[-1].items():
            assert one.logprobs == pytest.approx(expected[index].logprobs, abs=1e-4)
            assert replace(one, logprobs=[]) == replace(expected[index], logprobs=[]), number


@pytest.mark.parametrize("variant", VARIANTS)
def test_choices_go_on_from_each_of_their_tokens(engine: Engine, variant: str) -> None:
    assert engine._thread is not None
    node = engine._thread.runner.engine

    async def work() -> None:
        await continued(node, message(engine, **VARIANTS[variant]))
        await until(lambda: not node.core.load().kv_usage)

    engine._thread.call(work(), timeout=120)


def test_resumed_choices_go_first_however_long_the_queue_is() -> None:
    config = replace(CONFIG, max_num_seqs=1, max_waiting=1)
    with Engine(config) as engine:
        assert engine._thread is not None
        node = engine._thread.runner.engine
        finished: list[str] = []

        async def run(name: str, request: pb.GenerateRequest) -> None:
            await draw_all(node, request, {0: Drawn()} if request.resume else None)
            finished.append(name)

        async def all_of_them() -> None:
            running = asyncio.create_task(run("running", message(engine, max_tokens=200)))
            await until(lambda: node.core.load().running > 0)
            waiting = asyncio.create_task(run("waiting", message(engine, max_tokens=2)))
            await until(lambda: node.core.load().waiting > 0)
            resumed = message(engine, max_tokens=9)
            resumed.resume.add(index=0, tokens=[5, 6])
            await asyncio.gather(running, waiting, run("resumed", resumed))

        engine._thread.call(all_of_them(), timeout=60)
        assert finished == ["running", "resumed", "waiting"]


@pytest.mark.parametrize(
    ("resume", "sampling", "problem"),
    [
        ([(1, [])], {}, "below n"),
        ([(0, [1]), (0, [1])], {"n": 2}, "and unique"),
        ([(0, [1] * MAX_TOKENS)], {}, "max_tokens"),
        ([(0, [1 << 20])], {}, "vocabulary"),
        ([(0, [1])], {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_resumed_is_rejected(
    engine: Engine, resume: list[tuple[int, list[int]]], sampling: dict[str, Any], problem: str
) -> None:
    assert engine._thread is not None
    request = message(engine, **sampling)
    request.resume.extend(pb.Resumed(index=index, tokens=tokens) for index, tokens in resume)
    with pytest.raises(RequestError, match=problem):
        engine._thread.call(admitted_sequences(request, engine._thread.runner.engine), timeout=20)
    request = message(engine)
    request.resume.add(index=0, tokens=[1])
    request.embed.pooling = "last"
    with pytest.raises(RequestError, match="embed"):
        engine._thread.call(admitted_sequences(request, engine._thread.runner.engine), timeout=20)
