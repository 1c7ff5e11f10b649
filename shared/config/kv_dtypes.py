"""Dtypes of cached and transferred KV, by their torch names, without torch."""

from __future__ import annotations

from ..errors import ModelError, UsageError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
# Dtypes with a scale for each head and token, and the scale's dtype.
SCALES = {"int8": "float32"}
# Dtypes with one scale for each component of a layer, if the checkpoint has scales.
SCALED_AS_A_WHOLE = frozenset({"float8_e4m3fn"})

# Values of --kv-cache-dtype. auto: the dtype that the checkpoint requests, or that of the weights.
AUTO = "auto"
SPELLINGS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}


def kv_dtype_of(spelling: str, weights: str, checkpoint: str = "") -> str:
    """The dtype of the cache of a model with weights of dtype ``weights``. ``checkpoint`` is the
    dtype that its configuration requests, if any; see ``DecoderSpec``.

    Raises ``UsageError`` if ``spelling`` is not supported, ``ModelError`` if the checkpoint's dtype
    is needed but not supported.
    """
    unknown = checkpoint not in ("", *BYTES)
    if unknown and (spelling == AUTO or SPELLINGS.get(spelling) in SCALED_AS_A_WHOLE):
        raise ModelError(
            f"{checkpoint} is not supported: use --kv-cache-dtype bfloat16 or int8, which need "
            f"none of its scales"
        )
    if spelling == AUTO:
        return checkpoint or weights
    if spelling not in SPELLINGS:
        raise UsageError(
            f"--kv-cache-dtype {spelling!r} is not supported; use {AUTO} or {', '.join(SPELLINGS)}"
        )
    return SPELLINGS[spelling]
