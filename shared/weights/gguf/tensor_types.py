"""Types of tensors in GGUF files. No torch."""

from __future__ import annotations

from ....kernels.block_formats import Q4_0, Q4_1, Q6_K, Q8_0, BlockFormat

# By their number in a file; numbers are blocks of one.
TENSOR_TYPES = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    30: BlockFormat("BF16", 1, 2),
    2: Q4_0,
    3: Q4_1,
    8: Q8_0,
    14: Q6_K,
}
# Names of other types, for error messages.
_UNSUPPORTED = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def type_name(number: int) -> str:
    """The name of an unsupported type, or its number."""
    return _UNSUPPORTED.get(number, str(number))
