"""Sampling: draws tokens from logits.

A draw is the inverse of the cumulative distribution at one uniform number, which is a hash of the
sequence's seed and the number of the output. So a token depends only on its own logits and
parameters, not on its batch, the device's random generator, or a preemption.

Every filter (top-k, top-p, min-p) is a threshold on the logits: tied tokens are kept or dropped
together, and their order does not matter. R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ....kernels.reference.token_mask import TokenMask
from ....proto.packed_logprobs import ENTRY_BYTES
from ..plan import PositionLogprobs, RankSampling, SamplerSpec
from .logprobs import logprobs_of, position_logprobs

_MASK = (1 << 64) - 1
# Below this temperature, dividing by it would overflow before it changed the outcome.
GREEDY_BELOW = 1e-5
# The numbers of best logits that top-p sorts, the next one only if they do not suffice.
_TOP_P_CANDIDATES = (64, 1024)
# Neighbouring tokens whose probabilities are summed before a draw looks for one of them.
_SPAN = 64
NOT_FINITE_MESSAGE = (
    "the model's logits are not finite: the weights may be broken, or the prompt overflows the "
    "model's dtype; try float32"
)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a seed and the number of an output (splitmix64)."""
    return (_mix(stream_of(seed) + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def stream_of(seed: int) -> int:
    """The 64-bit number from which the numbers of all outputs are derived."""
    return _mix(seed & _MASK)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(slots=True)
class _State:
    """One live sequence. The counts exist only if a penalty reads them."""

    spec: SamplerSpec
    draws: int
    in_prompt: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    recent: list[int] = field(default_factory=list)  # outputs, if bad words depend on them

    @property
    def params(self) -> RankSampling:
        return self.spec.params

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def blocked(self) -> bool:
        return bool(self.spec.blocked_tokens) and self.draws < self.spec.blocked_until

    @property
    def edits_logits(self) -> bool:
        params = self.params
        edited = params.logit_bias or params.allowed_token_ids or params.bad_words
        return bool(edited) or self.counts is not None or self.blocked


class HostDraws(NamedTuple):
    """The draws of one step by sequence, in the order of rows, as ``StepResult`` has them: tokens,
    the logprobs of those that ask, and why the logits of others were not finite."""

    sampled: dict[int, list[int]]
    logprobs: dict[int, list[PositionLogprobs]]
    failed: dict[int, str]

    def collect(self) -> HostDraws:
        """See ``Draws.collect``."""
        return self


class Draws(Protocol):
    """The draws of one step, which may be on their way to the host."""

    def collect(self) -> HostDraws:
        """The draws, after the step's event."""
        ...


class Sampler:
    """Draws tokens for slots, and writes each slot's last one into ``last_tokens`` [S], int32.

    It keeps the parameters and the history of each slot's sequence.
    """

    def __init__(self, vocab_size: int, last_tokens_S: torch.Tensor, *, nudge: float = 0.0) -> None:
        """``nudge`` is added to all uniform numbers, to see what depends on their last bits."""
        self.vocab_size = vocab_size
        self.device = last_tokens_S.device
        self._last_tokens_S = last_tokens_S
        self._nudge = nudge
        # Kept, because asking a tensor for its device takes longer than argmax.
        self._on_cpu = self.device.type == "cpu"
        self._states: dict[int, _State] = {}
        self._token_mask = TokenMask(self.device)

    def add(self, slot: int, spec: SamplerSpec) -> None:
        """Start a sequence in a slot, or resume it after the tokens drawn before."""
        state = _State(spec, len(spec.outputs))
        if spec.params.penalizes:
            state.in_prompt = self._counts(spec.prompt) > 0
            state.counts = self._counts(spec.outputs)
        if spec.params.bad_words:
            state.recent = list(spec.outputs)
        self._states[slot] = state

    def remove(self, slot: int) -> None:
        """Forget the sequence in a slot. No-op if there is none."""
        self._states.pop(slot, None)

    def _counts(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        return torch.bincount(ids, minlength=self.vocab_size).float()

    def draw(
        self,
        slots_R: torch.Tensor,
        slots: Sequence[int],
        logits_RV: torch.Tensor,
        masks: Mapping[int, bytes] = MappingProxyType({}),
    ) -> HostDraws:
        """Draw one token for each row of fp32 logits, which may be changed.

        ``slots_R``, the slots on a GPU, are not read. ``masks`` has the tokens that may be drawn,
        for some of ``slots``.
        """
        states, logits = [self._states[slot] for slot in slots], logits_RV
        finite = self._finite(logits)
        failed: dict[int, str] = {}
        if not all(finite):
            good = [row for row, each in enumerate(finite) if each]
            bad = set(range(len(states))) - set(good)
            failed = {states[row].spec.sequence_id: NOT_FINITE_MESSAGE for row in bad}
            slots, states = [slots[row] for row in good], [states[row] for row in good]
            logits = logits[good]
        asking = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[asking] if asking else logits  # a copy: the logits are edited below
        for row, state in enumerate(states):
            if state.edits_logits:
                _edit(logits[row], state)
        if masks:
            self._mask(logits, slots, masks)
        tokens = self._draw(logits, states)
        self._set_last_tokens(slots, tokens)
        for state, token in zip(states, tokens, strict=True):
            state.draws += 1
            if state.counts is not None:
                state.counts[token] += 1
            if state.params.bad_words:
                state.recent.append(token)
        sampled = {
            state.spec.sequence_id: [token] for state, token in zip(states, tokens, strict=True)
        }
        return HostDraws(sampled, _logprobs(raw, asking, tokens, states), failed)

    def _set_last_tokens(self, slots: Sequence[int], tokens: list[int]) -> None:
        if self._on_cpu:
            host = self._last_tokens_S.numpy()
            for slot, token in zip(slots, tokens, strict=True):
                host[slot] = token
        else:
            drawn = torch.tensor(tokens, dtype=torch.int32, device=self.device)
            self._last_tokens_S[torch.tensor(slots, dtype=torch.int64)] = drawn

    def _finite(self, logits: torch.Tensor) -> list[bool]:
        """True for each row without NaN and infinity."""
        if not self._on_cpu:
            finite: list[bool] = logits.sum(dim=-1).isfinite().tolist()
            return finite
        # torch would wake other threads, which takes several times as long.
        rows = logits.numpy()
        lowest, highest = np.minimum.reduce(rows, -1).tolist(), np.maximum.reduce(rows, -1).tolist()
        return [isfinite(low) and isfinite(high) for low, high in zip(lowest, highest, strict=True)]

    def _draw(self, logits: torch.Tensor, states: list[_State]) -> list[int]:
        # On a CPU, numpy's argmax takes a tenth of the time of torch's.
        tokens: list[int] = (logits.numpy() if self._on_cpu else logits).argmax(-1).tolist()
        rows = [row for row, state in enumerate(states) if not state.greedy]
        if rows:
            random = [states[row] for row in rows]
            values = logits if len(rows) == len(states) else logits[rows]
            draws = _draw_random(values, random, self._nudge)
            for row, token in zip(rows, draws, strict=True):
                tokens[row] = token
        return tokens

    def _mask(self, logits: torch.Tensor, slots: Sequence[int], masks: Mapping[int, bytes]) -> None:
        """Apply the grammars' masks: last, so that no other restriction leaves nothing to draw."""
        rows = [row for row, slot in enumerate(slots) if slot in masks]
        restricted = [row for row in rows if self._states[slots[row]].edits_logits]
        row_masks = [masks[slots[row]] for row in rows]
        self._token_mask.apply(logits, rows, row_masks, restricted)


def _logprobs(
    raw: torch.Tensor, rows: list[int], tokens: list[int], states: list[_State]
) -> dict[int, list[PositionLogprobs]]:
    """Logprobs of the ``rows`` that request them, by sequence, from their ``raw`` logits. All at
    once, because each call synchronises a GPU."""
    if not rows:
        return {}
    counts = [states[row].params.logprobs or 0 for row in rows]
    positions = position_logprobs(raw, [tokens[row] for row in rows], max(counts))
    cut = [
        replace(one, packed_top=one.packed_top[: count * ENTRY_BYTES])
        for one, count in zip(positions, counts, strict=True)
    ]
    for number, row in enumerate(rows):
        if ids := states[row].params.logprob_token_ids:
            listed = logprobs_of(raw[number], list(dict.fromkeys((tokens[row], *ids))))
            cut[number] = replace(positions[number], packed_top=listed)
    return {states[row].spec.sequence_id: [one] for row, one in zip(rows, cut, strict=True)}


def _completing(state: _State) -> list[int]:
    """The tokens that would complete a bad word; empty if no other token were allowed."""
    recent, allowed = state.recent, state.params.allowed_token_ids
    tokens = {
        word[-1]
        for word in state.params.bad_words
        if len(word) == 1 or recent[-len(word) + 1 :] == list(word[:-1])
    }
    return [] if allowed and tokens.issuperset(allowed) else sorted(tokens)


def _edit(logits: torch.Tensor, state: _State) -> None:
    """Apply bias, penalties, blocked and allowed tokens to one row, in place."""
    params = state.params
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(
            list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device
        )
    if state.counts is not None and state.in_prompt is not None:
        in_outputs = state.counts > 0
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            weaker = torch.where(logits > 0, logits / factor, logits * factor)
            logits.copy_(torch.where(in_outputs | state.in_prompt, weaker, logits))
        logits -= params.frequency_penalty * state.counts + params.presence_penalty * in_outputs
    if state.blocked:
        logits[list(state.spec.blocked_tokens)] = float("-inf")
    if params.bad_words and (completing := _completing(state)):
        logits[completing] = float("-inf")
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        allowed_logits = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = allowed_logits


def _draw_random(logits: torch.Tensor, states: list[_State], nudge: float) -> list[int]:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    values = logits.div_(column([state.params.temperature for state in states]).float())
    _filter(values, [state.params for state in states])
    probabilities = values.softmax(dim=-1)
    _keep_top_p(probabilities, [state.params.top_p for state in states])
    points = column([uniform(state.spec.seed, state.draws) for state in states])
    return _tokens_at(probabilities, (points + nudge).clamp_(min=0))


def _tokens_at(probabilities: torch.Tensor, shares: torch.Tensor) -> list[int]:
    """The tokens at these shares [R, 1] of each row's cumulative probability."""
    vocab = probabilities.shape[-1]
    if probabilities.device.type != "cpu":
        sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
        places: list[int] = _first_above(sums, shares).flatten().tolist()
        return places
    # A cumulative sum over all tokens takes a CPU ten times as long: find the span of tokens first,
    # then the token in it.
    if missing := -vocab % _SPAN:
        probabilities = F.pad(probabilities, (0, missing))
    spans = probabilities.unflatten(-1, (-1, _SPAN))
    sums = spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    span_index = _first_above(sums, shares)
    span = spans[torch.arange(len(spans)), span_index[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    before = sums.gather(1, (span_index - 1).clamp(min=0)).masked_fill(span_index == 0, 0)
    rest = (shares * sums[:, -1:] - before) / span[:, -1:]
    within = _first_above(span, rest)
    tokens: list[int] = (span_index * _SPAN + within).clamp_(max=vocab - 1).flatten().tolist()
    return tokens


def _first_above(cumulative: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The first places [R, 1] whose sums exceed these shares of the total."""
    total = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, shares * total, right=True)
    # Rounding may put a point on the total itself, beyond the last place with any probability.
    last = torch.searchsorted(cumulative, total)
    # If every token is blocked, none has a probability; the draw must still be a valid token id.
    last.clamp_(max=cumulative.shape[-1] - 1)
    return torch.minimum(places, last)


def _filter(values: torch.Tensor, params: list[RankSampling]) -> None:
    """Apply min-p, then top-k, in place; only to rows that use them."""
    vocab = values.shape[-1]
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        log_min_p = torch.tensor([params[row].min_p for row in rows], device=values.device).log()
        selected = values[rows]
        _cut(values, rows, selected.amax(dim=-1) + log_min_p)
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab]
    if rows:
        ks = torch.tensor([params[row].top_k for row in rows], device=values.device)
        best = values[rows].topk(int(ks.max()), dim=-1).values
        _cut(values, rows, best.gather(1, ks[:, None] - 1)[:, 0])


def _keep_top_p(probabilities: torch.Tensor, limits: list[float]) -> None:
    """Set tokens outside the smallest set of best tokens that reaches the limit to zero."""
    rows = [row for row, limit in enumerate(limits) if limit < 1]
    if rows:
        row_limits = torch.tensor([limits[row] for row in rows], device=probabilities.device)
        selected = probabilities if len(rows) == len(limits) else probabilities[rows]
        _cut(probabilities, rows, _top_p_thresholds(selected, row_limits), 0.0)


def _cut(
    values: torch.Tensor, rows: list[int], thresholds: torch.Tensor, low: float = float("-inf")
) -> None:
    """Set values below the thresholds of some rows to ``low``."""
    if len(rows) == len(values):
        values.masked_fill_(values < thresholds[:, None], low)
        return
    selected = values[rows]
    values[rows] = selected.masked_fill(selected < thresholds[:, None], low)


def _top_p_thresholds(probabilities: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """The lowest probability of the smallest set of best tokens that reaches the limit."""
    vocab = probabilities.shape[-1]
    best = sums = probabilities[:, :0]
    for count in (*(each for each in _TOP_P_CANDIDATES if each < vocab), vocab):
        best = probabilities.topk(count, dim=-1).values
        sums = best.cumsum(dim=-1)
        if not (sums[:, -1] < limits).any():
            break
    # The number of sums below the limit is the index of the token that reaches it.
    index = (sums < limits[:, None]).sum(dim=-1).clamp(max=best.shape[-1] - 1)
    return best.gather(1, index[:, None])[:, 0]
