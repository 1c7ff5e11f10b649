"""Sampling on a GPU: draws of the ``Sampler``, without a wait for the device.

A sequence has a slot: a row of a table on the device that holds its parameters and its history.
A step only launches kernels, and copies what the host has to know into host memory. What the host
brings (new sequences, masks of tokens, what logprobs are asked for) travels in one copy per step,
but for the lists of a new sequence, such as counts of its tokens, which are freed when it ends.

R rows, S slots, V vocabulary, A rows that ask for logprobs, L tokens that they list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from ....kernels.gpu import sampling, sampling_table
from ....kernels.streams import to_host
from ..plan import SamplerSpec
from .device_logprobs import DrawnLogprobs, raw_logprobs
from .sampler import NOT_FINITE_MESSAGE, HostDraws
from .sampling_slots import columns_of, filters, mask_words
from .table_upload import Value, send_changes


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """``Draws`` on their way to the host. ``tokens_host`` is complete after the step's event; token
    -1: the logits are not finite."""

    sequence_ids: list[int]
    tokens_host: torch.Tensor
    logprobs: DrawnLogprobs | None

    def collect(self) -> HostDraws:
        """See ``Draws.collect``."""
        sequence_ids = self.sequence_ids
        tokens: list[int] = self.tokens_host.tolist()[: len(sequence_ids)]
        sampled = {key: [token] for key, token in zip(sequence_ids, tokens, strict=True)}
        logprobs = {}
        if self.logprobs is not None:
            rows = self.logprobs.collect(tokens)
            logprobs = {sequence_ids[row]: [one] for row, one in rows if tokens[row] >= 0}
        failed = {}
        if min(tokens, default=0) < 0:
            failed = {key: NOT_FINITE_MESSAGE for key, [token] in sampled.items() if token < 0}
            sampled = {key: drawn for key, drawn in sampled.items() if key not in failed}
        return HostDraws(sampled, logprobs, failed)


class GpuSampler:
    """Draws tokens for slots, and writes each slot's last one into ``last_tokens`` [S], int32.

    Its methods are called in the order of steps, and launch on the current stream.
    """

    def __init__(self, vocab_size: int, last_tokens_S: torch.Tensor) -> None:
        self.vocab_size = vocab_size
        self.device = last_tokens_S.device
        self._last_tokens_S = last_tokens_S
        shape = len(last_tokens_S), sampling_table.COLUMNS.value
        self._table_SC = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._specs: dict[int, SamplerSpec] = {}
        self._added: set[int] = set()  # slots whose columns are not on the device yet
        # Slots that ask for logprobs, and those whose tokens are filtered.
        self._asking: set[int] = set()
        self._filtered: set[int] = set()
        self._lists: dict[int, torch.Tensor] = {}  # the memory to which a slot's columns point
        self._uploaded: torch.Tensor | None = None  # by the last step

    def add(self, slot: int, spec: SamplerSpec) -> None:
        """Start a sequence in a slot, or resume it after the tokens drawn before."""
        self.remove(slot)
        self._specs[slot] = spec
        self._added.add(slot)
        if spec.params.logprobs is not None:
            self._asking.add(slot)
        if filters(spec.params, self.vocab_size):
            self._filtered.add(slot)

    def remove(self, slot: int) -> None:
        """Forget the sequence in a slot. No-op if there is none."""
        self._specs.pop(slot, None)
        self._lists.pop(slot, None)
        for slots in (self._added, self._asking, self._filtered):
            slots.discard(slot)

    def draw(
        self,
        slots_R: torch.Tensor,
        slots: Sequence[int],
        logits_RV: torch.Tensor,
        masks: Mapping[int, bytes] = MappingProxyType({}),
    ) -> DeviceDraws:
        """Launch one draw for each row of fp32 logits, which are changed.

        ``slots_R`` are the slots on the device, int32; rows of padding may follow, of slot -1.
        ``masks`` has the tokens that may be drawn, for some of ``slots``.
        """
        sequence_ids = [self._specs[slot].sequence_id for slot in slots]
        if masks:  # a slot that does not draw would keep the address of its mask
            masks = {slot: masks[slot] for slot in slots if slot in masks}
        raw = None
        if _meet(self._asking, slots):
            asking = [row for row, slot in enumerate(slots) if slot in self._asking]
            params = [self._specs[slots[row]].params for row in asking]
            listed = _rectangle([each.logprob_token_ids for each in params])
            rows_A, listed_AL = self._upload(masks, np.array(asking, np.int64), listed)
            raw = raw_logprobs(logits_RV, asking, params, rows_A, listed_AL)
        elif masks or self._added:
            self._upload(masks)
        tokens_R = sampling.draw_tokens(
            self._table_SC,
            slots_R,
            logits_RV.contiguous(),
            self._last_tokens_S,
            filtered=_meet(self._filtered, slots),
        )
        logprobs = None if raw is None else raw.of_draws(tokens_R)
        return DeviceDraws(sequence_ids, to_host(tokens_R), logprobs)

    def _upload(self, masks: Mapping[int, bytes], *others: np.ndarray) -> list[torch.Tensor]:
        """Send new columns, the masks of this step, and arrays of int64, which are returned."""
        count = sampling_table.COLUMNS.value
        changes: dict[int, Value] = {}
        for slot in self._added:
            columns = columns_of(self._specs[slot], self.vocab_size)
            own = dict(enumerate(columns, slot * count))
            if any(isinstance(value, np.ndarray) for value in columns):
                self._lists[slot], _ = send_changes(self._table_SC, own)
            else:
                changes |= own
        for slot, mask in masks.items():
            words = mask_words(mask, self.vocab_size)
            changes[slot * count + sampling_table.MASK.value] = words
        # The masks are read until this step has drawn.
        self._uploaded, arrays = send_changes(self._table_SC, changes, others)
        self._added.clear()
        return arrays


def _meet(some: set[int], slots: Sequence[int]) -> bool:
    """True if some of the slots are among ``some``, which are often none."""
    return bool(some) and not some.isdisjoint(slots)


def _rectangle(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of token ids, padded with zeros."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
