"""Attention over the paged cache in plain torch, one sequence at a time. Shapes as in
``operators.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from ..attention_metadata import AttentionParams, SequenceMetadata
from ..fp8 import FP8, castable
from ..scaled import INT8, CachedKV, ScaledKV, TensorScaledKV, dequantize

# Rows of a chunk with earlier context are computed this many at a time, which limits the mask and
# the products that it hides.
_TILE = 512


def paged_attention(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    sequences: Sequence[SequenceMetadata],
    params: AttentionParams,
    out: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    biases: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Each row attends to its own sequence up to itself; [T, H, D] in q's dtype. ``biases`` are
    added to the scores [H, rows, tokens] of each sequence, in attention that is not causal.

    If keys and values are one tensor, it is read once. The rows of ``sequences`` are written to
    ``out``, by default a new tensor.

    Products are in the cache's dtype, or in q's if the cache has one byte a value; but never in
    fp16 on a CPU, where torch takes two to five times as long as in fp32.
    """
    out = torch.empty_like(q_THD) if out is None else out
    dtype = q_THD.dtype if keys_KND.dtype in (FP8, INT8) else keys_KND.dtype
    narrow = dtype == torch.float16 and keys_KND.device.type == "cpu"
    q_THD = q_THD.to(torch.float32 if narrow else dtype)
    for number, sequence in enumerate(sequences):
        if not params.causal:
            k, v = _read_both(sequence, keys_KND, values_KND, 0, sequence.end, q_THD.dtype)
            mask = (
                sequence.mask_around(params.window, k.device)
                if biases is None
                else biases[number].to(q_THD.dtype)
            )
            out[sequence.rows] = _sdpa(q_THD[sequence.rows], k, v, mask, params.scale, causal=False)
            continue
        attend = _decode if sequence.num_rows == 1 else _chunk
        attend(q_THD, keys_KND, values_KND, sequence, params, out, sinks_H)
    return out


