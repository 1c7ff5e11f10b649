"""The memory of steps on a GPU, counted without one: no step takes more than those that a rank
profiles, and these no more than the estimate before."""

from __future__ import annotations

import json
import weakref
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.benchmarks.node.gpu_engine import EXPERTS_CONFIG, QWEN_CONFIG
from tandem.proto.packed_logprobs import MAX_LOGPROBS
from tandem.shared.engine.plan import (
    RankSampling,
    SamplerSpec,
    SequenceStep,
    SlotLimits,
    StepPlan,
)
from tandem.shared.engine.rank import sampler_choice
from tandem.shared.engine.rank.loading import LoadedModel
from tandem.shared.engine.rank.step_profile import largest_steps
from tandem.shared.kv import step_estimate
from tandem.shared.models.parallel import TensorParallel
from tandem.shared.weights.load import load_model
from tandem.tests.support.checkpoints import tiny_models

pytest.importorskip("triton")

from tandem.kernels.gpu import grouped_experts, latent_trial, routing_trial
from tandem.tests.support.meta_gpu import (
    META,
    DeviceWork,
    OnGpu,
    launches_counted,
    memory_of,
)

BLOCK, LENGTH = 16, 4000
LATENTS = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "head_dim": 64,
    "v_head_dim": 128,
}
ASKS_MUCH = RankSampling(
    temperature=0.5,
    top_k=50,
    top_p=0.9,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
    bad_words=((1, 2),),
    logprob_token_ids=(3, 4, 5),
    logprobs=MAX_LOGPROBS,
)


class LiveMemory(TorchDispatchMode):
    """Counts the bytes on the device that operators allocate and nobody has freed."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._bytes = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        before = memory_of((args, options))
        for key, storage in memory_of(result).items():
            if key not in before:
                self._sizes[weakref.ref(storage, self._freed)] = storage.nbytes()
                self._bytes += storage.nbytes()
        self.peak = max(self.peak, self._bytes)
        return result

    def _freed(self, storage: weakref.ref[Any]) -> None:
        self._bytes -= self._sizes.pop(storage)


def any_step(random: Random, tokens: int, sequences: int) -> StepPlan:
    """A step that the head may plan: chunks of any sizes, or a large one beside rows that decode,
    which ask for much or nothing."""
    count = random.choice([1, random.randint(1, sequences), sequences])
    total = random.choice([count, random.randint(count, tokens), tokens])
    cuts = sorted(random.sample(range(1, total), count - 1))
    if random.random() < 0.5:
        cuts = [*range(1, count)]
    rows, specs = list[SequenceStep](), list[SamplerSpec]()
    for number, (begin, end) in enumerate(pairwise([0, *cuts, total])):
        size = end - begin
        start = random.randint(0, LENGTH - size)
        asks = random.random() < 0.5
        row = SequenceStep(
            number,
            [0] * size,
            start,
            [0] * -(-(start + size) // BLOCK),
            random.random() < 0.9,
            MAX_LOGPROBS if asks else None,
            (0,) * (size - 1) if asks else (),
        )
        rows.append(row)
        if row.sample:
            params = ASKS_MUCH if random.random() < 0.9 else RankSampling()
            specs.append(SamplerSpec(number, params, number, [0]))
    return StepPlan.of(0, rows, specs, range(sequences))


@pytest.mark.parametrize(
    ("kind", "vocabulary"),
    [("dense", 100_000), ("dense", 4000), ("experts", 4000), ("latents", 4000)],
)
def test_steps_take_less_than_the_largest_and_these_less_than_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, vocabulary: int
) -> None:
    """Of a few layers, with a vocabulary beside which these take much or little. What the estimate
    has for libraries, fragments and graphs is left out."""
    for trial in (grouped_experts, routing_trial, sampler_choice):
        monkeypatch.setattr(trial, "works", lambda *_: True)
    for name in ("stores", "decodes", "takes_chunks"):
        monkeypatch.setattr(latent_trial, name, lambda *_, **__: True)
    for name in ("_FIXED_BYTES", "_GRAPH_BYTES"):
        monkeypatch.setattr(step_estimate, name, 0)
    if kind == "latents":
        tiny = tiny_models.cached("deepseek_v3_dense", tmp_path)
        config = json.loads((tiny / "config.json").read_text()) | LATENTS
    else:
        config = QWEN_CONFIG if kind == "dense" else EXPERTS_CONFIG
    config |= {"vocab_size": vocabulary, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def peak(plan: StepPlan) -> int:
        with LiveMemory() as memory:
            runner.execute(plan)
        return memory.peak

    random = Random(0)
    with launches_counted(DeviceWork()):
        model = load_model(
            tmp_path,
            dtype="bfloat16",
            device=META,
            load_format="dummy",
            operators=OnGpu(DeviceWork()),
        )
        loaded = LoadedModel(model, BLOCK, torch.bfloat16, TensorParallel())
        for tokens, sequences in ((512, 2), (160, 128)):
            runner = loaded.runner(2, SlotLimits(sequences, -(-LENGTH // BLOCK)))
            largest = max(map(peak, largest_steps(loaded, tokens, sequences, LENGTH)))
            others = max(peak(any_step(random, tokens, sequences)) for _ in range(20))
            estimate = step_estimate.estimated_step_bytes(
                model.spec, tokens=tokens, sequences=sequences, itemsize=2
            )
            # Lists of a few tokens, and numbers of splits that are rounded down, may make more.
            assert others <= 1.05 * largest
            assert largest <= estimate
