"""The inputs of a step: a plan's rows as the tensors that the model takes.

On a CPU they are numpy's arrays. For a GPU they are packed into one pinned buffer and copied at
once; a kernel then enters new blocks into the device's tables and replaces placeholders by tokens
that the host does not know yet. torch recycles a pinned buffer only when its copy has ended, so
nothing here waits for one.

T rows of a step, R of them decode, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.attention_metadata import (
    AttentionMetadata,
    ChunkMetadata,
    DecodeMetadata,
    SequenceMetadata,
)
from ....kernels.operators import Operators
from ...models.batch import ForwardBatch
from ..plan import StepColumns
from .slots import Slots

# The cache slot of a padding row, whose KV is written nowhere.
NO_SLOT = -1
_NO_CHUNKS = np.empty((0, 4), np.int32)
_NO_SLOTS = torch.empty(0, dtype=torch.int32)
_NO_TOKENS = torch.empty(0, dtype=torch.int64)
# Up to this many decoding rows are flattened one by one.
_FEW = 16
# Arrays in a buffer begin at multiples of 16 bytes, as Triton's kernels are compiled for.
_ALIGNMENT = 4


class HostRows(NamedTuple):
    """A step's rows on the host, int64 unless said otherwise. ``sequence_slots`` are those of the
    rows' sequences, ``cache_slots`` those of their KV; tokens may be ``PLACEHOLDER``. ``decodes``
    [R, 3] and ``chunks`` [C, 4] are those of the attention metadata, int32.
    """

    tokens: np.ndarray
    positions: np.ndarray
    cache_slots: np.ndarray
    sequence_slots: np.ndarray
    decodes: np.ndarray
    chunks: np.ndarray


def host_rows(rows: StepColumns, row_slots: list[int], slots: Slots, block_size: int) -> HostRows:
    """Flatten the sequences of a plan, which have these slots."""
    if len(rows.tokens) == len(row_slots) <= _FEW:
        return _few_decodes(rows.tokens, rows.start, row_slots, slots, block_size)
    # In half of the time of np.array.
    tokens = np.fromiter(rows.tokens, np.int64, len(rows.tokens))
    starts = np.fromiter(rows.start, np.int64, len(row_slots))
    owners = np.fromiter(row_slots, np.int64, len(row_slots))
    if len(tokens) == len(starts):
        positions, sequence_slots = starts, owners
        decodes, chunks = _columns(np.arange(len(starts)), owners, starts + 1), _NO_CHUNKS
    else:
        sizes = np.array(rows.count)
        firsts = np.cumsum(sizes) - sizes
        positions = np.arange(len(tokens)) + np.repeat(starts - firsts, sizes)
        sequence_slots = np.repeat(owners, sizes)
        single = sizes == 1
        decodes = _columns(firsts, owners, starts + 1)[single]
        chunks = _columns(firsts, sizes, owners, starts)[~single]
    places, offsets = np.divmod(positions, block_size)
    cache_slots = slots.host_tables[sequence_slots, places] * np.int64(block_size) + offsets
    return HostRows(tokens, positions, cache_slots, sequence_slots, decodes, chunks)


def _few_decodes(
    tokens: list[int],
    starts: Sequence[int],
    row_slots: list[int],
    slots: Slots,
    block_size: int,
) -> HostRows:
    """``host_rows`` of a few decoding rows: each call of numpy would take longer than one of them,
    which counts where a step of a small model takes 0.2 ms."""
    block = slots.host_tables.item
    pairs = [*zip(row_slots, starts, strict=True)]
    places = [
        block(slot, start // block_size) * block_size + start % block_size for slot, start in pairs
    ]
    decodes = [(row, slot, start + 1) for row, (slot, start) in enumerate(pairs)]
    numbers, positions, cache_slots, owners = np.array([tokens, starts, places, row_slots])
    rows = np.array(decodes, np.int32)
    return HostRows(numbers, positions, cache_slots, owners, rows, _NO_CHUNKS)


def segments_of(rows: StepColumns, host: HostRows) -> np.ndarray | None:
    """0 for the rows of first texts and 1 for those of second ones; ``None`` without these."""
    seconds = {row: pool.second_text for row, pool in rows.pool.items() if pool.second_text}
    if not seconds:
        return None
    never = np.iinfo(np.int64).max
    borders = np.repeat([seconds.get(row, never) for row in range(len(rows))], rows.count)
    return (host.positions >= borders).astype(np.int64)


def _targets(rows: StepColumns) -> list[int]:
    """The tokens whose logprobs are asked for."""
    return [token for row in rows.prompt_logprobs.values() for token in row.targets]


def _columns(*columns: np.ndarray) -> np.ndarray:
    """An int32 array of these columns."""
    joined = np.empty((len(columns[0]), len(columns)), np.int32)
    for index, column in enumerate(columns):
        joined[:, index] = column
    return joined


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs at fixed addresses, which graphs read: ``staged`` int64 [3, rows], and ``decodes``
    int32 [rows, 3]."""

    staged: torch.Tensor
    decodes: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> StaticInputs:
        """Inputs of which every row is padding."""
        staged = torch.zeros(3, rows, dtype=torch.int64, device=device)
        staged[2] = NO_SLOT
        return cls(staged, torch.zeros(rows, 3, dtype=torch.int32, device=device))


