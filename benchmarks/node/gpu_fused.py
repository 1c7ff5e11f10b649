"""Kernels between a layer's products on a GPU, frames of the handoff, and sampling.

    python -m tandem.benchmarks.node.gpu_fused [--out DIR] [--device emulation]

A fused kernel of 256 rows of 4,096 moves a few MB, so that its start counts: it is compared with a
copy of as many bytes that is launched alike. Enough inputs take turns to exceed the L2 cache, and
one graph has all launches. Frames are those of Llama-3-8B's KV. Sampling draws from 256 rows of
Qwen3's vocabulary, as a step does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tandem.benchmarks.support.gpu_figures import Figure, figure, limits_of_run, parser, run
from tandem.benchmarks.support.gpu_predictions import FRAME, FUSED, SAMPLING
from tandem.benchmarks.support.gpu_timing import (
    DEVICE,
    DTYPE,
    EMULATED,
    UNCACHED_BYTES,
    graph_seconds,
    limits,
    seconds,
)
from tandem.kernels.gpu import (
    activation,
    latent_store,
    norm,
    rope_store,
    router,
    routing,
    sampling,
)
from tandem.kernels.gpu.triton_frames import TritonFrames
from tandem.kernels.signatures import FrameCells, Routing
from tandem.shared.engine.plan import RankSampling, SamplerSpec
from tandem.shared.engine.rank.gpu_sampler import GpuSampler

EPS, BLOCK = 1e-6, 16
# Launches in a graph; its inputs stay in the L2 cache.
_LAUNCHES = 20
SAMPLINGS = {
    "greedy": RankSampling(temperature=0.0),
    "top-p": RankSampling(temperature=0.8, top_p=0.9),
    "top-k and top-p": RankSampling(temperature=0.8, top_k=50, top_p=0.9),
}
# One launch: its work, and the bytes that it reads and writes.
Launch = tuple[Callable[[], object], int]


@dataclass(frozen=True)
class FusedLoad:
    """Rows and their width; heads of attention and of latents; experts; a frame's layers and
    tokens; a vocabulary."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    latent: int
    experts: int
    layers: int
    tokens: int
    vocab: int


