"""Planning from the devices that ranks report."""

from __future__ import annotations

from tandem.shared.kv.planning import CPU, CUDA, NodeDevice, RankDevice, RankMemory

GIB = 1 << 30


def node(kind: str, *, ranks: int = 1, nodes: int = 1, total: int = 80 * GIB) -> NodeDevice:
    return NodeDevice((RankDevice(kind, "a device", total, total),) * ranks, nodes)


def test_a_gpu_computes_more_tokens_a_step_and_gives_more_to_the_cache() -> None:
    gpu, cpu = node(CUDA), node(CPU)
    assert (gpu.on_cpu, gpu.token_budget, gpu.cache_fraction) == (False, 8192, 0.9)
    assert (cpu.on_cpu, cpu.token_budget, cpu.cache_fraction) == (True, 512, 0.3)


def test_a_node_alone_on_its_gpu_may_have_what_is_free() -> None:
    assert node(CUDA).cache_bytes([RankMemory(60 * GIB, 16 * GIB, 1)]) == 60 * GIB


def test_the_rank_with_the_least_memory_decides() -> None:
    memory = [RankMemory(free * GIB, 16 * GIB, 1) for free in (60, 40)]
    assert node(CUDA, ranks=2).cache_bytes(memory) == 40 * GIB


def test_nodes_on_one_gpu_plan_alike_however_far_the_others_are() -> None:
    """The first one sees no cache yet, the last one those of all others."""
    gpu, weights = node(CUDA, nodes=2), 16 * GIB
    first = gpu.cache_bytes([RankMemory(63 * GIB, weights, 1)])
    cache = int(first * gpu.cache_fraction)
    last = gpu.cache_bytes([RankMemory(80 * GIB - GIB - 2 * weights - cache, weights, 1)])
    assert first == last == 40 * GIB - weights - 7 * GIB // 2  # a context, and room for a step


def test_ranks_that_talk_to_each_other_leave_room_for_nccl() -> None:
    """With one rank of the node as with several, its own share of the device is what counts."""
    memory = RankMemory(63 * GIB, 16 * GIB, 1)
    alone = node(CUDA, nodes=2).cache_bytes([memory])
    split = node(CUDA, ranks=2, nodes=2).cache_bytes([memory] * 2)
    assert alone - split == GIB


def test_a_share_of_the_whole_gpu_holds_weights_steps_and_cache() -> None:
    """The share is this node's own, whatever other processes are on the GPU."""
    memory = [RankMemory(60 * GIB, 16 * GIB, 1)]
    for nodes in (1, 2):
        cache = node(CUDA, nodes=nodes).cache_bytes(memory, 0.5)
        assert cache == 40 * GIB - 16 * GIB - 7 * GIB // 2  # a context, and room for a step
    assert node(CUDA).cache_bytes([RankMemory(3 * GIB, 16 * GIB, 1)], 0.5) == 3 * GIB
    assert node(CUDA).cache_bytes(memory, 0.1) == 0


def test_memory_that_is_not_free_is_not_planned_with() -> None:
    gpu = node(CUDA, nodes=2)
    assert gpu.cache_bytes([RankMemory(2 * GIB, 16 * GIB, 1)]) == 2 * GIB
    assert gpu.cache_bytes([RankMemory(2 * GIB, 50 * GIB, 1)]) == 0


def test_on_a_cpu_ranks_and_nodes_draw_on_one_memory() -> None:
    memory = [RankMemory(24 * GIB, 0, 1)] * 2
    assert node(CPU, ranks=2, nodes=3).cache_bytes(memory) == 4 * GIB


def test_the_caches_of_all_nodes_leave_a_cpu_memory_for_the_rest() -> None:
    fractions = [nodes * node(CPU, nodes=nodes).cache_fraction / nodes for nodes in (1, 2, 3, 64)]
    assert fractions == [0.3, 0.6, 0.6, 0.6]


def test_devices_are_described_in_gib() -> None:
    device = RankDevice(CUDA, "GPU 0 (NVIDIA H100 80GB HBM3)", 79 * GIB + GIB // 10, 78 * GIB)
    assert str(device) == "GPU 0 (NVIDIA H100 80GB HBM3): 78.0 of 79.1 GiB are free"
