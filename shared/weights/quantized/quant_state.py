"""The description that bitsandbytes stores with a matrix in 4 bits: JSON in a tensor of bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ...errors import ModelError
from ...models.config import Config

# bitsandbytes writes less than 200 bytes.
MAX_TEXT_BYTES = 4096
_LARGEST = 1e30


@dataclass(frozen=True, slots=True)
class QuantState:
    """``blocksize`` neighbours in the flattened weight of ``shape`` [outputs, inputs] share a
    scale. If scales are quantised too, ``nested_blocksize`` of them share a scale, and
    ``nested_offset`` is added to each."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    nested_offset: float


def read_quant_state(content: bytes, place: str, kind: str, is_nested: bool) -> QuantState:
    """Read the state of a matrix in ``kind``. Raises ``ModelError``, which names ``place``."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{place} is not JSON ({error}): download the model again, or use another version of it"
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"{place} holds a {type(values).__name__}, not an object")
    state = Config(values, place)
    state.one_of("quant_type", (kind,), kind)
    shape, size = state.matrix("shape"), state.integer("blocksize")
    if not is_nested:
        return QuantState(shape, size, 1, 0.0)
    return QuantState(shape, size, state.integer("nested_blocksize"), _offset(state))


def _offset(state: Config) -> float:
    key = "nested_offset"
    value = state.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST < value < _LARGEST:
        raise state.refusal(key, value, "a finite number")
    return float(value)
