"""FlashAttention 3 of chunks over the paged cache, for GPUs of sm_90 on which it is installed.

Its kernels come with the package ``flash-attn-3``, and are called through torch. On other machines,
and for what it does not support, the Triton kernel for chunks is used.

Shapes as in ``chunk_attention.py``; C chunks, of which each but the last is followed by a gap.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention_metadata import AttentionConfig, AttentionParams, ChunkMetadata
from ..scaled import CachedKV
from . import trials
from .chunk_trial import largest_error
from .decode_trial import limit

log = logging.getLogger("tandem.kernels")

# What torch imports.
_PACKAGE = "flash_attn_interface"
_CAPABILITY = (9, 0)
_DTYPES = (torch.float16, torch.bfloat16)
# Heads are read in vectors of 16 bytes.
_DIM_MULTIPLE, _MAX_DIM = 8, 256


def flash_attention(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    chunks: ChunkMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
) -> None:
    """Fill the chunks' rows of ``out``. Rows between two chunks become zeros."""
    from torch.nn.attention.varlen import varlen_attn_out

    assert isinstance(keys_KND, torch.Tensor) and isinstance(values_KND, torch.Tensor)
    derived = chunks.derived.get(flash_attention)
    if derived is None:
        derived = chunks.derived[flash_attention] = ragged(chunks)
    cu_seq_q, seqused_k, block_table = derived
    varlen_attn_out(
        out_THD,
        q_THD,
        paged(keys_KND, chunks.block_size),
        paged(values_KND, chunks.block_size),
        cu_seq_q,
        None,
        # Bounds: the lengths themselves are on the device.
        max_q=len(q_THD),
        max_k=block_table.shape[1] * chunks.block_size,
        scale=params.scale,
        window_size=window_size(params),
        enable_gqa=True,
        seqused_k=seqused_k,
        block_table=block_table,
        # Several would need memory for the sums of each, and round a chunk's results differently
        # from step to step.
        num_splits=1,
    )


def ragged(chunks: ChunkMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chunks as consecutive sequences of rows, int32: where each begins and the last ends [2C],
    the tokens that it attends to [2C - 1], and its blocks [2C - 1, blocks].

    Sequences must follow each other without other rows. So between two chunks there is one of those
    rows, with no tokens.
    """
    first, rows, table, start = chunks.chunks.unbind(1)
    cu_seq_q = torch.stack([first, first + rows], dim=1).flatten()
    seqused_k = torch.stack([start + rows, torch.zeros_like(rows)], dim=1).flatten()[:-1]
    tables = torch.stack([table, table], dim=1).flatten()[:-1]
    return cu_seq_q, seqused_k, chunks.tables.index_select(0, tables)


def paged(cache_KND: torch.Tensor, block_size: int) -> torch.Tensor:
    """A view of the cache, [blocks, tokens of a block, K, D]."""
    return cache_KND.unflatten(1, (-1, block_size)).permute(1, 2, 0, 3)


def window_size(params: AttentionParams) -> tuple[int, int]:
    """The tokens that a row sees before and after itself; -1 for all."""
    others = -1 if params.window is None else params.window - 1
    return others, 0 if params.causal else others


@cache
def works(config: AttentionConfig) -> bool:
    """True if FlashAttention 3 is here, supports this kind of attention, and is correct. Logs why
    not, unless it does not support it."""
    if unsupported(config) or not available(config.device):
        return False
    return trials.passes(
        lambda: trials.too_far(_largest_error(config), limit(config)),
        "Triton attends for chunks, because FlashAttention 3 cannot be used here",
    )


def unsupported(config: AttentionConfig) -> str:
    """What FlashAttention 3, as torch calls it, does not support; empty if nothing."""
    params, dim = config.params, config.dim
    if config.dtype != config.cache_dtype or config.dtype not in _DTYPES:
        return f"queries in {config.dtype} over a cache in {config.cache_dtype}"
    if dim % _DIM_MULTIPLE or dim > _MAX_DIM:
        return f"heads of {dim}"
    if params.soft_cap is not None or params.sinks:
        return "soft caps and sinks"
    return ""


@cache
def available(device: torch.device) -> bool:
    """True if FlashAttention 3 can be called on this device; torch's own attention uses it from
    then on, too. Logs why not where it could be installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    if importlib.util.find_spec(_PACKAGE) is None:
        log.info(
            "Triton attends for chunks, because flash-attn-3 is not installed (docs/kernels.md)"
        )
        return False
    return trials.passes(
        _activation_problem,
        "Triton attends for chunks, because torch cannot use FlashAttention 3",
    )


def _activation_problem() -> str:
    from torch.nn.attention import varlen

    attend = getattr(varlen, "varlen_attn_out", None)
    if attend is None or "block_table" not in inspect.signature(attend).parameters:
        return (
            f"torch {torch.__version__} has no attention over blocks; install torch 2.12 or later"
        )
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return ""


def _largest_error(config: AttentionConfig) -> float:
    """The largest difference from the reference, which must not be computed by the same kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return largest_error(config, flash_attention)
