"""Engines of several families: shared prefixes, chunks, preemption and planning
ahead do not change the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem import Engine, EngineConfig, SamplingParams
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.extent import selected

from ..models.test_parity import STEPS, prompt_of, reference, reference_run

pytestmark = pytest.mark.usefixtures("forked_ranks")

LENGTHS = (50, 33, 60, 41)


# Latents in turn, experts ahead, windows over two ranks.
PATHS = [("deepseek_v3", 1, "off"), ("qwen3_moe", 1, "on"), ("gemma3", 2, "on")]
OTHERS = [("phi3_partial", 1, "on"), ("gemma3", 1, "off"), ("qwen3", 2, "on")]


@pytest.mark.parametrize(("name", "ranks", "ahead"), selected(PATHS, full=OTHERS))
def test_prefixes_chunks_and_preemption_leave_the_tokens(
    tmp_path: Path, name: str, ranks: int, ahead: str
) -> None:
    """Four sequences need 32 blocks, and there are 20."""
    folder = tiny_models.cached(name, tmp_path)
    expected = [reference_run(folder, length, seed=length)[0] for length in LENGTHS]
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        block_size=8,
        num_blocks=20,
        max_model_len=128,
        max_num_batched_tokens=24,
        tensor_parallel_size=ranks,
        async_scheduling=ahead,
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Engine(config) as engine:
        completions = engine.generate_sync(prompts, params)
        assert [choices[0].tokens for choices in completions] == expected
        assert engine._thread is not None and engine._thread.runner.engine.core.load().preemptions
        for _ in range(2):
            again = engine.generate_sync([prompts[0]], params)[0][0]
            assert again.tokens == expected[0]
        assert again.cached_tokens == 48


@pytest.mark.parametrize("limit", [64, None])
def test_longrope_has_the_factors_of_the_longest_context(tmp_path: Path, limit: int | None) -> None:
    """transformers has the short factors up to 64 tokens, and Tandem with such a limit."""
    tiny_models.build("phi3_short", tmp_path, original_max_position_embeddings=64)
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", threads=1, num_blocks=20, max_model_len=limit
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Engine(config) as engine:
        completion = engine.generate_sync([prompt_of(40)], params)[0][0]
    [tokens] = reference(tmp_path).generate(
        torch.tensor([prompt_of(40)]), do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS
    )
    assert (completion.tokens == tokens[40:].tolist()) == (limit == 64)


def test_dynamic_rope_has_the_theta_of_the_longest_context(tmp_path: Path) -> None:
    """As transformers has it in a pass over so many tokens. The original context of 48 tokens ends
    within the prompt."""
    whole, length = 96, 60
    tiny_models.build("llama_dynamic", tmp_path, max_position_embeddings=48)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        threads=1,
        num_blocks=20,
        max_model_len=whole,
        max_num_batched_tokens=32,
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Engine(config) as engine:
        completion = engine.generate_sync([prompt_of(length)], params)[0][0]
    tokens = prompt_of(length) + completion.tokens
    padded = torch.tensor([tokens + [0] * (whole - len(tokens))])
    plain = tiny_models.new_model("llama_dynamic")
    plain.load_state_dict(reference(tmp_path).state_dict())
    for model, same in ((reference(tmp_path), True), (plain.eval(), False)):
        with torch.inference_mode():
            logits = model(padded, use_cache=False).logits[0, length - 1 : len(tokens) - 1]
        assert (logits.argmax(-1).tolist() == completion.tokens) == same
