"""Trial of the Triton decode kernel, before it is used.

Triton compiles kernels on the machine that runs them, and needs a C compiler and a folder from
which libraries can be loaded. The compiled code depends only on the ``AttentionConfig``, so no step
compiles again. On torch's ``meta`` device kernels are launched, for tests to record, but compute
nothing.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from ..attention_metadata import (
    AttentionConfig,
    AttentionMetadata,
    LatentConfig,
    SequenceMetadata,
    decode_metadata,
)
from ..batched_decode import batched_attention
from ..reference.attention import paged_attention
from ..scaled import INT8, CachedKV, ScaledKV, quantize
from . import paged_decode, trials


@cache
def works(config: AttentionConfig, *, required: bool = False) -> bool:
    """True if the decode kernel compiles and is correct on this device. Logs why not.

    Raises ``KernelUnavailableError`` if it is ``required`` on a GPU but does not work.
    """
    if config.device.type == "cpu":
        return False
    return trials.passes(
        lambda: trials.too_far(largest_error(config), limit(config)),
        "sequences decode one by one, because Triton cannot be used here",
        required=required,
    )


def limit(config: AttentionConfig | LatentConfig) -> float:
    """The allowed rounding error of results of magnitude 1."""
    return 1e-3 if config.dtype == config.cache_dtype == torch.float32 else 0.05


def largest_error(config: AttentionConfig) -> float:
    """The largest difference from the reference, for sequences with one split and with several, in
    relation to the row's largest result, if that is below one: means of many values are small."""
    lengths = (1, 19, 1100)
    size, device = config.block_size, config.device
    blocks = list(range(-(-max(lengths) // size)))[::-1]
    random = torch.Generator().manual_seed(0)
    cached = (2, config.kv_heads, len(blocks) * size, config.dim)
    keys, values = (
        cached_as(each.to(device), config.cache_dtype)
        for each in torch.randn(cached, generator=random)
    )
    q_shape = (len(lengths), config.heads, config.dim)
    q_THD = torch.randn(q_shape, generator=random).to(device, config.dtype)
    sequences = [
        SequenceMetadata(slice(row, row + 1), length - 1, blocks, size)
        for row, length in enumerate(lengths)
    ]
    slots = torch.empty(0, dtype=torch.int64, device=device)  # nothing is written
    metadata = AttentionMetadata(sequences, slots, decode_metadata(sequences, device))
    sinks_H = 3 * torch.randn(config.heads, generator=random) if config.params.sinks else None
    sinks_H = None if sinks_H is None else sinks_H.to(device)
    decode = partial(paged_decode.paged_decode, sinks_H=sinks_H)
    # Twice, as two layers of a step: the second finds the counters as the first leaves them.
    for _ in range(2):
        actual = batched_attention(
            q_THD, keys, values, metadata, config.params, decode, paged_attention
        )
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = paged_attention(q_THD, keys, values, sequences, config.params, sinks_H=sinks_H)
    return trials.row_error(actual, expected)


def cached_as(x: torch.Tensor, dtype: torch.dtype) -> CachedKV:
    """Keys or values as a cache of this dtype has them."""
    return ScaledKV(*quantize(x)) if dtype == INT8 else x.to(dtype)
