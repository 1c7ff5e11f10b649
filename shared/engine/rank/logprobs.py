"""Log probabilities of the raw logits, as they came out of the model (vLLM's ``raw_logprobs``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from ....proto.packed_logprobs import ENTRY_BYTES, pack_logprobs
from ..plan import PositionLogprobs

# An entry of ``pack_logprobs``.
_ENTRY = np.dtype([("token", "<u4"), ("logprob", "<f4")])
# Entries that are packed one by one faster than by numpy.
_FEW = 32


def position_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], top: int
) -> list[PositionLogprobs]:
    """For each row of fp32 logits [R, V]: its token's logprob and rank, and the ``top`` best.

    Tokens with equal logits are listed by id, so that the same logits give the same list.
    """
    values = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    chosen = values.gather(1, ids)
    ranks = (values > chosen).sum(dim=-1) + 1
    best = _best(values, min(top, values.shape[-1]))
    return [
        PositionLogprobs(token, logprob, rank, listed)
        for token, logprob, rank, listed in zip(
            tokens, chosen[:, 0].tolist(), ranks.tolist(), best, strict=True
        )
    ]


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int]) -> bytes:
    """The given tokens with their logprobs, from one row of fp32 logits [V]."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return _packed(ids, logits.log_softmax(dim=-1)[ids])


def _best(values: torch.Tensor, top: int) -> list[bytes]:
    if top == 0 or not len(values):
        return [b""] * len(values)
    least = values.topk(top, dim=-1).values[:, -1:]
    found, logprobs = [], []
    for row, floor in zip(values, least, strict=True):
        ids = (row >= floor).nonzero().flatten()
        order = row[ids].sort(descending=True, stable=True).indices[:top]
        found.append(ids[order])
        logprobs.append(row[found[-1]])
    packed = _packed(torch.cat(found), torch.cat(logprobs))
    # A row that is not finite may have fewer.
    ends = [ENTRY_BYTES * end for end in accumulate(map(len, found))]
    return [packed[begin:end] for begin, end in pairwise([0, *ends])]


def _packed(ids: torch.Tensor, values: torch.Tensor) -> bytes:
    """As ``pack_logprobs`` of each id with its fp32 value."""
    if len(ids) <= _FEW:
        return pack_logprobs(zip(ids.tolist(), values.tolist(), strict=True))
    entries = np.empty(len(ids), dtype=_ENTRY)
    entries["token"] = ids.cpu().numpy()
    entries["logprob"] = values.cpu().numpy()
    return entries.tobytes()
