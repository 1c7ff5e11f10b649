"""Formats of quantised weights: blocks of neighbouring inputs of one output. No torch.

Names and layouts are those of GGUF, where a weight [outputs, inputs] has for each output its blocks
one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """``values`` neighbouring weights in ``nbytes`` bytes."""

    name: str
    values: int
    nbytes: int

    def bytes_of(self, weights: int) -> int:
        """Bytes of so many neighbouring weights, a multiple of ``values``."""
        assert weights % self.values == 0, (self.name, weights)
        return weights // self.values * self.nbytes


# fp16 scale, then int8 codes.
Q8_0 = BlockFormat("Q8_0", 32, 2 + 32)
# fp16 scale, then codes of 4 bits, whose zero is 8: first the low halves of bytes, then the high.
Q4_0 = BlockFormat("Q4_0", 32, 2 + 16)
# fp16 scale and minimum, then codes of 4 bits.
Q4_1 = BlockFormat("Q4_1", 32, 2 + 2 + 16)
# Codes of 6 bits: low 4, then high 2; an int8 scale for each 16 of them, and the fp16 scale of all.
Q6_K = BlockFormat("Q6_K", 256, 128 + 64 + 16 + 2)

BLOCK_FORMATS = {each.name: each for each in (Q8_0, Q4_0, Q4_1, Q6_K)}
