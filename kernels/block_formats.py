"""Formats of quantised weights: blocks of neighbouring inputs of one output. No torch.

A weight [outputs, inputs] has each output's blocks one after the other. ``BLOCK_FORMATS`` are
GGUF's, with its names and layouts. A ``GroupFormat`` combines what other quantisation methods store
separately: codes, scales and zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """``values`` neighbouring weights in ``nbytes`` bytes."""

    name: str
    values: int
    nbytes: int

    def bytes_of(self, weights: int) -> int:
        """Bytes of ``weights`` neighbouring weights, a multiple of ``values``."""
        assert weights % self.values == 0, (self.name, weights)
        return weights // self.values * self.nbytes


# The type of codes: integers, floats of 8 bits (e4m3) or 4 (e2m1), or bitsandbytes' 16 numbers of
# nf4 and fp4.
Codes = Literal["int", "e4m3", "e2m1", "nf4", "fp4"]
Scale = Literal["F16", "BF16", "F32"]
# The offset of scaled codes: none, if integers are signed or have their zero in the middle; a zero
# to subtract for each group; or a minimum to add for each group.
Offset = Literal["none", "zero", "minimum"]
SCALE_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_ZERO_BYTES = 2


@dataclass(frozen=True, slots=True)
class GroupFormat(BlockFormat):
    """A scale; a zero as int16, or a minimum like the scale; then codes of ``bits``.

    8-bit codes are bytes: signed without an offset, else unsigned. 4-bit codes are halves of bytes:
    first all low halves, then all high ones. Other codes are in order from the lowest bit.
    ``rounds_inputs``: the weights expect activations rounded to e4m3.
    """

    codes: Codes
    bits: int
    scale: Scale
    offset: Offset
    rounds_inputs: bool = False

    @property
    def offset_bytes(self) -> int:
        return {"none": 0, "zero": _ZERO_BYTES, "minimum": SCALE_BYTES[self.scale]}[self.offset]


_GROUP_NAMES = {"e4m3": "FP8", "e2m1": "E2M1", "nf4": "NF4", "fp4": "FP4"}


def group_format(
    codes: Codes,
    bits: int,
    values: int,
    scale: Scale,
    offset: Offset = "none",
    *,
    rounds_inputs: bool = False,
) -> GroupFormat:
    """The format of ``values`` neighbouring codes that share a scale."""
    name = _GROUP_NAMES.get(codes, f"INT{bits}")
    assert values * bits % 8 == 0, (name, values)
    own = SCALE_BYTES[scale] + GroupFormat(name, 1, 0, codes, bits, scale, offset).offset_bytes
    nbytes = own + values * bits // 8
    return GroupFormat(name, values, nbytes, codes, bits, scale, offset, rounds_inputs)


# Numbers that are not quantised.
BF16 = BlockFormat("BF16", 1, 2)
# fp16 scale, then int8 codes.
Q8_0 = BlockFormat("Q8_0", 32, 2 + 32)
# fp16 scale, then 4-bit codes with zero 8: first the low halves of bytes, then the high ones.
Q4_0 = BlockFormat("Q4_0", 32, 2 + 16)
# fp16 scale and minimum, then codes of 4 bits.
Q4_1 = BlockFormat("Q4_1", 32, 2 + 2 + 16)
# As Q4_0 and Q4_1, with a fifth bit for each of 32 codes before the codes, and zero 16.
Q5_0 = BlockFormat("Q5_0", 32, 2 + 4 + 16)
Q5_1 = BlockFormat("Q5_1", 32, 2 + 2 + 4 + 16)
# K formats have a scale of a few bits for each 16 or 32 codes, and an fp16 factor of all scales. 16
# scales and minimums of 4 bits, codes of 2, scale and minimum of all.
Q2_K = BlockFormat("Q2_K", 256, 16 + 64 + 2 + 2)
# Codes of 3 bits: high 1, then low 2; 16 scales of 6 bits, scale of all.
Q3_K = BlockFormat("Q3_K", 256, 32 + 64 + 12 + 2)
# Scale and minimum of all, 8 scales and minimums of 6 bits, codes of 4.
Q4_K = BlockFormat("Q4_K", 256, 2 + 2 + 12 + 128)
# As Q4_K, with a fifth bit of each code before the other four.
Q5_K = BlockFormat("Q5_K", 256, 2 + 2 + 12 + 32 + 128)
# Codes of 6 bits: low 4, then high 2; an int8 scale for each 16 of them, and the fp16 scale of all.
Q6_K = BlockFormat("Q6_K", 256, 128 + 64 + 16 + 2)
# 4-bit codes are indices of 16 numbers: IQ4's, or 4-bit floats.
IQ4_NL = BlockFormat("IQ4_NL", 32, 2 + 16)
# Scale of all, 8 scales of 6 bits: high 2, then low 4; codes.
IQ4_XS = BlockFormat("IQ4_XS", 256, 2 + 2 + 4 + 128)
# A power of two, or 4 scales in fp8; codes.
MXFP4 = BlockFormat("MXFP4", 32, 1 + 16)
NVFP4 = BlockFormat("NVFP4", 64, 4 + 32)
# fp16 scale, then codes of 1 bit for -1 and 1, or of 2 bits for -1 to 2, with a zero of 1.
Q1_0 = BlockFormat("Q1_0", 128, 2 + 16)
Q2_0 = BlockFormat("Q2_0", 64, 2 + 16)
# -1, 0 and 1: five of them in a byte, or four; fp16 scale.
TQ1_0 = BlockFormat("TQ1_0", 256, 48 + 4 + 2)
TQ2_0 = BlockFormat("TQ2_0", 256, 64 + 2)
# Codes are indices of rows of 4 or 8 numbers in a codebook.
IQ1_S = BlockFormat("IQ1_S", 256, 2 + 32 + 16)
IQ1_M = BlockFormat("IQ1_M", 256, 32 + 16 + 8)
IQ2_XXS = BlockFormat("IQ2_XXS", 256, 2 + 64)
IQ2_XS = BlockFormat("IQ2_XS", 256, 2 + 64 + 8)
IQ2_S = BlockFormat("IQ2_S", 256, 2 + 32 + 32 + 8 + 8)
IQ3_XXS = BlockFormat("IQ3_XXS", 256, 2 + 64 + 32)
IQ3_S = BlockFormat("IQ3_S", 256, 2 + 64 + 8 + 32 + 4)


@dataclass(frozen=True, slots=True)
class Codebook:
    """Rows of numbers. Each number has a sign, or a whole row is moved up or down by an eighth.
    Each ``group`` of inputs has an odd scale; each block has an fp16 factor, times ``part``."""

    rows: int
    group: int
    part: float
    # The count of numbers in a row.
    row_size: int = 8
    moves: bool = False

    @property
    def bits(self) -> int:
        """Bits of a row's index."""
        return self.rows.bit_length() - 1


CODEBOOKS = {
    IQ1_S: Codebook(2048, 32, 1 / 8, moves=True),
    IQ1_M: Codebook(2048, 16, 1 / 8, moves=True),
    IQ2_XXS: Codebook(256, 32, 1 / 8),
    IQ2_XS: Codebook(512, 16, 1 / 8),
    IQ2_S: Codebook(1024, 16, 1 / 8),
    IQ3_XXS: Codebook(256, 32, 1 / 4, row_size=4),
    IQ3_S: Codebook(512, 32, 1.0, row_size=4),
}
CODEBOOK_FORMATS = frozenset(CODEBOOKS)
# Formats whose codes have up to 4 bits.
PACKED_FORMATS = frozenset(
    (Q4_0, Q4_1, Q2_K, Q3_K, Q4_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q1_0, Q2_0, TQ1_0, TQ2_0)
)
BLOCK_FORMATS = {
    each.name: each
    for each in (
        *(Q8_0, Q4_0, Q4_1, Q5_0, Q5_1),
        *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
        *(IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q1_0, Q2_0, TQ1_0, TQ2_0),
        *sorted(CODEBOOK_FORMATS, key=lambda each: each.name),
    )
}
