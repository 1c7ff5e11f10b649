"""Trial of the Triton kernel for chunks, before it is used; see ``decode_trial.py``."""

from __future__ import annotations

from functools import cache

import torch

from ..attention_metadata import (
    AttentionConfig,
    SequenceMetadata,
    chunk_metadata,
)
from ..batched_decode import ChunkKernel
from ..reference.attention import paged_attention
from ..scaled import CachedKV
from . import chunk_attention, trials
from .decode_trial import cached_as, limit

# The position of the first row of each chunk, and its rows.
CHUNKS = ((0, 37), (300, 3), (150, 70))


@cache
def works(config: AttentionConfig) -> bool:
    """True if the kernel compiles and is correct on this GPU. Logs why not."""
    if config.device.type == "cpu":
        return False
    return trials.passes(
        lambda: trials.too_far(largest_error(config), limit(config)),
        "torch attends for chunks one by one, because Triton cannot be used here",
    )


def largest_error(config: AttentionConfig, kernel: ChunkKernel[CachedKV] | None = None) -> float:
    """The largest difference of a kernel, the Triton one or one without sinks, from the reference,
    in relation to the row's largest result, if that is below one.

    Other rows lie between the chunks.
    """
    size, device, random = config.block_size, config.device, torch.Generator().manual_seed(0)
    blocks = list(range(-(-max(start + rows for start, rows in CHUNKS) // size)))[::-1]
    cached = (2, config.kv_heads, len(blocks) * size, config.dim)
    keys, values = (
        cached_as(each.to(device), config.cache_dtype)
        for each in torch.randn(cached, generator=random)
    )
    sequences, end = list[SequenceMetadata](), 0
    for start, rows in CHUNKS:
        sequences.append(SequenceMetadata(slice(end + 1, end + 1 + rows), start, blocks, size))
        end += 1 + rows
    q_THD = torch.randn(end, config.heads, config.dim, generator=random).to(device, config.dtype)
    sinks_H = 3 * torch.randn(config.heads, generator=random) if config.params.sinks else None
    sinks_H = None if sinks_H is None else sinks_H.to(device)
    chunks = chunk_metadata(sequences, device)
    assert chunks is not None
    actual = torch.full_like(q_THD, torch.nan)
    arguments = q_THD, keys, values, chunks, config.params, actual
    if kernel is None:
        chunk_attention.chunk_attention(*arguments, sinks_H)
    else:
        kernel(*arguments)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = paged_attention(q_THD, keys, values, sequences, config.params, sinks_H=sinks_H)
    of_chunks = torch.cat([torch.arange(each.rows.start, each.rows.stop) for each in sequences])
    of_chunks = of_chunks.to(device)
    return trials.row_error(actual[of_chunks], expected[of_chunks])
