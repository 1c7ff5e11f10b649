"""The kernels in plain torch: the oracle of their tests, and what runs on CPUs.

Shapes: T rows of a step, C hidden width, H query heads, K KV heads, G = H / K query heads of a KV
head, R = H + K heads that are turned, X = H + 2 K heads of a row, D head dimension, N slots of the
cache, L tokens of context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from ..fp8 import FP8, castable, indexable

# Rows of a chunk that attend to earlier context are taken this many at a time, so that the mask
# and the products spent on what it hides stay small.
_TILE = 512


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32 inside."""
    if _composed(x):
        return _compose_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of both, normed, and the sum itself."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def head_rms_norm(x_THD: torch.Tensor, weight_HD: torch.Tensor, eps: float) -> torch.Tensor:
    """Each head normed by itself, with gains of its own."""
    if _composed(x_THD):
        return _compose_norm(x_THD, weight_HD, eps)
    return F.rms_norm(x_THD, (x_THD.shape[-1],), None, eps) * weight_HD


def _composed(x: torch.Tensor) -> bool:
    """Whether torch would make its norm of eight operators, most of them as large as x: it has a
    kernel on GPUs only. On a CPU half of them do."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def _compose_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * weight / sqrt(mean(x^2) + eps)``."""
    scale, floor = _norm_constants(x.shape[-1], eps)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * weight).div_(size.mul_(scale).hypot_(floor))


