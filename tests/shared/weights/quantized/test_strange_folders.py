"""Quantised folders from strangers: a model, or one line that says what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tests.shared.weights.test_strange_folders import FILE, loads_or_tells, parts
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.quantized_folders import (
    METHODS,
    stack_experts,
    write_mxfp4,
    write_quantized,
    write_stacked,
)
from tandem.tests.support.fuzz import strange

LAYER = "model.layers.0."
STATE = ".quant_state.bitsandbytes__"
BITS = {
    "F4": 4,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 3), (0, 5), (5, 0), (2, 2, 2), (10**12, 0, 1)])
VALUES = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2, 3, 4, 8, 16, 32, 64, 1 << 40, 1 << 64, 10**400),
        *(4.0, 32.0, 2.5, 1e30, float("inf"), float("nan"), "", "x", "x\n", "y" * 3000, "4"),
        *([], [1], [0, 0], [-1, 2], [64, 128], [1 << 40, 1], [1, 1 << 40], [32.0, 32], ["a", "b"]),
        *({}, {"x\n": 1}, {"x\n": {"a": 1}}, {"a" * 3000: {"weights": {}}}, [*range(900)]),
    ]
)
KEYS = st.sampled_from(
    [
        *("quant_method", "quant_algo", "quant_library", "quantization", "mode", "fmt", "format"),
        *("bits", "w_bit", "group_size", "q_group_size", "sym", "version", "checkpoint_format"),
        *("is_marlin_format", "weight_block_size", "config_groups", "sparsity_config"),
        *("transform_config", "kv_cache_scheme", "kv_cache_quant_algo", "load_in_4bit", "x\n"),
        *("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "model.layers.0.self_attn.q_proj"),
    ]
)
# Folders whose experts are stacked, beside one of each method.
STACKED = ("gpt-oss", "mlx experts", "fp8 experts", "turned fp8 experts")
STATES = ("quant_type", "shape", "blocksize", "nested_blocksize", "nested_offset")


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def as_(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Another one, of the same bytes as often as it takes."""
        size = prod(shape) * BITS[dtype] // 8
        content = (self.content or b"\0") * (size // max(1, len(self.content)) + 1)
        return Tensor(dtype, shape, content[:size])


def read(folder: Path) -> dict[str, Tensor]:
    header, values = parts((folder / FILE).read_bytes())
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), values[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    header, at = {}, 0
    for name, each in tensors.items():
        end = at + len(each.content)
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    content = b"".join(each.content for each in tensors.values())
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + content)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("strange")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 300}
    for name in ("llama", "gpt_oss", "qwen3_moe"):
        more: dict[str, Any] = {"moe_intermediate_size": 32} if name == "qwen3_moe" else {}
        tiny_models.build(name, root / name, num_hidden_layers=1, **sizes, **more)
    return root


@cache
def coded(root: Path, name: str) -> tuple[Path, dict[str, Tensor]]:
    """A folder and its tensors."""
    target = root / name.replace(" ", "-")
    if name == "gpt-oss":
        folder, _ = write_mxfp4(root / "gpt_oss", target)
    elif name == "mlx experts":
        folder, _ = write_quantized(root / "qwen3_moe", target, METHODS["mlx 4"])
        stack_experts(folder)
    elif name in STACKED:
        transpose = name.startswith("turned")
        folder, _ = write_stacked(
            root / "qwen3_moe", target, METHODS["fp8 blocks"], transpose=transpose
        )
    else:
        folder, _ = write_quantized(root / "llama", target, METHODS[name])
    return folder, read(folder)


@st.composite
def other(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """A tensor with another dtype, shape or content."""
    dtype, shape = tensor.dtype, tensor.shape
    count = prod(shape)
    match draw(st.integers(0, 5)):
        case 0:
            return tensor.as_(draw(st.sampled_from([*BITS])), shape)
        case 1:
            return tensor.as_(dtype, draw(SHAPES))
        case 2:
            shapes = [(count,), (1, count), (count, 1), shape[::-1], (*shape, 1), (1, *shape)]
            return replace(tensor, shape=draw(st.sampled_from(shapes)))
        case 3 if shape:
            sides = list(shape)
            side = draw(st.integers(0, len(sides) - 1))
            sides[side] = draw(st.sampled_from([0, 1, sides[side] // 2, 2 * sides[side]]))
            return tensor.as_(dtype, tuple(sides))
        case 4:
            byte = draw(st.sampled_from([0, 1, 127, 128, 255]))
            return replace(tensor, content=bytes([byte]) * len(tensor.content))
    return tensor.as_(draw(st.sampled_from([*BITS])), draw(SHAPES))


@given(data=st.data())
def test_any_tensors_of_a_method_are_a_model_or_an_error(root: Path, data: st.DataObject) -> None:
    folder, tensors = coded(root, data.draw(st.sampled_from([*METHODS, *STACKED])))
    variant = dict(tensors)
    names = [name for name in tensors if name.startswith(LAYER)]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        variant[name] = data.draw(other(tensors[name]))
        if data.draw(st.integers(0, 7)) == 0:
            del variant[name]
    write(folder, variant)
    try:
        loads_or_tells(folder)
    finally:
        write(folder, tensors)


def tables(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield table
    for each in table.values():
        if isinstance(each, dict):
            yield from tables(each)


@given(data=st.data())
def test_any_description_of_a_method_is_a_model_or_an_error(
    root: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([*METHODS]))
    folder, _ = coded(root, name)
    beside = [*METHODS[name].beside]
    file = folder / data.draw(st.sampled_from(beside or ["config.json"]))
    text = file.read_text()
    values = json.loads(text)
    described = values if beside else values[METHODS[name].key]
    for _ in range(data.draw(st.integers(1, 2))):
        table = data.draw(st.sampled_from([*tables(described)]))
        key = data.draw(st.sampled_from(sorted(table)) | KEYS if table else KEYS)
        table[key] = deepcopy(data.draw(VALUES))
    file.write_text(json.dumps(values))
    try:
        loads_or_tells(folder)
    finally:
        file.write_text(text)


@given(data=st.data())
def test_any_state_of_bitsandbytes_is_a_model_or_an_error(root: Path, data: st.DataObject) -> None:
    folder, tensors = coded(root, data.draw(st.sampled_from(["nf4", "nf4 nested", "fp4"])))
    name = next(name for name in tensors if STATE in name)
    state = json.loads(tensors[name].content)
    for key in data.draw(st.lists(st.sampled_from(STATES), max_size=3)):
        state[key] = data.draw(VALUES)
        if data.draw(st.integers(0, 7)) == 0:
            del state[key]
    text = json.dumps(state).encode()
    content = data.draw(st.just(text) | strange(st.just(text)) | st.just(b"[" * 4000))
    variant = tensors | {name: Tensor("U8", (len(content),), content)}
    if isinstance(size := state.get("blocksize"), int) and size > 0:  # which the scales follow
        absmax = f"{name.partition(STATE)[0]}.absmax"
        count = -(-2 * len(tensors[name.partition(STATE)[0]].content) // size)
        variant[absmax] = variant[absmax].as_(variant[absmax].dtype, (count,))
    write(folder, variant)
    try:
        loads_or_tells(folder)
    finally:
        write(folder, tensors)
