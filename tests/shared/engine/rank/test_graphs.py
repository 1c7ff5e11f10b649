"""Graphs of decode steps, on an emulator: repeated at other lengths, tables and paddings, they give
what the same kernels give when they are launched one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tandem.shared.engine.plan import (
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepPlan,
)
from tandem.shared.engine.rank import gpu_sampler
from tandem.shared.engine.rank.gpu_sampler import DeviceDraws
from tandem.shared.engine.rank.graphs import DecodeGraphs, graph_sizes
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.engine.rank.step_inputs import StepInputs
from tandem.shared.engine.rank.step_profile import graph_bytes
from tandem.shared.errors import StartupError
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.extent import selected
from tandem.tests.support.ranks import Meeting
from tandem.tests.support.runners import build_runner, paddings_of, written_slots
from tandem.tests.support.step_plans import NUM_BLOCKS, UNFILTERED, Streams, drawn, drawn_late

pytest.importorskip("triton")

from tandem.tests.support.emulated_gpu import emulated_runner, use_kernels
from tandem.tests.support.graph_emulator import CapturedRank, CaptureError, emulated_capture
from tandem.tests.support.step_rows import rows_of

BLOCK = 4
# Of up to four rows, one and three are padded, and more than ``SIZES`` have no graph.
MAX_ROWS = 3
SIZES = [2, 3]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch.setattr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    tiny_models.build("qwen3", folder, num_hidden_layers=2)
    return folder


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    return emulated_runner(folder, block_size=BLOCK, num_blocks=NUM_BLOCKS, **options)


def on_cpu(folder: Path, **options: Any) -> ModelRunner:
    blocks: dict[str, Any] = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS}
    return build_runner(folder, dtype="float32", **blocks, **options)


def streams(seed: int, rows: int, params: Sequence[RankSampling] = UNFILTERED) -> Streams:
    """With short chunks, and draws without filters, since interpreted kernels are slow."""
    return Streams(seed, block_size=BLOCK, max_rows=rows, params=params, chunk=5)


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(4096)[-2:] == [504, 512]


def test_a_replay_is_what_its_kernels_give_alone(folder: Path) -> None:
    """Also those that are padded, and if the next step is launched before one is collected."""
    eager, captured = runner_of(folder), runner_of(folder)
    captured.capture_graphs(emulated_capture, SIZES)
    paddings = paddings_of(captured)
    plans = [*streams(2402, MAX_ROWS).plans(23)]
    assert drawn_late(captured, plans) == [drawn(eager.execute(plan)) for plan in plans]
    for mine, theirs in zip(captured.cache.layers, eager.cache.layers, strict=True):
        for component, other in zip(mine, theirs, strict=True):
            assert torch.equal(component, other), "padding was written to the cache"
    assert len(paddings) >= 20 and sum(map(bool, paddings)) >= 5


def test_a_gpu_draws_the_tokens_of_a_cpu(folder: Path) -> None:
    """Chunks beside decoding rows, by the kernels of a GPU and by torch."""
    gpu, cpu = runner_of(folder), on_cpu(folder)
    plans = list(Streams(5, block_size=BLOCK, max_rows=MAX_ROWS).plans(6))
    expected = [drawn(cpu.execute(plan)) for plan in plans]
    assert [drawn(gpu.execute(plan)) for plan in plans] == expected
    assert any(len(row.tokens) > 1 for plan in plans for row in rows_of(plan))


WINDOW = {"sliding_window": 4}
EXPERTS = {"intermediate_size": 32}
HALF = {"dtype": "float16"}


@pytest.mark.parametrize(
    ("name", "kv_dtype", "changes", "options"),
    selected(
        [
            ("gemma2", "auto", WINDOW, {}),
            ("mistral", "int8", WINDOW, {}),
            ("llama", "fp8", {"num_hidden_layers": 1}, {}),
            ("deepseek_v3_dense", "fp8", {}, {}),
            ("gpt_oss", "auto", WINDOW | EXPERTS, {}),
        ],
        full=[
            ("llama", "fp8", HALF, HALF | {"isq": "q8_0"}),
            ("gpt_oss", "int8", HALF | WINDOW | EXPERTS, HALF),
            ("qwen3_moe", "fp8", HALF | {"moe_intermediate_size": 32}, HALF),
        ],
    ),
)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of padding
def test_replays_of_all_kinds_of_layers_draw_the_tokens_of_a_cpu(
    tmp_path: Path,
    name: str,
    kv_dtype: str,
    changes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Beside chunks, and longer than a window."""
    tiny_models.build(name, tmp_path, **{"num_hidden_layers": 2} | changes)
    gpu = runner_of(tmp_path, kv_dtype=kv_dtype, **options)
    cpu = on_cpu(tmp_path, kv_dtype=kv_dtype, isq=options.get("isq"))
    gpu.capture_graphs(emulated_capture, [2])
    paddings = paddings_of(gpu)
    # In half precision only the likeliest tokens are the same.
    plans = [*streams(192, 1, UNFILTERED[:1] if options else UNFILTERED).plans(4)]
    with np.errstate(over="ignore"):  # to infinity, as on a GPU
        drawn_on_gpu = drawn_late(gpu, plans)
    assert drawn_on_gpu == [drawn(cpu.execute(plan)) for plan in plans]
    assert written_slots(gpu) == written_slots(cpu)
    assert paddings == [1, 0, 1] and len(rows_of(plans[1])) == 2


