"""Engines that plan steps ahead, beside engines that plan in turn.

That the tokens are those of transformers is in ``test_families_in_engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem import Completion, Engine, EngineConfig, SamplingParams
from tandem.shared.config.engine import EngineConfig as Config
from tandem.shared.engine import start
from tandem.shared.engine.start import plans_ahead
from tandem.shared.kv.planning import NodeDevice, RankDevice

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    config = EngineConfig(dtype="float32", threads=1, num_blocks=256, max_model_len=512)
    with (
        Engine(replace(config, async_scheduling="on")) as ahead,
        Engine(replace(config, async_scheduling="off")) as in_turn,
    ):
        yield ahead, in_turn


EVERY_WAY = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=3, top_p=0.9, top_k=40, min_p=0.01),
    "choices": SamplingParams(temperature=1.0, seed=4, n=3),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "at least": SamplingParams(temperature=0.8, seed=5, min_tokens=12, stop_token_ids=(300, 301)),
    "bias": SamplingParams(temperature=0.0, logit_bias={65: 3.0, 66: -100.0}),
    "stop string": SamplingParams(temperature=0.0, stop=("e",)),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
    "one token": SamplingParams(temperature=0.0, max_tokens=1),
}


def essence(one: Completion) -> tuple[object, ...]:
    def positions(of: object) -> object:
        # The values differ in the last bit with the batch's size.
        return [position.token for position in of] if of else of  # type: ignore[attr-defined]

    logprobs = (positions(one.logprobs), positions(one.prompt_logprobs))
    return one.text, one.tokens, one.finish_reason, one.stop_reason, *logprobs


def test_every_way_of_sampling_draws_the_same(pair: tuple[Engine, Engine]) -> None:
    """All in one batch, so that rows come and go while others are planned ahead."""
    prompts = [f"Once upon a time there was a {name} fox" for name in EVERY_WAY]
    params = [
        one if one.max_tokens == 1 else replace(one, max_tokens=40) for one in EVERY_WAY.values()
    ]
    ahead, in_turn = (engine.generate_sync(prompts, params) for engine in pair)
    assert [[essence(one) for one in choices] for choices in ahead] == [
        [essence(one) for one in choices] for choices in in_turn
    ]


def test_a_stream_that_is_dropped_leaves_nothing(pair: tuple[Engine, Engine]) -> None:
    engine, _ = pair
    short, long = (
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (8, 400)
    )
    stream = engine.generate_stream("Once upon a time", long)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate_sync(["Hello"], short)[0][0].finish_reason == "length"
    assert engine._thread is not None
    assert engine._thread.runner.engine.core.load().blocks.owned == 0


@pytest.mark.parametrize(
    ("setting", "threads", "kernels", "kind", "expected"),
    [
        ("auto", 1, "torch", "cpu", True),
        ("auto", 2, "torch", "cpu", False),
        ("auto", 2, "compiled", "cpu", True),
        ("auto", None, "torch", "cpu", False),
        ("auto", None, "torch", "cuda", True),
        ("off", None, "torch", "cuda", False),
        ("on", 2, "torch", "cpu", True),
    ],
)
def test_auto_is_off_where_long_steps_need_the_heads_core(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    threads: int | None,
    kernels: str,
    kind: str,
    expected: bool,
) -> None:
    monkeypatch.setattr(start, "share_of_cores", lambda ranks: 2 // ranks)
    device = NodeDevice((RankDevice(kind, "", 0, 0),))
    config = Config(async_scheduling=setting, threads=threads, cpu_kernels=kernels)
    assert plans_ahead(config, device) is expected
