"""Errors of quantised weights beside those of llama.cpp's own quantiser.

    python -m tandem.tests.kernels.llama_errors libggml-base.so

quantises the weights of ``test_block_encoding.py`` by both, without an importance matrix, and
prints relative errors in percent: llama.cpp's, Tandem's, and their ratio.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from tandem.kernels.block_encoding import encode
from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.kernels.quantized import QuantizedWeight
from tandem.tests.kernels.test_block_encoding import relative_error, weights

# llama.cpp's numbers of the formats.
_TYPES = {"Q8_0": 8, "Q4_0": 2, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def main() -> None:
    quantise = ctypes.CDLL(sys.argv[1]).ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantise.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    weight = weights()
    rows, inputs = weight.shape
    for name, number in _TYPES.items():
        format = BLOCK_FORMATS[name]
        theirs = torch.zeros(rows, format.bytes_of(inputs), dtype=torch.uint8)
        quantise(number, weight.data_ptr(), theirs.data_ptr(), 0, rows, inputs, None)
        errors = [
            relative_error(QuantizedWeight(format, blocks).values(), weight)
            for blocks in (theirs, encode(format, weight))
        ]
        print(f"{name} {errors[0]:.4f} {errors[1]:.4f} {errors[1] / errors[0]:.4f}")


if __name__ == "__main__":
    main()