def test_a_step_without_memory_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences are sent again, as the head does, and draw what they would have drawn."""
    spec = SamplerSpec(1, RankSampling(repetition_penalty=1.3, top_p=0.9, logprobs=2), 3, [5, 6])
    first = StepPlan.of(1, [SequenceStep(1, [5, 6], 0, [0], True)], [spec])
    second = StepPlan.of(2, [SequenceStep(1, [7], 2, [], True)])
    failing = runner_of(folder)
    expected = [drawn(failing.execute(plan)) for plan in (first, second)]
    again = replace(first, removed=[1])
    failing.capture_graphs(emulated_capture, graph_sizes(1))
    for owner, name in (
        (StepInputs, "_upload"),
        (gpu_sampler, "send_changes"),
        (gpu_sampler, "raw_logprobs"),
        (gpu_sampler, "to_host"),
        (gpu_sampler.sampling, "draw_tokens"),
        (DeviceDraws, "collect"),
    ):
        for plan in (again, second):  # the second one by a graph
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(owner, name, Mock(side_effect=torch.OutOfMemoryError("full")))
                failing.execute(plan)
    assert [drawn(failing.execute(plan)) for plan in (again, second)] == expected
    assert len(failing.slots._free) == len(failing.slots.host_tables) - 1


def test_a_replay_announces_every_layer(folder: Path) -> None:
    runner = runner_of(folder)
    runner.capture_graphs(emulated_capture, graph_sizes(1))
    spec = SamplerSpec(1, RankSampling(temperature=0.0), 0)
    layers: list[int] = []
    runner.execute(StepPlan.of(1, [SequenceStep(1, [5], 0, [0], True)], [spec]), layers.append)
    assert layers == list(range(len(runner.model.layers)))


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nGPU 0 has")
INVALID = RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OUT_OF_MEMORY, "OutOfMemoryError: .* 2 GiB; lower --gpu-memory-utilization or "),
        (RuntimeError("operation not permitted\n"), "RuntimeError: .* permitted; .*-eager$"),
        (KeyError("num_warps"), "KeyError: 'num_warps'; use --enforce-eager$"),
    ],
)
def test_a_capture_that_fails_ends_the_start_with_a_remedy(
    folder: Path, error: Exception, words: str, at_the_end: bool
) -> None:
    """Memory is a remedy only if it was short; torch's second error hides the first."""

    def capture(forward: object) -> Any:
        try:
            raise error
        finally:
            if at_the_end:
                raise INVALID

    runner = runner_of(folder)
    with pytest.raises(StartupError, match=rf"^the CUDA graphs .* captured: {words}"):
        runner.capture_graphs(capture, graph_sizes(1))


def pair_of(folder: Path) -> tuple[Meeting, list[ModelRunner]]:
    """The runners of two ranks, to be called in turn by ``Meeting.run``."""
    meeting = Meeting(2)
    ranks = [CapturedRank(rank, 2, meeting) for rank in range(2)]
    return meeting, [runner_of(folder, tp=rank) for rank in ranks]


