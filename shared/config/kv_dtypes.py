"""The dtypes in which KV is cached and handed over, by their torch names. No torch."""

from __future__ import annotations

from ..errors import UsageError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
# Those whose values have a scale, one for each head and token, and its dtype.
SCALES = {"int8": "float32"}

# What --kv-cache-dtype calls them. auto: the dtype of the weights.
AUTO = "auto"
SPELLINGS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}


def kv_dtype_of(spelling: str, weights: str) -> str:
    """The dtype of the cache of a model whose weights are kept in ``weights``.

    Raises ``UsageError`` for one that is not implemented.
    """
    if spelling == AUTO:
        return weights
    if spelling not in SPELLINGS:
        raise UsageError(
            f"--kv-cache-dtype {spelling!r} is not supported; use {AUTO} or {', '.join(SPELLINGS)}"
        )
    return SPELLINGS[spelling]
