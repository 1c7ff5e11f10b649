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
# Up to this many entries, packing one by one is faster than numpy.
_FEW = 32


def position_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], top: int
) -> list[PositionLogprobs]:
    """The logprob and rank of each row's token, and its ``top`` best tokens, from fp32 logits [R,
    V].

    Tokens with equal logits are listed by id, so that the same logits give the same list.
    """
    values = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    token_values = values.gather(1, ids)
    ranks = (values > token_values).sum(dim=-1) + 1
    best = _best(values, min(top, values.shape[-1]))
    return [
        PositionLogprobs(token, logprob, rank, packed)
        for token, logprob, rank, packed in zip(
            tokens, token_values[:, 0].tolist(), ranks.tolist(), best, strict=True
        )
    ]


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int]) -> bytes:
    """These tokens with their logprobs from one row of fp32 logits [V], packed."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return _packed(ids, logits.log_softmax(dim=-1)[ids])


def _best(values: torch.Tensor, top: int) -> list[bytes]:
    if top == 0 or not len(values):
        return [b""] * len(values)
    floors = values.topk(top, dim=-1).values[:, -1:]
    top_ids, logprobs = [], []
    for row, floor in zip(values, floors, strict=True):
        ids = (row >= floor).nonzero().flatten()
        order = row[ids].sort(descending=True, stable=True).indices[:top]
        top_ids.append(ids[order])
        logprobs.append(row[top_ids[-1]])
    entries = _packed(torch.cat(top_ids), torch.cat(logprobs))
    # A row that is not finite may have fewer than ``top``.
    ends = [ENTRY_BYTES * end for end in accumulate(map(len, top_ids))]
    return [entries[begin:end] for begin, end in pairwise([0, *ends])]


def _packed(ids: torch.Tensor, values: torch.Tensor) -> bytes:
    """Pack each id with its fp32 value, as ``pack_logprobs`` does."""
    if len(ids) <= _FEW:
        return pack_logprobs(zip(ids.tolist(), values.tolist(), strict=True))
    entries = np.empty(len(ids), dtype=_ENTRY)
    entries["token"] = ids.cpu().numpy()
    entries["logprob"] = values.cpu().numpy()
    return entries.tobytes()
