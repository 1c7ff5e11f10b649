"""The profile of steps: what it runs, and what it makes of the allocator's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.proto.packed_logprobs import MAX_LOGPROBS
from tandem.shared.engine.messages import RankSettings
from tandem.shared.engine.plan import StepLimits, StepPlan, StepResult
from tandem.shared.engine.rank.loading import LoadedModel
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.engine.rank.step_profile import largest_steps, memory_of, profile
from tandem.shared.errors import StartupError
from tandem.shared.kv.planning import CONTEXT_BYTES, CUDA, RankDevice, RankMemory, library_bytes
from tandem.shared.models.decoder import Decoder
from tandem.shared.models.parallel import TensorParallel
from tandem.shared.weights.load import load_model
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.step_rows import rows_of

BLOCK, MIB = 4, 1 << 20


def loaded(name: str, root: Path) -> LoadedModel:
    model = load_model(tiny_models.cached(name, root), dtype="float32")
    return LoadedModel(model, BLOCK, torch.float32, TensorParallel())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded("qwen3", tmp_path_factory.mktemp("profile"))


class FakeMemory:
    """Weights of 100 MiB and a step of 30 on a device where others use 7."""

    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1

    def reserved(self) -> int:
        return 100 * MIB

    def peak(self) -> int:
        assert self.releases == 2, "weights and runner are there, nothing that is cached"
        return 130 * MIB

    def free(self) -> int:
        return 393 * MIB


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepPlan]]:
    """The plans that runners execute."""
    seen: list[StepPlan] = []
    execute = ModelRunner.execute

    def noted(self: ModelRunner, plan: StepPlan) -> StepResult:
        seen.append(plan)
        result = execute(self, plan)
        assert not result.failed
        return result

    monkeypatch.setattr(ModelRunner, "execute", noted)
    yield seen


def test_the_largest_steps_run_and_the_peak_above_the_weights_is_returned(
    qwen: LoadedModel, plans: list[StepPlan]
) -> None:
    memory = FakeMemory()
    assert profile(qwen, StepLimits(40, 6, 90), memory, None) == (30 * MIB, 0)
    assert memory.releases == 3
    mixed, chunks, decodes = plans
    assert [len(row.tokens) for row in rows_of(mixed)] == [35, 1, 1, 1, 1, 1]
    ends = [row.start + len(row.tokens) for row in rows_of(mixed)]
    assert ends[:2] == [90, 90]
    assert [len(row.tokens) for row in rows_of(chunks)] == [6] * 6
    assert [len(row.tokens) for row in rows_of(decodes)] == [1] * 6
    for plan in plans:
        assert all(row.sample for row in rows_of(plan))
        for spec in plan.added:
            params = spec.params
            assert params.penalizes and params.top_p < 1 and params.logprobs == MAX_LOGPROBS
    assert len(rows_of(mixed)[0].prompt_targets) == 34


@pytest.mark.parametrize(
    ("tokens", "sequences", "length"),
    [(1, 1, 2), (1, 9, 2), (8, 8, 100), (7, 264, 100), (64, 1, 20), (64, 3, 5), (512, 72, 4096)],
)
def test_no_step_is_larger_than_the_head_plans(
    qwen: LoadedModel, tokens: int, sequences: int, length: int
) -> None:
    for plan in largest_steps(qwen, tokens, sequences, length):
        assert 1 <= len(rows_of(plan)) <= sequences
        assert sum(len(row.tokens) for row in rows_of(plan)) <= tokens
        for row in rows_of(plan):
            assert row.start >= 0 and row.start + len(row.tokens) <= length
            assert len(row.blocks) * BLOCK >= row.start + len(row.tokens)


@pytest.mark.parametrize(("in_place", "start"), [(True, 1000), (False, 4061)])
def test_a_chunk_is_far_into_its_sequence_only_where_that_takes_memory(
    qwen: LoadedModel, monkeypatch: pytest.MonkeyPatch, in_place: bool, start: int
) -> None:
    monkeypatch.setattr(Decoder, "chunks_in_place", in_place)
    mixed, _, decodes = largest_steps(qwen, 40, 6, 4096)
    assert [row.start for row in rows_of(mixed)] == [start, 4095, 1000, 1000, 1000, 1000]
    assert [row.start for row in rows_of(decodes)[:3]] == [4095, 4095, 1000]


def test_a_model_that_only_embeds_is_profiled_with_prompts(
    tmp_path: Path, plans: list[StepPlan]
) -> None:
    model = loaded("bert", tmp_path)
    assert profile(model, StepLimits(20, 4, 50), FakeMemory(), None) == (30 * MIB, 0)
    # Alone, a whole prompt may be longer than a step.
    assert [[len(row.tokens) for row in rows_of(plan)] for plan in plans] == [[50], [5] * 4]
    assert all(row.start == 0 and row.pool for plan in plans for row in rows_of(plan))


@pytest.mark.parametrize("where", ["_run", "_sample", "_prompt_logprobs", "_update_slots"])
def test_a_step_that_does_not_fit_beside_the_weights_is_refused(
    qwen: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nGPU 0 has")

    monkeypatch.setattr(ModelRunner, where, full)
    with pytest.raises(StartupError, match=r"^a step of 40 tokens and 6 .* 2 GiB; lower --max-num"):
        profile(qwen, StepLimits(40, 6, 90), FakeMemory(), None)


def test_a_rank_tells_what_is_torchs_and_what_is_not(qwen: LoadedModel) -> None:
    settings = RankSettings(model_path="", device="cuda")
    opened = RankDevice(CUDA, "a GPU", 600 * MIB, 500 * MIB)
    limits = StepLimits(40, 6, 90)
    memory = memory_of(qwen, settings, limits, opened, FakeMemory())
    used = CONTEXT_BYTES + 107 * MIB  # 7 MiB besides the context and torch's
    assert memory == RankMemory(393 * MIB, used, qwen.bytes_per_block, 30 * MIB, 0)
    shared = RankSettings(model_path="", device="cuda", shares_device=True, size=2)
    used = memory_of(qwen, shared, limits, opened, FakeMemory()).used_bytes
    assert used == 100 * MIB + library_bytes(2)


def test_a_cpu_pays_nothing(qwen: LoadedModel, plans: list[StepPlan]) -> None:
    settings = RankSettings(model_path="", device="cpu")
    opened = RankDevice("cpu", "a CPU", 1 << 40, 1 << 40)
    memory = memory_of(qwen, settings, StepLimits(40, 6, 90), opened, None)
    assert (memory.used_bytes, memory.steps_bytes, plans) == (0, 0, [])
