"""Attention over a paged cache of latents, of which every head's keys and values are products.

A token's latent is C numbers and R rotated ones. Its key for head h is ``k_up[h] @ latent[:C]``,
followed by ``latent[C:]``, which is the same for all heads; its value is ``v_up[h] @ latent[:C]``.
There are two ways to attend, with the same result:

- Absorbed: queries are multiplied with ``k_up`` and sums with ``v_up`` instead. Nothing is computed
  for a token of the context, but scores and sums are as wide as a latent.
- Expanded: keys and values of the context are multiplied out. That costs as much for a few rows as
  for many, whose scores and sums are then only as wide as a head.

Shapes: T rows of a step, H heads, N numbers of a query or key without position, V of a value, D the
wider of N + R and V, L tokens of context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..fp8 import castable
from .attention import SequenceContext, paged_attention

# As many heads of a context are expanded at a time as take no more than this.
_EXPANDED_BYTES = 64 << 20


def latent_attention(
    q_THD: torch.Tensor,
    latents: torch.Tensor,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    contexts: Sequence[SequenceContext],
    scale: float,
) -> torch.Tensor:
    """Each row attends to its own sequence, up to itself, in the cheaper way; [T, H, V].

    q is [T, H, N + R], latents [1, slots, C + R]. ``up`` is in q's dtype. Contexts are in the order
    of their rows.
    """
    few: list[SequenceContext] = []
    many: list[SequenceContext] = []
    for context in contexts:
        wide = context.count > 1 and _pays_to_expand(context, q_THD, k_up_HNC, v_up_HVC)
        (many if wide else few).append(context)
    if not many:
        return absorbed_attention(q_THD, latents, k_up_HNC, v_up_HVC, few, scale)
    out = q_THD.new_empty(q_THD.shape[0], *v_up_HVC.shape[:2])
    if few:
        rows = slice(few[-1].rows.stop)
        out[rows] = absorbed_attention(q_THD[rows], latents, k_up_HNC, v_up_HVC, few, scale)
    for context in many:
        rows = context.rows
        out[rows] = expanded_attention(q_THD[rows], latents, k_up_HNC, v_up_HVC, context, scale)
    return out


def absorbed_attention(
    q_THD: torch.Tensor,
    latents: torch.Tensor,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    contexts: Sequence[SequenceContext],
    scale: float,
) -> torch.Tensor:
    """All heads are queries of one wide head, whose keys are their own values.

    (The sums' last R numbers are of no use; leaving them out makes torch take a slower way.)
    """
    nope, width = k_up_HNC.shape[1:]
    wide_THC = torch.bmm(q_THD[..., :nope].transpose(0, 1), k_up_HNC).transpose(0, 1)
    wide = torch.cat([wide_THC, q_THD[..., nope:]], dim=-1)
    sums = paged_attention(wide, latents, latents, contexts, None, scale)
    return torch.bmm(sums[..., :width].transpose(0, 1), v_up_HVC.mT).transpose(0, 1)


def expanded_attention(
    q_THD: torch.Tensor,
    latents: torch.Tensor,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    context: SequenceContext,
    scale: float,
) -> torch.Tensor:
    """The rows of one context, a few heads at a time; q has these rows alone."""
    heads, value_dim, width = v_up_HVC.shape
    dim = max(q_THD.shape[-1], value_dim)
    q_THD = _widened(q_THD, dim)
    latent_LC = castable(context.gather(latents, 0, context.end), q_THD.dtype)[0].to(q_THD.dtype)
    # The context's tokens in order: one block as long as all of it.
    whole = SequenceContext(slice(0, context.count), context.start, [0], context.end)
    out = q_THD.new_empty(q_THD.shape[0], heads, value_dim)
    each = max(1, _EXPANDED_BYTES // (4 * context.end * dim * q_THD.dtype.itemsize))
    for first in range(0, heads, each):
        some = slice(first, first + each)
        nope = torch.matmul(latent_LC[:, :width], k_up_HNC[some].mT)
        rope = latent_LC[:, width:].expand(nope.shape[0], -1, -1)
        k = _widened(torch.cat([nope, rope], dim=-1), dim)
        v = _widened(torch.matmul(latent_LC[:, :width], v_up_HVC[some].mT), dim)
        out[:, some] = paged_attention(q_THD[:, some], k, v, [whole], None, scale)[..., :value_dim]
    return out


def _widened(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros are appended, since torch has its fast attention for K and V of one width only."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _pays_to_expand(
    context: SequenceContext, q_THD: torch.Tensor, k_up_HNC: torch.Tensor, v_up_HVC: torch.Tensor
) -> bool:
    """Whether what the narrower heads save, over all pairs of a row and a token that it sees, is
    more than what it costs to multiply the earlier context out. For the rows' own tokens both ways
    take the same products, of the queries and sums or of the keys and values.

    Measured on a Zen 3 core with 16 heads of 128 + 64 and latents of 512: after 2,000 tokens both
    take the same for about 200 rows, and for 512 expanding takes 0.6 of the time; at the start of a
    prompt 0.4 to 0.7, however long the chunk.
    """
    nope, width = k_up_HNC.shape[1:]
    value_dim, key_dim = v_up_HVC.shape[1], q_THD.shape[-1]
    saved = 2 * (width + key_dim - nope) - 2 * max(key_dim, value_dim)
    pairs = context.count * (context.start + context.end) // 2
    return pairs * saved > context.start * (nope + value_dim) * width