@cache
def _norm_constants(size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As tensors: torch takes longer to make one of a number than to multiply by it."""
    return torch.tensor(size**-0.5), torch.tensor(eps**0.5)


def rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate the first half of each head against the second.

    cos and sin are fp32 and as wide as a head, both halves alike but for sin's sign: minus in the
    first. So the products are taken in fp32 and rounded once.
    """
    wide = x_THD.float()
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * cos_T1D).addcmul_(swapped, sin_T1D).to(x_THD.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [T, gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def turn_and_cache(
    qkv_TXD: torch.Tensor,
    gains_RD: torch.Tensor | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, ...],
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Of each row's query, key and value heads: queries and keys are normed, if there are gains for
    them, and turned by cos and sin; keys and values go to the cache. Returns the queries [T, H, D].
    """
    keys, values = cache
    kv_heads = keys.shape[0]
    turned, v = qkv_TXD.split([qkv_TXD.shape[1] - kv_heads, kv_heads], dim=1)
    if gains_RD is not None:
        turned = head_rms_norm(turned, gains_RD, eps)
    turned = rotary(turned, *angles)
    q, k = turned.split([turned.shape[1] - kv_heads, kv_heads], dim=1)
    write_kv(keys, values, slots_T, k, v)
    return q


@dataclass(slots=True)
class SequenceContext:
    """Where the tokens of one sequence lie in the cache, and which of its rows a step computes.

    ``rows`` are the flattened rows of the step, ``start`` the position of the first one. Token t
    is in slot ``blocks[t // block_size] * block_size + t % block_size``. The context is all
    tokens up to the last row's. Index tensors and masks are built when first needed and serve all
    layers of the step.
    """

    rows: slice
    start: int
    blocks: list[int]
    block_size: int
    consecutive: bool = field(init=False)
    _indices: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)
    _masks: dict[tuple[int, ...], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        used = self.blocks[: -(-self.end // self.block_size)]
        self.blocks = used
        self.consecutive = used == list(range(used[0], used[0] + len(used)))

    @property
    def count(self) -> int:
        """Rows of this sequence."""
        return self.rows.stop - self.rows.start

    @property
    def end(self) -> int:
        """Tokens of context, with those of this step."""
        return self.start + self.rows.stop - self.rows.start

    def gather(self, cache_KND: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Tokens first to end, [K, end - first, D]: a view if the blocks are consecutive."""
        if self.consecutive:
            base = self.blocks[0] * self.block_size
            return cache_KND[:, base + first : base + end]
        low, high = first // self.block_size, -(-end // self.block_size)
        index = self._indices.get((low, high))
        if index is None:
            index = torch.tensor(self.blocks[low:high], device=cache_KND.device)
            self._indices[low, high] = index
        heads, _, dim = cache_KND.shape
        paged = indexable(cache_KND).view(heads, -1, self.block_size * dim)
        blocks = paged.index_select(1, index).view(cache_KND.dtype)
        offset = low * self.block_size
        return blocks.view(heads, -1, dim)[:, first - offset : end - offset]

    def mask(
        self, start: int, rows: int, first: int, window: int | None, device: torch.device
    ) -> torch.Tensor:
        """Which of the tokens from ``first`` on the rows from position ``start`` on may see."""
        key = (start, rows, first, window or 0)
        mask = self._masks.get(key)
        if mask is None:
            query = torch.arange(start, start + rows, device=device)[:, None]
            token = torch.arange(first, start + rows, device=device)
            mask = token <= query
            if window is not None:
                mask &= token > query - window
            self._masks[key] = mask
        return mask


def write_kv(
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    slots_T: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
) -> None:
    """Put the step's K and V into their slots, in the cache's dtype."""
    write(keys_KND, slots_T, k_TKD)
    write(values_KND, slots_T, v_TKD)


def write(cached_KND: torch.Tensor, slots_T: torch.Tensor, x_TKD: torch.Tensor) -> None:
    """Put one side of what the step caches into its slots, in the cache's dtype."""
    dtype = cached_KND.dtype
    x_KTD = castable(x_TKD, dtype).to(dtype).transpose(0, 1)
    indexable(cached_KND).index_copy_(1, slots_T, indexable(x_KTD))


def paged_attention(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    contexts: Sequence[SequenceContext],
    window: int | None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row attends to its own sequence, up to itself; [T, H, D] in q's dtype.

    ``scale`` is 1 / sqrt(D) by default. Keys may be their own values: one tensor, read once. Of
    ``out``, if it is given, the contexts' rows are filled.

    The products are taken in the cache's dtype, or in q's where the cache is fp8; but not in fp16
    on a CPU, where torch takes two to five times as long as in fp32.
    """
    out = torch.empty_like(q_THD) if out is None else out
    dtype = q_THD.dtype if keys_KND.dtype == FP8 else keys_KND.dtype
    narrow = dtype == torch.float16 and keys_KND.device.type == "cpu"
    q_THD = q_THD.to(torch.float32 if narrow else dtype)
    for context in contexts:
        attend = _decode if context.count == 1 else _chunk
        attend(q_THD, keys_KND, values_KND, context, window, scale, out)
    return out


def _read(
    context: SequenceContext, cache_KND: torch.Tensor, first: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Tokens first to end of the cache, [K, end - first, D], in the type of the products."""
    return castable(context.gather(cache_KND, first, end), dtype).to(dtype)


def _read_both(
    context: SequenceContext,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    first: int,
    end: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    k = _read(context, keys_KND, first, end, dtype)
    return k, k if values_KND is keys_KND else _read(context, values_KND, first, end, dtype)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _decode(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    context: SequenceContext,
    window: int | None,
    scale: float | None,
    out: torch.Tensor,
) -> None:
    """The G query heads of a KV head are taken as G rows, so that K and V are not repeated."""
    heads, dim = keys_KND.shape[0], keys_KND.shape[2]
    first = _first_visible(context.start, window)
    k, v = _read_both(context, keys_KND, values_KND, first, context.end, q_THD.dtype)
    row = context.rows.start
    q_KGD = q_THD[row].view(heads, -1, dim)
    attended = F.scaled_dot_product_attention(q_KGD[None], k[None], v[None], scale=scale)
    out[row] = attended.view(-1, dim)


def _chunk(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    context: SequenceContext,
    window: int | None,
    scale: float | None,
    out: torch.Tensor,
) -> None:
    rows, start = context.rows, context.start
    if window is None or context.end <= window:
        k, v = _read_both(context, keys_KND, values_KND, 0, context.end, q_THD.dtype)
        if start == 0:
            out[rows] = _sdpa(q_THD[rows], k, v, None, scale)
            return
        if _flash_takes(q_THD[rows], k):
            out[rows] = _last_rows(q_THD[rows], k, v, scale)
            return
    for offset in range(0, context.count, _TILE):
        tile = slice(rows.start + offset, min(rows.start + offset + _TILE, rows.stop))
        position, count = start + offset, tile.stop - tile.start
        first = _first_visible(position, window)
        end = position + count
        k, v = _read_both(context, keys_KND, values_KND, first, end, q_THD.dtype)
        mask = context.mask(position, count, first, window, q_THD.device)
        out[tile] = _sdpa(q_THD[tile], k, v, mask, scale)


def _sdpa(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    grouped = q_THD.shape[1] != k_KLD.shape[0]
    if grouped and q_THD.device.type != "cpu" and not _flash_groups(q_THD, mask):
        return _sdpa_expanded(q_THD, k_KLD, v_KLD, mask, scale)
    attended = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_KLD[None],
        v_KLD[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=grouped,
        scale=scale,
    )
    return attended[0].transpose(0, 1)


def _flash_groups(q_THD: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a GPU has a kernel in which query heads share a KV head. For all others torch would
    write the scores of every row and token out: gigabytes for a chunk of a long prompt."""
    return mask is None and q_THD.dtype != torch.float32 and q_THD.shape[-1] <= 256


def _sdpa_expanded(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Each KV head is taken as a batch of its own, and seen once for each of its query heads."""
    rows, heads, dim = q_THD.shape
    kv_heads, tokens = k_KLD.shape[:2]
    q_KGTD = q_THD.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3)
    seen = (kv_heads, heads // kv_heads, tokens, -1)
    attended = F.scaled_dot_product_attention(
        q_KGTD,
        k_KLD[:, None].expand(seen),
        v_KLD[:, None].expand(seen),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _flash_takes(q_THD: torch.Tensor, k_KLD: torch.Tensor) -> bool:
    """Whether this is a GPU that attends without a mask to a context longer than the rows."""
    if q_THD.device.type == "cpu":
        return False
    q, k = q_THD.transpose(0, 1)[None], k_KLD[None]
    return can_use_flash_attention(SDPAParams(q, k, k, None, 0.0, False, True))


def _last_rows(
    q_THD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """The rows are those of the last tokens of the context."""
    # It loads torch's compiler, which takes as long as the rest of torch; GPUs alone need it.
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
