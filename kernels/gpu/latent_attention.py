"""Latent attention by Triton: of decoding rows and chunks, between the products with ``k_up`` and
``v_up``.

Shapes as in ``latent_decode.py``.
"""

from __future__ import annotations

import torch

from ..attention_metadata import ChunkMetadata, DecodeMetadata
from ..scaled import CachedKV
from .latent_chunks import latent_chunks
from .latent_decode import latent_decode


def attend_latents(
    q_THD: torch.Tensor,
    latents: CachedKV,
    k_up_HNC: torch.Tensor,
    v_up_HVC: torch.Tensor,
    decodes: DecodeMetadata | None,
    chunks: ChunkMetadata | None,
    scale: float,
    out_THV: torch.Tensor,
) -> None:
    """Fill the decoding rows of ``out`` and those of chunks; other rows are undefined."""
    wide_HTC = torch.bmm(q_THD[..., : k_up_HNC.shape[1]].transpose(0, 1), k_up_HNC)
    # Sums take the place of the queries, of which each program reads those that it replaces.
    if decodes is not None:
        latent_decode(q_THD, wide_HTC, latents, decodes, scale, wide_HTC)
    if chunks is not None:
        latent_chunks(q_THD, wide_HTC, latents, chunks, scale, wide_HTC)
    torch.bmm(wide_HTC, v_up_HVC.mT, out=out_THV.transpose(0, 1))
