"""Logprobs of prompts, and of draws on a GPU, where nothing waits: those of ``position_logprobs``
and ``logprobs_of``.

R rows of a step, A of them that ask, P positions of prompts, V vocabulary, E numbers of best
tokens, L tokens whose logprobs are looked up. Tensors whose names end in ``host`` are complete
after the step's event. An entry is the row of int32 of a position: the bits of its token's logprob,
its rank, and for each of its best tokens the id and the bits of the logprob, as ``pack_logprobs``
writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
import torch

from ....kernels.streams import to_host
from ....proto.packed_logprobs import ENTRY_BYTES, pack_logprobs
from ..plan import PositionLogprobs, PromptTargets, RankSampling

# Rows whose best tokens are searched at a time: each has copies of twice its logits, a few of which
# a CPU's cache holds.
_ROWS, _ROWS_ON_CPU = 32, 4


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Logprobs of the rows that ask, before the step's logits are edited."""

    rows: list[int]
    params: list[RankSampling]
    rows_A: torch.Tensor
    listed_AL: torch.Tensor
    values_AV: torch.Tensor
    best_AE: torch.Tensor

    def of_draws(self, tokens_R: torch.Tensor) -> DrawnLogprobs:
        """The logprobs of the tokens that were drawn for all rows; any for token -1."""
        tokens_A = tokens_R.index_select(0, self.rows_A).clamp_(min=0)
        ids_AL = torch.cat([tokens_A[:, None], self.listed_AL], dim=1)
        entries_host = to_host(_entries(self.values_AV, ids_AL, self.best_AE))
        return DrawnLogprobs(self.rows, self.params, entries_host, self.listed_AL.shape[1])


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Logprobs of the rows that ask, on their way to the host: entries, and those of as many tokens
    as a request lists at most."""

    rows: list[int]
    params: list[RankSampling]
    entries_host: torch.Tensor
    listed: int

    def collect(self, tokens: Sequence[int]) -> Iterator[tuple[int, PositionLogprobs]]:
        """The rows with their logprobs, from the tokens of all rows."""
        end = self.entries_host.shape[1] - self.listed
        listed_host = self.entries_host[:, end:].view(torch.float32)
        positions = _positions(
            self.entries_host[:, :end],
            [tokens[row] for row in self.rows],
            [params.logprobs or 0 for params in self.params],
        )
        for number, (row, one) in enumerate(zip(self.rows, positions, strict=True)):
            if ids := self.params[number].logprob_token_ids:
                values = listed_host[number].tolist()
                listed = {one.token: one.logprob} | dict(zip(ids, values, strict=False))
                one = replace(one, packed_top=pack_logprobs(listed.items()))
            yield row, one


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt targets by sequence, on their way to the host."""

    asks: dict[int, PromptTargets]
    entries_host: torch.Tensor

    def collect(self) -> dict[int, list[PositionLogprobs]]:
        tokens = [token for ask in self.asks.values() for token in ask.targets]
        tops = [ask.top for ask in self.asks.values() for _ in ask.targets]
        positions = iter(_positions(self.entries_host, tokens, tops))
        return {
            sequence_id: list(islice(positions, len(ask.targets)))
            for sequence_id, ask in self.asks.items()
        }


def raw_logprobs(
    logits_RV: torch.Tensor,
    rows: list[int],
    params: list[RankSampling],
    rows_A: torch.Tensor,
    listed_AL: torch.Tensor,
) -> RawLogprobs:
    """Launch the logprobs of some rows; ``rows_A`` are the same on the device."""
    values_AV = logits_RV.index_select(0, rows_A).log_softmax(dim=-1)
    best_AE = _best(values_AV, max(each.logprobs or 0 for each in params))
    return RawLogprobs(rows, params, rows_A, listed_AL, values_AV, best_AE)


def prompt_entries(logits_PV: torch.Tensor, tokens_P: torch.Tensor, top: int) -> torch.Tensor:
    """Launch the entries of prompt positions, whose tokens are these, with ``top`` best tokens."""
    values_PV = logits_PV.log_softmax(dim=-1)
    return _entries(values_PV, tokens_P[:, None], _best(values_PV, top))


def _entries(values_PV: torch.Tensor, ids_PL: torch.Tensor, best_PE: torch.Tensor) -> torch.Tensor:
    """Entries of the first tokens; behind each, the bits of the logprobs of the others."""
    found_PL = values_PV.gather(1, ids_PL)
    ranks_P1 = (values_PV > found_PL[:, :1]).sum(-1, keepdim=True, dtype=torch.int32) + 1
    bits_PL = found_PL.view(torch.int32)
    return torch.cat([bits_PL[:, :1], ranks_P1, best_PE, bits_PL[:, 1:]], dim=1)


def _positions(
    entries_host: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]
) -> list[PositionLogprobs]:
    """The positions of entries, with as many of their best tokens as each asks for."""
    entries = entries_host.numpy()
    logprobs, ranks = entries[:, 0].view(np.float32).tolist(), entries[:, 1].tolist()
    best = entries[:, 2:].tobytes()
    each = ENTRY_BYTES * (entries.shape[1] // 2 - 1)
    return [
        PositionLogprobs(token, logprob, rank, best[begin : begin + min(each, ENTRY_BYTES * top)])
        for token, logprob, rank, top, begin in zip(
            tokens, logprobs, ranks, tops, count(0, each), strict=False
        )
    ]


def _best(values_PV: torch.Tensor, top: int) -> torch.Tensor:
    """The ``top`` best values as entries have them, equal ones in the order of ids."""
    vocab = values_PV.shape[1]
    if not top:
        return values_PV.new_empty((len(values_PV), 0), dtype=torch.int32)
    ids_V = torch.arange(vocab, device=values_PV.device)
    best = []
    for part in values_PV.split(_ROWS_ON_CPU if values_PV.device.type == "cpu" else _ROWS):
        # Logprobs are at most 0: the best ones have the smallest bits, but for the sign.
        keys = torch.add(ids_V, part.abs().view(torch.int32), alpha=1 << 32)
        best.append(keys.topk(min(top, vocab), dim=-1, largest=False).values)
    best_PE = torch.cat(best).view(torch.int32)
    best_PE.view(torch.float32)[:, 1::2].neg_().add_(0.0)  # which makes 0 of -0
    return best_PE
