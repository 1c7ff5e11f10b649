"""Whole engines whose device is behind the host: requests of all kinds come, leave and fail at any
moment, and get what they get alone, one step at a time. Without Triton the tests are skipped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.extent import selected
from tandem.tests.support.runners import build_runner

from ..models.test_parity import reference

pytest.importorskip("triton")

from tandem.tests.support.late_engine import (
    BLOCK,
    MAX_LEN,
    Expected,
    LateEngine,
    Request,
    storm,
)


class Family:
    """A model's folder and answers, and engines of it."""

    def __init__(self, folder: Path, kv_dtype: str = "auto") -> None:
        self.folder = folder
        self.kv_dtype = kv_dtype
        self.expected = Expected(self._runner(24))

    def _runner(self, blocks: int) -> ModelRunner:
        return build_runner(
            self.folder,
            dtype="float32",
            kv_dtype=self.kv_dtype,
            block_size=BLOCK,
            num_blocks=blocks,
        )

    def engine(self, *, blocks: int = 24, slots: int = 4, tokens: int = 16) -> LateEngine:
        runner = self._runner(blocks)
        return LateEngine(runner, self.expected, blocks=blocks, slots=slots, tokens=tokens)

    def storm(self, seed: int, moves: int) -> None:
        draw = random.Random(seed)
        limits = {
            "blocks": draw.choice((16, 20, 40)),
            "slots": draw.randint(1, 5),
            "tokens": draw.choice((8, 16, 40)),
        }
        with self.engine(**limits) as engine:
            storm(engine, seed, moves)


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def qwen3(model_root: Path) -> Family:
    return Family(tiny_models.cached("qwen3", model_root))


@pytest.mark.parametrize("seed", selected(range(3), full=range(3, 200)))
def test_whatever_happens_each_request_gets_what_it_gets_alone(qwen3: Family, seed: int) -> None:
    qwen3.storm(seed, moves=60)


FAMILIES = [("gemma3", "auto"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int8")]
OTHERS = [
    ("gemma2", "auto"),
    ("gpt_oss", "auto"),
    ("mistral", "int8"),
    ("deepseek_v2", "auto"),
    ("qwen3", "int8"),
    ("qwen3", "fp8"),
]


@pytest.mark.parametrize(("name", "kv_dtype"), selected(FAMILIES, full=OTHERS))
def test_families_draw_what_they_draw_in_turn(model_root: Path, name: str, kv_dtype: str) -> None:
    Family(tiny_models.cached(name, model_root), kv_dtype).storm(1, moves=30)


def test_greedy_tokens_are_those_of_transformers(qwen3: Family) -> None:
    """One batch, of which each step is launched before the one before has ended."""
    requests = [Request("greedy", length, MAX_LEN, distinct=length) for length in (7, 17, 30)]
    most = 0
    with qwen3.engine(blocks=60) as engine:
        for request in requests:
            engine.arrive(request)
        while engine.may_launch:
            while engine.may_launch:
                engine.launch()
            most = max(most, engine.rank.replies_due)
            engine.complete()
        engine.finish()
    assert most == 2
    for request, answer in zip(requests, engine.answers.values(), strict=True):
        tokens = request.prompt + answer.tokens
        assert len(tokens) == MAX_LEN
        with torch.inference_mode():
            logits = reference(qwen3.folder)(torch.tensor([tokens]), use_cache=False).logits[0]
        assert logits.argmax(-1)[request.length - 1 : -1].tolist() == answer.tokens


def test_a_step_that_waits_for_masks_goes_on_if_the_one_before_fails(qwen3: Family) -> None:
    with qwen3.engine() as engine:
        engine.arrive(Request("grammar", 7, 14))
        engine.launch("device")
        engine.launch()
        assert engine.rank.busy, "its mask follows from the token that the first step draws"
        engine.complete()
        assert not engine.rank.busy
        engine.finish()
