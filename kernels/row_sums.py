"""Row sums over bytes in GPU memory, for a checksum that does not move the bytes.

The bytes are little-endian 32-bit words, in rows of ``COLUMNS``; the last row is padded with zeros.
A row's sum is that of its words, as signed numbers, times the keys of their columns, modulo 2**64
(multilinear hashing: Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string
hashing is fast", 2014). The keys are splitmix64 of 1, 2, 3 and so on, made odd.

A change within one word is always detected, since an odd key times less than 2**32 is never 0
modulo 2**64. Any other change of a row, such as two swapped words, escapes with a probability of
about 2**-32, and must escape in every row that it touches. Swapped rows swap their sums. Missing
zeros at the end are not detected: callers must compare lengths too. The keys are public, so this
detects accidents and not attacks, as xxh3 does.

Integer sums wrap around and do not depend on their order, so CPUs and GPUs agree in every bit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

WORD = 4
COLUMNS = 4096
_ROW_BYTES = WORD * COLUMNS
_2_64 = (1 << 64) - 1


def row_sums(payload: torch.Tensor) -> torch.Tensor:
    """Sum ``payload``, bytes [N] at a multiple of four, to int64 [ceil(N / 16384)]."""
    assert payload.dtype == torch.uint8 and payload.dim() == 1, (payload.dtype, payload.shape)
    whole = payload.numel() // _ROW_BYTES * _ROW_BYTES
    sums = _sums(payload[:whole])
    if whole == payload.numel():
        return sums
    rest = payload[whole:]
    return torch.cat([sums, _sums(F.pad(rest, (0, _ROW_BYTES - rest.numel())))])


def rows_of(size: int) -> int:
    """The number of row sums of ``size`` bytes."""
    return -(-size // _ROW_BYTES)


def _sums(rows: torch.Tensor) -> torch.Tensor:
    words = rows.view(torch.int32).view(-1, COLUMNS)
    return (words * keys(rows.device)).sum(dim=1)


@lru_cache(maxsize=16)
def keys(device: torch.device) -> torch.Tensor:
    """The keys of the columns, int64 [COLUMNS]."""
    numbers = [_signed(splitmix64(column + 1) | 1) for column in range(COLUMNS)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def splitmix64(number: int) -> int:
    """Element ``number`` of Vigna's splitmix64 sequence with seed 0."""
    z = number * 0x9E3779B97F4A7C15 & _2_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _2_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _2_64
    return z ^ z >> 31


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
