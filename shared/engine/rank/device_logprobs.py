"""Logprobs of draws on a GPU: those of ``position_logprobs`` and ``logprobs_of``, without a wait.

R rows of a step, A of them that ask, V vocabulary, N best tokens, L tokens whose logprobs a request
lists. Tensors whose names end in ``host`` are complete after the step's event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ....kernels.streams import to_host
from ....proto.packed_logprobs import ENTRY_BYTES, pack_logprobs
from ..plan import PositionLogprobs, RankSampling
from .logprobs import packed_entries

# Rows whose best tokens are searched at a time: each has a copy of twice its logits.
_ROWS = 32


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Logprobs of the rows that ask, before the step's logits are edited."""

    rows: list[int]
    params: list[RankSampling]
    rows_A: torch.Tensor
    listed_AL: torch.Tensor
    values_AV: torch.Tensor
    best_AN: torch.Tensor

    def of_draws(self, tokens_R: torch.Tensor) -> DrawnLogprobs:
        """The logprobs of the tokens that were drawn for all rows; any for token -1."""
        tokens_A = tokens_R.index_select(0, self.rows_A).clamp_(min=0).long()[:, None]
        chosen_A = self.values_AV.gather(1, tokens_A)
        ranks_A = (self.values_AV > chosen_A).sum(-1) + 1
        values = [self.values_AV.gather(1, ids) for ids in (self.best_AN, self.listed_AL)]
        host = [to_host(each) for each in (chosen_A[:, 0], ranks_A, self.best_AN, *values)]
        return DrawnLogprobs(self.rows, self.params, *host)


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Logprobs of the rows that ask, on their way to the host."""

    rows: list[int]
    params: list[RankSampling]
    chosen_host: torch.Tensor
    ranks_host: torch.Tensor
    best_host: torch.Tensor
    best_values_host: torch.Tensor
    listed_values_host: torch.Tensor

    def collect(self, tokens: Sequence[int]) -> Iterator[tuple[int, PositionLogprobs]]:
        """The rows with their logprobs, from the tokens of all rows."""
        entries = packed_entries(self.best_host, self.best_values_host)
        each = ENTRY_BYTES * self.best_host.shape[1]
        chosen, ranks = self.chosen_host.tolist(), self.ranks_host.tolist()
        for number, (row, params) in enumerate(zip(self.rows, self.params, strict=True)):
            begin = each * number
            best = entries[begin : begin + min(each, ENTRY_BYTES * (params.logprobs or 0))]
            if params.logprob_token_ids:
                values = self.listed_values_host[number].tolist()
                listed = dict(zip(params.logprob_token_ids, values, strict=False))
                best = pack_logprobs(({tokens[row]: chosen[number]} | listed).items())
            yield row, PositionLogprobs(tokens[row], chosen[number], ranks[number], best)


def raw_logprobs(
    logits_RV: torch.Tensor,
    rows: list[int],
    params: list[RankSampling],
    rows_A: torch.Tensor,
    listed_AL: torch.Tensor,
) -> RawLogprobs:
    """Launch the logprobs of some rows; ``rows_A`` are the same on the device."""
    top = min(max(each.logprobs or 0 for each in params), logits_RV.shape[1])
    values_AV = logits_RV.index_select(0, rows_A).log_softmax(dim=-1)
    best_AN = torch.cat([_best(part, top) for part in values_AV.split(_ROWS)])
    return RawLogprobs(rows, params, rows_A, listed_AL, values_AV, best_AN)


def _best(values_AV: torch.Tensor, top: int) -> torch.Tensor:
    """The ids of the best values, equal ones in the order of ids."""
    vocab = values_AV.shape[1]
    bits = values_AV.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(vocab - 1, -1, -1, device=values_AV.device)
    keys = (ordered.long() << 32) + ids
    return vocab - 1 - (keys.topk(top, dim=-1).values & 0xFFFFFFFF)
