"""Types of tensors in GGUF files. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.block_formats import BLOCK_FORMATS


@dataclass(frozen=True, slots=True)
class TensorType:
    """``values`` numbers in ``size`` bytes."""

    name: str
    values: int
    size: int

    def nbytes(self, count: int) -> int:
        """Bytes of so many numbers, a multiple of ``values``."""
        return count // self.values * self.size


_NUMBERS = {0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 30: TensorType("BF16", 1, 2)}
_BLOCKS = {2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 14: "Q6_K"}
# By their number in a file.
TENSOR_TYPES = _NUMBERS | {
    number: TensorType(name, BLOCK_FORMATS[name].values, BLOCK_FORMATS[name].nbytes)
    for number, name in _BLOCKS.items()
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
