"""Folders of safetensors from strangers: a model, or one line that says what is wrong, and never
much more memory than their bytes."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.errors import ModelError
from tandem.shared.weights.load import load_model
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.fuzz import EXTREMES, FEWER, cheap, strange

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = st.sampled_from([*EXTREMES, -1, 1.5, None, "4", [4]]) | st.integers(0, 400)
DTYPES = st.sampled_from(
    ["F64", "F32", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", "x\n", None, 4]
)
NAMES = st.sampled_from(["model.norm.weight", "lm_head.bias", "a", "", "x\n", "é" * 3000])
FILES = st.sampled_from(
    [
        *(FILE, "other.safetensors", "../model.safetensors", "/etc/passwd", "a.bin", "", "."),
        *("x\n.safetensors", f"{'x' * 300}.safetensors", 4, None, [FILE]),
    ]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strange") / "model"
    tiny_models.build("llama", folder, num_hidden_layers=1, vocab_size=300, hidden_size=16)
    return folder


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the values."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@st.composite
def headers(draw: st.DrawFn, header: dict[str, Any]) -> bytes:
    """A header some of whose tensors are other ones, missing, twice there or elsewhere."""
    entries = [(name, dict(entry)) for name, entry in header.items()]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(entries) - 1))
        name, entry = entries[at]
        match draw(st.integers(0, 6)):
            case 0:
                entry["dtype"] = draw(DTYPES)
            case 1:
                entry["shape"] = draw(st.lists(SIZES, max_size=5))
            case 2:
                entry["data_offsets"] = draw(st.lists(SIZES, min_size=1, max_size=3))
            case 3:
                entries[at] = (draw(NAMES), entry)
            case 4:
                entries.append((name, draw(st.sampled_from(entries))[1]))
            case 5:
                del entries[at]
            case _:
                entry.pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)
        if not entries:
            break
    inner = ", ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
    text = f"{{{inner}}}".encode()
    return struct.pack("<Q", draw(st.just(len(text)) | st.sampled_from(EXTREMES))) + text


def is_one_line(error: ModelError) -> bool:
    """True for one line of a bearable length."""
    return len(str(error)) < 2000 and str(error).isprintable()


def loads_or_tells(folder: Path) -> None:
    with cheap(seconds=20.0):
        try:
            load_model(folder, dtype="float32")
        except ModelError as error:
            assert is_one_line(error), str(error)


@given(data=st.data())
def test_any_tensors_are_a_model_or_an_error(whole: Path, data: st.DataObject) -> None:
    folder = whole.with_name("tensors")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    header, values = parts((whole / FILE).read_bytes())
    (folder / FILE).write_bytes(data.draw(headers(header)) + values)
    loads_or_tells(folder)


@FEWER
@given(data=st.data())
def test_any_bytes_are_a_model_or_an_error(whole: Path, data: st.DataObject) -> None:
    folder = whole.with_name("bytes")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    (folder / FILE).write_bytes(data.draw(strange(st.just((whole / FILE).read_bytes()))))
    loads_or_tells(folder)


@FEWER
@given(data=st.data())
def test_any_index_is_a_model_or_an_error(whole: Path, data: st.DataObject) -> None:
    folder = whole.with_name("index")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    header, _ = parts((whole / FILE).read_bytes())
    header.pop("__metadata__", None)
    entries: Any = dict.fromkeys(header, FILE)
    for name in data.draw(st.lists(st.sampled_from([*entries]) | NAMES, max_size=3)):
        entries[name] = data.draw(FILES)
    entries = data.draw(st.just(entries) | st.sampled_from([None, [], {}, "x", 4, [FILE]]))
    whole_file = json.dumps({"weight_map": entries}).encode()
    (folder / INDEX).write_bytes(data.draw(st.just(whole_file) | strange(st.just(whole_file))))
    loads_or_tells(folder)
