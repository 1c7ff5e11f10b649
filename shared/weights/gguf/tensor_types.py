"""Types of tensors in GGUF files. No torch."""

from __future__ import annotations

from ....kernels import block_formats as formats
from ....kernels.block_formats import BlockFormat

# By their number in a file; unquantised values are blocks of one.
TENSOR_TYPES = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    30: BlockFormat("BF16", 1, 2),
    2: formats.Q4_0,
    3: formats.Q4_1,
    6: formats.Q5_0,
    7: formats.Q5_1,
    8: formats.Q8_0,
    10: formats.Q2_K,
    11: formats.Q3_K,
    12: formats.Q4_K,
    13: formats.Q5_K,
    14: formats.Q6_K,
    16: formats.IQ2_XXS,
    17: formats.IQ2_XS,
    18: formats.IQ3_XXS,
    19: formats.IQ1_S,
    20: formats.IQ4_NL,
    21: formats.IQ3_S,
    22: formats.IQ2_S,
    23: formats.IQ4_XS,
    29: formats.IQ1_M,
    34: formats.TQ1_0,
    35: formats.TQ2_0,
    39: formats.MXFP4,
    40: formats.NVFP4,
    41: formats.Q1_0,
    42: formats.Q2_0,
}
# Names of types without support: used in products only, or removed from GGUF.
_UNSUPPORTED = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def type_name(number: int) -> str:
    """The name of an unsupported type, or its number."""
    return _UNSUPPORTED.get(number, str(number))