def test_two_ranks_replay_what_one_draws(folder: Path) -> None:
    """Sums over the ranks are in the graph, and the second rank has the tokens of the first."""
    meeting, runners = pair_of(folder)
    paddings = [paddings_of(runner) for runner in runners]
    plans = [*streams(192, 1).plans(5)]

    def work(rank: int) -> list[dict[int, int]]:
        runners[rank].capture_graphs(emulated_capture, [2])
        return drawn_late(runners[rank], plans)

    first, second = meeting.run(work)
    alone = on_cpu(folder)
    assert first == [drawn(alone.execute(plan)) for plan in plans]
    assert not any(second)
    assert paddings[0] == paddings[1] and any(paddings[0]) and not all(paddings[0])


def test_no_rank_captures_unless_all_can(folder: Path) -> None:
    meeting, runners = pair_of(folder)
    runners[1].batched_decode = False
    refuse = Mock(side_effect=AssertionError)
    meeting.run(lambda rank: runners[rank].capture_graphs(refuse, [1]))
    assert [runner.graphs for runner in runners] == [None, None]


def test_the_memory_of_all_graphs_follows_from_the_largest(folder: Path) -> None:
    """The largest takes 100 MiB with what the others use too, each of the others 5."""
    runner, mib = runner_of(folder), 1 << 20
    capture = Mock(return_value=(lambda: None, torch.empty(0)))
    free = iter([900 * mib, 800 * mib, 795 * mib, 790 * mib])
    memory = Mock(free=lambda: next(free))
    sizes = graph_sizes(20)
    assert graph_bytes(runner, 20, memory, capture) == (100 + 5 * (len(sizes) - 1)) * mib
    assert not list(free), "three are captured"
    assert capture.call_count == 3
    assert graph_bytes(runner, 20, memory, None) == 0
    assert memory.release.called, "a capture frees what torch caches"
    memory.free = lambda: 0
    assert graph_bytes(runner, 1, memory, capture) > 0
    # Where others allocate, only what torch reserves is known to be the rank's.
    reserved = iter([300 * mib, 400 * mib, 403 * mib, 406 * mib])
    memory.reserved = lambda: next(reserved)
    expected = (100 + 3 * (len(sizes) - 1)) * mib
    assert graph_bytes(runner, 20, memory, capture, shared=True) == expected
    runner.batched_decode = False
    assert graph_bytes(runner, 20, memory, capture) == 0


def test_experts_that_wait_are_not_captured(tmp_path: Path) -> None:
    """Experts without a kernel, as of this width, are computed in turn, which a capture would
    refuse."""
    runner = runner_of(tiny_models.cached("qwen3_moe", tmp_path))
    runner.capture_graphs(emulated_capture, graph_sizes(1))
    assert runner.graphs is None
    with pytest.raises(CaptureError, match="tolist waits"), torch.inference_mode():
        DecodeGraphs(runner.model, runner.cache, runner.inputs, [1], emulated_capture)


def test_a_model_that_only_embeds_has_no_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(folder)
    monkeypatch.setattr(runner.model, "head", None)
    runner.capture_graphs(emulated_capture, graph_sizes(1))
    assert runner.graphs is None
    assert graph_bytes(runner, 20, Mock(), emulated_capture) == 0


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x + x.sum().item(), "waits for the device"),
        (lambda x: x + torch.tensor([1.0, 2.0]), "from the host"),
        (lambda x: x[x > 1], "waits for the device"),
        (lambda x: x * len(x.int().tolist()), "tolist waits for the device"),
        (lambda x: x + x.cpu(), "cpu waits for the device"),
        (lambda x: x + float(x.numpy().sum()), "numpy waits for the device"),
    ],
    ids=["a wait", "an upload", "a size", "a list", "a copy", "an array"],
)
def test_the_emulator_refuses_what_a_capture_forbids(
    forward: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=message):
        emulated_capture(lambda: forward(x))


def test_the_emulator_finds_numbers_of_the_captured_step() -> None:
    length, x = [3.0], torch.zeros(2)
    replay, out = emulated_capture(lambda: x + length[0])
    length[0] = 4.0
    replay()
    assert out.tolist() == [3.0, 3.0]
    x += 1
    replay()
    assert out.tolist() == [4.0, 4.0]
