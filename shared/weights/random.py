"""Random weights, for benchmarks."""

from __future__ import annotations

import zlib

import torch

from ..models.layers.part import Part
from ..models.parallel import WeightSlot

# Random weights repeat with this (prime) period, so that rows differ and filling is a copy.
_PERIOD = 1_000_003
# Elements of a weight that are generated at a time.
_PIECE = 1 << 24


class RandomWeights:
    """Seeded weights, equal for every tensor-parallel size. Norms are one; the others are scaled so
    that the hidden state keeps its magnitude, and rounded to bfloat16, as in most checkpoints."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Drawn on the host, so that all devices get the same numbers, and repeated on the device.
        self._pool = torch.randn(_PERIOD, generator=generator).to(device)

    def fill(self, part: Part) -> None:
        """Fill the slots of a part."""
        for name, slot in part.weight_slots().items():
            if len(slot.shape) == 1:
                slot.target.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                _fill_matrix(name, slot, self._pool)


def _fill_matrix(name: str, slot: WeightSlot, pool: torch.Tensor) -> None:
    """Fill a few rows at a time: a float32 copy of a large weight takes twice its memory."""
    rows, columns = slot.shape
    scale = 1.0 if name == "embed.weight" else columns**-0.5
    first_row, last_row = (slot.first, slot.end) if slot.dim == 0 else (0, rows)
    phase = zlib.crc32(name.encode())
    rows_at_once = max(1, _PIECE // columns)
    for row in range(first_row, last_row, rows_at_once):
        end = min(row + rows_at_once, last_row)
        begin = (phase + row * columns) % _PERIOD
        count = (end - row) * columns
        repeats = -(-(begin + count) // _PERIOD)
        piece = pool.repeat(repeats)[begin : begin + count].view(-1, columns) * scale
        piece = piece if slot.dim == 0 else piece[:, slot.first : slot.end]
        slot.target[row - first_row : end - first_row].copy_(piece.bfloat16())