ON_GPU = FusedLoad(256, 4096, 32, 8, 128, 512, 128, 32, 64, 151_936)
SMALL = FusedLoad(3, 64, 4, 2, 16, 32, 8, 2, 16, 300)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of rotations."""
    turned = torch.rand(rows, 1, dim // 2, device=DEVICE)
    return turned.cos().repeat(1, 1, 2), torch.cat([-turned.sin(), turned.sin()], -1)


def slots(rows: int) -> torch.Tensor:
    return torch.randperm(rows, device=DEVICE)


# ---- one launch of each kernel -----------------------------------------------------------------


def norm_launch(load: FusedLoad) -> Launch:
    x, weight = random(load.rows, load.width), random(load.width)
    return lambda: norm.rms_norm(x, weight, EPS), 2 * x.nbytes


def add_and_norm_launch(load: FusedLoad) -> Launch:
    x, residual = random(2, load.rows, load.width)
    weight = random(load.width)
    return lambda: norm.add_rms_norm(x, residual, weight, EPS), 4 * x.nbytes


def activation_launch(load: FusedLoad) -> Launch:
    x = random(load.rows, 2 * load.width)
    return lambda: activation.act_and_mul(x, "silu"), x.nbytes * 3 // 2


def rope_launch(load: FusedLoad) -> Launch:
    qkv = random(load.rows, load.heads + 2 * load.kv_heads, load.dim)
    weight = random(load.heads + load.kv_heads, load.dim)
    cos_sin, places = angles(load.rows, load.dim), slots(load.rows)
    keys, values = random(2, load.kv_heads, load.rows, load.dim)
    store = rope_store.rope_and_cache_kv
    # Half of the angles is read, since both halves are alike.
    size = 2 * qkv.nbytes + cos_sin[0].nbytes + places.nbytes
    return lambda: store(qkv, weight, EPS, cos_sin, (keys, values), places), size


def latent_launch(load: FusedLoad) -> Launch:
    rope, nope = load.dim // 2, load.dim
    q = random(load.rows, load.heads, nope + rope)
    kv, weight = random(load.rows, load.latent + rope), random(load.latent)
    cos_sin, places = angles(load.rows, rope), slots(load.rows)
    latents = random(1, load.rows, load.latent + rope)
    store = latent_store.rope_and_cache_latent
    rotated = 2 * q.nbytes * rope // (nope + rope)
    size = 2 * kv.nbytes + rotated + cos_sin[0].nbytes + places.nbytes
    return lambda: store(q, kv, weight, EPS, cos_sin, latents, places), size


def frame_launch(load: FusedLoad, *, scatter: bool = False) -> Launch:
    """Launch of the frame kernel for all layers, with row sums; blocks lie anywhere."""
    shape = load.kv_heads, 4 * load.tokens, load.dim
    layers = [list(random(2, *shape)) for _ in range(load.layers)]
    copies = TritonFrames(layers, BLOCK)
    table = torch.randperm(shape[1] // BLOCK, device=DEVICE).int()
    cells = FrameCells(range(load.layers), range(load.kv_heads), table, 0, load.tokens)
    size = 2 * DTYPE.itemsize * load.layers * load.kv_heads * load.tokens * load.dim
    frame = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    copy = copies.scatter if scatter else copies.pack
    return lambda: copy(cells, frame), 2 * size


LAUNCHES: dict[str, Callable[[FusedLoad], Launch]] = {
    FUSED.format("norm"): norm_launch,
    FUSED.format("add and norm"): add_and_norm_launch,
    FUSED.format("activation"): activation_launch,
    FUSED.format("rope and store"): rope_launch,
    FUSED.format("latent store"): latent_launch,
    FRAME.format("packed"): frame_launch,
    FRAME.format("scattered"): partial(frame_launch, scatter=True),
}


def many(launch: Callable[[FusedLoad], Launch], load: FusedLoad) -> tuple[float, int]:
    """Seconds of a launch among as many as exceed the L2 cache, and its bytes."""
    _, size = launch(load)
    works = [launch(load)[0] for _ in range(-(-UNCACHED_BYTES // size))]
    return graph_seconds(works), size


def copy_launch(size: int) -> Launch:
    """A copy that reads and writes ``size`` bytes together."""
    source = torch.ones(size // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), size


# ---- the figures -------------------------------------------------------------------------------


def fused(load: FusedLoad) -> Iterator[Figure]:
    """The value is the share of an equal copy's speed, ``share`` that of a large copy's."""
    for name, launch in LAUNCHES.items():
        duration, size = many(launch, load)
        copied, _ = many(lambda _, size=size: copy_launch(size), load)  # type: ignore[misc]
        share = size / duration / limits().copy
        yield figure(name, copied / duration, "", share)


def routed(load: FusedLoad) -> Iterator[Figure]:
    """The choice of experts, from logits and with their product."""
    config = Routing("softmax", 8, None, normalise=True, scale=1.0)
    logits = torch.randn(load.rows, load.experts, device=DEVICE)
    half = torch.float16 if EMULATED else DTYPE
    x, weight = (random(n, load.width).to(half) for n in (load.rows, load.experts))
    choose = partial(routing.choose_experts, logits, config)
    route = partial(router.route, x, weight, None, config)
    for name, work in (("choice", choose), ("router and choice", route)):
        duration = graph_seconds([work] * _LAUNCHES)
        name = f"{name} of 8 of {load.experts} experts, {load.rows} rows"
        yield figure(name, duration * 1e6, "us")


def sampled(load: FusedLoad) -> Iterator[Figure]:
    """A draw for each row: the kernels in a graph, and a whole call from Python."""
    last = torch.zeros(load.rows, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(load.rows, dtype=torch.int32, device=DEVICE)
    logits = torch.randn(load.rows, load.vocab, device=DEVICE)
    everyone = list(range(load.rows))
    for name, params in SAMPLINGS.items():
        sampler = GpuSampler(load.vocab, last)
        for row in everyone:
            sampler.add(row, SamplerSpec(row, params, row))
        whole = seconds(partial(sampler.draw, rows, everyone, logits))
        state = (sampler._table_SC, rows, logits, last)
        draw = partial(sampling.draw_tokens, *state, filtered=name != "greedy")
        duration = graph_seconds([draw])
        share = logits.nbytes / duration / limits().copy
        yield figure(SAMPLING.format(name), duration * 1e3, "ms", share)
        yield figure(f"{SAMPLING.format(name)}, from Python", whole * 1e3, "ms")


def measure(load: FusedLoad) -> Iterator[Figure]:
    """All figures."""
    yield from limits_of_run()
    for part in (fused, sampled, routed):
        yield from part(load)


def main() -> int:
    options = parser("gpu_fused", __doc__).parse_args()
    return run("gpu_fused", options, measure(SMALL if EMULATED else ON_GPU))


if __name__ == "__main__":
    sys.exit(main())
