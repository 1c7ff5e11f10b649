"""The slots of live sequences on a rank: for each a block table and its last token.

A sequence keeps its slot for its life, so a step brings only the blocks that are new, and a kernel
finds the rest on the device. N slots, B blocks of a table.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ..plan import SlotLimits, StepColumns


class Slots:
    """Assigns slots, and keeps their block tables.

    ``tables`` int32 [N, B] and ``last_tokens`` int32 [N] are on the device. ``host_tables`` are
    the same tables on the host; a CPU's are the device's own, and so are ``host_last_tokens``,
    which mean nothing on a GPU.
    """

    def __init__(self, limits: SlotLimits, device: torch.device) -> None:
        self.host_tables = np.zeros((limits.sequences, limits.blocks), np.int32)
        # Kept, because asking a tensor for its device takes microseconds.
        self.on_cpu = device.type == "cpu"
        tables = torch.from_numpy(self.host_tables)
        self.tables = tables if self.on_cpu else torch.zeros_like(tables, device=device)
        self.host_last_tokens = np.zeros(limits.sequences, np.int32)
        self.last_tokens = torch.from_numpy(self.host_last_tokens).to(device)
        self._by_sequence: dict[int, int] = {}
        self._free = list(reversed(range(limits.sequences)))

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_sequence

    def __getitem__(self, sequence_id: int) -> int:
        """The slot of a live sequence."""
        return self._by_sequence[sequence_id]

    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Free the slots of sequences that have ended; no-op for those without one."""
        for sequence_id in sequence_ids:
            slot = self._by_sequence.pop(sequence_id, None)
            if slot is not None:
                self._free.append(slot)

    def assign(self, sequence_id: int) -> int:
        """The slot of a sequence, which gets one unless it has one. Raises ``RuntimeError`` if the
        head planned more sequences than the limits."""
        slot = self._by_sequence.get(sequence_id)
        if slot is None:
            if not self._free:
                raise RuntimeError(f"all {len(self.host_tables)} slots are taken")
            slot = self._by_sequence[sequence_id] = self._free.pop()
        return slot

    def place(self, rows: StepColumns) -> tuple[list[int], list[tuple[int, int, list[int]]]]:
        """Give each row's sequence a slot, and enter the row's blocks in the host's table.

        Returns the slots, and the entries that changed: slot, index of the first, blocks. Raises
        like ``assign``, and if a sequence has more blocks than the limits.
        """
        try:
            slots = [*map(self._by_sequence.__getitem__, rows.sequence_id)]
        except KeyError:  # some begin
            slots = [*map(self.assign, rows.sequence_id)]
        changes = [(slots[row], first, blocks) for row, (first, blocks) in rows.blocks.items()]
        limit = self.host_tables.shape[1]
        for slot, first, blocks in changes:
            end = first + len(blocks)
            if end > limit:
                sequence_id = rows.sequence_id[slots.index(slot)]
                raise RuntimeError(
                    f"sequence {sequence_id} has {end} blocks, more than the {limit} of a block "
                    f"table"
                )
            self.host_tables[slot, first:end] = blocks
        return slots, changes
