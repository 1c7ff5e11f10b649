"""The caches that the benchmarks of the handoff move KV between."""

from __future__ import annotations

import torch

from tandem.kernels.cpu import jit
from tandem.shared.kv.cache import KVCache
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec

HEADS, DIM, BLOCK = 8, 128, 16
CELL = 2 * HEADS * DIM * torch.bfloat16.itemsize  # bytes of a token and layer


def model_of(layers: int, tokens: int) -> DecoderSpec:
    """The model fields that a cache needs."""
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM),
        mlp=DenseSpec(intermediate=8),
    )
    return DecoderSpec(
        vocab_size=10,
        hidden_size=8,
        layers=(layer,) * layers,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_position=tokens,
    )


def host_cache(layers: int, tokens: int) -> tuple[KVCache, None]:
    """A cache in a CPU's memory, whose pages are there, as ranks with ``--cpu-kernels compiled``
    have it. The process computes on one thread."""
    torch.set_num_threads(1)
    jit.prepare()
    from tandem.kernels.cpu.operators import CompiledOperators

    cache = KVCache(
        model_of(layers, tokens),
        num_blocks=tokens // BLOCK,
        block_size=BLOCK,
        dtype=torch.bfloat16,
        operators=CompiledOperators(),
    )
    for components in cache.layers:
        for component in components:
            component.fill_(1.0)
    return cache, None
