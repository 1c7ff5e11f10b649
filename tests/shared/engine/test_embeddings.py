"""Hidden states of prompts: those of transformers, in chunks, from prefixes and over two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem import Embedding, Engine, EngineConfig, SamplingParams
from tandem.shared.engine.hidden_states import check_result_size
from tandem.shared.engine.plan import StepResult
from tandem.shared.engine.sequence import FinishReason, Sequence
from tandem.shared.engine.work import Pool
from tandem.shared.errors import RequestError
from tandem.tests.shared.engine.scheduling.schedulers import make
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.extent import selected
from tandem.tests.support.step_rows import rows_of

from ..models.test_parity import prompt_of, reference

pytestmark = pytest.mark.usefixtures("forked_ranks")

# One token, a block, one more, several chunks, and the whole context.
LENGTHS = (1, 8, 9, 33, 128)
NAME = "qwen3"


def states(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The final hidden states [tokens, hidden] of transformers."""
    with torch.inference_mode():
        output = reference(folder)(torch.tensor([tokens]), output_hidden_states=True)
    return output.hidden_states[-1][0]


POOLED: dict[Any, Any] = {
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(dim=0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.cached(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=selected([(2, "on"), (1, "off")], full=[(1, "on")]))
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    ranks, ahead = request.param
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        block_size=8,
        num_blocks=24,
        max_model_len=128,
        max_num_batched_tokens=24,
        tensor_parallel_size=ranks,
        async_scheduling=ahead,
    )
    with Engine(config) as engine:
        yield engine


def check(embedding: Embedding, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(embedding.values), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", list(POOLED))
def test_hidden_states_are_those_of_transformers(
    engine: Engine, folder: Path, pooling: Any
) -> None:
    """All in one batch, beside a stream, twice: the second time, prefixes are cached."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    stream = engine.generate_stream(
        prompt_of(20), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    )
    next(stream)
    for _ in range(2):
        embeddings = engine.encode(prompts, pooling=pooling)
        for tokens, one in zip(prompts, embeddings, strict=True):
            check(one, POOLED[pooling](states(folder, tokens)))
            assert one.prompt_tokens == len(tokens)
    assert (embeddings[-1].cached_tokens > 0) == (pooling == "last")
    assert sum(len(delta.tokens) for delta in stream) == 59


def test_an_embedding_has_length_one(engine: Engine, folder: Path) -> None:
    tokens = prompt_of(40)
    [embedding] = engine.embed([tokens])
    check(embedding, torch.nn.functional.normalize(states(folder, tokens)[-1], dim=0))
    assert sum(value * value for value in embedding.values) == pytest.approx(1.0)


def test_nothing_is_held_afterwards(engine: Engine) -> None:
    engine.embed([prompt_of(70, seed=3)] * 4, pooling="mean")
    assert engine._thread is not None
    assert engine._thread.runner.engine.core.load().blocks.owned == 0


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("one", {}, "a list of prompts is expected"),
        ([[1]], {"pooling": "max"}, "pooling is 'max'; it must be one of last, cls, mean"),
        ([[]], {}, "the prompt is empty"),
        ([[1] * 129], {}, "maximum context length is 128 tokens"),
        ([[100_000]], {}, "outside the vocabulary"),
    ],
)
def test_invalid_requests_are_rejected(
    engine: Engine, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.embed(prompts, **options)


def test_the_vectors_of_a_step_are_bounded() -> None:
    check_result_size(64, 16_384)
    with pytest.raises(RequestError, match="--max-num-seqs of at most 1024"):
        check_result_size(1025, 16_384)


def pooled(prompt: int, pooling: Any) -> Sequence:
    return Sequence(1, list(range(prompt)), Pool(pooling))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("last", [None, None, "last"]),
        ("cls", ["first", None, None]),
        ("mean", ["sum", "sum", "sum"]),
    ],
)
def test_only_rows_that_count_return_hidden_states(
    pooling: Any, expected: list[str | None]
) -> None:
    scheduler = make(max_num_batched_tokens=16)
    scheduler.add(one := pooled(40, pooling))
    hidden_states = []
    while not one.finish_reason:
        plan = scheduler.schedule()
        assert plan is not None
        [row] = rows_of(plan)
        assert row.pool is not None
        hidden_states.append(row.pool.hidden)
        hidden = {} if row.pool.hidden is None else {1: b"\0\0\0\0"}
        scheduler.apply(StepResult(plan.step, hidden=hidden))
    assert hidden_states == expected and one.finish_reason is FinishReason.COMPUTED
    assert len(one.hidden) == sum(each is not None for each in expected)


def test_a_preempted_prompt_starts_its_hidden_states_anew() -> None:
    scheduler = make(max_num_batched_tokens=16)
    scheduler.add(one := pooled(40, "mean"))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(StepResult(plan.step, hidden={1: b"\0\0\0\0"}))
    scheduler._preemption._preempt(one)
    assert one.hidden == [] and one.computed == 0
    plan = scheduler.schedule()
    assert plan is not None and rows_of(plan)[0].start == 0


def test_a_model_without_a_head_embeds_and_does_not_generate(folder: Path, tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B is saved: without a head, and without the first part of all names."""
    headless = Path(shutil.copytree(folder, tmp_path / "model"))
    weights = load_file(headless / "model.safetensors")
    del weights["lm_head.weight"]
    short = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(short, headless / "model.safetensors")
    config = EngineConfig(model=str(headless), dtype="float32", threads=1, num_blocks=24)
    with Engine(config) as engine:
        [embedding] = engine.encode([prompt_of(33)])
        check(embedding, states(folder, prompt_of(33))[-1])
        with pytest.raises(RequestError, match="has no lm_head, so that it serves"):
            engine.generate_sync([prompt_of(33)], SamplingParams(max_tokens=1))
