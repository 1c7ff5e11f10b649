"""The upload of changes of a table on the device, and of what goes with them, in one copy."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from ....kernels.gpu.sampling_table import set_columns

# A column's value: a number, or a list of int32 of which the column gets the address.
Value = int | float | np.ndarray
# A list begins at a multiple of 16 bytes.
_ALIGNMENT = 16
_WORD = 8


def send_changes(
    table_SC: torch.Tensor,
    changes: Mapping[int, Value],
    others: Sequence[np.ndarray] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Set elements of the table, int64, by their index in all of it, and upload other arrays. Each
    element has one value: threads write them in any order.

    Returns the memory of the lists, which lives as long as the caller keeps it, and the arrays,
    which are in it.
    """
    lists = [value for value in changes.values() if isinstance(value, np.ndarray)]
    sizes = [_WORD * 2 * len(changes), *(each.nbytes for each in (*lists, *others))]
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    memory = torch.empty(ends[-1], dtype=torch.uint8, device=table_SC.device)
    if ends[-1]:
        # Torch does not use this memory again before the copy has ended.
        host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=memory.is_cuda)
        content = host.numpy()
        for start, each in zip(ends, (*lists, *others), strict=False):
            content[start : start + each.nbytes] = each.view(np.uint8).ravel()
        addresses = iter(memory.data_ptr() + start for start in ends)
        pairs = [(index, _word(value, addresses)) for index, value in changes.items()]
        content[: sizes[0]] = np.array(pairs, np.int64).view(np.uint8).ravel()
        memory.copy_(host, non_blocking=True)
    if changes:
        set_columns(table_SC, memory[: sizes[0]].view(torch.int64).view(-1, 2))
    starts = ends[len(lists) :]
    return memory, [
        memory[start : start + each.nbytes].view(torch.int64).view(each.shape)
        for start, each in zip(starts, others, strict=False)
    ]


def _word(value: Value, addresses: Iterator[int]) -> int:
    """The 64 bits of a column."""
    if isinstance(value, np.ndarray):
        return next(addresses)
    return value if isinstance(value, int) else struct.unpack("<q", struct.pack("<d", value))[0]