def read_cache(
    sequence: SequenceMetadata, cache_KND: CachedKV, first: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Tokens first to end of the cache, [K, end - first, D], in ``dtype``."""
    if isinstance(cache_KND, ScaledKV):
        values, scales = (
            sequence.gather(each, first, end) for each in (cache_KND.values, cache_KND.scales)
        )
        return dequantize(values, scales).to(dtype)
    if isinstance(cache_KND, TensorScaledKV):
        return cache_KND.decoded(sequence.gather(cache_KND.values, first, end)).to(dtype)
    return castable(sequence.gather(cache_KND, first, end), dtype).to(dtype)


def _read_both(
    sequence: SequenceMetadata,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    first: int,
    end: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    k = read_cache(sequence, keys_KND, first, end, dtype)
    return k, k if values_KND is keys_KND else read_cache(sequence, values_KND, first, end, dtype)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _decode(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    sequence: SequenceMetadata,
    params: AttentionParams,
    out: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> None:
    """Attend with the G query heads of a KV head as G rows, so that K and V are not repeated."""
    heads, dim = keys_KND.shape[0], keys_KND.shape[2]
    first = _first_visible(sequence.start, params.window)
    k, v = _read_both(sequence, keys_KND, values_KND, first, sequence.end, q_THD.dtype)
    row = sequence.rows.start
    if _is_composed(params):
        out[row] = _compose(q_THD[row, None], k, v, None, params, sinks_H)[0]
        return
    q_KGD = q_THD[row].view(heads, -1, dim)
    attended = F.scaled_dot_product_attention(q_KGD[None], k[None], v[None], scale=params.scale)
    out[row] = attended.reshape(-1, dim)


def _chunk(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    sequence: SequenceMetadata,
    params: AttentionParams,
    out: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> None:
    rows, start, window = sequence.rows, sequence.start, params.window
    unmasked = not _is_composed(params) and (window is None or sequence.end <= window)
    if unmasked:
        k, v = _read_both(sequence, keys_KND, values_KND, 0, sequence.end, q_THD.dtype)
        if start == 0:
            out[rows] = _sdpa(q_THD[rows], k, v, None, params.scale)
            return
        if _flash_takes(q_THD[rows], k):
            out[rows] = _last_rows(q_THD[rows], k, v, params.scale)
            return
    for offset in range(0, sequence.num_rows, _TILE):
        tile = slice(rows.start + offset, min(rows.start + offset + _TILE, rows.stop))
        position, count = start + offset, tile.stop - tile.start
        first = _first_visible(position, window)
        end = position + count
        k, v = _read_both(sequence, keys_KND, values_KND, first, end, q_THD.dtype)
        mask = sequence.mask(position, count, first, window, q_THD.device)
        if _is_composed(params):
            out[tile] = _compose(q_THD[tile], k, v, mask, params, sinks_H)
        else:
            out[tile] = _sdpa(q_THD[tile], k, v, mask, params.scale)


def _is_composed(params: AttentionParams) -> bool:
    """True if torch has no fused kernel for this attention."""
    return params.soft_cap is not None or params.sinks


def _compose(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLD: torch.Tensor,
    mask: torch.Tensor | None,
    params: AttentionParams,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks: scores are materialised."""
    rows, dim = q_THD.shape[0], q_THD.shape[-1]
    q_KGTD = q_THD.view(rows, k_KLD.shape[0], -1, dim).permute(1, 2, 0, 3)
    scores = torch.matmul(q_KGTD, k_KLD[:, None].mT).float() * params.scale
    if params.soft_cap is not None:
        scores = torch.tanh(scores / params.soft_cap) * params.soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if params.sinks:
        assert sinks_H is not None
        sinks = sinks_H.float().view(scores.shape[0], -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    attended = torch.matmul(shares.to(v_KLD.dtype), v_KLD[:, None])
    return attended.flatten(0, 1).transpose(0, 1)


def _sdpa(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Attention with a mask; without one, ``causal`` or to all tokens."""
    grouped = q_THD.shape[1] != k_KLD.shape[0]
    if grouped and q_THD.device.type != "cpu" and not _flash_groups(q_THD, mask):
        return _sdpa_expanded(q_THD, k_KLD, v_KLD, mask, scale, causal=causal)
    attended = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_KLD[None],
        v_KLD[None],
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=grouped,
        scale=scale,
    )
    return attended[0].transpose(0, 1)


def _flash_groups(q_THD: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """True if a GPU has a kernel in which query heads share a KV head. Otherwise torch would
    materialise the scores of every row and token: gigabytes for a chunk of a long prompt."""
    return mask is None and q_THD.dtype != torch.float32 and q_THD.shape[-1] <= 256


def _sdpa_expanded(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool,
) -> torch.Tensor:
    """Make each KV head a batch of its own, expanded to its query heads without a copy."""
    rows, heads, dim = q_THD.shape
    kv_heads, tokens = k_KLD.shape[:2]
    q_KGTD = q_THD.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3)
    expanded = (kv_heads, heads // kv_heads, tokens, -1)
    attended = F.scaled_dot_product_attention(
        q_KGTD,
        k_KLD[:, None].expand(expanded),
        v_KLD[:, None].expand(expanded),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _flash_takes(q_THD: torch.Tensor, k_KLD: torch.Tensor) -> bool:
    """True if a GPU has a kernel without a mask for a context longer than the rows."""
    if q_THD.device.type == "cpu":
        return False
    q, k = q_THD.transpose(0, 1)[None], k_KLD[None]
    return can_use_flash_attention(SDPAParams(q, k, k, None, 0.0, False, True))


def _last_rows(
    q_THD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of the rows of the last tokens of a sequence."""
    # Imported here because it loads torch's compiler, which takes as long as the rest of torch.
    from torch.nn.attention.bias import causal_lower_right

    attended = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_KLD[None],
        v_KLD[None],
        attn_mask=causal_lower_right(q_THD.shape[0], k_KLD.shape[1]),
        enable_gqa=q_THD.shape[1] != k_KLD.shape[0],
        scale=scale,
    )
    return attended[0].transpose(0, 1)
