"""Planning from the devices that ranks report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tandem.shared.config import EngineConfig
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.kv.planning import (
    CPU,
    CUDA,
    NodeDevice,
    RankDevice,
    RankMemory,
    check_gpu_memory,
    library_bytes,
)

GIB = 1 << 30


def node(kind: str, *, ranks: int = 1, nodes: int = 1, total: int = 80 * GIB) -> NodeDevice:
    return NodeDevice((RankDevice(kind, "a device", total, total),) * ranks, nodes)


def test_a_gpu_computes_more_tokens_and_sequences_a_step_and_gives_more_to_the_cache() -> None:
    gpu, cpu = node(CUDA), node(CPU)
    assert (gpu.on_cpu, gpu.token_budget, gpu.cache_fraction) == (False, 8192, 1.0)
    assert (cpu.on_cpu, cpu.token_budget, cpu.cache_fraction) == (True, 512, 0.3)
    assert (gpu.max_num_seqs, cpu.max_num_seqs) == (256, 64)


def test_the_share_of_a_gpu_is_that_of_the_option_or_what_nodes_leave_to_each_other() -> None:
    gpu, shared = node(CUDA), node(CUDA, nodes=3)
    assert (gpu.gpu_share(EngineConfig()), shared.gpu_share(EngineConfig())) == (0.9, 0.9 / 3)
    assert shared.gpu_share(EngineConfig(gpu_memory_utilization=0.6)) == 0.6
    # Whoever sizes the cache may have everything.
    for sized in (EngineConfig(kv_fraction=0.5), EngineConfig(num_blocks=9)):
        assert shared.gpu_share(sized) == 1 / 3


@pytest.mark.parametrize("total", [24, 80, 141])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_weights_steps_graphs_and_cache_stay_within_the_share(total: int, share: float) -> None:
    gpu = node(CUDA, total=total * GIB)
    for used, step, graphs in ((1, 1, 0), (5, 3, 1), (16, 2, 1), (60, 4, 1), (200, 1, 0)):
        memory = RankMemory((total - used) * GIB, used * GIB, 1, step * GIB, graphs * GIB)
        cache = gpu.cache_bytes([memory], share)
        assert cache == max(0, int(total * GIB * share) - (used + step + graphs) * GIB)


def test_what_others_use_is_not_planned_with() -> None:
    """A share is the node's own, but the cache and a step must fit what is free."""
    memory = RankMemory(5 * GIB, 16 * GIB, 1, 2 * GIB, GIB)
    assert node(CUDA).cache_bytes([memory]) == 2 * GIB
    assert node(CUDA).cache_bytes([replace(memory, free_bytes=2 * GIB)]) == 0


def test_the_rank_with_the_least_memory_decides() -> None:
    memory = [RankMemory(free * GIB, 16 * GIB, 1) for free in (60, 40)]
    assert node(CUDA, ranks=2).cache_bytes(memory) == 40 * GIB


def test_the_rank_with_the_largest_step_decides() -> None:
    """Rank 0 samples, so that it usually takes most."""
    memory = [RankMemory(60 * GIB, 16 * GIB, 1, step * GIB) for step in (5, 2)]
    for ranks in (memory, memory[::-1]):
        assert node(CUDA, ranks=2).cache_bytes(ranks) == (72 - 16 - 5) * GIB


def test_nodes_on_one_gpu_plan_alike_however_far_the_others_are() -> None:
    """The first one sees no cache yet, the last one those of all others."""
    gpu, used, step = node(CUDA, nodes=2), 16 * GIB, 2 * GIB
    share = gpu.gpu_share(EngineConfig())
    first = gpu.cache_bytes([RankMemory(63 * GIB, used, 1, step)], share)
    last = gpu.cache_bytes([RankMemory(80 * GIB - 2 * used - first, used, 1, step)], share)
    assert first == last == 36 * GIB - used - step


def test_ranks_that_talk_to_each_other_leave_room_for_nccl() -> None:
    assert library_bytes(2) - library_bytes(1) == GIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"gpu_memory_utilization": 0.25}, None),
        (
            {"gpu_memory_utilization": 0.2},
            r"^--gpu-memory-utilization 0\.2 is 16\.00 GiB of a device, but the weights and CUDA "
            r"take 16\.00 GiB, a step 2\.00 GiB, CUDA graphs 0\.50 GiB, and the smallest KV cache "
            r"0\.02 GiB; use 0\.24 or more, or lower --max-num-batched-tokens, .*-len$",
        ),
        ({"gpu_memory_utilization": 0.0}, "utilization 0 is 0.00 GiB .* use 0.24 or more"),
        ({"max_model_len": 60000}, "KV cache 58.59 GiB; use 0.97 or more"),
        ({"max_model_len": 70000}, "68.36 GiB; split the model over more GPUs"),
        ({"kv_fraction": 0.1}, None),
    ],
)
def test_a_share_that_is_too_small_is_told_with_one_that_works(
    options: dict[str, Any], message: str | None
) -> None:
    config, gpu = EngineConfig(**options), node(CUDA)
    memory = [RankMemory(63 * GIB, 16 * GIB, 16 << 20, 2 * GIB, GIB // 2)]
    if message is None:
        check_gpu_memory(config, gpu, memory)
        return
    with pytest.raises(StartupError, match=message) as raised:
        check_gpu_memory(config, gpu, memory)
    if works := re.search(r"use (\S+) or more", str(raised.value)):
        enough = replace(config, gpu_memory_utilization=float(works[1]))
        check_gpu_memory(enough, gpu, memory)
        assert gpu.cache_bytes(memory, gpu.gpu_share(enough)) >= 16 << 20


def test_a_gpu_that_others_have_filled_is_told() -> None:
    memory = RankMemory(2 * GIB, 16 * GIB, 16 << 20, 2 * GIB)
    with pytest.raises(
        StartupError, match=r"only 2\.00 GiB of a device are free .* stop what else"
    ):
        check_gpu_memory(EngineConfig(), node(CUDA), [memory])
    check_gpu_memory(EngineConfig(), node(CPU), [memory])
    with pytest.raises(StartupError, match=r"fewer nodes .*--nodes-per-device is 3"):
        check_gpu_memory(EngineConfig(), node(CUDA, nodes=3), [replace(memory, step_bytes=GIB * 9)])


def test_more_than_a_whole_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--gpu-memory-utilization 1\.1 "):
        EngineConfig(gpu_memory_utilization=1.1)


def test_on_a_cpu_ranks_and_nodes_draw_on_one_memory() -> None:
    memory = [RankMemory(24 * GIB, 0, 1)] * 2
    assert node(CPU, ranks=2, nodes=3).cache_bytes(memory) == 4 * GIB


def test_the_caches_of_all_nodes_leave_a_cpu_memory_for_the_rest() -> None:
    fractions = [nodes * node(CPU, nodes=nodes).cache_fraction / nodes for nodes in (1, 2, 3, 64)]
    assert fractions == [0.3, 0.6, 0.6, 0.6]


def test_devices_are_described_in_gib() -> None:
    device = RankDevice(CUDA, "GPU 0 (NVIDIA H100 80GB HBM3)", 79 * GIB + GIB // 10, 78 * GIB)
    assert str(device) == "GPU 0 (NVIDIA H100 80GB HBM3): 78.0 of 79.1 GiB are free"