class DrawingSlots(NamedTuple):
    """The slots of the sequences that draw, in the order of rows: on the host, and on a GPU,
    int32."""

    on_host: list[int]
    on_device: torch.Tensor


class StepBatch(NamedTuple):
    """A step's rows as the model and the sampler take them. ``prompt_targets``: the tokens whose
    logprobs are asked for, int64."""

    forward: ForwardBatch
    drawing: DrawingSlots
    prompt_targets: torch.Tensor


class StepInputs:
    """Builds the batch of each step.

    ``batched_decode``: the operators attend for all decoding rows at once. ``one_by_one``: some
    layer attends to each sequence by itself.
    """

    def __init__(
        self,
        slots: Slots,
        block_size: int,
        operators: Operators,
        *,
        batched_decode: bool,
        one_by_one: bool,
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._stage = operators.prepare_step_inputs(slots.tables.device)
        self._batched_decode = batched_decode
        self._one_by_one = one_by_one or not batched_decode

    @property
    def _device(self) -> torch.device:
        return self._slots.tables.device

    def batch(
        self,
        rows: StepColumns,
        output_rows: Sequence[int] | None = None,
        *,
        needs_logits: bool = True,
    ) -> StepBatch:
        """Enter the rows' blocks, and flatten the rows, of which ``output_rows`` have outputs, by
        default all."""
        row_slots, changes = self._slots.place(rows)
        host = host_rows(rows, row_slots, self._slots, self._block_size)
        drawing_slots = [*compress(row_slots, rows.sample)]
        count = len(host.tokens)
        outputs: np.ndarray | None = None
        if output_rows is not None and list(output_rows) != list(range(count)):
            outputs = np.array(output_rows, np.int64)
        build = self._on_cpu if self._slots.on_cpu else self._on_gpu
        return build(rows, host, outputs, drawing_slots, changes, needs_logits)

    def _on_cpu(
        self,
        rows: StepColumns,
        host: HostRows,
        outputs: np.ndarray | None,
        drawing_slots: list[int],
        changes: object,
        needs_logits: bool,
    ) -> StepBatch:
        as_tensor = torch.from_numpy
        last_tokens = self._slots.host_last_tokens[host.sequence_slots]
        segments = segments_of(rows, host)
        forward = ForwardBatch(
            as_tensor(np.where(host.tokens < 0, last_tokens, host.tokens)),
            as_tensor(host.positions),
            AttentionMetadata(
                self._sequences(host),
                as_tensor(host.cache_slots),
                self._decodes(as_tensor(host.decodes), host) if self._batched_decode else None,
            ),
            None if outputs is None else as_tensor(outputs),
            needs_logits,
            None if segments is None else as_tensor(segments),
        )
        targets = (
            torch.tensor(_targets(rows), dtype=torch.int64) if rows.prompt_logprobs else _NO_TOKENS
        )
        return StepBatch(forward, DrawingSlots(drawing_slots, _NO_SLOTS), targets)

    def _on_gpu(
        self,
        rows: StepColumns,
        host: HostRows,
        outputs: np.ndarray | None,
        drawing_slots: list[int],
        changes: list[tuple[int, int, list[int]]],
        needs_logits: bool,
    ) -> StepBatch:
        segments, nothing = segments_of(rows, host), np.empty(0)
        parts = [
            np.stack([host.tokens, host.positions, host.cache_slots, host.sequence_slots]),
            self._entries(changes),
            host.decodes,
            host.chunks,
            nothing if outputs is None else outputs,
            np.array(drawing_slots),
            np.array(_targets(rows)),
            nothing if segments is None else segments,
        ]
        uploaded = self._upload(parts)
        inputs, changed, decodes, chunks, output_rows, drawing, targets, seconds = uploaded
        staged = torch.empty(3, len(host.tokens), dtype=torch.int64, device=self._device)
        self._stage(inputs, changed, self._slots.tables, self._slots.last_tokens, staged)
        tokens, positions, cache_slots = staged.unbind()
        forward = ForwardBatch(
            tokens,
            positions,
            AttentionMetadata(
                self._sequences(host),
                cache_slots,
                self._decodes(decodes, host) if self._batched_decode else None,
                self._chunks(chunks, host),
            ),
            None if outputs is None else output_rows,
            needs_logits,
            None if segments is None else seconds,
        )
        targets = targets.long() if len(targets) else targets
        return StepBatch(forward, DrawingSlots(drawing_slots, drawing), targets)

    def fill(self, rows: StepColumns, static: StaticInputs, size: int) -> DrawingSlots:
        """Enter the rows' blocks, and write decoding rows that all draw to the inputs of a graph,
        with padding up to ``size`` rows."""
        row_slots, changes = self._slots.place(rows)
        host = host_rows(rows, row_slots, self._slots, self._block_size)
        count = len(host.tokens)
        padded, padded_decodes = np.zeros((4, size), np.int32), np.zeros((size, 3), np.int32)
        padded[2] = NO_SLOT
        padded[:, :count] = host.tokens, host.positions, host.cache_slots, host.sequence_slots
        padded_decodes[:count] = host.decodes
        # The slots once more, at the beginning of an array: kernels are compiled for aligned ones.
        parts = [padded, self._entries(changes), padded_decodes, host.sequence_slots]
        inputs, changed, decodes, drawing = self._upload(parts)
        static.decodes[:size].copy_(decodes)
        tables, last_tokens = self._slots.tables, self._slots.last_tokens
        self._stage(inputs, changed, tables, last_tokens, static.staged[:, :size])
        return DrawingSlots(row_slots, drawing)

    def static_batch(self, static: StaticInputs, size: int) -> ForwardBatch:
        """The batch of ``size`` decoding rows whose inputs ``fill`` writes."""
        tokens, positions, cache_slots = static.staged[:, :size].unbind()
        tables = self._slots.tables
        longest = tables.shape[1] * self._block_size
        decodes = DecodeMetadata(static.decodes[:size], tables, longest, self._block_size)
        return ForwardBatch(tokens, positions, AttentionMetadata([], cache_slots, decodes), None)

    def _entries(self, changes: list[tuple[int, int, list[int]]]) -> np.ndarray:
        """The changed entries of the tables: flat index and block, [E, 2]."""
        width = self._slots.tables.shape[1]
        entries = [
            (slot * width + first + place, block)
            for slot, first, blocks in changes
            for place, block in enumerate(blocks)
        ]
        return np.array(entries, np.int64).reshape(-1, 2)

    def _upload(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy arrays as int32 to the device, in one buffer; returns their views of it."""
        pinned = self._device.type == "cuda"
        ends = [*accumulate(-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts)]
        staged = torch.empty(ends[-1], dtype=torch.int32, pin_memory=pinned)
        content = staged.numpy()
        begins = [0, *ends[:-1]]
        for begin, part in zip(begins, parts, strict=True):
            content[begin : begin + part.size] = part.ravel()
        uploaded = staged.to(self._device, non_blocking=pinned)
        return [
            uploaded[begin : begin + part.size].view(part.shape)
            for begin, part in zip(begins, parts, strict=True)
        ]

    def _decodes(self, decodes: torch.Tensor, host: HostRows) -> DecodeMetadata | None:
        if not len(host.decodes):
            return None
        longest = max(host.decodes[:, 2].tolist())
        return DecodeMetadata(decodes, self._slots.tables, longest, self._block_size)

    def _chunks(self, chunks: torch.Tensor, host: HostRows) -> ChunkMetadata | None:
        if not len(host.chunks):
            return None
        return ChunkMetadata(chunks, self._slots.tables, self._block_size)

    def _sequences(self, host: HostRows) -> list[SequenceMetadata]:
        """The chunks, and if a layer attends one by one, also the decoding rows; in row order."""
        if not (self._one_by_one or len(host.chunks)):
            return []
        spans = host.chunks.tolist()
        if self._one_by_one:
            spans += [[first, 1, slot, end - 1] for first, slot, end in host.decodes.tolist()]
            spans.sort()
        tables = self._slots.host_tables
        return [
            SequenceMetadata(slice(first, first + count), start, tables[slot], self._block_size)
            for first, count, slot, start in spans
        ]
