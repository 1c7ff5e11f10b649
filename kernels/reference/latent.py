"""Attention over a paged cache of latents, from which every head's keys and values are computed.

A token's latent has C numbers and R rotated ones. Its key for head h is ``k_up[h] @ latent[:C]``,
followed by ``latent[C:]``, which is the same for all heads; its value is ``v_up[h] @ latent[:C]``.
There are two ways to attend, with the same result:

- Absorbed: queries are multiplied by ``k_up`` and sums by ``v_up``. Nothing is computed for tokens
  of the context, but scores and sums are as wide as a latent.
- Expanded: keys and values of the context are computed, at the same cost for few rows as for many.
  Scores and sums are then only as wide as a head.

Shapes: T rows of a step, H heads, N dimensions of a query or key without position, V of a value, D
the wider of N + R and V, L tokens of context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..attention_metadata import AttentionParams, SequenceMetadata
from ..scaled import CachedKV
from .attention import paged_attention, read_cache

# The largest buffer for expanded heads of a context; limits the heads expanded at a time.
_EXPANDED_BYTES = 64 << 20


def latent_attention(
    q_THD: torch.Tensor,
    latents: CachedKV,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    sequences: Sequence[SequenceMetadata],
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in the cheaper way for each sequence; [T, H, V].

    q is [T, H, N + R], latents [1, slots, C + R]. ``up`` is in q's dtype. Sequences are in the
    order of their rows. Given ``out``, only their rows are written.
    """
    few: list[SequenceMetadata] = []
    many: list[SequenceMetadata] = []
    for sequence in sequences:
        wide = sequence.num_rows > 1 and _pays_to_expand(sequence, q_THD, k_up_HNC, v_up_HVC)
        (many if wide else few).append(sequence)
    if not many and out is None:
        return absorbed_attention(q_THD, latents, k_up_HNC, v_up_HVC, few, scale)
    if out is None:
        out = q_THD.new_empty(q_THD.shape[0], *v_up_HVC.shape[:2])
    if few:
        span = slice(few[-1].rows.stop)
        attended = absorbed_attention(q_THD[span], latents, k_up_HNC, v_up_HVC, few, scale)
        for sequence in few:
            out[sequence.rows] = attended[sequence.rows]
    for sequence in many:
        rows = sequence.rows
        out[rows] = expanded_attention(q_THD[rows], latents, k_up_HNC, v_up_HVC, sequence, scale)
    return out


def absorbed_attention(
    q_THD: torch.Tensor,
    latents: CachedKV,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    sequences: Sequence[SequenceMetadata],
    scale: float,
) -> torch.Tensor:
    """Attend with all heads as queries of one wide head, whose keys are their own values.

    The sums' last R numbers are unused; without them torch would use a slower kernel.
    """
    nope, width = k_up_HNC.shape[1:]
    wide_THC = torch.bmm(q_THD[..., :nope].transpose(0, 1), k_up_HNC).transpose(0, 1)
    wide = torch.cat([wide_THC, q_THD[..., nope:]], dim=-1)
    sums = paged_attention(wide, latents, latents, sequences, AttentionParams(scale))
    return torch.bmm(sums[..., :width].transpose(0, 1), v_up_HVC.mT).transpose(0, 1)


def expanded_attention(
    q_THD: torch.Tensor,
    latents: CachedKV,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    sequence: SequenceMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend for the rows of one sequence, a few heads at a time; q has only these rows."""
    heads, value_dim, width = v_up_HVC.shape
    params = AttentionParams(scale)
    dim = max(q_THD.shape[-1], value_dim)
    q_THD = _widened(q_THD, dim)
    latent_LC = read_cache(sequence, latents, 0, sequence.end, q_THD.dtype)[0]
    # The context as one block with its tokens in order.
    whole = SequenceMetadata(slice(0, sequence.num_rows), sequence.start, [0], sequence.end)
    out = q_THD.new_empty(q_THD.shape[0], heads, value_dim)
    each = max(1, _EXPANDED_BYTES // (4 * sequence.end * dim * q_THD.dtype.itemsize))
    for first in range(0, heads, each):
        some = slice(first, first + each)
        nope = torch.matmul(latent_LC[:, :width], k_up_HNC[some].mT)
        rope = latent_LC[:, width:].expand(nope.shape[0], -1, -1)
        k = _widened(torch.cat([nope, rope], dim=-1), dim)
        v = _widened(torch.matmul(latent_LC[:, :width], v_up_HVC[some].mT), dim)
        out[:, some] = paged_attention(q_THD[:, some], k, v, [whole], params)[..., :value_dim]
    return out


def _widened(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Append zeros, because torch has fast attention only for K and V of equal width."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _pays_to_expand(
    sequence: SequenceMetadata, q_THD: torch.Tensor, k_up_HNC: torch.Tensor, v_up_HVC: torch.Tensor
) -> bool:
    """True if narrower heads save more, over all pairs of a row and a visible token, than expanding
    the earlier context costs. For the rows' own tokens both ways cost the same.

    Measured on a Zen 3 core with 16 heads of 128 + 64 and latents of 512: after 2,000 tokens both
    take the same for about 200 rows, and for 512 expanding takes 0.6 of the time; at the start of a
    prompt 0.4 to 0.7, however long the chunk.
    """
    nope, width = k_up_HNC.shape[1:]
    value_dim, key_dim = v_up_HVC.shape[1], q_THD.shape[-1]
    saved = 2 * (width + key_dim - nope) - 2 * max(key_dim, value_dim)
    pairs = sequence.num_rows * (sequence.start + sequence.end) // 2
    return pairs * saved > sequence.start * (nope + value_dim) * width
